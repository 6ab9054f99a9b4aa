"""What a connection sends: frames that fit at once, and bodies that wait for the client to make room."""

from collections import deque
from collections.abc import Callable, Sequence

from dragoman.transports.http2 import frames
from dragoman.transports.http2.backlog import Backlog
from dragoman.transports.http2.fields import NO_TABLE
from dragoman.transports.http2.stream import Buffer, Stream

# So much is handed on before a look at whether the other side takes it.
_BATCH = 1 << 18
# A piece of one stream, so that others have their turn.
_TURN = 1 << 18
# A client that makes less room than this at a time does not read.
_STEP = 1 << 8
# Up to so many bytes are put together, which is cheaper than to hand them on apart.
_SMALL = 1 << 14

_pack = frames.head.pack


class Sending:
    """The sending half. `sink` takes buffers in order; while `paused` no body goes there."""

    def __init__(self, sink: Callable[[list[Buffer]], None], backlog: Backlog) -> None:
        self._sink = sink
        self.backlog = backlog
        self._out: list[Buffer] = []
        self._out_bytes = 0
        self._waiting: deque[Stream] = deque()
        self._prefix = b""
        self.holding = False  # within a batch: what is sent goes out at its end
        self.paused = False
        self.window_out = frames.DEFAULT_WINDOW
        self.stream_window_out = frames.DEFAULT_WINDOW
        self.max_frame_out = frames.SMALLEST_FRAME
        self.heads_sent = self.bytes_sent = 0
        self.now_s = 0.0
        self.moved_s = 0.0  # when the client last took some of any body

    # --- frames --------------------------------------------------------------------------------------------------

    def control(self, frame: bytes) -> None:
        """Send a frame that no window bounds."""
        self._out.append(frame)
        self._out_bytes += len(frame)
        if not self.holding:
            self.flush()

    def flush(self) -> None:
        """Hand on what is there."""
        if self._out:
            out, self._out = self._out, []
            small, self._out_bytes = self._out_bytes <= _SMALL, 0
            self._sink([b"".join(out)] if small and len(out) > 1 else out)

    def no_table(self) -> None:
        """The next block says that our side keeps no table of fields."""
        self._prefix = NO_TABLE

    def head(self, stream: Stream, block: bytes, ended: bool) -> None:
        """A block in one HEADERS frame and, where it is long, CONTINUATION."""
        if self._prefix:
            block, self._prefix = self._prefix + block, b""
        most = self.max_frame_out
        flags = frames.END_STREAM if ended else 0
        first, rest = block[:most], block[most:]
        kind = frames.HEADERS
        self.heads_sent += 1
        told = b""
        while rest:
            told += frames.frame(kind, flags, stream.number, first)
            kind, flags = frames.CONTINUATION, 0
            first, rest = rest[:most], rest[most:]
        self.control(told + frames.frame(kind, flags | frames.END_HEADERS, stream.number, first))

    def whole(self, stream: Stream, head: bytes, parts: Sequence[Buffer], size: int, trailers: bytes) -> bool:
        """Send an answer at once, where there is room for all of it; tells whether it was."""
        if size > self.window_out or size > stream.window_out or size > self.max_frame_out:
            return False
        if self._prefix or self.paused or len(head) + len(trailers) > frames.SMALLEST_FRAME or stream.pending:
            return False
        number = stream.number
        self.window_out -= size
        self.heads_sent += 1
        out = self._out
        length = len(head)
        out.append(_pack(length >> 8, length & 0xFF, 1, 4, number) + head + _pack(size >> 8, size & 0xFF, 0, 0, number))
        out += parts
        length = len(trailers)
        out.append(_pack(length >> 8, length & 0xFF, 1, 5, number) + trailers)
        self._out_bytes += size + 256
        if not self.holding or self._out_bytes > _BATCH:
            self.flush()
        return True

    # --- bodies --------------------------------------------------------------------------------------------------

    def queue(self, stream: Stream, parts: Sequence[Buffer]) -> None:
        """Send these as soon as there is room."""
        if not stream.pending:
            stream.pending = deque()
            stream.sent_s = self.now_s
        for part in parts:
            if len(part):
                stream.pending.append(memoryview(part).cast("B"))
                stream.pending_bytes += len(stream.pending[-1])
                stream.kept += len(stream.pending[-1])
                self.backlog.size += len(stream.pending[-1])
        self._wait(stream)
        self.pump()

    def finish(self, stream: Stream, trailers: bytes) -> None:
        """End the stream once its body is sent."""
        stream.trailers = trailers
        if stream.pending:
            return
        self._end(stream)

    def _wait(self, stream: Stream) -> None:
        if stream.pending and stream not in self._waiting:
            self._waiting.append(stream)

    def drop(self, stream: Stream) -> None:
        """Forget what waits to be sent."""
        self._let_go(stream)
        stream.pending, stream.pending_bytes = None, 0
        if stream in self._waiting:
            self._waiting.remove(stream)

    def pump(self) -> None:
        """Send what waits, stream by stream in turns, as far as the windows and the transport allow."""
        stuck, waiting = 0, self._waiting
        if not waiting:
            self.backlog.changed()
            return
        held, self.holding = self.holding, True
        while waiting and stuck < len(waiting) and self.window_out > 0 and not self.paused:
            stream = waiting.popleft()
            if stream.window_out <= 0:
                waiting.append(stream)
                stuck += 1
                continue
            stuck = 0
            self._turn(stream)
            if stream.pending:
                waiting.append(stream)
            else:
                self._emptied(stream)
            if self._out_bytes > _BATCH:
                self.flush()  # this may pause us
        self.backlog.changed()
        self.holding = held
        if not held:
            self.flush()

    def _turn(self, stream: Stream) -> None:
        """Send one stream's next pieces."""
        assert stream.pending is not None
        most = left = min(_TURN, self.window_out, stream.window_out)
        out, number = self._out, stream.number
        while left and stream.pending:
            size = min(left, stream.pending_bytes, self.max_frame_out)
            out.append(_pack(size >> 8, size & 0xFF, frames.DATA, 0, number))
            _take(stream.pending, size, out)
            left -= size
            self.window_out -= size
            stream.window_out -= size
            stream.pending_bytes -= size
            self._out_bytes += size + frames.HEAD_BYTES
            self.heads_sent += 1
            self.bytes_sent += size
        if most - left >= _STEP or not stream.pending:
            stream.sent_s = self.moved_s = self.now_s

    def unread_since_s(self, stream: Stream) -> float:
        """Return since when the client has made no room for what waits on a stream.

        A stream whose own window is open only waits for its turn: it counts as read while any other one is.
        """
        return max(stream.sent_s, self.moved_s) if stream.window_out > 0 else stream.sent_s

    def _let_go(self, stream: Stream) -> None:
        """All of it counts until the last byte is sent, for a part keeps the whole."""
        self.backlog.size -= stream.kept
        stream.kept = 0

    def _emptied(self, stream: Stream) -> None:
        self._let_go(stream)
        if stream.trailers is not None:
            self._end(stream)
        elif stream.listener is not None:
            stream.listener.drained()

    def _end(self, stream: Stream) -> None:
        if stream.trailers:
            self.head(stream, stream.trailers, True)
        else:
            self.control(frames.frame(frames.DATA, frames.END_STREAM, stream.number))
        self.ended(stream)

    def ended(self, stream: Stream) -> None:
        """Our part of the stream is over."""
        raise NotImplementedError


def _take(pending: deque[memoryview], size: int, out: list[Buffer]) -> None:
    """Move the next `size` bytes."""
    while size:
        part = pending[0]
        if len(part) <= size:
            out.append(part)
            size -= len(part)
            pending.popleft()
        else:
            out.append(part[:size])
            pending[0] = part[size:]
            size = 0
