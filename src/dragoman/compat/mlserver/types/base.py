"""Base class of the types: mutable objects with named fields, as with pydantic."""

import copy
import inspect
import json
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, ClassVar, Self

_Dict = dict[str, Any]  # the class has a method of that name


class BaseModel:
    """Base class whose annotations are fields and whose class attributes are their defaults.

    _converters: functions that convert the values of fields in the constructor.
    _allows_extra: keep keyword arguments that are not fields.
    """

    _converters: ClassVar[Mapping[str, Callable[[Any], Any]]] = {}
    _allows_extra: ClassVar[bool] = False

    def __init__(self, **given: Any) -> None:
        for name in self._fields():
            if name in given:
                value = given.pop(name)
                convert = self._converters.get(name)
                setattr(self, name, convert(value) if convert is not None and value is not None else value)
            elif hasattr(type(self), name):
                setattr(self, name, copy.copy(getattr(type(self), name)))
            else:
                raise ValueError(f"{type(self).__name__}: field '{name}' is missing")
        for name, value in given.items() if self._allows_extra else ():
            setattr(self, name, value)

    @classmethod
    def _fields(cls) -> list[str]:
        kinds = [inspect.get_annotations(k) for k in reversed(cls.__mro__) if issubclass(k, BaseModel)]
        return [name for found in kinds for name in found if not name.startswith("_")]

    @classmethod
    def of(cls, value: Any) -> Self:
        """Return an instance unchanged, and a mapping as an instance."""
        return value if isinstance(value, cls) else cls(**value)

    @property
    def model_extra(self) -> _Dict:
        """Keyword arguments that are not fields."""
        fields = {*self._fields()}
        return {k: v for k, v in vars(self).items() if k not in fields and not k.startswith("_")}

    # --- conversion ------------------------------------------------------------------------------------------

    def model_dump(self, *, exclude_none: bool = True, **_: Any) -> _Dict:
        """Return a dict of plain values; None is left out by default, because strict servers reject it."""
        own = {k: v for k, v in vars(self).items() if not k.startswith("_")}
        found = {name: own[name] for name in (*self._fields(), *self.model_extra)}
        return {k: _plain(v, exclude_none) for k, v in found.items() if v is not None or not exclude_none}

    def model_dump_json(self, *, exclude_none: bool = True, indent: int | None = None, **_: Any) -> str:
        fields = self.model_dump(exclude_none=exclude_none)
        return json.dumps(fields, indent=indent, separators=None if indent else (",", ":"), ensure_ascii=False)

    def dict(self, **options: Any) -> _Dict:
        return self.model_dump(**options)

    def json(self, **options: Any) -> str:
        return self.model_dump_json(**options)

    @classmethod
    def model_validate(cls, value: Any) -> Self:
        return cls.of(value)

    @classmethod
    def model_validate_json(cls, text: str | bytes) -> Self:
        return cls.of(json.loads(text))

    @classmethod
    def parse_obj(cls, value: Any) -> Self:
        return cls.of(value)

    @classmethod
    def parse_raw(cls, text: str | bytes) -> Self:
        return cls.of(json.loads(text))

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


def list_of(kind: type[BaseModel]) -> Callable[[Any], list[Any]]:
    """Return a converter for a list of objects."""
    return lambda values: [kind.of(value) for value in values]


def _plain(value: Any, exclude_none: bool) -> Any:
    match value:
        case BaseModel():
            return value.model_dump(exclude_none=exclude_none)
        case Enum():
            return value.value
        case list() | tuple():
            return [_plain(each, exclude_none) for each in value]
        case dict():
            return {k: _plain(v, exclude_none) for k, v in value.items()}
        case bytes():
            return _text(value)
    return value.plain() if hasattr(value, "plain") else value


def _text(value: bytes) -> str | bytes:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value
