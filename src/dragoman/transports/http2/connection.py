"""One HTTP/2 connection without its socket: bytes come in, streams are told, and frames go out (RFC 9113)."""

import logging
import math
import time
from collections.abc import Callable
from typing import Any

from dragoman.transports.http2 import frames
from dragoman.transports.http2.blocks import Blocks, unpadded
from dragoman.transports.http2.control import Control
from dragoman.transports.http2.frames import ConnectionFault, StreamFault
from dragoman.transports.http2.request import Head, check_trailers
from dragoman.transports.http2.stream import Buffer, Listener, Stream, Streams
from dragoman.transports.http2.terms import Terms

log = logging.getLogger("dragoman.http2")

# Less than this of a body goes through the common buffer.
_DIRECT = 1 << 13
# How long the requests that were read at once may take before others have a turn.
_SLICE_S = 0.002
# Clients send the rest of a body that was refused in pieces that are larger.
_TINY = 1 << 10

_unpack = frames.head.unpack_from


def _keep_nothing(_size: int) -> None:
    """For connections without a budget."""


class Connection(Control):
    """The server's side. `sink` takes what is to be sent, `close` is called once when nothing more will be.

    `keep` hears how many bytes more, or fewer, of answers are held for a client that has no room for them.
    """

    def __init__(
        self,
        streams: Streams,
        terms: Terms,
        sink: Callable[[list[Buffer]], None],
        close: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        keep: Callable[[int], None] = _keep_nothing,
    ) -> None:
        super().__init__(terms, sink, close, clock, keep)
        self._streams = streams
        self._blocks = Blocks(terms.max_header_bytes, terms.max_headers)
        self._rest = bytearray()
        self._rest_s = 0.0
        self._need = len(frames.PREFACE)
        self._greeted = False
        self._window_in = terms.connection_window
        self._low = terms.connection_window // 2
        # The DATA frame that is coming in: whose it is, what is left of its data and of its padding, and if it ends.
        self._data: Stream | None = None
        self._left = 0
        self._padding = 0
        self._ends = False
        self.more = False  # frames wait that came in; `receive` with nothing takes them
        self._stopwatch = time.perf_counter  # not the loop's clock, which may stand still during a turn

    # --- bytes in ------------------------------------------------------------------------------------------------

    def receive(self, data: bytes) -> None:
        """Take what the client has sent."""
        if not self.over:
            self._within(self._read, data)

    def _within(self, take: Callable[[Any], None], given: Any) -> None:
        self.holding = True
        try:
            take(given)
        except ConnectionFault as fault:
            self.fail(fault.code, fault.message)
        finally:
            self.holding = False
            self.flush()

    def waits_since_s(self) -> float:
        """When the frame or header block began to come in that is not complete; infinity where all are."""
        return self._rest_s if self._rest or self._blocks.begun else math.inf

    def _read(self, data: bytes) -> None:
        self.more = False
        if self._rest:
            self._rest += data
            if len(self._rest) < self._need and self._greeted:
                return
            data = bytes(self._rest)
            self._rest.clear()
        at = 0 if self._greeted else self._greet(data)
        if self._greeted:
            at = self._frames(data, at, len(data))
        if at < len(data):
            if not self._blocks.begun:
                self._rest_s = self.now_s
            self._rest += memoryview(data)[at:]

    def _greet(self, data: bytes) -> int:
        if not frames.PREFACE.startswith(data[: len(frames.PREFACE)]):
            raise ConnectionFault(frames.PROTOCOL_ERROR, "expected the preface of HTTP/2")
        self._greeted = len(data) >= len(frames.PREFACE)
        return len(frames.PREFACE) if self._greeted else 0

    def _frames(self, data: bytes, at: int, end: int) -> int:
        """Take every frame that is there; gives where the first one begins that is not."""
        if self._left or self._padding:
            at = self._go_on(data, at, end)
        until_s = self._stopwatch() + _SLICE_S
        while end - at >= 9:
            high, low, kind, flags, number = _unpack(data, at)
            length = high << 8 | low
            number &= frames.NUMBER
            if kind == 0 and (end - at > 9 or not flags & frames.PADDED or not length):
                at = self._data_frame(flags, number, length, data, at + 9, end)
                continue
            stop = at + 9 + length
            if stop > end:
                self._expect(kind, length)
                return at
            at = stop
            try:
                self._frame(kind, flags, number, data[stop - length : stop])
            except StreamFault as fault:
                self.fail_stream(number, fault)
            if self.over:
                return end
            if kind == frames.HEADERS and self._stopwatch() > until_s:
                self.more = at < end
                break
        self._need = frames.HEAD_BYTES
        return at

    def _expect(self, kind: int, length: int) -> None:
        """Wait for the rest of a frame, if it is not too long to be held here."""
        most = self._blocks.most
        if length > most and kind != frames.DATA:
            code = frames.FRAME_SIZE_ERROR if length > self.terms.max_frame else frames.ENHANCE_YOUR_CALM
            raise ConnectionFault(code, f"expected at most {most} bytes in a frame of type {kind}, got {length}")
        self._need = frames.HEAD_BYTES + (1 if kind == frames.DATA else length)

    def _frame(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        if not self.settled:
            if kind != frames.SETTINGS or flags & frames.ACK:
                raise ConnectionFault(frames.PROTOCOL_ERROR, "expected SETTINGS first")
        elif kind == frames.HEADERS and not self._blocks.begun:
            self._headers(flags, number, payload)
            return
        elif kind == frames.CONTINUATION:
            whole = self._blocks.go_on(number, flags, payload)
            if whole is not None:
                self._head(number, *whole)
            return
        if self._blocks.begun:
            raise ConnectionFault(frames.PROTOCOL_ERROR, "expected CONTINUATION")
        if len(payload) > self._blocks.most:
            self._expect(kind, len(payload))
        self.take(kind, flags, number, payload)

    # --- requests ------------------------------------------------------------------------------------------------

    def _headers(self, flags: int, number: int, payload: bytes) -> None:
        if len(payload) > self._blocks.most:
            self._expect(frames.HEADERS, len(payload))
        if not number & 1:
            raise ConnectionFault(frames.PROTOCOL_ERROR, f"a client cannot open stream {number}")
        block = unpadded(flags, payload) if flags & 0x28 else payload
        if flags & frames.END_HEADERS:
            self._head(number, flags & 1 == 1, block)
        else:
            self._blocks.begin(number, flags & 1 == 1, block)
            self._rest_s = self.now_s

    def _head(self, number: int, ended: bool, block: bytes) -> None:
        stream = self.open.get(number)
        if stream is not None:
            self._trailers(stream, ended, block)
            return
        if number <= self.last:
            self._blocks.fields(block)  # for the table's sake
            if number not in self.reset_lately:
                raise ConnectionFault(frames.STREAM_CLOSED, f"stream {number} is closed")
            return
        self.last = number
        head = self._blocks.head(block)
        if len(self.open) >= self.terms.max_streams or self.refusing:
            raise StreamFault(frames.REFUSED_STREAM, "too many streams at a time")
        length = -1 if head.fault is not None else head.length
        if ended and length > 0:
            raise StreamFault(frames.PROTOCOL_ERROR, f"expected {length} bytes, got no body")
        stream = Stream(self, number, length, self.terms.stream_window, self.stream_window_out, self.now_s)
        self.open[number] = stream
        stream.heard_all = ended
        self._begin(stream, head, ended)

    def _begin(self, stream: Stream, head: Head, ended: bool) -> None:
        try:
            listener = self._streams.open(stream, head, ended)
        except Exception as fault:
            self._failed(stream, fault)
        else:
            if not stream.told_all:
                stream.listener = listener

    def _trailers(self, stream: Stream, ended: bool, block: bytes) -> None:
        fields, too_many = self._blocks.fields(block)
        if stream.heard_all:
            raise StreamFault(frames.STREAM_CLOSED, "fields after the end of a request")
        if not ended or too_many is not None:
            raise StreamFault(frames.PROTOCOL_ERROR, "expected one block of fields after a body, which ends it")
        check_trailers(fields)
        self._ends = True
        self._data = stream
        self._go_on(b"", 0, 0)

    # --- bodies --------------------------------------------------------------------------------------------------

    def _data_frame(self, flags: int, number: int, length: int, data: bytes, at: int, end: int) -> int:
        """Take a DATA frame, whose payload begins at `at`, as far as it is there; gives where that is."""
        padding = 0
        if flags & frames.PADDED:
            padding = 1 + data[at] if length else 1
            at += 1
        self._check_data(number, length, padding)
        self._left, self._padding = length - padding, max(0, padding - 1)
        self._ends = flags & 1 == 1
        self._window_in -= length
        if self._window_in < self._low:
            self._refill()
        stream = self.open.get(number)
        self._data = None
        try:
            if stream is None or stream.heard_all:
                self._stray(number, length)
            else:
                self._admit(stream, length, padding)
                self._data = stream
        except StreamFault as fault:
            self.fail_stream(number, fault)
        return self._go_on(data, at, end)

    def _check_data(self, number: int, length: int, padding: int) -> None:
        if self._blocks.begun or number > self.last or not number & 1:
            raise ConnectionFault(frames.PROTOCOL_ERROR, f"DATA on stream {number}, which is not open")
        if length > self.terms.max_frame:
            raise ConnectionFault(frames.FRAME_SIZE_ERROR, f"expected at most {self.terms.max_frame} bytes in a frame")
        if padding > length:
            raise ConnectionFault(frames.PROTOCOL_ERROR, "there is more padding than frame")
        if length > self._window_in:
            raise ConnectionFault(frames.FLOW_CONTROL_ERROR, "more data than the connection's window allows")

    def _refill(self) -> None:
        full = self.terms.connection_window
        self.control(frames.window_update(0, full - self._window_in))
        self._window_in = full

    def _stray(self, number: int, length: int) -> None:
        """DATA on a stream that has ended; what was on its way when we reset it is passed over."""
        if length < _TINY:
            self.spend()
        if number not in self.reset_lately:
            raise StreamFault(frames.STREAM_CLOSED, "DATA after the end of a request")

    def _admit(self, stream: Stream, length: int, padding: int) -> None:
        stream.window_in -= length
        if stream.window_in < 0:
            raise StreamFault(frames.FLOW_CONTROL_ERROR, "more data than the stream's window allows")
        if length == padding and not self._ends:
            self.spend()
        if padding:
            self.grant(stream, padding)

    def _go_on(self, data: bytes, at: int, end: int) -> int:
        """Hand on what is there of a DATA frame's payload; gives where that ends."""
        stream = self._data
        stop = min(end, at + self._left)
        self._left -= stop - at
        if stream is not None:
            ended = self._ends and not self._left
            if not self._left:
                self._data = None
            if ended or stop > at:
                try:
                    self._heard(stream, stop - at, ended)
                    stream.listener.receive(data, at, stop, ended)
                except StreamFault as fault:
                    self.fail_stream(stream.number, fault)
                except Exception as fault:
                    self._failed(stream, fault)
        skipped = min(end - stop, self._padding) if not self._left else 0
        self._padding -= skipped
        return stop + skipped

    def _heard(self, stream: Stream, size: int, ended: bool) -> None:
        """Count a piece of a body. Raises StreamFault where the body is not as long as it was announced."""
        if stream.length >= 0:
            stream.length -= size
            if stream.length < 0 or (ended and stream.length):
                self._data = None
                raise StreamFault(frames.PROTOCOL_ERROR, "the body is not as long as its content-length")
        if ended:
            stream.heard_all = True

    def _failed(self, stream: Stream, fault: Exception) -> None:
        """Whoever answers this stream has failed; the others have nothing to do with it."""
        if isinstance(fault, ConnectionFault):
            raise fault
        log.error("a stream failed", exc_info=fault)
        self.give_up(stream, frames.INTERNAL_ERROR)

    def _forget(self, stream: Stream) -> Listener | None:
        if stream is self._data:
            self._data = None
        return super()._forget(stream)

    # --- large bodies, written where they belong -----------------------------------------------------------------

    def room(self) -> memoryview | None:
        """Where the next bytes of the client may be written to, instead of being given to `receive`."""
        if self._left < _DIRECT or self._data is None or self._rest:
            return None
        found: memoryview | None = self._data.listener.room(self._left)
        return found

    def filled(self, size: int) -> None:
        """So many bytes were written there."""
        self._within(self._filled, size)

    def _filled(self, size: int) -> None:
        stream = self._data
        assert stream is not None
        self._left -= size
        ended = self._ends and not self._left
        if not self._left:
            self._data = None
        try:
            self._heard(stream, size, ended)
            stream.listener.filled(size, ended)
        except StreamFault as fault:
            self.fail_stream(stream.number, fault)
        except Exception as fault:
            self._failed(stream, fault)
