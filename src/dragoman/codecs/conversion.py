"""How values of one annotation travel."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dragoman.core.datatypes import Array, Datatype
from dragoman.core.tensor import Tensor


@dataclass(frozen=True, slots=True)
class Conversion:
    """How values of one annotation travel.

    `datatype`, `shape`, `accepts` and `content_type` are as in TensorSpec. `to_value(tensor, name)` makes the value, or
    raises InvalidInput; `to_tensor(value)` goes back, or raises what NumPy or `Tensor.of` raise. `kind` is what the
    value is an instance of, or with `many` the elements of the list that it is; None where that is not so simple.
    """

    datatype: Datatype | None
    shape: tuple[int, ...] | None
    accepts: frozenset[Datatype]
    to_value: Callable[[Tensor, str], Any]
    to_tensor: Callable[[Any], Tensor]
    content_type: str = ""
    kind: Any = None
    many: bool = False


def data_of(tensor: Tensor, name: str) -> Array:
    """The tensor's array, as it is."""
    return tensor.data


ANY = Conversion(None, None, frozenset(), data_of, Tensor.of)
