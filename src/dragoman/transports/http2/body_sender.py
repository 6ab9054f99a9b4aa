"""Sends response bodies within the client's flow-control windows, several streams in turns."""

from collections import deque
from collections.abc import Callable, Sequence

from dragoman.transports.http2 import frames
from dragoman.transports.http2.frames import FrameWriter, Http2ConnectionError, Http2StreamError
from dragoman.transports.http2.stream import Backlog, Buffer, Http2Stream

# Bytes passed to the transport before a check whether the client reads them.
_BATCH_BYTES = 1 << 18
# Bytes of one stream before the next stream has its turn.
_TURN_BYTES = 1 << 18
# A client that makes less room than this at a time counts as not reading.
_MIN_PROGRESS_BYTES = 1 << 8

_pack = frames.frame_header.pack


class BodySender:
    """The windows that the client grants, and the bodies that wait for them.

    While `paused`, the transport has no room and no body is sent. `on_sent(stream)` is called when the response of a
    stream has been sent completely. `now_s` is a coarse clock that the owner of the connection sets.
    """

    __slots__ = ("_on_sent", "_waiting", "_writer", "backlog", "moved_s", "now_s", "paused", "stream_window", "window")

    def __init__(
        self, writer: FrameWriter, backlog: Backlog, on_sent: Callable[[Http2Stream], None], now_s: float
    ) -> None:
        self._writer = writer
        self._on_sent = on_sent
        self._waiting: deque[Http2Stream] = deque()
        self.backlog = backlog
        self.paused = False
        self.window = frames.DEFAULT_WINDOW
        self.stream_window = frames.DEFAULT_WINDOW  # initial window of new streams
        self.now_s = now_s
        self.moved_s = 0.0  # when the client last accepted some of any body

    # --- windows -------------------------------------------------------------------------------------------------

    def widen(self, increment: int) -> None:
        """Widen the connection's window. Raises Http2ConnectionError."""
        self.window += increment
        if not increment or self.window > frames.LARGEST_WINDOW:
            code = frames.FLOW_CONTROL_ERROR if increment else frames.PROTOCOL_ERROR
            raise Http2ConnectionError(code, f"the connection's window cannot grow by {increment}")

    def widen_stream(self, stream: Http2Stream, increment: int) -> None:
        """Widen a stream's window. Raises Http2StreamError."""
        stream.window_out += increment
        if not increment or stream.window_out > frames.LARGEST_WINDOW:
            code = frames.FLOW_CONTROL_ERROR if increment else frames.PROTOCOL_ERROR
            raise Http2StreamError(code, f"a stream's window cannot grow by {increment}")

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

    def send_response(
        self, stream: Http2Stream, headers: bytes, parts: Sequence[Buffer], size: int, trailers: bytes
    ) -> bool:
        """Send a whole response at once if there is room for all of it; return whether it was sent."""
        writer = self._writer
        if size > self.window or size > stream.window_out or size > writer.max_frame:
            return False
        if self.paused or stream.pending or not writer.fits_headers(len(headers) + len(trailers)):
            return False
        number = stream.number
        self.window -= size
        length = len(headers)
        start = _pack(length >> 8, length & 0xFF, 1, 4, number) + headers + _pack(size >> 8, size & 0xFF, 0, 0, number)
        length = len(trailers)
        writer.add_response((start, *parts, _pack(length >> 8, length & 0xFF, 1, 5, number) + trailers), size)
        if not writer.is_batching or writer.size > _BATCH_BYTES:
            writer.flush()
        return True

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
        if stream.pending and stream not in self._waiting:
            self._waiting.append(stream)
        self.pump()

    def finish(self, stream: Http2Stream, trailers: bytes) -> None:
        """End the stream once its body is sent; without trailers if they are empty."""
        stream.trailers = trailers
        if not stream.pending:
            self._send_end(stream)

    def drop(self, stream: Http2Stream) -> None:
        """Discard what waits to be sent on a stream."""
        if stream.pending:
            self._uncount(stream)
            stream.pending, stream.pending_bytes = None, 0
            if stream in self._waiting:
                self._waiting.remove(stream)
            self.backlog.changed()

    def pump(self) -> None:
        """Send what waits, as far as the windows and the transport allow."""
        waiting, writer, blocked = self._waiting, self._writer, 0
        if not waiting:
            self.backlog.changed()
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
            if writer.size > _BATCH_BYTES:
                writer.flush()  # the transport may pause us
        self.backlog.changed()
        writer.is_batching = was_batching
        if not was_batching:
            writer.flush()

    def _send_some(self, stream: Http2Stream) -> None:
        """Give a stream its turn."""
        assert stream.pending is not None
        most = left = min(_TURN_BYTES, self.window, stream.window_out)
        number, writer = stream.number, self._writer
        while left and stream.pending:
            size = min(left, stream.pending_bytes, writer.max_frame)
            header = _pack(size >> 8, size & 0xFF, frames.DATA, 0, number)
            writer.add_data(header, _take(stream.pending, size), size)
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
            stream.handler.drained()

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
