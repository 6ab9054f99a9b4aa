"""BYTES tensors as text."""

from dragoman.core.datatypes import Array
from dragoman.core.errors import InvalidInput
from dragoman.core.tensor import Tensor, object_array


def strings(tensor: Tensor, name: str) -> Array:
    """The `str` of every element, in an object array of the same shape; InvalidInput where one is not UTF-8."""
    try:
        return object_array((element.decode() for element in tensor.data.flat), tensor.data.shape)
    except UnicodeDecodeError as fault:
        raise InvalidInput(f"input '{name}': expected text in UTF-8, got {fault.object[:20]!r}") from fault
