"""The datatypes of tensors: the thirteen of the Open Inference Protocol and BF16.

BYTES elements are `bytes` objects in an object array. NumPy has no bfloat16, so a BF16 array holds the
sixteen bits of each number as `uint16`; `bf16_to_fp32` and `fp32_to_bf16` convert.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dragoman.core.errors import InvalidInput

Kind = Literal["bool", "uint", "int", "float", "bytes"]
Array = NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class Datatype:
    """One datatype: its name on the wire, the NumPy dtype that holds it and its bytes per element.

    There is one instance a name, so `is` compares. `size` is 0 for BYTES, whose elements vary.
    """

    name: str
    dtype: np.dtype[Any]
    size: int
    kind: Kind

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return datatype, (self.name,)

    def __repr__(self) -> str:
        return self.name


BOOL = Datatype("BOOL", np.dtype(np.bool_), 1, "bool")
UINT8 = Datatype("UINT8", np.dtype("<u1"), 1, "uint")
UINT16 = Datatype("UINT16", np.dtype("<u2"), 2, "uint")
UINT32 = Datatype("UINT32", np.dtype("<u4"), 4, "uint")
UINT64 = Datatype("UINT64", np.dtype("<u8"), 8, "uint")
INT8 = Datatype("INT8", np.dtype("<i1"), 1, "int")
INT16 = Datatype("INT16", np.dtype("<i2"), 2, "int")
INT32 = Datatype("INT32", np.dtype("<i4"), 4, "int")
INT64 = Datatype("INT64", np.dtype("<i8"), 8, "int")
FP16 = Datatype("FP16", np.dtype("<f2"), 2, "float")
BF16 = Datatype("BF16", np.dtype("<u2"), 2, "float")
FP32 = Datatype("FP32", np.dtype("<f4"), 4, "float")
FP64 = Datatype("FP64", np.dtype("<f8"), 8, "float")
BYTES = Datatype("BYTES", np.dtype(object), 0, "bytes")

DATATYPES: Mapping[str, Datatype] = {
    d.name: d for d in (BOOL, UINT8, UINT16, UINT32, UINT64, INT8, INT16, INT32, INT64, FP16, BF16, FP32, FP64, BYTES)
}
NUMERIC = frozenset(DATATYPES.values()) - {BYTES, BF16}

_BY_DTYPE: Mapping[np.dtype[Any], Datatype] = {d.dtype: d for d in DATATYPES.values() if d is not BF16}


def datatype(name: str) -> Datatype:
    """The datatype called `name`, exactly (the protocol is case-sensitive); InvalidInput where there is none."""
    found = DATATYPES.get(name)
    if found is None:
        raise InvalidInput(f"datatype '{name}' is not known; expected one of {', '.join(DATATYPES)}")
    return found


def datatype_of(dtype: np.dtype[Any]) -> Datatype:
    """The datatype that holds arrays of `dtype`; InvalidInput where none does.

    Byte order does not matter here (`Tensor.of` converts); strings and objects are BYTES; bfloat16 as other
    libraries define it for NumPy is BF16.
    """
    found = _BY_DTYPE.get(dtype.newbyteorder("="))
    if found is not None:
        return found
    if dtype.name == "bfloat16":
        return BF16
    if dtype.kind in "SU":
        return BYTES
    raise InvalidInput(f"arrays of dtype {dtype} have no datatype in the protocol; convert them first")


def bf16_to_fp32(bits: Array) -> NDArray[np.float32]:
    """The numbers whose bfloat16 bits are given, exactly."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def fp32_to_bf16(numbers: Array) -> NDArray[np.uint16]:
    """The bits of the nearest bfloat16, ties to even; NaN stays NaN."""
    single = np.ascontiguousarray(numbers, dtype=np.float32)
    bits = single.view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
    # Rounding up may carry a NaN into infinity: keep its sign and make it quiet.
    quiet = ((bits >> np.uint32(16)) | np.uint32(0x0040)).astype(np.uint16)
    return np.where(np.isnan(single), quiet, rounded)
