"""Small tensors of numbers in JSON, read in a few steps where everything about them is plain.

Whatever is not so is left to `json_data`, which takes the same and tells what is wrong with the rest.
"""

import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from dragoman.core.datatypes import (
    BOOL,
    FP16,
    FP32,
    FP64,
    INT8,
    INT16,
    INT32,
    INT64,
    UINT8,
    UINT16,
    UINT32,
    UINT64,
    Array,
    Datatype,
)
from dragoman.core.tensor import Tensor
from dragoman.formats.policy import Buffer, Policy

SMALL = 2048  # performance only: bytes of JSON up to which the short way is faster

_NESTED = ord("[")
_BOOLS, _INTEGERS, _FLOATS = (
    (msgspec.json.Decoder(list[kind]), msgspec.json.Decoder(list[list[kind]]))  # type: ignore[valid-type]
    for kind in (bool, int, float)
)
# By the name of a datatype: itself, what reads its elements flat and as rows, and the code by which `struct` packs them
# and refuses what does not fit.
FORMS: Mapping[str, tuple[Datatype, Any, Any, str]] = {
    kind.name: (kind, *readers, code)
    for kind, readers, code in (
        (BOOL, _BOOLS, "?"),
        (UINT8, _INTEGERS, "B"),
        (UINT16, _INTEGERS, "H"),
        (UINT32, _INTEGERS, "I"),
        (UINT64, _INTEGERS, "Q"),
        (INT8, _INTEGERS, "b"),
        (INT16, _INTEGERS, "h"),
        (INT32, _INTEGERS, "i"),
        (INT64, _INTEGERS, "q"),
        (FP16, _FLOATS, "e"),
        (FP32, _FLOATS, "f"),
        (FP64, _FLOATS, "d"),
    )
}
# An axis of a negative length is a ValueError of the array.
FAULTS = (msgspec.DecodeError, UnicodeDecodeError, struct.error, OverflowError, ValueError)


def small_tensor(datatype: str, shape: Sequence[int], data: Any, policy: Policy) -> Tensor | None:
    """The tensor of a named datatype in `data`, flat or in rows; None where there is anything else to be said of it."""
    form = FORMS.get(datatype)
    if form is None or type(data) is not msgspec.Raw or not (2 < len(text := memoryview(data)) <= SMALL):
        return None
    kind, flat, rows, code = form
    try:
        values = _joined(rows.decode(data), shape) if text[1] == _NESTED else flat.decode(data)
        count = len(values)
        if not (0 < count == math.prod(shape) <= policy.max_elements and len(shape) <= policy.max_rank):
            return None
        array: Array = np.ndarray(shape, kind.dtype, struct.pack(f"<{count}{code}", *values))
    except FAULTS:
        return None
    return Tensor(array, kind)


def plain_raw(datatype: str, shape: Sequence[int], raw: Buffer, policy: Policy) -> Tensor | None:
    """The tensor of a named datatype whose numbers are given as bytes; None where anything else is to be said of it."""
    form = FORMS.get(datatype)
    if form is None or not len(raw):
        return None
    kind = form[0]
    if kind is BOOL or math.prod(shape) * kind.size != len(raw):
        return None
    if len(raw) // kind.size > policy.max_elements or len(shape) > policy.max_rank:
        return None
    try:
        return Tensor(numbers_in(raw, shape, kind.dtype), kind)
    except ValueError:
        return None


def numbers_in(raw: Buffer, shape: Sequence[int], dtype: Any) -> Array:
    """The numbers in some bytes, read-only: a view of many that lie where the processor wants them, else a copy."""
    if len(raw) <= SMALL:
        return np.ndarray(shape, dtype, bytes(raw))
    array: Array = np.frombuffer(raw, dtype).reshape(shape)
    if not array.flags.aligned:
        array = array.copy()
    array.flags.writeable = False
    return array


def _joined(rows: list[list[Any]], shape: Sequence[int]) -> list[Any]:
    """The elements of all rows; none where the rows are not as the shape has it."""
    if len(shape) != 2 or len(rows) != shape[0] or any(len(row) != shape[1] for row in rows):
        return []
    return [value for row in rows for value in row]
