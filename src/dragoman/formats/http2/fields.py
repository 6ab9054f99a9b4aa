"""Header fields to and from their compressed form (HPACK, RFC 7541).

Blocks are decoded here instead of by the `hpack` library for three reasons: the decoder reports whether a block has
changed the dynamic table (`version`), so that equal blocks are decoded once; a list beyond the limit takes no memory
while the table stays correct; and gRPC's blocks, which are mostly indices, take a quarter of the time. The static table
comes from the library's public decoder.
"""

from collections.abc import Iterable
from functools import cache
from typing import Final

import hpack

from dragoman.formats.http2.frames import COMPRESSION_ERROR, Http2ConnectionError
from dragoman.system.request_context import HEADER, NUMBER_DIGITS, PREFIX, Context, request_id

# Padding is the most significant bits of the code of the end-of-string symbol: ones, and fewer than 8.
_MOST_PADDING: Final = 7
_SYMBOLS: Final = 256
_MALFORMED: Final = "a string is not valid Huffman code"

_Step = tuple[bytes, int]  # the symbols that a byte completes, and the next state


class Huffman:
    """A state machine whose states are the inner nodes of the code's tree; state 0 is the root.

    Transitions are computed when they are first needed, and cached.
    """

    __slots__ = ("_children", "_final", "_steps")

    def __init__(self) -> None:
        # Of each inner node: its two children. A symbol's leaf is ~symbol, so that it is negative; None: no code.
        self._children: list[list[int | None]] = [[None, None]]
        for symbol in range(_SYMBOLS):
            self._insert(symbol, *_code_of(symbol))
        self._steps: list[dict[int, _Step]] = [{} for _ in self._children]
        self._final = self._padding_states()

    def decode(self, text: bytes) -> bytes:
        """Return the plain text. Raises ValueError if it is malformed."""
        state, found = 0, []
        steps = self._steps
        for byte in text:
            step = steps[state].get(byte)
            if step is None:
                step = steps[state][byte] = self._step(state, byte)
            symbols, state = step
            found.append(symbols)
        if state not in self._final:
            raise ValueError(_MALFORMED)
        return b"".join(found)

    def _insert(self, symbol: int, bits: int, length: int) -> None:
        node = 0
        for shift in range(length - 1, 0, -1):
            bit = bits >> shift & 1
            child = self._children[node][bit]
            if child is None:
                child = self._children[node][bit] = len(self._children)
                self._children.append([None, None])
            node = child
        self._children[node][bits & 1] = ~symbol

    def _step(self, state: int, byte: int) -> _Step:
        symbols = bytearray()
        for shift in range(7, -1, -1):
            child = self._children[state][byte >> shift & 1]
            if child is None:
                raise ValueError(_MALFORMED)
            if child < 0:
                symbols.append(~child)
                state = 0
            else:
                state = child
        return bytes(symbols), state

    def _padding_states(self) -> frozenset[int]:
        states = [0]
        for _ in range(_MOST_PADDING):
            child = self._children[states[-1]][1]
            assert child is not None
            states.append(child)
        return frozenset(states)


def _code_of(symbol: int) -> tuple[int, int]:
    """Return the bits of a symbol's code and their number.

    Eight equal symbols take as many bytes as the code has bits, so that there is no padding.
    """
    block = hpack.Encoder().encode([(b"", bytes((symbol,)) * 8)], huffman=True)
    length = block[2] & 0x7F  # after the literal's first byte and the empty name
    return int.from_bytes(block[3:]) >> 7 * length, length


@cache
def huffman() -> Huffman:
    """Return the state machine that all decoders share."""
    return Huffman()


Field = tuple[bytes, bytes]

# RFC 7541, 4.1: size of an entry beside its name and value.
ENTRY_BYTES: Final = 32
TABLE_BYTES: Final = 4096

# RFC 7541, appendix A.
_STATIC: Final[tuple[Field, ...]] = (
    (b"", b""),
    *((bytes(name), bytes(value)) for name, value in hpack.Decoder().decode(bytes(range(0x81, 0x81 + 61)), raw=True)),
)
_NAMES: Final = {name: at for at, (name, _) in reversed(list(enumerate(_STATIC))) if at}
# No integer in a valid block within our limits is larger.
_MAX_INTEGER: Final = 1 << 24


class Decoder:
    """Decodes the header blocks of one connection.

    `version` changes with the table: while it stays, equal blocks mean equal fields. A block whose fields count more
    than `max_list_bytes` (each its name, value and 32 bytes) is decoded to its end, to keep the table correct;
    `too_large` is true after such a block, of which only the fields that fit are returned.
    """

    __slots__ = ("_entries", "_huffman", "_limit", "_max_list_bytes", "_size", "too_large", "version")

    def __init__(self, max_list_bytes: int) -> None:
        self.version = 0
        self.too_large = False
        self._huffman = huffman()
        self._max_list_bytes = max_list_bytes
        self._entries: list[Field] = []  # the newest last
        self._size = 0
        self._limit = TABLE_BYTES

    def decode(self, block: bytes) -> list[Field]:
        """Return the fields of a block. Raises Http2ConnectionError COMPRESSION_ERROR."""
        try:
            return self._decode(block)
        except (IndexError, ValueError) as error:
            raise Http2ConnectionError(COMPRESSION_ERROR, "a header block ends early or is malformed") from error

    def _decode(self, block: bytes) -> list[Field]:
        found: list[Field] = []
        at, end, room = 0, len(block), self._max_list_bytes
        while at < end:
            first = block[at]
            if first >= 0x80:
                if first == 0xFF:
                    index, at = _integer(block, at, 0x7F)
                else:
                    index, at = first & 0x7F, at + 1
                field = self._entry(index)
            elif first >= 0x40:
                field, at = self._literal(block, at, 0x3F)
                self._add(field)
            elif first >= 0x20:
                at = self._resize(block, at, bool(found) or room < 0)
                continue
            else:
                field, at = self._literal(block, at, 0x0F)
            room -= len(field[0]) + len(field[1]) + ENTRY_BYTES
            if room >= 0:
                found.append(field)
        self.too_large = room < 0
        return found

    def _entry(self, index: int) -> Field:
        if 0 < index <= 61:
            return _STATIC[index]
        if 61 < index <= 61 + len(self._entries):
            return self._entries[61 - index]
        raise Http2ConnectionError(COMPRESSION_ERROR, f"there is no header field {index} in the table")

    def _literal(self, block: bytes, at: int, mask: int) -> tuple[Field, int]:
        index = block[at] & mask
        if index == 0:
            name, at = self._text(block, at + 1)
        else:
            if index == mask:
                index, at = _integer(block, at, mask)
            else:
                at += 1
            name = self._entry(index)[0]
        value, at = self._text(block, at)
        return (name, value), at

    def _text(self, block: bytes, at: int) -> tuple[bytes, int]:
        first = block[at]
        if first & 0x7F == 0x7F:
            length, at = _integer(block, at, 0x7F)
        else:
            length, at = first & 0x7F, at + 1
        end = at + length
        if end > len(block):
            raise Http2ConnectionError(COMPRESSION_ERROR, "a header block ends within a string")
        text = block[at:end]
        return (self._huffman.decode(text) if first >= 0x80 else text), end

    def _add(self, field: Field) -> None:
        self.version += 1
        self._size += len(field[0]) + len(field[1]) + ENTRY_BYTES
        self._entries.append(field)
        if self._size > self._limit:
            self._evict()

    def _evict(self) -> None:
        gone = 0
        while self._size > self._limit:
            name, value = self._entries[gone]
            self._size -= len(name) + len(value) + ENTRY_BYTES
            gone += 1
        del self._entries[:gone]

    def _resize(self, block: bytes, at: int, late: bool) -> int:
        size, at = _integer(block, at, 0x1F)
        if late or size > TABLE_BYTES:
            reason = "after a field" if late else f"to {size} bytes, of which {TABLE_BYTES} are allowed"
            raise Http2ConnectionError(COMPRESSION_ERROR, f"a header block resizes the table {reason}")
        self.version += 1
        self._limit = size
        self._evict()
        return at


def _integer(block: bytes, at: int, mask: int) -> tuple[int, int]:
    """Decode an integer (RFC 7541, 5.1) that begins in the low bits of a byte; return it and where it ends."""
    value = block[at] & mask
    at += 1
    if value < mask:
        return value, at
    shift = 0
    while True:
        byte = block[at]
        at += 1
        value += (byte & 0x7F) << shift
        if value > _MAX_INTEGER or shift > 28:
            raise Http2ConnectionError(COMPRESSION_ERROR, "an integer in a header block is too large")
        if byte < 0x80:
            return value, at
        shift += 7


def encode_fields(fields: Iterable[Field]) -> bytes:
    """Return a block that does not use the dynamic table, so that it can be prepared once and sent many times."""
    return b"".join(_encode_field(name, value) for name, value in fields)


# The header x-request-id up to the number in a generated value, and how many numbers have NUMBER_DIGITS digits.
_REQUEST_ID: Final = b"\0%c%b%c%b" % (len(HEADER), HEADER.encode(), len(PREFIX) + NUMBER_DIGITS, PREFIX)
_NUMBERS: Final = 10**NUMBER_DIGITS


def encode_request_id(context: Context) -> bytes:
    """Return the header x-request-id of a response."""
    if type(context) is int and context < _NUMBERS:
        return _REQUEST_ID + b"%d" % context
    return encode_fields([(HEADER.encode(), request_id(context).encode())])


def _encode_field(name: bytes, value: bytes) -> bytes:
    index = _NAMES.get(name, 0)
    if index and _STATIC[index] == (name, value):
        return _encode_integer(index, 0x7F, 0x80)
    if name == b":status" and (name, value) in _STATIC:
        return _encode_integer(_STATIC.index((name, value)), 0x7F, 0x80)
    encoded_field = _encode_integer(index, 0x0F, 0) if index else b"\0" + _encode_integer(len(name), 0x7F, 0) + name
    return encoded_field + _encode_integer(len(value), 0x7F, 0) + value


def _encode_integer(value: int, mask: int, bits: int) -> bytes:
    if value < mask:
        return bytes((bits | value,))
    value -= mask
    found = bytearray((bits | mask,))
    while value >= 0x80:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)
