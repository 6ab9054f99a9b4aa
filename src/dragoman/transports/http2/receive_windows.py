"""Flow control of what the client sends: the windows that we grant."""

from dragoman.transports.http2 import frames
from dragoman.transports.http2.frame_writer import FrameWriter
from dragoman.transports.http2.frames import Http2ConnectionError, Http2StreamError
from dragoman.transports.http2.limits import Http2Limits
from dragoman.transports.http2.stream import Http2Stream


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
