"""Base class of the types: mutable objects with named fields, as with pydantic."""

import copy
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from types import UnionType
from typing import Any, ClassVar, Self, get_args, get_origin, get_type_hints

from dragoman.core.documents import parse_json

_Dict = dict[str, Any]  # the class has a method of that name
_MISSING = object()
_IMMUTABLE = frozenset({str, int, float, bool})


class BaseModel:
    """Base class whose annotations are fields and whose class attributes are their defaults.

    Dicts are converted to the annotated BaseModel, also in lists. `_allows_extra`: keep keyword arguments that are not
    fields.
    """

    _allows_extra: ClassVar[bool] = False

    def __init__(self, **given: Any) -> None:
        values = vars(self)
        for name, convert, default in self._defaults():
            if name in given:
                value = given.pop(name)
                values[name] = value if convert is None or value is None else convert(value)
            elif default is None or type(default) in _IMMUTABLE:
                values[name] = default
            elif default is _MISSING:
                raise ValueError(f"{type(self).__name__}: field '{name}' is missing")
            else:
                values[name] = copy.copy(default)
        if self._allows_extra:
            values.update(given)

    @classmethod
    @cache
    def _defaults(cls) -> tuple[tuple[str, Callable[[Any], Any] | None, Any], ...]:
        """Return name, converter and default of each field."""
        return tuple((name, convert, getattr(cls, name, _MISSING)) for name, convert in cls._fields().items())

    @classmethod
    @cache
    def _fields(cls) -> _Dict:
        """Return the converter of each field, or None, by name."""
        hints = {name: hint for name, hint in get_type_hints(cls).items() if not name.startswith("_")}
        return {name: _converter(hint) for name, hint in hints.items()}

    @classmethod
    def of(cls, value: Any) -> Self:
        """Return an instance unchanged, and a mapping as an instance."""
        return value if isinstance(value, cls) else cls(**value)

    @property
    def model_extra(self) -> _Dict:
        """Keyword arguments that are not fields."""
        return {k: v for k, v in vars(self).items() if k not in self._fields() and not k.startswith("_")}

    # --- conversion ------------------------------------------------------------------------------------------

    def model_dump(self, *, include: Any = None, exclude: Any = None, exclude_none: bool = True, **_: Any) -> _Dict:
        """Return a dict of plain values: the fields in `include` but not in `exclude`, which may nest as in pydantic.

        None is left out by default, because strict servers reject it.
        """
        wanted = _Selection(include, exclude)
        own = {k: v for k, v in vars(self).items() if not k.startswith("_")}
        fields = {name: own[name] for name in (*self._fields(), *self.model_extra)}
        return {
            k: _to_plain(v, exclude_none, wanted.below(k))
            for k, v in fields.items()
            if (v is not None or not exclude_none) and wanted.has(k)
        }

    def model_dump_json(
        self,
        *,
        include: Any = None,
        exclude: Any = None,
        exclude_none: bool = True,
        indent: int | None = None,
        **_: Any,
    ) -> str:
        fields = self.model_dump(include=include, exclude=exclude, exclude_none=exclude_none)
        return json.dumps(fields, indent=indent, separators=None if indent else (",", ":"), ensure_ascii=False)

    def dict(self, **options: Any) -> _Dict:
        return self.model_dump(**options)

    def json(self, **options: Any) -> str:
        return self.model_dump_json(**options)

    @classmethod
    def model_validate_json(cls, text: str | bytes) -> Self:
        return cls.of(parse_json(text))

    @classmethod
    def model_validate(cls, value: Any) -> Self:
        return cls.of(value)

    @classmethod
    def parse_obj(cls, value: Any) -> Self:
        return cls.of(value)

    @classmethod
    def parse_raw(cls, text: str | bytes) -> Self:
        return cls.model_validate_json(text)

    @classmethod
    def parse_file(cls, path: str | os.PathLike[str]) -> Self:
        with open(path, "rb") as file:
            return cls.model_validate_json(file.read())

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        copied = copy.deepcopy(self) if deep else copy.copy(self)
        vars(copied).update(update or {})
        return copied

    def copy(self, **options: Any) -> Self:
        return self.model_copy(**options)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self.model_dump() == other.model_dump()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        fields = {k: v for k, v in vars(self).items() if not k.startswith("_")}
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in fields.items())})"


class ErrorResponse(BaseModel):
    """The body of an error."""

    error: str | None = None


def _converter(hint: Any) -> Callable[[Any], Any] | None:
    """Return the function that converts a value to an annotation; None if there is nothing to convert."""
    if isinstance(hint, UnionType):
        return next(filter(None, map(_converter, get_args(hint))), None)
    if get_origin(hint) is list:
        convert = _converter(get_args(hint)[0])
        return list if convert is None else lambda values: [convert(value) for value in values]
    if hint is str:
        return lambda value: value.value if isinstance(value, Enum) else value
    return hint if isinstance(hint, type) and issubclass(hint, Enum) else getattr(hint, "of", None)


def plain_text(value: Any) -> Any:
    """Return bytes that are UTF-8 as text, and any other value unchanged."""
    try:
        return value.decode() if isinstance(value, bytes) else value
    except UnicodeDecodeError:
        return value


@dataclass(frozen=True, slots=True)
class _Selection:
    """The fields or elements to dump, as pydantic names them: a set of keys, or a dict that selects below a key."""

    include: Any = None
    exclude: Any = None

    def has(self, key: Any) -> bool:
        is_included = self.include is None or key in self.include or "__all__" in self.include
        if isinstance(self.exclude, Mapping):
            return is_included and _value_below(self.exclude, key) not in (True, ...)
        return is_included and key not in (self.exclude or ())

    def below(self, key: Any) -> "_Selection":
        """Return what is selected of the value of a key."""
        include = _value_below(self.include, key)
        return _Selection(None if include in (True, ...) else include, _value_below(self.exclude, key))


def _value_below(keys: Any, key: Any) -> Any:
    return keys.get(key, keys.get("__all__")) if isinstance(keys, Mapping) else None


def _to_plain(value: Any, exclude_none: bool, wanted: _Selection) -> Any:
    match value:
        case BaseModel():
            return value.model_dump(include=wanted.include, exclude=wanted.exclude, exclude_none=exclude_none)
        case Enum():
            return value.value
        case list() | tuple():
            kept = ((i, each) for i, each in enumerate(value) if wanted.has(i))
            return [_to_plain(each, exclude_none, wanted.below(i)) for i, each in kept]
        case dict():
            kept = ((k, v) for k, v in value.items() if wanted.has(k))
            return {k: _to_plain(v, exclude_none, wanted.below(k)) for k, v in kept}
    return value.plain() if hasattr(value, "plain") else plain_text(value)
