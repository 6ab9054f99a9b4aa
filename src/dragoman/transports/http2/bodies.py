"""Send and receive bodies within the flow-control windows of a connection and of its streams."""

from collections import deque
from collections.abc import Callable, Sequence

from dragoman.formats.http2 import frames
from dragoman.formats.http2.frames import FrameWriter, Http2ConnectionError, Http2StreamError
from dragoman.transports.http2.limits import Http2Limits
from dragoman.transports.http2.stream import Backlog, Buffer, Http2Stream

# Less than this of a body is read into the buffer that all connections share. Half of a frame: with a whole one, the
# rest of each frame would be copied.
_DIRECT_BYTES = 1 << 13


class BodyReceiver:
    """Receives one DATA frame after the other, of `stream`, which it ends if `ended`; without a stream it is skipped.

    `left` and `padding` are the bytes of the frame that have not arrived. `fail(stream, error)` is called if a body is
    not as long as announced or a handler raises.
    """

    __slots__ = ("_fail", "ended", "left", "padding", "stream")

    def __init__(self, fail: Callable[[Http2Stream, Exception], None]) -> None:
        self._fail = fail
        self.stream: Http2Stream | None = None
        self.ended = False
        self.left = 0
        self.padding = 0

    def receive(self, data: bytes, at: int, end: int) -> int:
        """Take the payload between `at` and `end`; return where it ends."""
        stream, left = self.stream, self.left
        stop = min(end, at + left)
        self.left = left = left - (stop - at)
        if stream is not None:
            ended = self.ended and not left
            if not left:
                self.stream = None
            if ended or stop > at:
                try:
                    if stream.length >= 0:
                        self._check_length(stream, stop - at, ended)
                    if ended:
                        stream.remote_ended = True
                    stream.handler.receive(data, at, stop, ended)
                except Exception as error:
                    self._fail(stream, error)
        if left or not self.padding:
            return stop
        skipped = min(end - stop, self.padding)
        self.padding -= skipped
        return stop + skipped

    def end(self, stream: Http2Stream) -> None:
        """End the body of a stream without data, by trailers."""
        self.stream, self.ended = stream, True
        self.receive(b"", 0, 0)

    def buffer(self) -> memoryview | None:
        """Return where the next bytes of a large body may be read to; None to pass them to `receive`."""
        if self.left < _DIRECT_BYTES or self.stream is None:
            return None
        found: memoryview | None = self.stream.handler.buffer(self.left)
        return found

    def count_filled(self, size: int) -> None:
        """Count bytes that were read to `buffer()`."""
        stream = self.stream
        assert stream is not None
        self.left -= size
        ended = self.ended and not self.left
        if not self.left:
            self.stream = None
        try:
            if stream.length >= 0:
                self._check_length(stream, size, ended)
            if ended:
                stream.remote_ended = True
            stream.handler.on_buffer_filled(size, ended)
        except Exception as error:
            self._fail(stream, error)

    def _check_length(self, stream: Http2Stream, size: int, ended: bool) -> None:
        """Count bytes of a body with a content-length. Raises Http2StreamError if the body is not as long."""
        stream.length -= size
        if stream.length < 0 or (ended and stream.length):
            self.stream = None
            raise Http2StreamError(frames.PROTOCOL_ERROR, "the body is not as long as its content-length")


class ReceiveWindows:
    """The connection's window is refilled when it is half used, a stream's when its data has been acknowledged."""

    __slots__ = ("_left", "_limits", "_low", "_writer")

    def __init__(self, limits: Http2Limits, writer: FrameWriter) -> None:
        self._limits = limits
        self._writer = writer
        self._left = limits.connection_window
        self._low = limits.connection_window // 2

    def take(self, length: int, stream: Http2Stream | None) -> None:
        """Count a DATA frame against the windows of the connection and of its stream, if that is open.

        Raises Http2ConnectionError and Http2StreamError.
        """
        left = self._left - length
        if left < 0:
            text = "more data than the connection's window allows"
            raise Http2ConnectionError(frames.FLOW_CONTROL_ERROR, text)
        if left < self._low:
            full = self._limits.connection_window
            self._writer.send(frames.window_update(0, full - left))
            left = full
        self._left = left
        if stream is not None:
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


# Bytes passed to the transport before a check whether the client reads them.
BATCH_BYTES = 1 << 18
# Bytes of one stream before the next stream has its turn.
_TURN_BYTES = 1 << 18
# A client that makes less room than this at a time counts as not reading.
_MIN_PROGRESS_BYTES = 1 << 8

_pack = frames.frame_header.pack


class BodySender:
    """The windows that the client grants, and the bodies that wait for them.

    While `paused`, the transport has no room and no body is sent. `waiting`: streams with bodies to send.
    `on_sent(stream)` is called when the response of a stream has been sent completely. `now_s` is a coarse clock that
    the owner of the connection sets.
    """

    __slots__ = ("_on_sent", "_writer", "backlog", "moved_s", "now_s", "paused", "stream_window", "waiting", "window")

    def __init__(
        self, writer: FrameWriter, backlog: Backlog, on_sent: Callable[[Http2Stream], None], now_s: float
    ) -> None:
        self._writer = writer
        self._on_sent = on_sent
        self.waiting: deque[Http2Stream] = deque()
        self.backlog = backlog
        self.paused = False
        self.window = frames.DEFAULT_WINDOW
        self.stream_window = frames.DEFAULT_WINDOW  # initial window of new streams
        self.now_s = now_s
        self.moved_s = 0.0  # when the client last accepted some of any body

    # --- windows -------------------------------------------------------------------------------------------------

    def set_stream_window(self, size: int, streams: Sequence[Http2Stream]) -> None:
        """Change the initial window of streams, and with it that of open ones. Raises Http2ConnectionError."""
        change = size - self.stream_window
        self.stream_window = size
        for stream in streams:
            stream.window_out += change
            if stream.window_out > frames.LARGEST_WINDOW:
                text = "SETTINGS make the window of a stream too large"
                raise Http2ConnectionError(frames.FLOW_CONTROL_ERROR, text)

    # --- bodies --------------------------------------------------------------------------------------------------

    def queue(self, stream: Http2Stream, parts: Sequence[Buffer]) -> None:
        """Send these bytes as soon as there is room."""
        if not stream.pending:
            stream.pending = deque()
            stream.sent_s = self.now_s
        for part in parts:
            size = len(part)
            if size:
                view = memoryview(part).cast("B")
                size = len(view)
                stream.pending.append(view)
                stream.pending_bytes += size
                stream.held_bytes += size
                self.backlog.size += size
        if stream.pending and stream not in self.waiting:
            self.waiting.append(stream)
        self.pump()

    def finish(self, stream: Http2Stream, trailers: bytes) -> None:
        """End the stream once its body is sent; without trailers if they are empty."""
        stream.trailers = trailers
        if not stream.pending:
            self._send_end(stream)

    def drop(self, stream: Http2Stream) -> None:
        """Discard what waits to be sent on a stream."""
        self._uncount(stream)
        stream.pending, stream.pending_bytes = None, 0
        if stream in self.waiting:
            self.waiting.remove(stream)
        self.backlog.update()

    def pump(self) -> None:
        """Send what waits, as far as the windows and the transport allow."""
        waiting, writer, blocked = self.waiting, self._writer, 0
        if not waiting:
            self.backlog.update()
            return
        was_batching, writer.is_batching = writer.is_batching, True
        while waiting and blocked < len(waiting) and self.window > 0 and not self.paused:
            stream = waiting.popleft()
            if stream.window_out <= 0:
                waiting.append(stream)
                blocked += 1
                continue
            blocked = 0
            self._send_some(stream)
            if stream.pending:
                waiting.append(stream)
            else:
                self._sent_all(stream)
            if writer.size > BATCH_BYTES:
                writer.flush()  # the transport may pause us
        self.backlog.update()
        writer.is_batching = was_batching
        if not was_batching:
            writer.flush()

    def _send_some(self, stream: Http2Stream) -> None:
        assert stream.pending is not None
        most = left = min(_TURN_BYTES, self.window, stream.window_out)
        number, writer = stream.number, self._writer
        while left and stream.pending:
            size = min(left, stream.pending_bytes, writer.max_frame)
            header = _pack(size >> 8, size & 0xFF, frames.DATA, 0, number)
            writer.add((header, *_take(stream.pending, size)), size)
            left -= size
            self.window -= size
            stream.window_out -= size
            stream.pending_bytes -= size
        if most - left >= _MIN_PROGRESS_BYTES or not stream.pending:
            stream.sent_s = self.moved_s = self.now_s

    def unread_since_s(self, stream: Http2Stream) -> float:
        """Return since when the client has made no room for what waits on a stream.

        A stream whose own window is open only waits for its turn: it counts as read while any other one is.
        """
        return max(stream.sent_s, self.moved_s) if stream.window_out > 0 else stream.sent_s

    def _uncount(self, stream: Http2Stream) -> None:
        """A body counts until its last byte is sent, because a part keeps the whole in memory."""
        self.backlog.size -= stream.held_bytes
        stream.held_bytes = 0

    def _sent_all(self, stream: Http2Stream) -> None:
        self._uncount(stream)
        if stream.trailers is not None:
            self._send_end(stream)
        elif stream.handler is not None:
            stream.handler.on_drained()

    def _send_end(self, stream: Http2Stream) -> None:
        if stream.trailers:
            self._writer.send_headers(stream.number, stream.trailers, ended=True)
        else:
            self._writer.send(frames.frame(frames.DATA, frames.END_STREAM, stream.number))
        self._on_sent(stream)


def _take(pending: deque[memoryview], size: int) -> list[Buffer]:
    """Remove the next `size` bytes and return them."""
    taken: list[Buffer] = []
    while size:
        part = pending[0]
        if len(part) <= size:
            taken.append(part)
            size -= len(part)
            pending.popleft()
        else:
            taken.append(part[:size])
            pending[0] = part[size:]
            size = 0
    return taken
