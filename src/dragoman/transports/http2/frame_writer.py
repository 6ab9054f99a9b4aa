"""Collects outgoing frames and passes them to the transport in few writes."""

from collections.abc import Callable, Sequence

from dragoman.transports.http2 import frames
from dragoman.transports.http2.fields import NO_TABLE
from dragoman.transports.http2.stream import Buffer

# Up to this size buffers are joined, which is cheaper than passing them on one by one.
_JOIN_BYTES = 1 << 14
_FRAME_OVERHEAD = 256


class FrameWriter:
    """Frames on their way to `sink`, which takes buffers in order.

    While `is_batching`, frames are collected until `flush`. `response_frames` and `body_bytes` count what was sent of
    responses. `max_frame` is the largest payload that the client accepts.
    """

    __slots__ = ("_buffers", "_prefix", "_sink", "body_bytes", "is_batching", "max_frame", "response_frames", "size")

    def __init__(self, sink: Callable[[list[Buffer]], None]) -> None:
        self._sink = sink
        self._buffers: list[Buffer] = []
        self._prefix = b""
        self.size = 0  # about how many bytes wait for `flush`
        self.is_batching = False
        self.max_frame = frames.SMALLEST_FRAME
        self.response_frames = self.body_bytes = 0

    def send(self, frame: bytes) -> None:
        """Send a frame that flow control does not apply to."""
        self._buffers.append(frame)
        self.size += len(frame)
        if not self.is_batching:
            self.flush()

    def send_headers(self, number: int, block: bytes, *, ended: bool) -> None:
        """Send a header block: one HEADERS frame and, if it is long, CONTINUATION frames."""
        if self._prefix:
            block, self._prefix = self._prefix + block, b""
        most = self.max_frame
        flags = frames.END_STREAM if ended else 0
        first, rest = block[:most], block[most:]
        kind = frames.HEADERS
        self.response_frames += 1
        before = b""
        while rest:
            before += frames.frame(kind, flags, number, first)
            kind, flags = frames.CONTINUATION, 0
            first, rest = rest[:most], rest[most:]
        self.send(before + frames.frame(kind, flags | frames.END_HEADERS, number, first))

    def fits_headers(self, size: int) -> bool:
        """Return whether header blocks of this size need no CONTINUATION and no change of the dynamic table."""
        return not self._prefix and size <= frames.SMALLEST_FRAME

    def add_response(self, buffers: Sequence[Buffer], size: int) -> None:
        """Add the frames of a whole response, whose body has `size` bytes."""
        self.response_frames += 1
        self._buffers += buffers
        self.size += size + _FRAME_OVERHEAD

    def add_data(self, head: bytes, body: Sequence[Buffer], size: int) -> None:
        """Add a DATA frame."""
        self._buffers.append(head)
        self._buffers += body
        self.size += size + frames.HEAD_BYTES
        self.response_frames += 1
        self.body_bytes += size

    def flush(self) -> None:
        """Pass everything collected to the sink."""
        if self._buffers:
            buffers, self._buffers = self._buffers, []
            is_small, self.size = self.size <= _JOIN_BYTES, 0
            self._sink([b"".join(buffers)] if is_small and len(buffers) > 1 else buffers)

    def discard(self) -> None:
        """Drop what has not been flushed."""
        self._buffers.clear()
        self.size = 0

    def disable_dynamic_table(self) -> None:
        """Announce with the next header block that our encoder uses no dynamic table."""
        self._prefix = NO_TABLE
