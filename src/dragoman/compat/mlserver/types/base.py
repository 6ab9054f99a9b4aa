"""Objects with named fields: built by keyword, changed by attribute, written as a dict or as JSON."""

import copy
import inspect
import json
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, ClassVar, Self

_Dict = dict[str, Any]  # the class has a method of that name


class BaseModel:
    """The annotations of a subclass are its fields, and its class attributes their defaults.

    `_readers` make a field's value of what is given; `_open` keeps keywords that are no field.
    """

    _readers: ClassVar[Mapping[str, Callable[[Any], Any]]] = {}
    _open: ClassVar[bool] = False

    def __init__(self, **given: Any) -> None:
        for name in self._fields():
            if name in given:
                value = given.pop(name)
                reader = self._readers.get(name)
                setattr(self, name, reader(value) if reader is not None and value is not None else value)
            elif hasattr(type(self), name):
                setattr(self, name, copy.copy(getattr(type(self), name)))
            else:
                raise ValueError(f"{type(self).__name__} needs the field '{name}'")
        for name, value in given.items() if self._open else ():
            setattr(self, name, value)

    @classmethod
    def _fields(cls) -> list[str]:
        kinds = [inspect.get_annotations(k) for k in reversed(cls.__mro__) if issubclass(k, BaseModel)]
        return [name for found in kinds for name in found if not name.startswith("_")]

    @classmethod
    def of(cls, value: Any) -> Self:
        """The object itself, or one made of a mapping."""
        return value if isinstance(value, cls) else cls(**value)

    @property
    def model_extra(self) -> _Dict:
        """What was given beside the fields."""
        fields = {*self._fields()}
        return {k: v for k, v in vars(self).items() if k not in fields and not k.startswith("_")}

    # --- as plain values -------------------------------------------------------------------------------------

    def model_dump(self, *, exclude_none: bool = True, **_: Any) -> _Dict:
        """As plain values; what is None is left out, as servers which are strict want it."""
        own = {k: v for k, v in vars(self).items() if not k.startswith("_")}
        found = {name: own[name] for name in (*self._fields(), *self.model_extra)}
        return {k: _plain(v, exclude_none) for k, v in found.items() if v is not None or not exclude_none}

    def model_dump_json(self, *, exclude_none: bool = True, indent: int | None = None, **_: Any) -> str:
        told = self.model_dump(exclude_none=exclude_none)
        return json.dumps(told, indent=indent, separators=None if indent else (",", ":"), ensure_ascii=False)

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
        made = copy.deepcopy(self) if deep else copy.copy(self)
        vars(made).update(update or {})
        return made

    def copy(self, **options: Any) -> Self:
        return self.model_copy(**options)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self.model_dump() == other.model_dump()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        told = {k: v for k, v in vars(self).items() if not k.startswith("_")}
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in told.items())})"


def each(kind: type[BaseModel]) -> Callable[[Any], list[Any]]:
    """A reader for a list of objects."""
    return lambda values: [kind.of(value) for value in values]


def _plain(value: Any, exclude_none: bool) -> Any:
    match value:
        case BaseModel():
            return value.model_dump(exclude_none=exclude_none)
        case Enum():
            return value.value
        case list() | tuple():
            return [_plain(each_, exclude_none) for each_ in value]
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
