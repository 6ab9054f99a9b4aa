"""Content type `np`: tensors as NumPy arrays."""

from typing import Any

import numpy as np

from dragoman.codecs.codec import FirstTensorCodec, InputCodec
from dragoman.codecs.elements import content_error, decode_texts
from dragoman.core.datatypes import BYTES, Array
from dragoman.core.errors import InvalidInput
from dragoman.core.tensor import Scalar, Tensor

CONTENT_TYPE = "np"

# Parameter with the dtype of the encoded array where the datatype does not imply it: text, another byte order.
DTYPE = "numpy_dtype"
_FIXED_WIDTH_FREE_BYTES = 1 << 20  # memory that fixed-width elements may take whatever their content


class NumpyCodec(InputCodec):
    """`np.ndarray`. An array [N] is encoded as [N, 1]; decoding returns a view with the tensor's shape.

    BYTES are decoded as an object array of `bytes`, or of `str` if the encoded array held `str`.
    """

    content_type = CONTENT_TYPE
    type_hint = np.ndarray

    @classmethod
    def can_encode(cls, value: Any) -> bool:
        return isinstance(value, np.ndarray)

    @classmethod
    def to_tensor(cls, value: Any, **options: Any) -> Tensor:
        if isinstance(value, np.ma.MaskedArray):
            raise content_error("value", CONTENT_TYPE, "masked arrays are not supported: fill the array first")
        array = np.asarray(value)
        try:
            plain = Tensor.of(array)
        except InvalidInput as error:
            raise content_error("value", CONTENT_TYPE, error.message) from error
        data = plain.data.reshape(-1, 1) if plain.data.ndim == 1 else plain.data
        return Tensor(data, plain.datatype, {"content_type": CONTENT_TYPE, **_dtype_parameter(array, plain)})

    @classmethod
    def to_value(cls, tensor: Tensor, where: str = "tensor") -> Any:
        name = tensor.parameters.get(DTYPE)
        return tensor.data if name is None else _with_dtype(tensor, str(name), where)


class NumpyRequestCodec(FirstTensorCodec):
    """A whole request of one array."""

    content_type = CONTENT_TYPE
    type_hint = np.ndarray
    codec = NumpyCodec


def _dtype_parameter(array: Array, plain: Tensor) -> dict[str, Scalar]:
    """Return the parameter from which `_with_dtype` restores the dtype of an array; {} if the datatype implies it."""
    if array.dtype != object:
        return {} if array.dtype == plain.datatype.dtype else {DTYPE: array.dtype.str}
    kinds = {type(element) for element in array.flat}
    if kinds <= {bytes}:
        return {}
    if kinds == {str}:
        return {DTYPE: "str"}
    names = " and ".join(sorted(kind.__name__ for kind in kinds))
    raise content_error("value", CONTENT_TYPE, f"expected elements of one type, got {names}")


def _with_dtype(tensor: Tensor, name: str, where: str) -> Any:
    """Return the array with the dtype that its parameters name. Raises InvalidInput."""
    if name == tensor.datatype.dtype.name:
        return tensor.data
    if name == "str" and tensor.datatype is BYTES:
        array = np.empty(tensor.data.size, object)
        array[:] = decode_texts(tensor, where)
        return array.reshape(tensor.data.shape)
    try:
        dtype = np.dtype(name)
    except TypeError as error:
        raise content_error(where, CONTENT_TYPE, f"unknown '{DTYPE}' {name!r}") from error
    if tensor.datatype is BYTES and dtype.kind in "SU":
        return _fixed_width(tensor, dtype, where)
    if dtype.kind in "biuf" and dtype.newbyteorder("=") == tensor.datatype.dtype:
        return tensor.data.astype(dtype)
    raise content_error(where, CONTENT_TYPE, f"'{DTYPE}' {name!r} does not match datatype {tensor.datatype}")


def _fixed_width(tensor: Tensor, dtype: np.dtype[Any], where: str) -> Array:
    """Return an array of elements of a fixed width. A short request must not be able to make it huge."""
    elements: list[Any] = decode_texts(tensor, where) if dtype.kind == "U" else list(tensor.data.flat)
    width = dtype.itemsize // (4 if dtype.kind == "U" else 1)
    longest = max(map(len, elements), default=0)
    if longest > width or any(e[-1:] in ("\0", b"\0") for e in elements):
        text = f"'{DTYPE}' '{dtype.str}' cannot hold an element of length {longest}"
        raise content_error(where, CONTENT_TYPE, text)
    if dtype.itemsize * len(elements) > _FIXED_WIDTH_FREE_BYTES + 16 * sum(map(len, elements)):
        raise content_error(where, CONTENT_TYPE, f"'{DTYPE}' '{dtype.str}' takes too much memory for its elements")
    return np.array(elements, dtype).reshape(tensor.data.shape)
