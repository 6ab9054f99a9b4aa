"""One HTTP/2 connection without its socket (RFC 9113): bytes in, requests to their handlers, frames out.

`receive` takes what has arrived. `FrameReader` cuts it into frames and calls `handle_data` for DATA, as far as a
frame has arrived, and `handle_frame` for all others once they are complete. A complete block of headers opens a
stream: the service returns its handler, and the body goes there through `BodyReceiver`, within the windows of
`ReceiveWindows`. A handler responds in any of these calls or later. What the windows of the client and the transport
have room for is sent; the rest waits in its stream (`BodySender`), and while too much waits (`Backlog`), so do
further requests. Whatever is sent during `receive` is written at once at its end.

An error of the client in one stream (Http2StreamError) resets that stream, any other (Http2ConnectionError) ends the
connection. `RateLimits` bounds what a client may let the server do for nothing.

    phase     entered by                                       new streams   leaves it
    OPEN      the start                                        accepted      by `drain`, by GOAWAY of the client
    ENDING    `drain` during a request that is not of gRPC,    accepted      with its last stream, by `refuse_streams`
              `retire` of a connection without gRPC
    DRAINING  our GOAWAY with the highest number, and a PING   accepted      by the acknowledgement of the PING, or soon
    REFUSING  our GOAWAY with the last number, or the          refused       with its last stream
              client's GOAWAY
    CLOSED    the end of the last stream, an error, or the     none
              client's disconnection

Clients of gRPC open another connection once they have our GOAWAY, and finish their calls on this one. Others, such as
the package h2, drop everything after a GOAWAY, also the response that they wait for: they get it after that.

Until the client's SETTINGS have arrived (`settled`), every other frame is an error.
"""

import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from dragoman.access.certificates import PeerCertificate
from dragoman.formats.http2 import frames
from dragoman.formats.http2.fields import TABLE_BYTES
from dragoman.formats.http2.frames import HEADERS, WINDOW_UPDATE, FrameWriter, Http2ConnectionError, Http2StreamError
from dragoman.transports.http2.bodies import BATCH_BYTES, BodyReceiver, BodySender, ReceiveWindows
from dragoman.transports.http2.frame_reader import FrameReader, HeaderBlocks
from dragoman.transports.http2.limits import Http2Limits, RateLimits
from dragoman.transports.http2.request import check_trailers
from dragoman.transports.http2.stream import (
    CLOSED,
    DRAINING,
    ENDING,
    OPEN,
    REFUSING,
    Backlog,
    Buffer,
    Http2Service,
    Http2Stream,
)

log = logging.getLogger("dragoman.http2")

# Clients send the rest of a rejected body in frames larger than this; smaller ones count as empty.
_TINY_BYTES = 1 << 10
# A stream that is reset so soon after it began counts as reset early.
_EARLY_S = 0.05
_PING = b"dragoman"
# Streams that we reset, remembered because frames that were sent before are not errors.
_MAX_RESETS = 256

_pack = frames.frame_header.pack


class Http2Connection:
    """The server's side of one connection, composed of its parts.

    `sink` takes what is to be sent; `close` is called once, when nothing more will be sent; `report_unsent` is called
    with changes of how many response bytes wait for the client. `service` handles the requests.

    `host` is the address of the client, `address` is that by which its calls are counted; on a `reserved` connection
    only health checks are answered; `calls` belongs to the service. `streams` are the open ones by number, and `last`
    is the highest number that the client has used. `incomplete_since_s` is when the frame or header block began that is
    incomplete; infinity if there is none.
    """

    def __init__(
        self,
        service: Http2Service,
        limits: Http2Limits,
        sink: Callable[[list[Buffer]], None],
        close: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        report_unsent: Callable[[int], None] = lambda _size: None,  # without a common limit of unsent bytes
    ) -> None:
        self._service = service
        self._limits = limits
        self._close = close
        self.backlog = Backlog(limits.max_unsent, report_unsent)
        self._writer = FrameWriter(sink)
        self.streams: dict[int, Http2Stream] = {}
        self.last = 0
        self._resets: dict[int, None] = {}
        self.sender = BodySender(self._writer, self.backlog, self._response_sent, clock())
        self._windows = ReceiveWindows(limits, self._writer)
        self._rates = RateLimits(limits, self._writer, clock)
        self._blocks = HeaderBlocks(limits.max_header_bytes, limits.max_headers)
        self.body = BodyReceiver(self._handler_failed)
        self.reader = FrameReader(self, self.body, limits.max_frame, self._blocks.max_block)
        self.incomplete_since_s = math.inf
        self.settled = False
        self.phase = OPEN
        self._has_grpc = False
        self.host = self.address = ""
        self.certificate: PeerCertificate | None = None
        self.reserved = False
        self.calls: Any = None

    # --- bytes in ------------------------------------------------------------------------------------------------

    def receive(self, data: bytes, filled: int = 0) -> None:
        """Take what the client has sent: `data`, or as many bytes as were `filled` in `buffer()`."""
        if self.phase == CLOSED:
            return
        writer = self._writer
        writer.is_batching = True
        try:
            if filled:
                self.body.count_filled(filled)
            elif self.reader.read(data) and not self._blocks.is_open:
                self.incomplete_since_s = self.sender.now_s
            elif not (self.reader.unparsed or self._blocks.is_open):
                self.incomplete_since_s = math.inf
        except Http2ConnectionError as error:
            self.fail(error.code, error.message)
        finally:
            writer.is_batching = False
            writer.flush()

    def buffer(self) -> memoryview | None:
        """Return where the rest of a body, `body.left` bytes, may be read to; None to pass it to `receive`."""
        return None if self.reader.unparsed else self.body.buffer()

    def handle_frame(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        blocks = self._blocks
        if not self.settled and (kind != frames.SETTINGS or flags & frames.ACK):
            raise Http2ConnectionError(frames.PROTOCOL_ERROR, "expected SETTINGS first")
        if blocks.is_open and kind != frames.CONTINUATION:
            raise Http2ConnectionError(frames.PROTOCOL_ERROR, "expected CONTINUATION")
        if len(payload) > blocks.max_block:
            self.reader.check_length(kind, len(payload))
        if (kind == WINDOW_UPDATE or kind == frames.RST_STREAM) and len(payload) != 4:
            raise Http2ConnectionError(frames.FRAME_SIZE_ERROR, f"expected 4 bytes, got {len(payload)}")
        if kind == WINDOW_UPDATE:
            self._handle_window_update(number, payload)
        elif kind != HEADERS:
            self._handle_control(kind, flags, number, payload)
        elif not number & 1:
            raise Http2ConnectionError(frames.PROTOCOL_ERROR, f"a client cannot open stream {number}")
        else:
            block = frames.strip_padding(flags, payload) if flags & 0x28 else payload
            if flags & frames.END_HEADERS:
                self._handle_block(number, flags & 1 == 1, block)
            else:
                blocks.begin(number, flags & 1 == 1, block)
                self.incomplete_since_s = self.sender.now_s

    # --- requests ------------------------------------------------------------------------------------------------

    def _handle_block(self, number: int, ended: bool, block: bytes) -> None:
        """Begin the request of a header block, or end one by trailers."""
        streams = self.streams
        stream = streams.get(number)
        if stream is not None:
            self._handle_trailers(stream, ended, block)
            return
        if number <= self.last:
            self._blocks.decode(block)  # it may change the dynamic table
            if number not in self._resets:
                raise Http2ConnectionError(frames.STREAM_CLOSED, f"stream {number} is closed")
            return
        self.last = number
        headers = self._blocks.parse_request(block)
        if len(streams) >= self._limits.max_streams or self.phase >= REFUSING:
            raise Http2StreamError(frames.REFUSED_STREAM, "too many streams at a time")
        length = -1 if headers.error is not None else headers.length
        if ended and length > 0:
            raise Http2StreamError(frames.PROTOCOL_ERROR, f"expected {length} bytes, got no body")
        sender = self.sender
        stream = Http2Stream(self, number, length, self._limits.stream_window, sender.stream_window, sender.now_s)
        streams[number] = stream
        self._has_grpc = self._has_grpc or headers.is_grpc
        stream.remote_ended = ended
        try:
            handler = self._service.open(stream, headers, ended)
        except Exception as error:
            self._handler_failed(stream, error)
        else:
            if not stream.local_ended:
                stream.handler = handler

    def _handle_trailers(self, stream: Http2Stream, ended: bool, block: bytes) -> None:
        fields, too_many = self._blocks.decode(block)
        if stream.remote_ended:
            raise Http2StreamError(frames.STREAM_CLOSED, "fields after the end of a request")
        if not ended or too_many is not None:
            raise Http2StreamError(frames.PROTOCOL_ERROR, "expected one block of fields after a body, which ends it")
        check_trailers(fields)
        self.body.end(stream)

    def handle_data(self, flags: int, number: int, length: int, data: bytes, at: int, end: int) -> int:
        """Handle a DATA frame, whose payload begins at `at`, as far as it has arrived; return where that ends."""
        padding = 0
        if flags & frames.PADDED:
            padding = 1 + data[at] if length else 1
            at += 1
        if self._blocks.is_open or number > self.last or not number & 1:
            raise Http2ConnectionError(frames.PROTOCOL_ERROR, f"DATA on stream {number}, which is not open")
        if length > self._limits.max_frame:
            text = f"expected at most {self._limits.max_frame} bytes in a frame"
            raise Http2ConnectionError(frames.FRAME_SIZE_ERROR, text)
        if padding > length:
            raise Http2ConnectionError(frames.PROTOCOL_ERROR, "the padding is longer than the frame")
        ended = flags & 1 == 1
        stream = self.streams.get(number)
        body, accepted = self.body, None
        try:
            if stream is None or stream.remote_ended:
                self._windows.take(length, None)
                self._check_late_data(number, length)
            else:
                self._windows.take(length, stream)
                if length == padding and not ended:
                    self._count_empty_frame()
                if padding:
                    self._windows.acknowledge(stream, padding)
                accepted = stream
        except Http2StreamError as error:
            self.fail_stream(number, error)
        body.stream, body.left, body.ended = accepted, length - padding, ended
        body.padding = padding - 1 if padding else 0
        return body.receive(data, at, end)

    def _check_late_data(self, number: int, length: int) -> None:
        """DATA on a stream that has ended is skipped if it was on its way when we reset the stream."""
        if length < _TINY_BYTES:
            self._count_empty_frame()
        if number not in self._resets:
            raise Http2StreamError(frames.STREAM_CLOSED, "DATA after the end of a request")

    def _handler_failed(self, stream: Http2Stream, error: Exception) -> None:
        """Handle an error of one stream; the others are not affected. Raises a Http2ConnectionError again."""
        if isinstance(error, Http2ConnectionError):
            raise error
        if isinstance(error, Http2StreamError):
            self.fail_stream(stream.number, error)
        else:
            log.error("a stream failed", exc_info=error)
            self.abort(stream, frames.INTERNAL_ERROR)

    # --- control frames ------------------------------------------------------------------------------------------

    def _count_empty_frame(self) -> None:
        if not self._rates.empty_frames.take():
            self._rates.count_empty_frame(self.last >> 1)

    def _handle_control(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        """Handle a frame other than DATA, HEADERS and WINDOW_UPDATE."""
        match kind:
            case frames.CONTINUATION:
                block = self._blocks.append(number, flags, payload)
                if block is not None:
                    self._handle_block(number, *block)
            case frames.RST_STREAM:
                self._handle_rst_stream(number, payload)
            case frames.SETTINGS | frames.PING | frames.GOAWAY if number:
                raise Http2ConnectionError(frames.PROTOCOL_ERROR, f"frame type {kind} belongs to no stream")
            case frames.SETTINGS:
                self._handle_settings(flags, payload)
            case frames.PING:
                self._handle_ping(flags, payload)
            case frames.GOAWAY:
                self._handle_goaway(payload)
            case frames.PUSH_PROMISE:
                raise Http2ConnectionError(frames.PROTOCOL_ERROR, "PUSH_PROMISE from a client")
            case frames.PRIORITY:
                frames.check_priority(number, payload)
                self._count_empty_frame()
            case _:
                self._count_empty_frame()  # unknown types are ignored

    def _handle_settings(self, flags: int, payload: bytes) -> None:
        if flags & frames.ACK:
            if payload:
                text = "SETTINGS: expected no payload in an acknowledgement"
                raise Http2ConnectionError(frames.FRAME_SIZE_ERROR, text)
            self._count_empty_frame()
            return
        self._count_empty_frame()
        for name, value in frames.read_settings(payload):
            match name:
                case frames.INITIAL_WINDOW_SIZE:
                    self.sender.set_stream_window(value, list(self.streams.values()))
                case frames.MAX_FRAME_SIZE:
                    self._writer.max_frame = value
                case frames.HEADER_TABLE_SIZE if value < TABLE_BYTES:
                    self._writer.disable_dynamic_table()
        self.settled = True
        self._writer.send(frames.frame(frames.SETTINGS, frames.ACK, 0))
        self.sender.pump()

    def _handle_ping(self, flags: int, payload: bytes) -> None:
        if len(payload) != 8:
            raise Http2ConnectionError(frames.FRAME_SIZE_ERROR, f"PING: expected 8 bytes, got {len(payload)}")
        if not flags & frames.ACK:
            self._rates.count_ping()
            self._writer.send(frames.frame(frames.PING, frames.ACK, 0, payload))
            return
        self._count_empty_frame()
        if payload == _PING and self.phase >= DRAINING:
            self.refuse_streams()

    def _handle_goaway(self, payload: bytes) -> None:
        if len(payload) < 8:
            raise Http2ConnectionError(frames.FRAME_SIZE_ERROR, f"GOAWAY: expected 8 bytes, got {len(payload)}")
        self._count_empty_frame()
        self.phase = REFUSING
        self._close_if_done()

    def _handle_window_update(self, number: int, payload: bytes) -> None:
        increment = int.from_bytes(payload) & frames.LARGEST_WINDOW
        if not self._rates.empty_frames.take():  # not by `_count_empty_frame`: most frames are of this kind
            self._rates.count_empty_frame(self.last >> 1)
        code = frames.FLOW_CONTROL_ERROR if increment else frames.PROTOCOL_ERROR
        sender = self.sender
        if number == 0:
            sender.window += increment
            if not increment or sender.window > frames.LARGEST_WINDOW:
                raise Http2ConnectionError(code, f"the connection's window cannot grow by {increment}")
        else:
            stream = self.streams.get(number)
            if stream is None:
                self._check_opened(number)
                return
            stream.window_out += increment
            if not increment or stream.window_out > frames.LARGEST_WINDOW:
                raise Http2StreamError(code, f"a stream's window cannot grow by {increment}")
        if sender.waiting:
            sender.pump()

    def _handle_rst_stream(self, number: int, payload: bytes) -> None:
        self._check_opened(number)
        stream = self.streams.get(number)
        if stream is None or self.sender.now_s - stream.began_s < _EARLY_S:
            self._rates.count_reset()
        if stream is not None:
            self._drop(stream, int.from_bytes(payload))

    def _check_opened(self, number: int) -> None:
        """Raise Http2ConnectionError if the client has not opened this stream."""
        if number > self.last or not number & 1:
            raise Http2ConnectionError(frames.PROTOCOL_ERROR, f"stream {number} is not open")

    # --- the connection begins and ends --------------------------------------------------------------------------

    def start(self) -> None:
        """Send our SETTINGS."""
        limits = self._limits
        values = {
            frames.MAX_CONCURRENT_STREAMS: limits.max_streams,
            frames.INITIAL_WINDOW_SIZE: limits.stream_window,
            frames.MAX_FRAME_SIZE: limits.max_frame,
            frames.MAX_HEADER_LIST_SIZE: limits.max_header_bytes,
        }
        more = limits.connection_window - frames.DEFAULT_WINDOW
        self._writer.send(frames.settings(values) + (frames.window_update(0, more) if more else b""))

    def ping(self) -> None:
        """Send a PING to find out whether the client responds."""
        self._writer.send(frames.frame(frames.PING, 0, 0, _PING))

    def retire(self) -> None:
        """End the connection when no request can be lost: of gRPC as `drain` does, else with its last stream, also if
        that is still to come."""
        if self.phase == OPEN and not self._has_grpc:
            self.phase = ENDING
        else:
            self.drain()

    def drain(self) -> None:
        """Announce that no new stream will be accepted; `refuse_streams` follows once the client has seen it, or the
        last stream of a client without gRPC has ended."""
        if self.phase == OPEN and self.streams and not self._has_grpc:
            self.phase = ENDING
        elif self.phase == OPEN or (self.phase == ENDING and not self.streams):
            self.phase = DRAINING
            self._writer.send(frames.goaway(frames.NUMBER, frames.NO_ERROR))
            self.ping()

    def refuse_streams(self) -> None:
        """Accept no new stream, and close once the open ones have ended."""
        if self.phase < REFUSING:
            self.phase = REFUSING
            self._writer.send(frames.goaway(self.last, frames.NO_ERROR))
        self._close_if_done()

    def fail(self, code: int, message: str) -> None:
        """End the connection with an error."""
        if self.phase != CLOSED:
            self._writer.send(frames.goaway(self.last, code, message))
            self._end()

    def on_connection_lost(self) -> None:
        """The client has disconnected."""
        if self.phase != CLOSED:
            self._end()

    def _end(self) -> None:
        self._writer.flush()
        self.phase = CLOSED
        self.backlog.close()
        for stream in list(self.streams.values()):
            self._drop(stream, frames.CANCEL)
        self._writer.discard()
        self._close()

    def _close_if_done(self) -> None:
        if self.phase == REFUSING and not self.streams:
            self._writer.flush()
            self.phase = CLOSED
            self._close()

    # --- streams end ---------------------------------------------------------------------------------------------

    def fail_stream(self, number: int, error: Http2StreamError) -> None:
        """Reset a stream, open or not, because of an error of the client, and notify its handler.

        Raises Http2ConnectionError if there were too many.
        """
        self._send_reset(number, error.code)
        stream = self.streams.get(number)
        if stream is not None:
            self._drop(stream, error.code)
        self._rates.count_reset()

    def reset(self, stream: Http2Stream, code: int) -> None:
        """Reset a stream; its handler is not notified."""
        if stream.number in self.streams:
            self._send_reset(stream.number, code)
            self._remove(stream)

    def abort(self, stream: Http2Stream, code: int) -> None:
        """Reset a stream and notify its handler."""
        handler = stream.handler
        self.reset(stream, code)
        _notify(handler, code)

    def _drop(self, stream: Http2Stream, code: int) -> None:
        """Remove a stream that the client has reset or left, and notify its handler."""
        handler = stream.handler
        self._remove(stream)
        _notify(handler, code)

    def _response_sent(self, stream: Http2Stream) -> None:
        """The response is complete, so the stream ends, whether the request is or not."""
        stream.local_ended = True
        if stream.remote_ended:
            self._remove(stream)
        else:
            self.reset(stream, frames.NO_ERROR)  # 8.1: the rest of the request is not needed

    def _send_reset(self, number: int, code: int) -> None:
        self._resets[number] = None
        if len(self._resets) > _MAX_RESETS:
            del self._resets[next(iter(self._resets))]
        self._writer.send(frames.rst_stream(number, code))

    def _remove(self, stream: Http2Stream) -> None:
        """The stream is no longer open: forget it, with what was to be received and sent."""
        stream.local_ended = stream.remote_ended = True
        stream.handler = None  # they refer to each other; this frees both at once
        self.streams.pop(stream.number, None)
        if stream is self.body.stream:
            self.body.stream = None  # what is left of its frame is skipped
        if stream.pending:
            self.sender.drop(stream)
        if self.phase == REFUSING:
            self._close_if_done()
        elif self.phase == ENDING and not self.streams:
            self.refuse_streams()

    # --- for streams ---------------------------------------------------------------------------------------------

    def send_headers(self, stream: Http2Stream, block: bytes, ended: bool) -> None:
        if not stream.local_ended:
            self._writer.send_headers(stream.number, block, ended=ended)
            if ended:
                self._response_sent(stream)

    def send_data(self, stream: Http2Stream, parts: Sequence[Buffer]) -> None:
        if not stream.local_ended:
            self.sender.queue(stream, parts)

    def send_trailers(self, stream: Http2Stream, block: bytes) -> None:
        if not stream.local_ended:
            self.sender.finish(stream, block)

    def send_response(
        self, stream: Http2Stream, headers: bytes, parts: Sequence[Buffer], size: int, trailers: bytes
    ) -> None:
        """Send a whole response, whose body has `size` bytes: at once if there is room for all of it."""
        if stream.local_ended:
            return
        sender, writer, number = self.sender, self._writer, stream.number
        if (
            size <= sender.window
            and size <= stream.window_out
            and size <= writer.max_frame
            and not (sender.paused or stream.pending)
            and len(headers) + len(trailers) <= writer.max_whole_block
        ):
            sender.window -= size
            length = len(headers)
            start = _pack(length >> 8, length & 0xFF, 1, 4, number) + headers
            start += _pack(size >> 8, size & 0xFF, 0, 0, number)
            length = len(trailers)
            writer.add((start, *parts, _pack(length >> 8, length & 0xFF, 1, 5, number) + trailers), size)
            if not writer.is_batching or writer.size > BATCH_BYTES:
                writer.flush()
            self._response_sent(stream)
            return
        was_batching, writer.is_batching = writer.is_batching, True
        writer.send_headers(number, headers, ended=False)
        sender.queue(stream, parts)
        sender.finish(stream, trailers)
        writer.is_batching = was_batching
        if not was_batching:
            writer.flush()

    def acknowledge(self, stream: Http2Stream, size: int) -> None:
        self._windows.acknowledge(stream, size)

    def widen(self, stream: Http2Stream, size: int) -> None:
        self._windows.widen(stream, size)


def _notify(handler: Any, code: int) -> None:
    if handler is not None:
        try:
            handler.on_closed(code)
        except Exception:
            log.exception("a stream failed")
