"""The table of datatypes of tensors: the thirteen of the Open Inference Protocol and BF16.

BYTES elements are `bytes` objects in an object array. The dtype of BF16 is `ml_dtypes.bfloat16`, since NumPy has none
of its own. A line here is all that another datatype needs: formats, workers, runtimes and the client ask the table.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from dragoman.core.errors import InvalidInput

Kind = Literal["bool", "uint", "int", "float", "bytes"]
Array = NDArray[Any]
Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True, eq=False)
class Datatype:
    """One datatype: its name on the wire, the NumPy dtype that holds it and its bytes per element.

    There is one instance a name, so `is` compares.

    size: 0 for BYTES, whose elements vary.
    contents_field: the field of InferTensorContents (gRPC) for its elements; "" if they are always raw contents.
    wire_view: unsigned integers of NumPy as which its arrays are exported; None if Python's buffer protocol knows its
        dtype, which is one of NumPy's own then.
    json_dtype: NumPy's own dtype that holds each of its values, for JSON and libraries that know no other.
    """

    name: str
    dtype: np.dtype[Any]
    size: int
    kind: Kind
    contents_field: str = ""
    wire_view: np.dtype[Any] | None = field(init=False)
    json_dtype: np.dtype[Any] = field(init=False)

    def __post_init__(self) -> None:
        is_numpy = self.dtype.isbuiltin != 2  # 2: of a library
        object.__setattr__(self, "wire_view", None if is_numpy else np.dtype(f"<u{self.size}"))
        object.__setattr__(self, "json_dtype", self.dtype if is_numpy else np.dtype(np.float32))

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return datatype, (self.name,)

    def __repr__(self) -> str:
        return self.name


BOOL = Datatype("BOOL", np.dtype(np.bool_), 1, "bool", "bool_contents")
UINT8 = Datatype("UINT8", np.dtype("<u1"), 1, "uint", "uint_contents")
UINT16 = Datatype("UINT16", np.dtype("<u2"), 2, "uint", "uint_contents")
UINT32 = Datatype("UINT32", np.dtype("<u4"), 4, "uint", "uint_contents")
UINT64 = Datatype("UINT64", np.dtype("<u8"), 8, "uint", "uint64_contents")
INT8 = Datatype("INT8", np.dtype("<i1"), 1, "int", "int_contents")
INT16 = Datatype("INT16", np.dtype("<i2"), 2, "int", "int_contents")
INT32 = Datatype("INT32", np.dtype("<i4"), 4, "int", "int_contents")
INT64 = Datatype("INT64", np.dtype("<i8"), 8, "int", "int64_contents")
FP16 = Datatype("FP16", np.dtype("<f2"), 2, "float")
BF16 = Datatype("BF16", np.dtype(ml_dtypes.bfloat16), 2, "float")
FP32 = Datatype("FP32", np.dtype("<f4"), 4, "float", "fp32_contents")
FP64 = Datatype("FP64", np.dtype("<f8"), 8, "float", "fp64_contents")
BYTES = Datatype("BYTES", np.dtype(object), 0, "bytes", "bytes_contents")

DATATYPES: Mapping[str, Datatype] = {d.name: d for d in tuple(globals().values()) if isinstance(d, Datatype)}
# The datatypes of NumPy's own numbers, which most libraries take; few take bfloat16.
NUMERIC = frozenset(d for d in DATATYPES.values() if d is not BYTES and d.wire_view is None)

_BY_DTYPE: Mapping[np.dtype[Any], Datatype] = {d.dtype: d for d in DATATYPES.values()}


def datatype(name: str) -> Datatype:
    """Return the datatype of a name, which is case-sensitive. Raises InvalidInput."""
    found = DATATYPES.get(name)
    if found is None:
        raise InvalidInput(f"unknown datatype '{name}': expected one of {', '.join(DATATYPES)}")
    return found


def datatype_of(dtype: np.dtype[Any]) -> Datatype:
    """Return the datatype of arrays of `dtype`. Raises InvalidInput if there is none.

    Byte order does not matter here (`Tensor.of` converts); strings and objects are BYTES.
    """
    found = _BY_DTYPE.get(dtype.newbyteorder("="))
    if found is not None:
        return found
    if dtype.kind in "SU":
        return BYTES
    raise InvalidInput(f"arrays of dtype {dtype} have no datatype in the protocol; convert them first")


def widens(source: Datatype, target: Datatype) -> bool:
    """Return whether every value of a datatype is one of another, larger datatype of numbers.

    NumPy calls INT64 to FP64 safe, which rounds beyond 2**53: datatypes of the same size do not widen.
    """
    if {source.kind, target.kind} & {"bool", "bytes"}:
        return False
    return source.size < target.size and np.can_cast(source.dtype, target.dtype, "safe")


def round_to(numbers: Array, datatype: Datatype) -> Array:
    """Return the numbers as the floating-point datatype: the nearest, ties to even.

    Raises InvalidInput naming the first number that is too large for the datatype; an infinity is if it has none.
    """
    with np.errstate(over="ignore", invalid="ignore"):  # ml_dtypes warns of signalling NaN wherever it meets one
        exact = numbers if datatype.wire_view is None else _to_odd_fp32(numbers)
        result: Array = exact.astype(datatype.dtype, copy=False)
        finite = np.isfinite(result)
        if not finite.all():
            lost = (np.isfinite(numbers) & ~finite) | (np.isinf(numbers) & np.isnan(result))
            if lost.any():
                raise InvalidInput(f"{numbers[lost].flat[0]} does not fit into {datatype}")
    return result


def _to_odd_fp32(numbers: Array) -> Array:
    """Return the numbers as FP32, where one that is not exact gets the neighbour whose last bit is 1.

    Rounding that to BF16, or a smaller datatype, gives the value that is nearest to the number itself. Rounding to the
    nearest FP32 first would turn numbers close to the middle between two BF16 into that middle.
    S. Boldo, G. Melquiond: Emulation of FMA and correctly rounded sums, IEEE Trans. Computers 57(4), 2008.
    """
    if np.can_cast(numbers.dtype, np.float32):
        return numbers
    wide = numbers.astype(np.longdouble if numbers.dtype.kind in "iu" else np.float64)
    single = wide.astype(np.float32)
    inexact, is_larger = (single != wide) & ~np.isnan(wide), np.abs(single) > np.abs(wide)
    bits = single.view(np.uint32)
    bits -= is_larger
    bits |= inexact
    return single
