"""Large typed contents of a ModelInferRequest, read from the wire in portions without an object for each element.

protobuf's own parser takes up to 16 bytes for an element of two, and holds the interpreter lock until it is done. So
the elements of large messages are counted before anything is parsed, and numbers are decoded here.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dragoman.core.datatypes import Array
from dragoman.core.errors import InvalidInput
from dragoman.formats.oip_messages import InferTensorContents, ModelInferRequest, length_delimited
from dragoman.formats.oip_raw import extent, varint
from dragoman.formats.policy import Buffer, Policy

LARGE = 1 << 20  # bytes of a message from which on it is read so; those are read in a thread
_CONTENTS_LARGE = 1 << 16
_PORTION = 1 << 18  # performance only: bytes decoded at a time
_MOST_VARINT = 10
_INPUTS = ModelInferRequest.DESCRIPTOR.fields_by_name["inputs"]
_CONTENTS: int = _INPUTS.message_type.fields_by_name["contents"].number
_DELIMITED = 2

# By the number of a field of InferTensorContents: its name, and the dtype of elements of fixed size or None.
FIXED: Mapping[str, Any] = {"fp32_contents": np.dtype("<f4"), "fp64_contents": np.dtype("<f8")}
_VARINTS: Mapping[str, Any] = {
    "bool_contents": np.dtype(np.bool_),
    "int_contents": np.dtype("<i4"),
    "int64_contents": np.dtype("<i8"),
    "uint_contents": np.dtype("<u4"),
    "uint64_contents": np.dtype("<u8"),
}
_NAMES: Mapping[int, str] = {field.number: field.name for field in InferTensorContents.DESCRIPTOR.fields}


@dataclass(frozen=True, slots=True)
class Packed:
    """The elements of one field of contents, as they are on the wire."""

    field: str
    wire: memoryview

    def __len__(self) -> int:
        if self.field in FIXED:
            return len(self.wire) // int(FIXED[self.field].itemsize)
        view = np.frombuffer(self.wire, np.uint8)
        return sum(int(np.count_nonzero(view[at : at + _PORTION] < 0x80)) for at in range(0, view.size, _PORTION))

    def array(self) -> Array:
        """The elements. Raises InvalidInput if their bytes are broken off."""
        if self.field in FIXED:
            if len(self.wire) % FIXED[self.field].itemsize:
                raise InvalidInput(f"'{self.field}' ends within an element")
            return np.frombuffer(self.wire, FIXED[self.field])
        found = np.empty(len(self), _VARINTS[self.field])
        view, at, done = np.frombuffer(self.wire, np.uint8), 0, 0
        while at < view.size:
            ends = np.flatnonzero(view[at : at + _PORTION] < 0x80)
            if not ends.size:
                raise InvalidInput(f"'{self.field}' ends within an element")
            values = _decoded(view[at : at + int(ends[-1]) + 1], ends)
            found[done : done + values.size] = values.astype(found.dtype)
            done += values.size
            at += int(ends[-1]) + 1
        return found


def _decoded(view: Array, ends: Array) -> Array:
    """The varints in some bytes as uint64, the excess bits dropped as by protobuf; `ends` are their last bytes."""
    starts = np.concatenate(([0], ends[:-1] + 1))
    sizes = ends - starts + 1
    most = int(sizes.max())
    if most > _MOST_VARINT:
        raise InvalidInput(f"a varint has {most} bytes, expected at most {_MOST_VARINT}")
    values = np.zeros(ends.size, np.uint64)
    for at in range(most):
        longer = sizes > at
        values[longer] |= (view[starts[longer] + at] & 0x7F).astype(np.uint64) << np.uint64(7 * at)
    return values


def varints(integers: Array) -> bytes:
    """The integers as varints. Negative ones take ten bytes, as if they had 64 bits."""
    values = integers.astype(np.uint64 if integers.dtype.kind in "ub" else np.int64).view(np.uint64)
    sizes = np.ones(values.size, np.intp)
    for bits in range(7, 64, 7):
        sizes += values >> np.uint64(bits) > 0
    starts = np.cumsum(sizes) - sizes
    found = np.empty(int(sizes.sum()), np.uint8)
    for at in range(int(sizes.max())):
        longer = sizes > at
        low = values[longer] >> np.uint64(7 * at) & np.uint64(0x7F)
        found[starts[longer] + at] = low | np.where(sizes[longer] > at + 1, np.uint64(0x80), np.uint64(0))
    return found.tobytes()


def typed_apart(body: Buffer, policy: Policy) -> tuple[bytes, Mapping[int, Packed]] | None:
    """A ModelInferRequest without its large packed contents, and these by the place of their input.

    None where the message is broken, so that protobuf tells what is wrong. Raises InvalidInput where it has too many
    fields or elements to be parsed.
    """
    view = memoryview(body).cast("B")
    rest: list[Buffer] = []
    found: dict[int, Packed] = {}
    done = place = 0
    budget = _Budget(policy.max_json_values, policy.max_bytes_elements)
    try:
        for number, wire_type, tag, start, end in _fields(view, budget.field):
            if number != _INPUTS.number or wire_type != _DELIMITED:
                continue
            packed, other = _without_contents(view[start:end], budget)
            if packed is not None:
                rest += (view[done:tag], *length_delimited(number, other))
                found[place] = packed
                done = end
            place += 1
    except (IndexError, ValueError):
        return None
    return b"".join((*rest, view[done:])), found


class _Budget:
    """How many fields and elements a message may have. Raises InvalidInput beyond."""

    def __init__(self, fields: int, elements: int) -> None:
        self._fields, self._most_fields = 0, fields
        self._elements, self._most_elements = 0, elements

    def field(self) -> None:
        self._fields += 1
        if self._fields > self._most_fields:
            raise InvalidInput(f"the message has too many fields: expected at most {self._most_fields}, got more")

    def element(self) -> None:
        self._elements += 1
        if self._elements > self._most_elements:
            raise InvalidInput(
                f"the message has too many unpacked elements: expected at most {self._most_elements}, got more"
            )


def _without_contents(tensor: memoryview, budget: _Budget) -> tuple[Packed | None, bytes]:
    """The contents of an input, if they are one large packed field of numbers, and the rest of it."""
    packed, count, cut = None, 0, (0, 0)
    for number, wire_type, tag, start, end in _fields(tensor, budget.field):
        if number != _CONTENTS or wire_type != _DELIMITED:
            continue
        if cut[1]:
            count += 1  # contents may be there twice
        cut, contents = (tag, end), tensor[start:end]
        for field, kind, _, first, last in _fields(contents, budget.element):
            count += 1
            name = _NAMES.get(field, "")
            if kind == _DELIMITED and (name in FIXED or name in _VARINTS):
                packed = Packed(name, contents[first:last])
    if packed is None or count != 1 or len(packed.wire) < _CONTENTS_LARGE:
        return None, b""
    return packed, b"".join((tensor[: cut[0]], tensor[cut[1] :]))


def _fields(view: memoryview, counted: Any) -> Iterator[tuple[int, int, int, int, int]]:
    """The fields of a message: number, wire type, and where tag, value and end are."""
    at = 0
    while at < len(view):
        counted()
        tag_at = at
        tag, at = varint(view, at)
        start, end = extent(view, tag, at)
        yield tag >> 3, tag & 7, tag_at, start, end
        at = end
