"""Frames: messages between the server and its child processes, as bytes.

A frame has a header (kind, number of parts, job, bytes that follow, moments of the call), the lengths of its parts, and
the parts: a serialized value, then its arrays. They are received straight into the buffer that the arrays refer to. For
a large array in shared memory only its location is sent.

Values are serialized by `marshal` for the usual calls and responses, by pickle for all others. `marshal` takes less
than half the time of pickle. It is used only for values that are exactly a str, int, float, bool or None, because it
would turn a NumPy scalar into bytes. Arrays are passed out of band by both. Pickle is safe in this direction: from the
server to its workers, and between the processes of a server. Values from workers are `worker_messages`.
"""

import enum
import marshal
import pickle
import struct
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from dragoman.core.calls import Infer, Inference, Response, Tensors
from dragoman.core.sizes import INLINE, SHARED
from dragoman.core.tensor import NONE, Parameters
from dragoman.system.call_times import NO_STAMPS, Stamps
from dragoman.workers.shared_blocks import BlockReader, BlockWriter
from dragoman.workers.worker_messages import Row, deserialize_message, tensor_of_row, tensor_row

Buffer = bytes | memoryview
# Returns a value as bytes, followed by the memory of its arrays.
Serializer = Callable[[Any], list[Buffer]]

_EXACT_TYPES = frozenset({str, int, float, bool, type(None)})
_PICKLE_MARK = pickle.PROTO[0]  # the first byte of a pickle, and of nothing that marshal writes here


class _NeedsPickle(Exception):
    """The value cannot be written by marshal."""


def serialize(value: object) -> list[Buffer]:
    """Return a value as bytes, followed by the memory of its arrays. Raises what pickle raises."""
    arrays: list[Any] = []
    with suppress(_NeedsPickle, TypeError):
        fields = _fields(value, arrays)
        if fields is not None:
            return [marshal.dumps(fields), *arrays]
    pickled: list[pickle.PickleBuffer] = []
    return [pickle.dumps(value, 5, buffer_callback=pickled.append), *(array.raw() for array in pickled)]


def deserialize(parts: list[memoryview]) -> Any:
    """Return the value of `serialize`. Its arrays are read-only views of the parts."""
    if parts[0][0] == _PICKLE_MARK:
        return pickle.loads(parts[0], buffers=parts[1:])  # noqa: S301 (see above)
    rows, parameters, *rest = marshal.loads(parts[0])  # noqa: S302 (see above)
    arrays = iter(parts[1:])
    tensors = {row[0]: tensor_of_row(row, arrays) for row in rows}
    match rest:
        case [outputs, context, request, metadata]:
            return (context, Infer(tensors, outputs, parameters or NONE), *request, metadata or {})
        case [response]:
            return Response(Inference(tensors, parameters or NONE), *response)
    return Inference(tensors, parameters or NONE)


def _fields(value: object, arrays: list[Any]) -> tuple[Any, ...] | None:
    """Return the fields of a call of `Job.fields`, or of an inference, alone or with its response; None for others.

    Raises _NeedsPickle for fields that are not plain.
    """
    match value:
        case (tuple() as context, Infer() as call, *request, Mapping() as metadata) if _has_only_tensors(call):
            _check(context)
            _check(request)
            _check(call.outputs)
            rows, parameters = _rows(call.inputs, arrays), _parameters(call.parameters)
            return rows, parameters, tuple(call.outputs), context, tuple(request), _parameters(metadata)
        case Inference() if not (value.metadata or value.is_last):
            return _rows(value.outputs, arrays), _parameters(value.parameters)
        case Response(Inference() as answer, model, version) if not (answer.metadata or answer.is_last):
            _check((model, version))
            return _rows(answer.outputs, arrays), _parameters(answer.parameters), (model, version)
    return None


def _has_only_tensors(call: Infer) -> bool:
    """Return whether a call has no fields but named inputs, names of outputs and parameters."""
    return call.raw is None and call.positional is None and not (call.config or call.content_types or call.sequences)


def _rows(tensors: Tensors, arrays: list[Any]) -> list[Row]:
    _check(tensors)
    rows = list[Row]()
    for key, tensor in tensors.items():
        name, datatype, form, shape, parameters, elements = tensor_row(key, tensor, arrays)
        if elements is not None and set(map(type, elements)) - {str, bytes}:
            raise _NeedsPickle
        rows.append((name, datatype, form, shape, _parameters(parameters), elements))
    return rows


def _parameters(parameters: Parameters | None) -> dict[str, Any] | None:
    if not parameters:
        return None
    _check(parameters)
    _check(parameters.values())
    return dict(parameters)


def _check(values: Iterable[Any]) -> None:
    for value in values:
        if type(value) not in _EXACT_TYPES:
            raise _NeedsPickle


_HEADER = struct.Struct("<IIQQ4d")
HEADER_BYTES = _HEADER.size
# A part in the arena: offset and length. A part in a shared buffer: block number, offset and length; the path follows.
_IN_ARENA = struct.Struct("<QQ")
_IN_BUFFER = struct.Struct("<QQQ")
# Bits in the length of a part that mark such locations.
_ARENA_BIT = 1 << 63
_BUFFER_BIT = 1 << 62
_LENGTH = _BUFFER_BIT - 1
_ALIGNMENT = 16  # of arrays, for SIMD code
_PADDING = [bytes(n) for n in range(_ALIGNMENT)]


class FrameKind(enum.IntEnum):
    """The kind of a frame.

    To a worker: SPEC, FILE, CALL, STREAM, CREDIT, CANCEL, PING. From it: the others. A worker that lacks files of its
    model sends FILES with their numbers, and gets FILE frames with blocks of bytes, whose job is the number.
    SPEC is answered by LOADED, WRONG_PLACEMENT or ERROR, after a STEP for each step of loading. PING is answered by
    PONG with the reason why the model cannot answer, or "". Each CALL and STREAM ends with exactly one RESPONSE, END
    or ERROR, also if it was cancelled; these and CHUNK have the moments of the call by the clock of the sender. CREDIT
    allows a stream further chunks.

    A process of `--processes` is started with SPEC too. It sends CALL, STREAM, CREDIT and CANCEL to the process of the
    engine, which sends it the responses, READY, DRAIN (true: connections are only replaced) and STOP. COPIES names the
    models that it may compute itself; it sends the number of that table back once it computes no others. REQUESTS asks
    for its recent requests. TIMES have the batch of a call and the calls that it made, before its response. It sends
    AUDIT with each line of the audit log.

    Three kinds go both ways: UNUSED, shared memory that the other side may write again; METRICS, a request for the
    metrics of a process of `--processes` and its response; and HEARTBEAT, between the server and workers that have
    joined it. A worker sends METRICS when those of its model have changed. It sends DRAIN with a reason when it will
    end soon: it completes the calls that it has, and gets no further ones. If its model can never answer again, the
    reason is a WorkerLost. FAREWELL ends a worker that would otherwise look for its server again.
    """

    SPEC = 0
    CALL = 1
    STREAM = 2
    CREDIT = 3
    CANCEL = 4
    LOADED = 5
    RESPONSE = 6
    CHUNK = 7
    END = 8
    ERROR = 9
    WRONG_PLACEMENT = 10
    UNUSED = 11
    READY = 12
    STOP = 13
    PING = 14
    PONG = 15
    DRAIN = 16
    METRICS = 17
    TIMES = 18
    HEARTBEAT = 19
    STEP = 20
    FILES = 21
    FILE = 22
    COPIES = 23
    REQUESTS = 24
    FAREWELL = 25
    AUDIT = 26


class Frame(NamedTuple):
    """A received frame."""

    kind: int
    job: int
    parts: list[memoryview]
    stamps: Stamps = NO_STAMPS

    def value(self) -> Any:
        """Return the value, None if it has none; arrays are read-only. Raises what `pickle.loads` raises."""
        return deserialize(self.parts) if self.parts else None

    def message(self) -> Any:
        """Return the value that a worker sent, None if it has none; arrays are read-only. Raises ValueError and others.

        Unlike `value` it runs no code that the other end chooses.
        """
        return deserialize_message(self.parts) if self.parts else None


def encode(
    kind: FrameKind,
    job: int = 0,
    value: object = None,
    arena: BlockWriter | None = None,
    serializer: Serializer = serialize,
    stamps: Stamps = NO_STAMPS,
) -> list[Buffer]:
    """Return the bytes of a frame, as buffers that refer to the memory of arrays. Raises what the serializer raises.

    Large arrays are put into shared memory if there is an arena.
    """
    if value is None:
        return [_HEADER.pack(kind, 0, job, 0, *stamps)]
    parts = serializer(value)
    lengths = [len(part) for part in parts]
    for i in range(1, len(parts)):
        if arena is None or lengths[i] < SHARED:
            continue
        if (shared := arena.share(parts[i])) is not None:
            number, offset, path = shared
            parts[i] = _IN_BUFFER.pack(number, offset, lengths[i]) + path.encode()
            lengths[i] = len(parts[i]) | _BUFFER_BIT
        elif (start := arena.put(parts[i])) is not None:
            parts[i], lengths[i] = _IN_ARENA.pack(start, lengths[i]), _IN_ARENA.size | _ARENA_BIT
    return _join(kind, job, parts, lengths, stamps)


def _join(kind: FrameKind, job: int, parts: list[Buffer], marked_lengths: list[int], stamps: Stamps) -> list[Buffer]:
    count = len(parts)
    table = struct.pack(f"<{count}Q", *marked_lengths) + _PADDING[-8 * count % _ALIGNMENT]
    buffers: list[Buffer] = [table]
    size = len(table)
    for part, marked_length in zip(parts, marked_lengths, strict=True):
        length = marked_length & _LENGTH
        if length:
            buffers.append(part)
        if padding := -length % _ALIGNMENT:
            buffers.append(_PADDING[padding])
        size += length + padding
    buffers[0] = _HEADER.pack(kind, count, job, size, *stamps) + table
    return [b"".join(buffers)] if size <= INLINE else buffers


class FrameParser:
    """Parses received bytes into frames: fill `buffer()`, then call `feed` with the number of bytes. Does no I/O."""

    def __init__(self, shared: BlockReader | None = None) -> None:
        self._shared = shared
        self._small = memoryview(bytearray(SHARED))
        self._end = 0
        self._large: memoryview | None = None
        self._header = (0, 0, 0, NO_STAMPS)
        self._filled = 0

    def buffer(self) -> memoryview:
        """Return the buffer for the next bytes; it is never empty."""
        return self._small[self._end :] if self._large is None else self._large[self._filled :]

    @property
    def missing(self) -> int:
        """Number of bytes that are missing of the frame whose header has been received."""
        if self._large is not None:
            return len(self._large) - self._filled
        size: int = _HEADER.unpack_from(self._small, 0)[3]
        return _HEADER.size + size - self._end

    def feed(self, count: int) -> list[Frame]:
        """Return the frames that `count` further bytes in `buffer()` complete."""
        if self._large is None:
            self._end += count
            return self._parse_small()
        self._filled += count
        if self._filled < len(self._large):
            return []
        body, self._large = self._large, None
        return [self._frame(*self._header, body.toreadonly())]

    def _parse_small(self) -> list[Frame]:
        frames: list[Frame] = []
        start = 0
        while self._end - start >= _HEADER.size:
            kind, parts, job, size, *moments = _HEADER.unpack_from(self._small, start)
            stamps: Any = tuple(moments)
            body, end = start + _HEADER.size, start + _HEADER.size + size
            if end > self._end:
                if _HEADER.size + size > SHARED:
                    self._begin_large((kind, job, parts, stamps), size, body)
                    return frames
                break
            frames.append(self._frame(kind, job, parts, stamps, memoryview(bytes(self._small[body:end]))))
            start = end
        rest = self._end - start
        if start and rest:
            self._small[:rest] = bytes(self._small[start : self._end])
        self._end = rest
        return frames

    def _begin_large(self, header: tuple[int, int, int, Stamps], size: int, body: int) -> None:
        self._header = header
        self._large = np.empty(size, np.uint8).data  # a bytearray would be filled with zeros first
        self._filled = self._end - body
        self._large[: self._filled] = self._small[body : self._end]
        self._end = 0

    def _frame(self, kind: int, job: int, count: int, stamps: Stamps, body: memoryview) -> Frame:
        """Return the frame. Its blocks of shared memory are referenced from now on, even if it is never decoded."""
        start = _pad_length(8 * count)
        parts: list[memoryview] = []
        for marked_length in struct.unpack_from(f"<{count}Q", body):
            length = marked_length & _LENGTH
            part = body[start : start + length]
            if marked_length != length:
                if self._shared is None:
                    raise ValueError("a location in shared memory, but none is shared")
                if marked_length & _ARENA_BIT:
                    part = self._shared.block(*_IN_ARENA.unpack(part))
                else:
                    number, offset, size = _IN_BUFFER.unpack_from(part)
                    part = self._shared.open_shared(number, offset, size, str(part[_IN_BUFFER.size :], "ascii"))
            parts.append(part)
            start = _pad_length(start + length)
        return Frame(kind, job, parts, stamps)


def _pad_length(length: int) -> int:
    return -(-length // _ALIGNMENT) * _ALIGNMENT
