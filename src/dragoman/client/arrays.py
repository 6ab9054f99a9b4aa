"""Arrays of any library as tensors, and tensors in the datatype that a model declares.

Libraries are recognised by the protocols of their objects; none is imported.
"""

import re
import sys
from typing import Any

import ml_dtypes
import numpy as np

from dragoman.core.datatypes import BYTES, FP64, Array, Datatype, round_to
from dragoman.core.errors import InvalidInput
from dragoman.core.signature import TensorSpec
from dragoman.core.tensor import Tensor

_SHOWN_VALUES = 3
_LARGEST_BITS = 1024  # of FP64
_EXACT_IN_FP64 = 1 << 53
_INTEGERS = re.compile(r"(dictionary<values=)?u?int(8|16|32|64)\b")


def is_array(value: Any) -> bool:
    """Return whether a value is an array of a library: of NumPy, or one that supports NumPy's or DLPack's protocol."""
    return isinstance(value, np.ndarray) or (
        not isinstance(value, (type, np.generic))
        and any(hasattr(value, name) for name in ("__array__", "__array_interface__", "__dlpack__"))
    )


def to_array(value: Any) -> Any:
    """Return the NumPy array of an array on any device; a value without such a protocol is returned as it is.

    Gradients of PyTorch are left out. Raises InvalidInput if the library cannot export the array.
    """
    if isinstance(value, np.ma.MaskedArray):
        raise InvalidInput("masked arrays are not supported: fill the array first")
    if isinstance(value, np.ndarray) or not is_array(value):
        return value
    try:
        array = _exported(value)
    except (TypeError, ValueError, RuntimeError, BufferError) as error:
        name = f"{type(value).__module__.partition('.')[0]}.{type(value).__name__}"
        raise InvalidInput(f"a {name} cannot be converted to a NumPy array ({error}): convert it first") from error
    _check_exact(value, array)
    return array


def _check_exact(source: Any, array: Array) -> None:
    """Raise InvalidInput if integers of which some are missing became floats that do not hold them exactly."""
    is_converted = array.dtype.kind == "f" and _INTEGERS.match(_type_name(source)) is not None
    if is_converted and (np.abs(array) >= _EXACT_IN_FP64).any():  # 2**53 may have been 2**53 + 1
        raise InvalidInput("expected integers below 2**53 beside missing values, which FP64 holds exactly")


def _type_name(source: Any) -> str:
    """Return the name of the type of a column of pyarrow, polars or pandas; of a categorical one that of its values."""
    dtype = getattr(source, "type", None) or getattr(source, "dtype", "")
    return str(getattr(getattr(dtype, "categories", dtype), "dtype", dtype)).lower()


def _exported(value: Any) -> Array:
    if str(getattr(value, "type", "")).startswith("dictionary<"):  # pyarrow gives missing ones a value of its own
        value = value.cast(value.type.value_type)
    if hasattr(value, "detach") and hasattr(value, "cpu"):  # PyTorch: gradients and devices
        value = value.detach().cpu()
        for name in ("resolve_conj", "resolve_neg"):
            value = getattr(value, name, lambda same=value: same)()
        if str(getattr(value, "dtype", "")) == "torch.bfloat16":  # NumPy has no such dtype of its own
            bits: Array = value.contiguous().view(sys.modules["torch"].int16).numpy()
            return bits.view(ml_dtypes.bfloat16)
    elif hasattr(value, "__cuda_array_interface__") and hasattr(value, "get"):  # CuPy
        value = value.get()
    if hasattr(value, "__array__") or hasattr(value, "__array_interface__"):
        return np.asarray(value)
    return np.from_dlpack(value)


def fit(tensor: Tensor, spec: TensorSpec, cast: bool) -> Tensor:
    """Return a tensor in the datatype of a model's input, if that changes no value; else the tensor as it is.

    A larger datatype that holds every value is lossless, and FP64 for integers of 64 bits that it holds exactly. With
    `cast` any numbers are converted: to floats by rounding to nearest, to integers and BOOL only without loss. Raises
    InvalidInput that names values which do not fit.
    """
    source, target = tensor.datatype, spec.datatype
    if target is None or source is target or BYTES in (source, target):
        return tensor
    if cast:
        return _replaced(tensor, _cast(tensor.data, target), target)
    if not np.can_cast(source.dtype, target.dtype, "safe"):
        return tensor
    if target is FP64 and source.kind in ("int", "uint") and source.size == FP64.size and not _is_exact(tensor.data):
        return tensor  # NumPy calls it safe, and rounds
    return _replaced(tensor, tensor.data.astype(target.dtype), target)


def hint(tensor: Tensor, spec: TensorSpec) -> str:
    """Return how to convert a tensor of another datatype than the model declares; "" if nothing is to be converted."""
    source, target = tensor.datatype, spec.datatype
    if target is None or source is target or BYTES in (source, target):
        return ""
    dtype = target.dtype.name
    name = f"np.{dtype}" if target.wire_view is None else f"ml_dtypes.{dtype}"
    return f"convert the array with .astype({name}), or pass cast=True"


def _replaced(tensor: Tensor, array: Array, datatype: Datatype) -> Tensor:
    return Tensor(array, datatype, tensor.parameters)


def mixed_numbers(values: list[Any]) -> Array:
    """Return numbers of Python as an array. Raises InvalidInput if integers among floats are not held exactly."""
    array = np.array(values)
    check_integers(values, array, None)
    return array


def check_integers(values: Any, array: Array, target: Datatype | None, advice: str = "") -> None:
    """Raise InvalidInput for integers in nested lists that a datatype of floats does not hold exactly.

    array: of the values, as NumPy converts them. target: None for the datatype of the array. Floats may be rounded.
    """
    target = FP64 if target is None and array.dtype.kind == "f" else target
    if target is None or target.kind != "float" or array.dtype.kind not in "iufO":
        return
    finfo: Any = ml_dtypes.finfo  # which has no annotations
    bits = finfo(target.dtype).nmant + 1
    if array.dtype.kind != "O" and not ((array >= 1 << bits) | (array <= -(1 << bits))).any():
        return  # the limit itself may have been the integer after it
    exact = np.array(values, object)
    lost = np.array([_bits_of(each) > bits for each in exact.flat], bool).reshape(exact.shape)
    if lost.any():
        expected = f"expected integers that {target} holds exactly, as those up to 2**{bits}"
        raise InvalidInput(f"{expected}, got {_shown(exact, lost)}{advice}")


def _bits_of(number: Any) -> int:
    """Return how many bits the mantissa of an integer needs; 0 for other values."""
    integer = abs(int(number)) if isinstance(number, int | np.integer) else 0
    if integer.bit_length() > _LARGEST_BITS:  # which fits into no datatype
        return 0
    return (integer // (integer & -integer)).bit_length() if integer else 0


def _is_exact(integers: Array) -> bool:
    """Return whether FP64 holds every integer."""
    large = integers[(integers > _EXACT_IN_FP64) | (integers < -_EXACT_IN_FP64)]
    return all(int(float(each)) == each for each in large.tolist())


def _cast(array: Array, target: Datatype) -> Array:
    if target.kind == "float":
        try:
            return round_to(array, target)
        except InvalidInput:
            with np.errstate(over="ignore", invalid="ignore"):
                rounded = array.astype(target.dtype)
            raise _unfit(array, np.isfinite(array) & ~np.isfinite(rounded), target) from None
    lost: Array = (array != 0) & (array != 1) if target.kind == "bool" else ~_within(array, target)
    if lost.any():
        raise _unfit(array, lost, target)
    return array.astype(target.dtype)


def _within(array: Array, target: Datatype) -> Array:
    """Return which elements are integers of a datatype."""
    limits = np.iinfo(target.dtype)
    whole: Array
    if array.dtype.kind in "biu":
        whole = (array >= limits.min) & (array <= limits.max)
        return whole
    numbers = array.astype(np.float64)  # lossless; the bounds are powers of two, which it holds
    with np.errstate(invalid="ignore"):
        whole = (numbers >= float(limits.min)) & (numbers < float(limits.max + 1)) & (np.floor(numbers) == numbers)
    return whole


def _unfit(array: Array, lost: Array, target: Datatype) -> InvalidInput:
    verb = "does" if np.count_nonzero(lost) == 1 else "do"
    return InvalidInput(f"{_shown(array, lost)} {verb} not fit into {target}")


def _shown(array: Array, lost: Array) -> str:
    """Return the first of these elements with their positions, and how many more there are."""
    at = np.argwhere(lost)
    shown = ", ".join(f"{array[tuple(index)]}{_position(index.tolist())}" for index in at[:_SHOWN_VALUES])
    return shown + (f" and {len(at) - _SHOWN_VALUES} more values" if len(at) > _SHOWN_VALUES else "")


def _position(index: list[int]) -> str:
    return f" at {index}" if index else ""
