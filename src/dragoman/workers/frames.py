"""Messages between the server and the workers that it started itself, as bytes.

A frame is a head (kind, number of parts, job, bytes that follow), the lengths of its parts, and the parts: plain
words or a pickle, then the arrays of its value, out of band, so that they are read straight into the buffer that
backs them. Of a large array that lies in memory which both sides share, only the place is sent.

Pickle is safe here because only our own child holds the other end; nothing of this listens on a port.
"""

import enum
import pickle
import struct
from typing import Any, NamedTuple

import numpy as np

from dragoman.workers import plain
from dragoman.workers.shared import LEAST, Arena, View

Buffer = bytes | memoryview

_HEAD = struct.Struct("<IIQQ")
_PLACE = struct.Struct("<QQ")  # where a part in shared memory begins, and its length
_SHARED = 1 << 63  # marks the length of a part that is such a place
_LENT = struct.Struct("<QQQ")  # number, beginning and length of a part in a room, whose place follows
_ROOM = 1 << 62  # marks the length of a part that is so lent
_LENGTH = _ROOM - 1
_ALIGN = 16  # arrays begin where any SIMD-free C code may read them
_SMALL = 64 * 1024  # frames up to this are gathered in one buffer that is used again
_JOINED = 32 * 1024  # frames up to this are sent as one piece, which is cheaper than many
_PICKLE = pickle.PROTO[0]  # how a pickle begins, and nothing that `plain` makes
_PADS = [bytes(n) for n in range(_ALIGN)]


class FrameKind(enum.IntEnum):
    """What a frame says. To the worker: SPEC, CALL, STREAM, CREDIT, CANCEL. To the server: the others.

    UNUSED goes both ways: shared memory that the other side may write again. A front end is spawned as a worker is, and
    asks as the server does: CALL and so on go from it to the server, which tells it READY (or not), DRAIN and
    STOP.
    PING is answered by PONG, at once where the process is idle, with the reason why its model cannot answer, or "".

    SPEC is answered by LOADED, by ELSEWHERE (the model would be in another place), or by ERROR.
    Every CALL and STREAM is ended by exactly one ANSWER, END or ERROR, also where it was cancelled.
    """

    SPEC = 0
    CALL = 1
    STREAM = 2
    CREDIT = 3
    CANCEL = 4
    LOADED = 5
    ANSWER = 6
    PIECE = 7
    END = 8
    ERROR = 9
    ELSEWHERE = 10
    UNUSED = 11
    READY = 12
    STOP = 13
    PING = 14
    PONG = 15
    DRAIN = 16


class Frame(NamedTuple):
    """One received message, decoded by `value`, which may raise."""

    kind: int
    job: int
    parts: list[memoryview]

    def value(self) -> Any:
        """What was sent. Its arrays are views of this frame's buffer, or of shared memory, and read-only."""
        parts = self.parts
        if not parts:
            return None
        if parts[0][0] != _PICKLE:
            return plain.loads(parts[0], parts[1:])
        return pickle.loads(parts[0], buffers=parts[1:])  # noqa: S301 (from our own child, or parent, alone)


def encode(kind: FrameKind, job: int = 0, value: object = None, arena: Arena | None = None) -> list[Buffer]:
    """The bytes of a frame, in pieces that share the memory of the arrays. Raises what pickle raises.

    Large arrays are put into the arena, as far as there is one and room in it.
    """
    if value is None:
        return [_HEAD.pack(kind, 0, job, 0)]
    parts = _plain(value) or _pickled(value)
    lengths = [len(part) for part in parts]
    for at in range(1, len(parts)):
        if arena is None or lengths[at] < LEAST:
            continue
        if (lent := arena.lend(parts[at])) is not None:
            parts[at] = _LENT.pack(*lent[:2], lengths[at]) + lent[2].encode()
            lengths[at] = len(parts[at]) | _ROOM
        elif (start := arena.put(parts[at])) is not None:
            parts[at], lengths[at] = _PLACE.pack(start, lengths[at]), _PLACE.size | _SHARED
    return _framed(kind, job, parts, lengths)


def _framed(kind: FrameKind, job: int, parts: list[Buffer], told: list[int]) -> list[Buffer]:
    lengths = [length & _LENGTH for length in told]
    count = len(parts)
    table = struct.pack(f"<{count}Q", *told) + _PADS[-8 * count % _ALIGN]
    size = len(table) + sum(map(_padded, lengths))
    pieces: list[Buffer] = [_HEAD.pack(kind, count, job, size) + table]
    for part, length in zip(parts, lengths, strict=True):
        if length:
            pieces.append(part)
        if length % _ALIGN:
            pieces.append(_PADS[-length % _ALIGN])
    return [b"".join(pieces)] if size <= _JOINED else pieces


class FrameParser:
    """Bytes in, frames out: fill `room()`, say with `take` how much came. Knows no socket."""

    def __init__(self, shared: View | None = None) -> None:
        self._shared = shared
        self._small = memoryview(bytearray(_SMALL))
        self._end = 0
        self._large: memoryview | None = None
        self._head = (0, 0, 0)
        self._filled = 0

    def room(self) -> memoryview:
        """Return the buffer for the next bytes; it is never empty."""
        return self._small[self._end :] if self._large is None else self._large[self._filled :]

    def take(self, count: int) -> list[Frame]:
        """The frames that the `count` bytes put into `room()` complete."""
        if self._large is None:
            self._end += count
            return self._cut()
        self._filled += count
        if self._filled < len(self._large):
            return []
        body, self._large = self._large, None
        return [self._frame(*self._head, body.toreadonly())]

    def _cut(self) -> list[Frame]:
        frames: list[Frame] = []
        start = 0
        while self._end - start >= _HEAD.size:
            kind, parts, job, size = _HEAD.unpack_from(self._small, start)
            body, end = start + _HEAD.size, start + _HEAD.size + size
            if end > self._end:
                if _HEAD.size + size > _SMALL:
                    return [*frames, *self._grow((kind, job, parts), size, body)]
                break
            frames.append(self._frame(kind, job, parts, memoryview(bytes(self._small[body:end]))))
            start = end
        left = self._end - start
        if start and left:
            self._small[:left] = bytes(self._small[start : self._end])
        self._end = left
        return frames

    def _frame(self, kind: int, job: int, count: int, body: memoryview) -> Frame:
        """The frame with its parts. Those in shared memory are taken hold of now, whatever becomes of the frame."""
        start = _padded(8 * count)
        parts: list[memoryview] = []
        for told in struct.unpack_from(f"<{count}Q", body):
            length = told & _LENGTH
            part = body[start : start + length]
            if told & _SHARED:
                assert self._shared is not None, "who shares no memory is sent no place in it"
                part = self._shared.block(*_PLACE.unpack(part))
            elif told & _ROOM:
                assert self._shared is not None, "who shares no memory is lent none"
                number, begin, size = _LENT.unpack_from(part)
                part = self._shared.entered(number, begin, size, str(part[_LENT.size :], "ascii"))
            parts.append(part)
            start = _padded(start + length)
        return Frame(kind, job, parts)

    def _grow(self, head: tuple[int, int, int], size: int, body: int) -> list[Frame]:
        self._head = head
        self._large = np.empty(size, np.uint8).data  # a bytearray would be filled with zeros first
        self._filled = self._end - body
        self._large[: self._filled] = self._small[body : self._end]
        self._end = 0
        return []


def _plain(value: object) -> list[Buffer] | None:
    found = plain.dumps(value)
    return None if found is None else [found[0], *found[1]]


def _pickled(value: object) -> list[Buffer]:
    arrays: list[pickle.PickleBuffer] = []
    return [pickle.dumps(value, 5, buffer_callback=arrays.append), *(array.raw() for array in arrays)]


def _padded(length: int) -> int:
    return -(-length // _ALIGN) * _ALIGN
