"""Frozen dataclasses that are made for every call, as structs of msgspec."""

from dataclasses import MISSING, Field, fields
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

_KEPT = ("__module__", "__qualname__", "__doc__", "__orig_bases__", "__dataclass_fields__")


def native(kind: type[T]) -> type[T]:
    """Return the frozen dataclass as a struct of msgspec, whose values are made in C: ten times as fast.

    Assigning a field raises AttributeError. `dataclasses.replace` and `fields` work as before. Classes that inherit
    from it are structs, too: their annotations are further fields, and they have no `__init__` of their own.
    """
    own: Any = kind
    names = own.__dataclass_fields__
    kept = {k: v for k, v in vars(own).items() if k in _KEPT or not (k.startswith("__") or k in names)}
    if "__reduce__" in vars(own):
        kept["__reduce__"] = own.__reduce__
    members = [(f.name, f.type, msgspec.field(**_default(f))) for f in fields(own)]
    bases = (msgspec.Struct, *(b for b in own.__bases__ if b is not object))
    eq: bool = own.__dataclass_params__.eq
    made: Any = msgspec.defstruct(own.__name__, members, bases=bases, namespace=kept, frozen=True, eq=eq)
    return made  # type: ignore[no-any-return]


def _default(of: "Field[Any]") -> dict[str, Any]:
    """What makes a field with the same default."""
    if of.default_factory is not MISSING:
        return {"default_factory": of.default_factory}
    return {} if of.default is MISSING else {"default": of.default}
