"""The content type `np`: tensors as NumPy arrays."""

from typing import Any

import numpy as np

from dragoman.codecs.codec import FirstTensorCodec, InputCodec
from dragoman.codecs.elements import fault, texts
from dragoman.core.datatypes import BYTES, Array
from dragoman.core.errors import InvalidInput
from dragoman.core.tensor import Scalar, Tensor

CONTENT_TYPE = "np"

# The dtype of an array that its datatype does not tell: text, another byte order.
DTYPE = "numpy_dtype"
_SLACK = 1 << 20


class NumpyCodec(InputCodec):
    """`np.ndarray`. An array [N] is encoded as [N, 1]; decoding gives the shape that is declared, as a view.

    BYTES become an object array of `bytes`, unless the array that was encoded held `str`.
    """

    content_type = CONTENT_TYPE
    type_hint = np.ndarray

    @classmethod
    def can_encode(cls, value: Any) -> bool:
        return isinstance(value, np.ndarray)

    @classmethod
    def to_tensor(cls, value: Any, **options: Any) -> Tensor:
        if isinstance(value, np.ma.MaskedArray):
            raise fault("value", CONTENT_TYPE, "has no form for a masked array; fill it first")
        array = np.asarray(value)
        try:
            plain = Tensor.of(array)
        except InvalidInput as bad:
            raise fault("value", CONTENT_TYPE, f"does not take it: {bad.message}") from bad
        data = plain.data.reshape(-1, 1) if plain.data.ndim == 1 else plain.data
        return Tensor(data, plain.datatype, {"content_type": CONTENT_TYPE, **_recorded(array, plain)})

    @classmethod
    def to_value(cls, tensor: Tensor, where: str = "tensor") -> Any:
        name = tensor.parameters.get(DTYPE)
        if name is not None:
            return _restored(tensor, str(name), where)
        return tensor.data


class NumpyRequestCodec(FirstTensorCodec):
    """A whole request of one array."""

    content_type = CONTENT_TYPE
    type_hint = np.ndarray
    codec = NumpyCodec


def _recorded(array: Array, plain: Tensor) -> dict[str, Scalar]:
    if array.dtype != object:
        return {} if array.dtype == plain.datatype.dtype else {DTYPE: array.dtype.str}
    kinds = {type(element) for element in array.flat}
    if kinds <= {bytes}:
        return {}
    if kinds == {str}:
        return {DTYPE: "str"}
    raise fault("value", CONTENT_TYPE, f"does not mix {' and '.join(sorted(k.__name__ for k in kinds))}")


def _restored(tensor: Tensor, name: str, where: str) -> Any:
    """The array in the dtype that was recorded."""
    if name == tensor.datatype.dtype.name:
        return tensor.data
    if name == "str" and tensor.datatype is BYTES:
        array = np.empty(tensor.data.size, object)
        array[:] = texts(tensor, where)
        return array.reshape(tensor.data.shape)
    try:
        dtype = np.dtype(name)
    except TypeError as bad:
        raise fault(where, CONTENT_TYPE, f"knows no '{DTYPE}' {name!r}") from bad
    if tensor.datatype is BYTES and dtype.kind in "SU":
        return _fixed(tensor, dtype, where)
    if dtype.kind in "biuf" and dtype.newbyteorder("=") == tensor.datatype.dtype:
        return tensor.data.astype(dtype)
    raise fault(where, CONTENT_TYPE, f"with '{DTYPE}' {name!r} does not fit datatype {tensor.datatype}")


def _fixed(tensor: Tensor, dtype: np.dtype[Any], where: str) -> Array:
    """An array of elements of a fixed width, which a few bytes in a request must not make huge."""
    elements: list[Any] = texts(tensor, where) if dtype.kind == "U" else list(tensor.data.flat)
    width = dtype.itemsize // (4 if dtype.kind == "U" else 1)
    longest = max(map(len, elements), default=0)
    if longest > width or any(e[-1:] in ("\0", b"\0") for e in elements):
        raise fault(where, CONTENT_TYPE, f"with '{DTYPE}' '{dtype.str}' does not hold an element of length {longest}")
    if dtype.itemsize * len(elements) > _SLACK + 16 * sum(map(len, elements)):
        raise fault(where, CONTENT_TYPE, f"with '{DTYPE}' '{dtype.str}' needs too much memory for its elements")
    return np.array(elements, dtype).reshape(tensor.data.shape)
