"""Frozen dataclasses that are made for every call, made quickly."""

from dataclasses import MISSING, Field, field, fields, make_dataclass
from typing import Any, TypeVar

T = TypeVar("T")


def quick(kind: type[T]) -> type[T]:
    """The frozen dataclass with an `__init__` that assigns its fields, four times as fast as one that goes around
    the guard against assignments.

    The guard is gone for it; that nobody changes a value is left to the type checker, which still sees it as frozen.
    """
    own: Any = kind
    made: Any = make_dataclass(kind.__name__, [(f.name, Any, _told(f)) for f in fields(own)], repr=False, eq=False)
    own.__init__ = made.__init__
    del own.__setattr__
    del own.__delattr__
    return kind


def _told(of: "Field[Any]") -> Any:
    """A field with the same default."""
    if of.default_factory is not MISSING:
        return field(default_factory=of.default_factory)
    return field() if of.default is MISSING else field(default=of.default)
