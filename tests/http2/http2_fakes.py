"""An HTTP/2 connection in memory, a service that echoes, and a client."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from hpack import Decoder, Encoder
from hyperframe.frame import Frame

from dragoman.formats.http2 import frames
from dragoman.formats.http2.fields import encode_fields
from dragoman.transports.http2.connection import Http2Connection
from dragoman.transports.http2.limits import Http2Limits
from dragoman.transports.http2.request import Http2Headers
from dragoman.transports.http2.stream import Buffer, Http2Stream

GET = [(":method", "GET"), (":scheme", "http"), (":path", "/"), (":authority", "localhost")]
POST = [(":method", "POST"), *GET[1:]]
OK = encode_fields([(b":status", b"200")])
END = encode_fields([(b"done", b"yes")])


class EchoHandler:
    """Echoes a body once it is complete."""

    def __init__(self, service: "EchoService", stream: Http2Stream, headers: Http2Headers) -> None:
        self.service = service
        self.stream = stream
        self.headers = headers
        self.body = b""
        self.ended = False
        self.code: int | None = None
        self.drained_count = 0

    def receive(self, data: Any, at: int, stop: int, ended: bool) -> None:
        assert self.code is None, "nothing is called after the end"
        if self.headers.error is not None:
            return
        self.body += bytes(data[at:stop])
        if self.service.reads:
            self.stream.acknowledge(stop - at)
        if ended:
            self.ended = True
            if self.service.responds:
                self.stream.connection.send_response(self.stream, OK, (self.body,), len(self.body), END)

    def buffer(self, size: int) -> memoryview | None:
        return None

    def on_buffer_filled(self, size: int, ended: bool) -> None:
        raise AssertionError("no buffer was returned")

    def check_timeout(self, now_s: float) -> None: ...

    def cancel(self) -> None: ...

    def on_drained(self) -> None:
        self.drained_count += 1

    def on_closed(self, code: int) -> None:
        assert self.code is None, "a stream ends once"
        self.code = code


class EchoService:
    """A service whose `handlers` echo bodies. `answering`: they respond; `reads`: they acknowledge data."""

    def __init__(self, *, responds: bool = True, reads: bool = True) -> None:
        self.responds = responds
        self.reads = reads
        self.handlers: list[EchoHandler] = []

    def open(self, stream: Http2Stream, headers: Http2Headers, ended: bool) -> EchoHandler:
        handler = EchoHandler(self, stream, headers)
        self.handlers.append(handler)
        if headers.error is not None:
            stream.send_headers(encode_fields([(b":status", b"%d" % headers.error.status)]), ended=True)
        if ended:
            handler.receive(b"", 0, 0, True)
        return handler


@dataclass
class Wire:
    """A client in memory: what it sends goes to the connection, and what the connection sends is parsed into frames."""

    service: EchoService = field(default_factory=EchoService)
    limits: Http2Limits = field(default_factory=Http2Limits)
    with_preface: bool = True

    def __post_init__(self) -> None:
        self.now_s = 1000.0
        self.received = b""
        self.closed = 0
        self.encoder = Encoder()
        self.decoder = Decoder()
        self.connection = Http2Connection(self.service, self.limits, self._sink, self._close, lambda: self.now_s)
        self.connection.start()
        if self.with_preface:
            self.send(frames.PREFACE + frames.settings({}))
            self.read()

    def _sink(self, buffers: list[Buffer]) -> None:
        self.received += b"".join(buffers)

    def _close(self) -> None:
        self.closed += 1

    def send(self, *data: bytes) -> "Wire":
        for chunk in data:
            self.connection.receive(chunk)
            while self.connection.reader.more:
                self.connection.receive(b"")
        return self

    def headers(self, number: int, fields: Iterable[tuple[str, str]] = POST, *, ended: bool = False) -> "Wire":
        return self.send(self.headers_frame(number, fields, ended=ended))

    def headers_frame(self, number: int, fields: Iterable[tuple[str, str]] = POST, *, ended: bool = False) -> bytes:
        return frames.frame(frames.HEADERS, 4 | ended, number, self.encoder.encode(list(fields)))

    def data(self, number: int, data: bytes = b"", *, ended: bool = False) -> "Wire":
        return self.send(frames.frame(frames.DATA, int(ended), number, data))

    def read(self) -> list[Any]:
        """Return the frames received since the last call."""
        found = []
        while self.received:
            frame, length = Frame.parse_frame_header(memoryview(self.received[:9]))
            frame.parse_body(memoryview(self.received[9 : 9 + length]))
            found.append(frame)
            self.received = self.received[9 + length :]
        return found

    def frame_names(self) -> list[str]:
        return [type(f).__name__.removesuffix("Frame") for f in self.read()]

    def response_body(self, number: int) -> bytes:
        """Return the complete body received on a stream."""
        found = [f for f in self.read() if f.stream_id == number]
        assert "END_STREAM" in found[-1].flags
        return b"".join(f.data for f in found if type(f).__name__ == "DataFrame")

    def goaway(self) -> tuple[int, str]:
        """Return the code and text of the GOAWAY that ended the connection."""
        last = self.read()[-1]
        assert type(last).__name__ == "GoAwayFrame", last
        assert self.closed == 1
        return last.error_code, last.additional_data.decode()

    def still_responds(self) -> bool:
        """Return whether another request gets a response."""
        number = self.connection.last + 2 if self.connection.last else 1
        self.read()
        self.headers(number).data(number, b"still", ended=True)
        return self.response_body(number) == b"still"
