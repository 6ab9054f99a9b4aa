"""Contents of a ModelInferRequest taken from its wire form, so that protobuf neither copies nor parses them.

Raw contents become views of the message. protobuf takes up to 16 bytes of memory for a typed element of two bytes, and
holds the interpreter lock until it finishes; so the elements of large messages are counted first, and numbers are
decoded here, without an object for each.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dragoman.core.datatypes import Array
from dragoman.core.errors import InvalidInput
from dragoman.core.sizes import SHARED
from dragoman.formats.oip_messages import InferTensorContents, ModelInferRequest, length_delimited
from dragoman.formats.policy import Buffer, Policy

_DECODED_BYTES = 1 << 18  # performance only: decoded at a time
_MAX_SCANNED_FIELDS = 1000  # performance only: scanning more takes longer than it saves
_MAX_VARINT_BITS = 63
_MAX_VARINT_BYTES = 10
_MAX_HEAD_BYTES = 6  # of the tag and length of contents; protobuf allows longer encodings of the same length
_DELIMITED = 2  # wire type of fields with a length

_RAW_INPUT_CONTENTS: int = ModelInferRequest.DESCRIPTOR.fields_by_name["raw_input_contents"].number
_INPUTS = ModelInferRequest.DESCRIPTOR.fields_by_name["inputs"]
_CONTENTS: int = _INPUTS.message_type.fields_by_name["contents"].number
_NAMES: Mapping[int, str] = {field.number: field.name for field in InferTensorContents.DESCRIPTOR.fields}
# The dtype of elements of fixed size, and of those that are varints, by the name of their field.
FIXED: Mapping[str, Any] = {"fp32_contents": np.dtype("<f4"), "fp64_contents": np.dtype("<f8")}
_VARINTS: Mapping[str, Any] = {
    "bool_contents": np.dtype(np.bool_),
    "int_contents": np.dtype("<i4"),
    "int64_contents": np.dtype("<i8"),
    "uint_contents": np.dtype("<u4"),
    "uint64_contents": np.dtype("<u8"),
}


def split_raw_contents(body: Buffer) -> tuple[bytes, Sequence[memoryview]] | None:
    """Return a ModelInferRequest without its raw input contents, and these as views in order.

    None if it has none, and for protobuf to report an error if it is malformed or has very many fields. Only the fields
    of the outermost message are scanned.
    """
    view = memoryview(body).cast("B")
    rest: list[memoryview] = []
    contents: list[memoryview] = []
    at = done = 0
    try:
        for _ in range(_MAX_SCANNED_FIELDS):
            if at == len(view):
                rest.append(view[done:])
                return (b"".join(rest), contents) if contents else None
            start = at
            tag, at = read_varint(view, at)
            value, at = field_extent(view, tag, at)
            if tag == _RAW_INPUT_CONTENTS << 3 | _DELIMITED:
                if value - start > _MAX_HEAD_BYTES:
                    return None
                rest.append(view[done:start])
                contents.append(view[value:at])
                done = at
    except (IndexError, ValueError):
        pass
    return None


def field_extent(view: memoryview, tag: int, at: int) -> tuple[int, int]:
    """Return the start and end of a field's value. Raises IndexError or ValueError if the message is malformed."""
    start = end = at
    match tag & 7:  # protobuf's wire types
        case 2:  # with a length
            size, start = read_varint(view, at)
            end = start + size
        case 0:  # a varint
            _, end = read_varint(view, at)
        case 1:
            end = at + 8
        case 5:
            end = at + 4
        case _:
            raise ValueError("a group, or not a field")
    if end > len(view):
        raise ValueError("truncated")
    return start, end


def read_varint(view: memoryview, at: int) -> tuple[int, int]:
    """Return the varint at an index, and the index after it."""
    number = shift = 0
    while True:
        digit = view[at]
        at += 1
        number |= (digit & 0x7F) << shift
        if digit < 0x80:
            return number, at
        shift += 7
        if shift > _MAX_VARINT_BITS:
            raise ValueError("a varint is too long")


# --- typed contents ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PackedContents:
    """The elements of one packed field of an InferTensorContents, not yet decoded."""

    field: str
    wire: memoryview

    def __len__(self) -> int:
        if self.field in FIXED:
            return len(self.wire) // int(FIXED[self.field].itemsize)
        view = np.frombuffer(self.wire, np.uint8)
        return sum(
            int(np.count_nonzero(view[at : at + _DECODED_BYTES] < 0x80)) for at in range(0, view.size, _DECODED_BYTES)
        )

    def array(self) -> Array:
        """Return the elements. Raises InvalidInput if the last one is truncated."""
        if self.field in FIXED:
            if len(self.wire) % FIXED[self.field].itemsize:
                raise InvalidInput(f"'{self.field}' ends within an element")
            return np.frombuffer(self.wire, FIXED[self.field])
        array = np.empty(len(self), _VARINTS[self.field])
        view, at, done = np.frombuffer(self.wire, np.uint8), 0, 0
        while at < view.size:
            ends = np.flatnonzero(view[at : at + _DECODED_BYTES] < 0x80)
            if not ends.size:
                raise InvalidInput(f"'{self.field}' ends within an element")
            values = _decode_varints(view[at : at + int(ends[-1]) + 1], ends)
            array[done : done + values.size] = values.astype(array.dtype)
            done += values.size
            at += int(ends[-1]) + 1
        return array


def _decode_varints(view: Array, ends: Array) -> Array:
    """Return varints as uint64, without excess bits, as protobuf does; `ends` are the indices of their last bytes."""
    starts = np.concatenate(([0], ends[:-1] + 1))
    sizes = ends - starts + 1
    longest = int(sizes.max())
    if longest > _MAX_VARINT_BYTES:
        raise InvalidInput(f"a varint has {longest} bytes, expected at most {_MAX_VARINT_BYTES}")
    values = np.zeros(ends.size, np.uint64)
    for at in range(longest):
        longer = sizes > at
        values[longer] |= (view[starts[longer] + at] & 0x7F).astype(np.uint64) << np.uint64(7 * at)
    return values


def encode_varints(integers: Array) -> bytes:
    """Return integers as varints; negative ones take ten bytes, as 64-bit integers."""
    values = integers.astype(np.uint64 if integers.dtype.kind in "ub" else np.int64).view(np.uint64)
    sizes = np.ones(values.size, np.intp)
    for bits in range(7, 64, 7):
        sizes += values >> np.uint64(bits) > 0
    starts = np.cumsum(sizes) - sizes
    encoded = np.empty(int(sizes.sum()), np.uint8)
    for at in range(int(sizes.max())):
        longer = sizes > at
        low = values[longer] >> np.uint64(7 * at) & np.uint64(0x7F)
        encoded[starts[longer] + at] = low | np.where(sizes[longer] > at + 1, np.uint64(0x80), np.uint64(0))
    return encoded.tobytes()


def split_typed_contents(body: Buffer, policy: Policy) -> tuple[bytes, Mapping[int, PackedContents]] | None:
    """Return a ModelInferRequest without its large packed contents, and these by the index of their input.

    None for protobuf to report an error if the message is malformed. Raises InvalidInput if it has too many fields or
    elements to be parsed.
    """
    view = memoryview(body).cast("B")
    rest: list[Buffer] = []
    contents: dict[int, PackedContents] = {}
    done = index = 0
    budget = _Budget(policy.max_json_values, policy.max_bytes_elements)
    try:
        for number, wire_type, tag, start, end in _fields(view, budget.field):
            if number != _INPUTS.number or wire_type != _DELIMITED:
                continue
            packed, other = _without_contents(view[start:end], budget)
            if packed is not None:
                rest += (view[done:tag], *length_delimited(number, other))
                contents[index] = packed
                done = end
            index += 1
    except (IndexError, ValueError):
        return None
    return b"".join((*rest, view[done:])), contents


class _Budget:
    """Counts the fields and elements of a message. Raises InvalidInput if there are too many."""

    def __init__(self, fields: int, elements: int) -> None:
        self._fields, self._max_fields = 0, fields
        self._elements, self._max_elements = 0, elements

    def field(self) -> None:
        self._fields += 1
        if self._fields > self._max_fields:
            raise InvalidInput(f"the message has too many fields: expected at most {self._max_fields}, got more")

    def element(self) -> None:
        self._elements += 1
        if self._elements > self._max_elements:
            raise InvalidInput(
                f"the message has too many elements in typed contents: expected at most {self._max_elements}"
                " (setting 'max_bytes_elements'), got more; send raw contents"
            )


def _without_contents(tensor: memoryview, budget: _Budget) -> tuple[PackedContents | None, bytes]:
    """Return the contents of an input if they are one large packed field of numbers, and the rest of the input."""
    packed, count, cut = None, 0, (0, 0)
    for number, wire_type, tag, start, end in _fields(tensor, budget.field):
        if number != _CONTENTS or wire_type != _DELIMITED:
            continue
        if cut[1]:
            count += 1  # the field may be repeated
        cut, contents = (tag, end), tensor[start:end]
        for field, kind, _, first, last in _fields(contents, budget.element):
            count += 1
            name = _NAMES.get(field, "")
            if kind == _DELIMITED and (name in FIXED or name in _VARINTS):
                packed = PackedContents(name, contents[first:last])
    if packed is None or count != 1 or len(packed.wire) < SHARED:
        return None, b""
    return packed, b"".join((tensor[: cut[0]], tensor[cut[1] :]))


def _fields(view: memoryview, count_field: Any) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield number and wire type of each field, and the indices of its tag, its value and its end."""
    at = 0
    while at < len(view):
        count_field()
        tag_at = at
        tag, at = read_varint(view, at)
        start, end = field_extent(view, tag, at)
        yield tag >> 3, tag & 7, tag_at, start, end
        at = end
