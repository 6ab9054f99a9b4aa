"""One stream of a connection: its windows, how far each side is, and what waits to be sent on it."""

from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

from dragoman.transports.http2.backlog import Backlog
from dragoman.transports.http2.request import Head

Buffer = bytes | bytearray | memoryview


class Listener(Protocol):
    """Who answers one stream. It may answer within any of these calls, or later."""

    def receive(self, data: bytes | memoryview, at: int, stop: int, ended: bool) -> None:
        """A piece of the body, valid during this call; the last one where `ended`."""

    def room(self, size: int) -> memoryview | None:
        """Where up to `size` further bytes of the body are to be written to; None where `receive` takes them."""

    def filled(self, size: int, ended: bool) -> None:
        """So many bytes were written there."""

    def drained(self) -> None:
        """All that was to be sent has been."""

    def watch(self, now_s: float) -> None:
        """Called from time to time while the client has not ended its part, which may be late."""

    def cut(self) -> None:
        """The server stops: answer that, without waiting for anything."""

    def broken(self, code: int) -> None:
        """The client reset the stream or left, or the stream was ended for a fault: nothing can be sent any more."""


class Streams(Protocol):
    """Who answers all streams of a connection."""

    def open(self, stream: "Stream", head: Head, ended: bool) -> Listener:
        """A request begins; `ended` where it has no body."""


class Outlet(Protocol):
    """Where a stream's frames go: its connection.

    `address` is that of the client, "" where it is not known. Where it is `reserved`, only health checks are answered.
    `calls` is for whoever counts its calls; None at first.
    """

    backlog: Backlog
    address: str
    reserved: bool
    calls: Any

    def send_head(self, stream: "Stream", block: bytes, ended: bool) -> None: ...

    def send_data(self, stream: "Stream", parts: Sequence[Buffer]) -> None: ...

    def send_trailers(self, stream: "Stream", block: bytes) -> None: ...

    def send_answer(
        self, stream: "Stream", head: bytes, parts: Sequence[Buffer], size: int, trailers: bytes
    ) -> None: ...

    def reset(self, stream: "Stream", code: int) -> None: ...

    def grant(self, stream: "Stream", size: int) -> None: ...

    def widen(self, stream: "Stream", size: int) -> None: ...


class Stream:
    """A request and its answer. `heard_all` and `told_all` say that the client, and that we, have ended our part."""

    __slots__ = (
        "began_s",
        "connection",
        "heard_all",
        "kept",
        "length",
        "listener",
        "number",
        "pending",
        "pending_bytes",
        "sent_s",
        "told_all",
        "trailers",
        "untaken",
        "window_in",
        "window_out",
    )

    def __init__(
        self, connection: Outlet, number: int, length: int, window_in: int, window_out: int, began_s: float
    ) -> None:
        self.connection = connection
        self.number = number
        self.length = length  # of the body, where it was announced and as far as it has not come; else -1
        self.window_in = window_in
        self.window_out = window_out
        self.heard_all = False
        self.told_all = False
        self.listener: Any = None  # a Listener, while the stream is open
        self.pending: deque[memoryview] | None = None
        self.pending_bytes = 0
        self.kept = 0  # bytes of what is or was pending, since nothing was
        self.trailers: bytes | None = None
        self.untaken = 0
        self.sent_s = 0.0
        self.began_s = began_s

    # --- for whoever answers -------------------------------------------------------------------------------------

    def head(self, block: bytes, *, ended: bool = False) -> None:
        """Send the answer's head, a block as `fields.encoded` makes it."""
        self.connection.send_head(self, block, ended)

    def data(self, *parts: Buffer) -> None:
        """Send a piece of the body; it waits here where the client has no room for it."""
        self.connection.send_data(self, parts)

    def end(self, trailers: bytes) -> None:
        """Send trailers, once all data is sent; an empty block ends the body without any."""
        self.connection.send_trailers(self, trailers)

    def answer(self, head: bytes, parts: Sequence[Buffer], size: int, trailers: bytes) -> None:
        """Send all of an answer, whose body has `size` bytes."""
        self.connection.send_answer(self, head, parts, size, trailers)

    def reset(self, code: int) -> None:
        """Give the stream up; its listener hears no more of it."""
        self.connection.reset(self, code)

    def take(self, size: int) -> None:
        """So many bytes of the body need no room here any more, so the client may send as many again."""
        self.connection.grant(self, size)

    def expect(self, size: int) -> None:
        """So many bytes are awaited now, however many are not taken yet: let the client send all of them."""
        if size > self.window_in and not self.heard_all:
            self.connection.widen(self, size - self.window_in)

    @property
    def over(self) -> bool:
        """Whether nothing can be sent any more."""
        return self.told_all
