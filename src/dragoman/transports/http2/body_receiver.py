"""Passes the payload of DATA frames to the handlers of their streams."""

from collections.abc import Callable

from dragoman.transports.http2 import frames
from dragoman.transports.http2.frames import FrameWriter, Http2ConnectionError, Http2StreamError
from dragoman.transports.http2.limits import Http2Limits
from dragoman.transports.http2.stream import Http2Stream

# Less than this of a body is read into the buffer that all connections share.
_DIRECT_BYTES = 1 << 13


class BodyReceiver:
    """`left` and `padding` are the bytes of the frame that have not arrived.

    `fail(stream, error)` is called if a body is not as long as announced or a handler raises.
    """

    __slots__ = ("_ended", "_fail", "_stream", "left", "padding")

    def __init__(self, fail: Callable[[Http2Stream, Exception], None]) -> None:
        self._fail = fail
        self._stream: Http2Stream | None = None
        self._ended = False
        self.left = 0
        self.padding = 0

    def begin(self, stream: Http2Stream | None, size: int, padding: int, *, ended: bool) -> None:
        """A frame begins; without a stream it is skipped."""
        self._stream, self.left, self.padding, self._ended = stream, size, padding, ended

    def receive(self, data: bytes, at: int, end: int) -> int:
        """Take the payload between `at` and `end`; return where it ends."""
        stream, left = self._stream, self.left
        stop = min(end, at + left)
        self.left = left = left - (stop - at)
        if stream is not None:
            ended = self._ended and not left
            if not left:
                self._stream = None
            if ended or stop > at:
                try:
                    self._count(stream, stop - at, ended)
                    stream.handler.receive(data, at, stop, ended)
                except Exception as error:
                    self._fail(stream, error)
        skipped = min(end - stop, self.padding) if not left else 0
        self.padding -= skipped
        return stop + skipped

    def end(self, stream: Http2Stream) -> None:
        """Trailers have ended the body."""
        self.begin(stream, 0, 0, ended=True)
        self.receive(b"", 0, 0)

    def buffer(self) -> memoryview | None:
        """Return where the next bytes of a large body may be read to; None to pass them to `receive`."""
        if self.left < _DIRECT_BYTES or self._stream is None:
            return None
        found: memoryview | None = self._stream.handler.buffer(self.left)
        return found

    def filled(self, size: int) -> None:
        """Count bytes that were read to `buffer()`."""
        stream = self._stream
        assert stream is not None
        self.left -= size
        ended = self._ended and not self.left
        if not self.left:
            self._stream = None
        try:
            self._count(stream, size, ended)
            stream.handler.buffer_filled(size, ended)
        except Exception as error:
            self._fail(stream, error)

    def _count(self, stream: Http2Stream, size: int, ended: bool) -> None:
        """Raises Http2StreamError if the body is not as long as announced."""
        if stream.length >= 0:
            stream.length -= size
            if stream.length < 0 or (ended and stream.length):
                self._stream = None
                raise Http2StreamError(frames.PROTOCOL_ERROR, "the body is not as long as its content-length")
        if ended:
            stream.remote_ended = True

    def forget(self, stream: Http2Stream) -> None:
        """Skip what is left of a frame of this stream."""
        if stream is self._stream:
            self._stream = None


class ReceiveWindows:
    """The connection's window is refilled when it is half used, a stream's when its data has been acknowledged."""

    __slots__ = ("_left", "_limits", "_low", "_writer")

    def __init__(self, limits: Http2Limits, writer: FrameWriter) -> None:
        self._limits = limits
        self._writer = writer
        self._left = limits.connection_window
        self._low = limits.connection_window // 2

    def take(self, length: int) -> None:
        """Count a DATA frame against the connection's window. Raises Http2ConnectionError."""
        left = self._left - length
        if left < 0:
            text = "more data than the connection's window allows"
            raise Http2ConnectionError(frames.FLOW_CONTROL_ERROR, text)
        if left < self._low:
            full = self._limits.connection_window
            self._writer.send(frames.window_update(0, full - left))
            left = full
        self._left = left

    def take_stream(self, stream: Http2Stream, length: int) -> None:
        """Count a DATA frame against its stream's window. Raises Http2StreamError."""
        stream.window_in -= length
        if stream.window_in < 0:
            raise Http2StreamError(frames.FLOW_CONTROL_ERROR, "more data than the stream's window allows")

    def acknowledge(self, stream: Http2Stream, size: int) -> None:
        """Let the client send as many bytes again, once they are half of the window."""
        stream.acknowledged += size
        if stream.acknowledged >= self._limits.stream_window >> 1 and not stream.remote_ended:
            self.widen(stream, stream.acknowledged)
            stream.acknowledged = 0

    def widen(self, stream: Http2Stream, size: int) -> None:
        """Let the client send `size` bytes more."""
        size = min(size, frames.LARGEST_WINDOW - stream.window_in)
        stream.window_in += size
        self._writer.send(frames.window_update(stream.number, size))
