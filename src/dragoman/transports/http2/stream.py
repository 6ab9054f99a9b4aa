"""Streams of a connection, each a request and its response."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from dragoman.access.certificates import PeerCertificate
from dragoman.transports.http2.request import Http2Headers

Buffer = bytes | bytearray | memoryview

# Phases of a connection, in their order; see `connection`.
OPEN, ENDING, DRAINING, REFUSING, CLOSED = range(5)


# Smaller changes are not reported.
_REPORT_BYTES = 1 << 16


class Backlog:
    """`size` bytes of responses wait for the client to make room.

    Beyond `limit` complete requests wait here too, so that a client that does not read costs no further work. `report`
    is called with changes of how much the server holds for this connection.
    """

    __slots__ = ("_is_resuming", "_report", "_reported", "_waiting", "limit", "size")

    def __init__(self, limit: int, report: Callable[[int], None]) -> None:
        self.size = 0
        self.limit = limit
        self._report = report
        self._reported = 0
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_resuming = False

    @property
    def is_full(self) -> bool:
        return self.size > self.limit

    def wait(self, resume: Callable[[], None]) -> None:
        """Call `resume` once the client has read enough."""
        self._waiting.append(resume)

    def update(self) -> None:
        """Report the size, and resume the requests that may go on."""
        change = self.size - self._reported
        if abs(change) > _REPORT_BYTES or (change and not self.size):
            self._reported = self.size
            self._report(change)
        if self._waiting and not self._is_resuming:
            self._is_resuming = True  # a resumed request may respond at once, and call this again
            try:
                while self._waiting and self.size <= self.limit:
                    self._waiting.popleft()()
            finally:
                self._is_resuming = False

    def close(self) -> None:
        """The client has disconnected."""
        self._waiting.clear()
        self._is_resuming = True


class Http2Handler(Protocol):
    """Handles the request of one stream. It may respond within any of these calls, or later."""

    def receive(self, data: bytes | memoryview, at: int, stop: int, ended: bool) -> None:
        """Take a part of the body, valid during this call; the last one if `ended`."""

    def buffer(self, size: int) -> memoryview | None:
        """Return where up to `size` further bytes of the body are to be written to; None to use `receive`."""

    def on_buffer_filled(self, size: int, ended: bool) -> None:
        """Take bytes that were written there."""

    def on_drained(self) -> None:
        """All data given to the stream has been sent."""

    def check_timeout(self, now_s: float) -> None:
        """Check timeouts; called from time to time while the client has not ended its request."""

    def cancel(self) -> None:
        """The server stops: respond now."""

    def on_closed(self, code: int) -> None:
        """The stream was reset or the client has disconnected, so nothing more can be sent."""


class Http2Service(Protocol):
    """Handles all requests of a connection."""

    def open(self, stream: "Http2Stream", headers: Http2Headers, ended: bool) -> Http2Handler:
        """Return the handler of a request; `ended` if it has no body."""


class StreamConnection(Protocol):
    """What a stream needs of its connection; see `Http2Connection`."""

    backlog: Backlog
    host: str
    address: str
    certificate: PeerCertificate | None
    reserved: bool
    calls: Any

    def send_headers(self, stream: "Http2Stream", block: bytes, ended: bool) -> None: ...

    def send_data(self, stream: "Http2Stream", parts: Sequence[Buffer]) -> None: ...

    def send_trailers(self, stream: "Http2Stream", block: bytes) -> None: ...

    def send_response(
        self, stream: "Http2Stream", headers: bytes, parts: Sequence[Buffer], size: int, trailers: bytes
    ) -> None: ...

    def reset(self, stream: "Http2Stream", code: int) -> None: ...

    def acknowledge(self, stream: "Http2Stream", size: int) -> None: ...

    def widen(self, stream: "Http2Stream", size: int) -> None: ...


class Http2Stream:
    """`remote_ended` and `local_ended`: the client has ended its request, we have ended our response.

    `length` is the part of the announced body that has not arrived, -1 if none was announced. `pending` is what waits
    to be sent, `held_bytes` the memory that this takes. `sent_s` is when the client last made room for it.
    """

    __slots__ = (
        "acknowledged", "began_s", "connection", "handler", "held_bytes", "length", "local_ended", "number", "pending",
        "pending_bytes", "remote_ended", "sent_s", "trailers", "window_in", "window_out",
    )  # fmt: skip

    def __init__(
        self, connection: StreamConnection, number: int, length: int, window_in: int, window_out: int, began_s: float
    ) -> None:
        self.connection = connection
        self.number = number
        self.length = length
        self.window_in = window_in
        self.window_out = window_out
        self.remote_ended = False
        self.local_ended = False
        self.handler: Any = None  # a Http2Handler, while the stream is open
        self.pending: deque[memoryview] | None = None
        self.pending_bytes = 0
        self.held_bytes = 0
        self.trailers: bytes | None = None
        self.acknowledged = 0  # bytes that the window has not been widened by
        self.sent_s = 0.0
        self.began_s = began_s

    def send_headers(self, block: bytes, *, ended: bool = False) -> None:
        """Send the response headers, a block made by `fields.encode_fields`."""
        self.connection.send_headers(self, block, ended)

    def send_data(self, *parts: Buffer) -> None:
        """Send a part of the body; it waits here if the client has no room for it."""
        self.connection.send_data(self, parts)

    def send_trailers(self, block: bytes) -> None:
        """End the response once all data is sent; an empty block ends it without trailers."""
        self.connection.send_trailers(self, block)

    def reset(self, code: int) -> None:
        """Reset the stream; its handler is not notified."""
        self.connection.reset(self, code)

    def acknowledge(self, size: int) -> None:
        """Bytes of the body have been processed: the client may send as many again."""
        self.connection.acknowledge(self, size)

    def expect(self, size: int) -> None:
        """Let the client send all of the next `size` bytes, also if earlier ones are not acknowledged."""
        if size > self.window_in and not self.remote_ended:
            self.connection.widen(self, size - self.window_in)
