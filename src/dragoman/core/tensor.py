"""A tensor: an array, its datatype on the wire and its parameters."""

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn, Self

import msgspec
import numpy as np

from dragoman.core.datatypes import BYTES, Array, Datatype, datatype_of, round_to
from dragoman.core.errors import InvalidInput

# Longer integers are not written out in messages.
_LONG_BITS = 256

Scalar = str | bool | int | float
Parameters = Mapping[str, Scalar]


class _EmptyParameters(dict[str, Scalar]):
    """Empty, immutable parameters: one object, used as a default."""

    __slots__ = ()

    def __hash__(self) -> int:  # type: ignore[override, unused-ignore]
        return 0

    def __setitem__(self, key: str, value: Scalar) -> NoReturn:
        raise TypeError("parameters are immutable")

    def __reduce__(self) -> str:
        return "NONE"


NONE: Parameters = _EmptyParameters()


class Tensor(msgspec.Struct, frozen=True, eq=False):
    """An array with its datatype. Fields cannot be assigned, because calls share tensors.

    `data` is little-endian and in row-major order (it may be a strided view). For BYTES it is an object array of
    `bytes`, for BF16 an array of `ml_dtypes.bfloat16`.
    """

    data: Array
    datatype: Datatype
    parameters: Parameters = NONE

    @classmethod
    def of(cls, value: Any, datatype: Datatype | None = None, parameters: Parameters = NONE) -> Self:
        """Return a tensor of anything that NumPy converts to an array.

        Without `datatype` the dtype of the array decides. With it the value is converted: to floats by rounding
        to nearest, to integers only without loss. Raises InvalidInput if a value does not fit or there is no such
        datatype.
        """
        if datatype is not None and type(value) is np.ndarray and value.dtype is datatype.dtype is not BYTES.dtype:
            return cls(value, datatype, parameters)
        array = np.asarray(value)
        if array.dtype.kind in "SU" and not isinstance(value, np.ndarray):
            array = np.array(value, dtype=object)  # NumPy's own strings drop NUL characters at their end
        source = datatype_of(array.dtype)
        if source is BYTES and datatype not in (None, BYTES):
            array = _as_numbers(array, datatype)
            source = datatype_of(array.dtype)
        elif source is BYTES:
            array = _as_bytes(array)
        result = source if datatype is None else datatype
        if source is not result:
            array = _convert(array, source, result)
        if array.dtype != result.dtype:
            array = array.astype(result.dtype)
        return cls(array, result, parameters)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        if self.datatype.wire_view is not None:
            return _of_bits, (self.data.view(self.datatype.wire_view), self.datatype, self.parameters)
        return Tensor, (self.data, self.datatype, self.parameters)


def _of_bits(bits: Array, datatype: Datatype, parameters: Parameters) -> Tensor:
    """Return the tensor of these bits: pickle leaves arrays outside its stream only if their dtype is NumPy's."""
    return Tensor(bits.view(datatype.dtype), datatype, parameters)


def with_own_dtype(tensor: Tensor) -> Tensor:
    """Return a tensor made by a user's code, with its data in the dtype of its datatype.

    Byte order is converted, and text to bytes. Raises InvalidInput for any other dtype, such as BF16 as bits in uint16.
    """
    dtype, datatype = tensor.data.dtype, tensor.datatype
    if dtype is datatype.dtype:
        return tensor
    if datatype_of(dtype) is not datatype:
        raise InvalidInput(f"a tensor of datatype {datatype} needs data of dtype {datatype.dtype.name}, got {dtype}")
    return Tensor.of(tensor.data, datatype, tensor.parameters)


def numpy_numbers(tensor: Tensor) -> Array:
    """Return the array in a dtype of NumPy's own, for libraries that know no other: BF16 as FP32, which is exact."""
    return tensor.data if tensor.datatype.wire_view is None else tensor.data.astype(tensor.datatype.json_dtype)


def object_array(elements: Iterable[Any], shape: tuple[int, ...]) -> Array:
    """Return an object array of this shape; `np.array` would convert nested elements."""
    return np.fromiter(elements, object).reshape(shape)


def _as_bytes(array: Array) -> Array:
    if array.dtype.kind == "O" and all(type(e) is bytes for e in array.flat):
        return array
    return object_array(map(_element_as_bytes, array.flat), array.shape)


def _element_as_bytes(element: Any) -> bytes:
    match element:
        case bytes():
            return bytes(element)
        case str():
            return element.encode()
        case bytearray() | memoryview():
            return bytes(element)
    raise InvalidInput(f"a BYTES tensor has elements of bytes or text, got {type(element).__name__}")


def _as_numbers(array: Array, target: Datatype) -> Array:
    """Convert an array of Python objects to numbers. Raises InvalidInput for anything else."""
    numbers = [_element_as_number(element, target) for element in array.flat]
    dtype = np.dtype(np.float64) if target.kind == "float" else target.dtype
    return np.array(numbers, dtype).reshape(array.shape)


def _element_as_number(element: Any, target: Datatype) -> Any:
    if isinstance(element, str | bytes):
        raise InvalidInput(f"BYTES does not convert to {target}")
    boolean = isinstance(element, bool | np.bool_)
    if boolean is not (target.kind == "bool") or not isinstance(element, int | float | np.number | np.bool_):
        raise InvalidInput(f"expected {target}, got {type(element).__name__}")
    if boolean:
        return element
    try:
        if target.kind == "float":
            return float(element)
        limits = np.iinfo(target.dtype)
        if int(element) == element and limits.min <= element <= limits.max:
            return int(element)
    except (OverflowError, ValueError):  # too large, infinite or NaN
        pass
    bits = element.bit_length() if isinstance(element, int) else 0
    value = f"an integer of {bits} bits" if bits > _LONG_BITS else str(element)
    raise InvalidInput(f"{value} does not fit into {target}")


def _convert(array: Array, source: Datatype, target: Datatype) -> Array:
    if BYTES in (source, target) or "bool" in (source.kind, target.kind):
        raise InvalidInput(f"{source} does not convert to {target}")
    if target.kind == "float":
        return round_to(array, target)
    with np.errstate(over="ignore", invalid="ignore"):
        result = array.astype(target.dtype)
        # Between signed and unsigned types the bits are equal, so the sign is compared too.
        changed = (result.astype(array.dtype) != array) | ((result < 0) != (array < 0))
    if changed.any():
        raise InvalidInput(f"{array[changed].flat[0]} does not fit into {target}")
    return result
