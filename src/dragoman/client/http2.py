"""HTTP/2 of one connection to a gRPC server, bytes in and bytes out (RFC 9113; the specification "gRPC over HTTP2").

One call at a time uses a connection; concurrent calls have connections of their own, as over HTTP/1.1. So there is one
open stream, whose flow control towards us is that of TCP: the announced windows are the largest ones. States of a call:

| state | until |
|---|---|
| sending | the request is sent as far as the server's windows allow; `is_blocked` if they do not |
| waiting | the header block of the response |
| receiving | messages, then the trailers: `done` |
"""

import zlib
from collections.abc import Iterable, Sequence
from typing import Self
from urllib.parse import unquote

from dragoman.core.errors import ServerError
from dragoman.core.sizes import INLINE
from dragoman.formats.http2 import frames
from dragoman.formats.http2.fields import Decoder, Field, encode_fields
from dragoman.formats.http2.frames import FrameWriter, Http2ConnectionError
from dragoman.formats.policy import Buffer

PREFIX_BYTES = 5
_CHUNK = 1 << 16
_DIRECT = 1 << 14  # performance only: longer rests of a message are received in place
_LARGEST_CONTROL = 1 << 20
_FIRST_PART = 1 << 20  # of a message's memory, which grows as it arrives: a length is only a claim
_MAX_HEADER_BYTES = 1 << 18
_MAX_IDLE_FRAMES = 10_000  # that bring a call no further; a server that pings each second needs nearly three hours
_REFILL = 1 << 30
_LAST_STREAM = frames.NUMBER - 2
_WINDOW_BITS = {"gzip": 31, "deflate": 15}
_NOTHING = memoryview(b"")

_PREFACE = (
    frames.PREFACE
    + frames.settings(
        {
            frames.ENABLE_PUSH: 0,
            frames.INITIAL_WINDOW_SIZE: frames.LARGEST_WINDOW,
            frames.MAX_FRAME_SIZE: frames.LARGEST_FRAME,
            frames.MAX_HEADER_LIST_SIZE: _MAX_HEADER_BYTES,
        }
    )
    + frames.window_update(0, frames.LARGEST_WINDOW - frames.DEFAULT_WINDOW)
)

# Error codes of RST_STREAM as statuses (the specification "gRPC over HTTP2"); INTERNAL for all others.
_STATUS_OF_RESET = {frames.CANCEL: "CANCELLED", frames.ENHANCE_YOUR_CALM: "RESOURCE_EXHAUSTED"}


class NotProcessed(ConnectionRefusedError):
    """The server has not begun the call: REFUSED_STREAM, or GOAWAY before its stream. It may be sent again."""


class Http2Parser:
    """Writer of a request and parser of its response: write received bytes into `buffer()`, then `bytes_received`.

    `replies` and `body` return what is to be sent. has_headers: the first header block is complete. done: the response
    is complete. keep_alive: the connection can be used for another call. headers, trailers: the fields by name;
    `reset_status`: the gRPC status of a stream that the server has reset. `raw`: the body of a response that is not
    gRPC.
    """

    is_duplex = True

    def __init__(self) -> None:
        self._decoder = Decoder(_MAX_HEADER_BYTES)
        self._out: list[Buffer] = [_PREFACE]
        self._writer = FrameWriter(self._out.extend)
        self._scratch = memoryview(bytearray(_CHUNK))
        self._pending = b""
        self._stream = -1
        self._send_window = frames.DEFAULT_WINDOW  # of the connection
        self._initial_window = frames.DEFAULT_WINDOW
        self._is_going_away = self._is_broken = False
        self._is_first = True
        self._received = 0
        self._idle_frames = 0
        self._reset_call()

    def _reset_call(self) -> None:
        self.headers: dict[str, str] = {}
        self.trailers: dict[str, str] = {}
        self.reset_status = ""
        self.raw = b""
        self.has_headers = False
        self.done = True
        self._messages: list[Buffer] = []
        self._received_of_call = 0
        self._stream_window = self._initial_window
        self._rest = _NOTHING  # of the request
        self._is_sent = True
        self._block: bytearray | None = None  # a header block that CONTINUATION frames complete
        self._block_ends = False
        self._frame_left = self._padding = 0  # of the current DATA frame
        self._frame_ends = False
        self._prefix = bytearray()
        self._message: bytearray | None = None
        self._at = self._length = 0
        self._is_direct = False

    # --- the request -------------------------------------------------------------------------------------------

    def next(self, *, streams: bool) -> Self:
        """Prepare for the next call."""
        self._reset_call()
        self.done = False
        return self

    def start(self, fields: Iterable[Field], message: bytes, *, is_compressed: bool) -> None:
        """Begin a call: its header fields and one message. Raises NotProcessed if the server takes no more calls."""
        if self._is_going_away:
            raise NotProcessed("the server is shutting down")
        self._stream += 2
        self._is_sent = False
        self._writer.send_headers(self._stream, encode_fields(fields), ended=False)
        self._rest = memoryview(b"%c%b%b" % (is_compressed, len(message).to_bytes(4, "big"), message))

    def body(self) -> Sequence[Buffer]:
        """Return all that can be sent now: replies, headers, and the request as far as the windows allow."""
        out, self._out[:] = [*self._out], []
        while not self._is_sent and not self.done:
            size = min(len(self._rest), self._writer.max_frame, self._send_window, self._stream_window)
            if size <= 0:
                break
            part, self._rest = self._rest[:size], self._rest[size:]
            if not self._rest:
                self._is_sent, self._rest = True, _NOTHING  # an idle connection keeps no request in memory
            self._idle_frames = 0
            self._send_window -= size
            self._stream_window -= size
            out.append(_data_header(size, self._is_sent, self._stream))
            out.append(part)
        is_small = sum(map(len, out)) <= INLINE
        return [b"".join(out)] if is_small and out else out

    @property
    def replies(self) -> bool:
        """Whether frames are to be sent: acknowledgements and window updates."""
        return bool(self._out)

    @property
    def is_blocked(self) -> bool:
        """Whether the rest of the request waits for the server's windows."""
        return not self._is_sent and not self.done

    # --- the response ------------------------------------------------------------------------------------------

    @property
    def keep_alive(self) -> bool:
        return self.done and self._is_sent and not self._is_going_away and self._stream < _LAST_STREAM

    def buffer(self) -> memoryview:
        """Return the buffer for the next bytes; those of a large message are received in place."""
        self._grow_message()
        left = min(self._frame_left, 0 if self._message is None else len(self._message) - self._at)
        self._is_direct = left > _DIRECT
        if self._is_direct and self._message is not None:
            return memoryview(self._message)[self._at : self._at + left]
        return self._scratch

    def bytes_received(self, count: int) -> None:
        """Parse `count` received bytes. Raises ServerError if they are not HTTP/2, NotProcessed if the call may be
        sent again."""
        try:
            self._receive(count)
        except (Http2ConnectionError, ServerError, NotProcessed) as error:
            # Where the next frame begins is not known: what follows is ignored, and no call uses the connection again.
            self._is_broken = self._is_going_away = True
            if self.done:
                return  # the response is complete
            if isinstance(error, Http2ConnectionError):
                raise ServerError(f"the response is not HTTP/2: {error.message}") from error
            raise

    def _receive(self, count: int) -> None:
        if self._is_broken:
            return
        if self._is_direct:
            self._frame_left -= count
            self._at += count
            self._end_message()
            self._end_frame()
            return
        data = self._pending + self._scratch[:count]
        if self._is_first and b"HTTP/1"[: len(data)] == data[:6]:
            raise ServerError("the server answers in HTTP/1.1, not in gRPC: expected another port, or an http:// URL")
        self._is_first = False
        self._pending = data[self._parse(data) :]

    def end(self) -> bool:
        """Return whether the response was complete when the connection was closed."""
        self._is_going_away = True
        return self.done

    def take(self) -> Buffer:
        """Return nothing: messages are returned by `messages`."""
        return b""

    def messages(self) -> list[Buffer]:
        """Return the messages received since the last call."""
        found, self._messages = self._messages, []
        return found

    # --- frames ------------------------------------------------------------------------------------------------

    def _parse(self, data: bytes) -> int:
        """Handle the frames in `data`; return where the first incomplete one begins."""
        at, end = 0, len(data)
        while True:
            if self._frame_left or self._padding:
                at = self._payload(data, at)
                if self._frame_left or self._padding:
                    return at
            if end - at < frames.FRAME_HEADER_BYTES:
                return at
            high, low, kind, flags, number = frames.frame_header.unpack_from(data, at)
            length, number = high << 8 | low, number & frames.NUMBER
            begin = at + frames.FRAME_HEADER_BYTES
            if kind == frames.DATA:
                padded = bool(flags & frames.PADDED)
                if end - begin < padded:
                    return at
                self._begin_data(number, flags, length, data[begin] if padded else None)
                at = begin + padded
                continue
            if length > _LARGEST_CONTROL:
                raise Http2ConnectionError(frames.FRAME_SIZE_ERROR, f"a frame of type {kind} has {length} bytes")
            if end - begin < length:
                return at
            at = begin + length
            self._handle(kind, flags, number, data[begin:at])

    def _count_idle_frame(self, length: int) -> None:
        """Count a frame that is no part of a response, a long one as several of 1 KiB. Raises ServerError if the server
        sends nothing else."""
        self._idle_frames += 1 + (length >> 10)
        if self._idle_frames > _MAX_IDLE_FRAMES:
            raise ServerError(
                f"the server sent {_MAX_IDLE_FRAMES} HTTP/2 frames (as PING, SETTINGS) without a response"
            )

    def _handle(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        self._count_idle_frame(len(payload))
        if self._block is not None and kind != frames.CONTINUATION:
            raise Http2ConnectionError(frames.PROTOCOL_ERROR, "a header block is interrupted")
        if kind == frames.HEADERS:
            self._block, self._block_ends = (
                bytearray(frames.strip_padding(flags, payload)),
                bool(flags & frames.END_STREAM),
            )
            self._continue(flags, number)
        elif kind == frames.CONTINUATION and self._block is not None:
            self._block += payload
            self._continue(flags, number)
        elif kind == frames.SETTINGS and not flags & frames.ACK:
            self._apply(frames.read_settings(payload))
            self._writer.send(frames.frame(frames.SETTINGS, frames.ACK, 0))
        elif kind == frames.PING and not flags & frames.ACK:
            self._writer.send(frames.frame(frames.PING, frames.ACK, 0, payload))
        elif kind == frames.WINDOW_UPDATE:
            self._grow_window(number, int.from_bytes(payload[:4], "big") & frames.NUMBER)
        elif kind == frames.RST_STREAM:
            self._handle_reset(number, int.from_bytes(payload[:4], "big"))
        elif kind == frames.GOAWAY:
            self._handle_goaway(int.from_bytes(payload[:4], "big") & frames.NUMBER)
        elif kind in (frames.PUSH_PROMISE, frames.CONTINUATION):
            raise Http2ConnectionError(frames.PROTOCOL_ERROR, f"unexpected frame of type {kind}")

    def _continue(self, flags: int, number: int) -> None:
        """Handle a header block once it is complete."""
        block = self._block or bytearray()
        if len(block) > _LARGEST_CONTROL:
            raise Http2ConnectionError(frames.ENHANCE_YOUR_CALM, "a header block is too long")
        if not flags & frames.END_HEADERS:
            return
        fields = {n.decode("latin-1"): v.decode("latin-1") for n, v in self._decoder.decode(bytes(block))}
        self._block = None
        if number != self._stream or self.done:
            return
        if not self._block_ends and fields.get(":status", "").startswith("1"):
            return  # 1xx: the final response follows
        self._idle_frames = 0
        if not self.has_headers:
            self.headers, self.has_headers = fields, True
        if self._block_ends:
            if self._prefix and fields.get("grpc-status") == "0":
                raise Http2ConnectionError(frames.PROTOCOL_ERROR, "the last message is not complete")
            self.trailers, self.done = fields, True

    def _apply(self, pairs: list[tuple[int, int]]) -> None:
        for name, value in pairs:
            if name == frames.INITIAL_WINDOW_SIZE:
                self._stream_window += value - self._initial_window
                self._initial_window = value
            elif name == frames.MAX_FRAME_SIZE:
                self._writer.max_frame = value
            elif name == frames.HEADER_TABLE_SIZE and value < 4096:
                self._writer.disable_dynamic_table()

    def _grow_window(self, number: int, increment: int) -> None:
        if number == 0:
            self._send_window += increment
        elif number == self._stream:
            self._stream_window += increment
        if not increment or max(self._send_window, self._stream_window) > frames.LARGEST_WINDOW:
            raise Http2ConnectionError(frames.FLOW_CONTROL_ERROR, "WINDOW_UPDATE: the increment is invalid")

    def _handle_reset(self, number: int, code: int) -> None:
        if number != self._stream or self.done:
            return
        if code == frames.REFUSED_STREAM:
            raise NotProcessed("the server refused the stream")
        self.reset_status = _STATUS_OF_RESET.get(code, "INTERNAL")
        self.done = True
        self._is_going_away = True

    def _handle_goaway(self, last: int) -> None:
        self._is_going_away = True
        if not self.done and self._stream > last:
            raise NotProcessed("the server is shutting down")

    # --- messages ----------------------------------------------------------------------------------------------

    def _begin_data(self, number: int, flags: int, length: int, padding: int | None) -> None:
        size = length if padding is None else length - 1 - padding
        if number != self._stream or self.done or not self.has_headers or size < 0:
            raise Http2ConnectionError(frames.PROTOCOL_ERROR, "unexpected DATA")
        if size:
            self._idle_frames = 0
        else:
            self._count_idle_frame(length)
        self._frame_left, self._padding = size, padding or 0
        self._frame_ends = bool(flags & frames.END_STREAM)
        self._received += length
        self._received_of_call += length
        if self._received >= _REFILL:  # the windows were opened completely
            self._writer.send(frames.window_update(0, self._received))
            self._received = 0
        if self._received_of_call >= _REFILL:
            self._writer.send(frames.window_update(number, self._received_of_call))
            self._received_of_call = 0
        self._end_frame()

    def _payload(self, data: bytes, at: int) -> int:
        """Take the payload of the current DATA frame as far as it has arrived; return where that ends."""
        stop = min(len(data), at + self._frame_left)
        self._frame_left -= stop - at
        if not self.headers.get("content-type", "").startswith("application/grpc"):
            self.raw += data[at:stop]
            at = stop
        while at < stop:
            if self._message is None:
                needed = PREFIX_BYTES - len(self._prefix)
                self._prefix += data[at : min(stop, at + needed)]
                at = min(stop, at + needed)
                if len(self._prefix) == PREFIX_BYTES:
                    self._length, self._at = int.from_bytes(self._prefix[1:], "big"), 0
                    self._message = bytearray(min(self._length, _FIRST_PART))
            else:
                self._grow_message()
                size = min(stop - at, len(self._message) - self._at)
                self._message[self._at : self._at + size] = data[at : at + size]
                self._at += size
                at += size
            self._end_message()
        skipped = min(len(data) - at, self._padding)
        self._padding -= skipped
        self._end_frame()
        return at + skipped

    def _grow_message(self) -> None:
        """Get more memory for a message if its present one is full."""
        if self._message is not None and self._at == len(self._message) < self._length:
            received = self._message
            self._message = bytearray(min(self._length, 4 * len(received)))
            self._message[: len(received)] = received

    def _end_message(self) -> None:
        if self._message is not None and self._at == self._length:
            self._messages.append(self._decompressed(self._message) if self._prefix[0] else self._message)
            self._message, self._prefix = None, bytearray()

    def _end_frame(self) -> None:
        if self._frame_ends and not self._frame_left and not self._padding:
            self._frame_ends = False
            self.done = True  # without trailers

    def _decompressed(self, message: bytearray) -> bytes:
        encoding = self.headers.get("grpc-encoding", "identity")
        if encoding not in _WINDOW_BITS:
            raise ServerError(f"the response has the grpc-encoding '{encoding}'; expected gzip or deflate")
        try:
            return zlib.decompress(message, _WINDOW_BITS[encoding])
        except zlib.error as error:
            raise ServerError(f"the response is not valid {encoding}: {error}") from error


def _data_header(size: int, ended: bool, number: int) -> bytes:
    flags = frames.END_STREAM if ended else 0
    return frames.frame_header.pack(size >> 8, size & 0xFF, frames.DATA, flags, number)


def status_message(trailers: dict[str, str]) -> str:
    """Return the message of a status, which is percent-encoded UTF-8."""
    return unquote(trailers.get("grpc-message", ""), errors="replace")
