"""Parses the bytes of one HTTP/1.1 connection into requests; knows neither sockets nor clocks."""

from dataclasses import dataclass

from dragoman.protocols.wire import Buffer, HttpError
from dragoman.transports.application import Application
from dragoman.transports.http1.body import Body, GrowingBody, too_large
from dragoman.transports.http1.chunks import ChunkedDecoder
from dragoman.transports.http1.headers import CHUNKED, KNOWN_BYTES, HeaderCache, HeaderParser, Http1Headers

# What is read at a time where it is not a body's own place: a small request whole, and little of a large one.
_SCRATCH = 16 << 10
# What is read at a time of a body.
_MAX_READ = 1 << 18
# How much of a body that nobody wants is passed over, so that the connection can be used again.
_PASSED_OVER = 1 << 20


@dataclass(slots=True)
class Http1Request:
    """A whole request."""

    head: Http1Headers
    body: Buffer


@dataclass(slots=True)
class RejectedRequest:
    """A request that is answered with a fault; where it is `fatal`, nothing behind it can be understood."""

    head: Http1Headers | None
    fault: HttpError
    fatal: bool


@dataclass(slots=True)
class ExpectContinue:
    """The client waits for word that it may send the body (RFC 9110, 10.1.1)."""


_CONTINUE = ExpectContinue()
RequestEvent = Http1Request | RejectedRequest | ExpectContinue


class Http1Context:
    """What all connections of a server share."""

    def __init__(self, application: Application) -> None:
        self.application = application
        self.limits = application.limits
        self.bodies = application.bodies
        self.heads = HeaderCache(application)
        # A transport asks where to read to, reads and tells so in one go; so one place serves all connections.
        self.scratch = memoryview(bytearray(_SCRATCH))


class RequestReader:
    """Put bytes in with `room` and `came`, or with `put`, and take out what `next` gives until it gives None."""

    __slots__ = (
        "_at",
        "_body",
        "_chunks",
        "_context",
        "_data",
        "_fault",
        "_fed",
        "_growing",
        "_head",
        "_last",
        "_over",
        "_reading",
    )

    def __init__(self, context: Http1Context) -> None:
        self._context = context
        self._data = b""  # what was read and is not used yet begins at _at
        self._at = 0
        self._reading: HeaderParser | None = None  # of a head that came in part; _fed bytes of it so far
        self._fed = 0
        self._head: Http1Headers | None = None  # whose body comes in
        self._body: Body | None = None
        self._growing: GrowingBody | None = None
        self._chunks: ChunkedDecoder | None = None
        self._over = 0  # bytes of a body to pass over
        self._last: tuple[bytes, Http1Headers] | None = (
            None  # a head with secrets, which this connection alone may know
        )
        self._fault: HttpError | None = None

    # --- in ----------------------------------------------------------------------------------------------------

    def room(self) -> memoryview:
        """Where the next bytes go."""
        return self._context.scratch if self._body is None else self._body.room()[:_MAX_READ]

    def came(self, count: int) -> bool:
        """So many bytes have been put there. False where `next` has nothing to say of them: a body goes on."""
        body = self._body
        if body is None:
            self.put(bytes(self._context.scratch[:count]))
            return True
        try:
            body.came(count)
        except HttpError as fault:
            self._fault = fault
            return True
        return body.held == body.length

    def put(self, data: bytes) -> None:
        """Bytes that were read elsewhere."""
        self._data = data if self._at == len(self._data) else self._data[self._at :] + data
        self._at = 0

    # --- what is known of it -------------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """How many bytes are not used yet."""
        return len(self._data) - self._at

    @property
    def in_body(self) -> bool:
        return self._head is not None or self._over > 0

    @property
    def held(self) -> int:
        """How many bytes of an unfinished body there are, which count as taken."""
        body = self._body or self._growing
        return body.held if body is not None else 0

    # --- out -----------------------------------------------------------------------------------------------------

    def next(self) -> RequestEvent | None:
        """The next request, or what is wrong with it; None where more bytes are needed."""
        try:
            if self._head is not None:
                return self._rest(self._head)
            if self._over and not self._passed_over():
                return None
            head = self._next_head()
            return None if head is None else self._begun(head)
        except HttpError as fault:
            return RejectedRequest(self._head, fault, fatal=True)

    def _next_head(self) -> Http1Headers | None:
        data, at = self._data, self._at
        if at == len(data):
            return None
        heads = self._context.heads
        if data[at] == 13 and self._reading is None:
            at = self._behind_empty_lines()
        end = data.find(b"\r\n\r\n", max(at, at + self._fed - 3)) + 4
        if end < 4:
            self._feed(at)
            return None
        if self._reading is None:
            raw = data[at:end]
            found = heads.known(raw) or self._read(raw)
        else:
            found = self._finished(self._reading, data[at + self._fed : end], end - at)
        self._at = end
        return found

    def _read(self, raw: bytes) -> Http1Headers:
        if self._last is not None and self._last[0] == raw:
            return self._last[1]
        found, kept = self._context.heads.read(raw)
        self._last = None if kept or len(raw) > KNOWN_BYTES else (raw, found)
        return found

    def _behind_empty_lines(self) -> int:
        """RFC 9112, 2.2: an empty line before a request means nothing. They stay until the request has come."""
        at = self._at
        while self._data.startswith(b"\r\n", at) and at - self._at <= self._context.limits.max_header_bytes:
            at += 2
        return at

    def _feed(self, at: int) -> None:
        """Look at a head that is not all there."""
        heads = self._context.heads
        if len(self._data) - self._at > self._context.limits.max_header_bytes:
            raise heads.too_large()
        if len(self._data) - at < 2:  # what is there may still be an empty line
            return
        if self._reading is None:
            self._reading, self._fed, self._at = heads.reading(), 0, at
        self._reading.feed(self._data[at + self._fed :])
        self._fed = len(self._data) - at

    def _finished(self, reading: HeaderParser, rest: bytes, size: int) -> Http1Headers:
        if size > self._context.limits.max_header_bytes:
            raise self._context.heads.too_large()
        reading.feed(rest)
        self._reading, self._fed = None, 0
        return self._context.heads.finished(reading)

    def _begun(self, head: Http1Headers) -> RequestEvent | None:
        """Its head is there: perhaps that is all, or its body is there too."""
        length, max_bytes = head.length, self._context.limits.max_body_bytes
        if head.fault is not None:
            return self._refused(head, head.fault)
        if not length:
            return Http1Request(head, b"")
        if length > max_bytes:
            return RejectedRequest(head, too_large(max_bytes), fatal=True)
        start, there = self._at, len(self._data) - self._at
        if 0 < length <= there:
            self._context.bodies.take(length)
            self._at = start + length
            return Http1Request(head, self._data[start : start + length])
        self._head = head
        if length == CHUNKED:
            self._growing = GrowingBody(max_bytes, self._context.bodies)
            self._chunks = ChunkedDecoder(self._growing.put)
        else:
            self._body = Body(length, self._context.bodies)
        if head.expects_continue and not there:
            return _CONTINUE
        return self._rest(head)

    def _rest(self, head: Http1Headers) -> Http1Request | None:
        """More of the body; it is whole where nothing is missing."""
        if self._fault is not None:
            raise self._fault
        if self._chunks is not None:
            self._at = self._chunks.take(self._data, self._at)
            done = self._chunks.done
        else:
            assert self._body is not None
            if self._at < len(self._data):
                part = self._data[self._at : self._at + self._body.length - self._body.held]
                self._at += len(part)
                self._body.put(part)
            done = self._body.held == self._body.length
        if not done:
            return None
        whole = self._body or self._growing
        assert whole is not None
        self._head = self._body = self._growing = self._chunks = None
        return Http1Request(head, whole.whole())

    # --- what nobody wants -----------------------------------------------------------------------------------------

    def _refused(self, head: Http1Headers, fault: HttpError) -> RejectedRequest:
        """Nothing answers this path, so its body is passed over where it is not too long for that."""
        if head.length == CHUNKED or head.expects_continue or head.length > _PASSED_OVER:
            return RejectedRequest(head, fault, fatal=True)
        self._over = head.length
        return RejectedRequest(head, fault, fatal=False)

    def _passed_over(self) -> bool:
        count = min(self._over, self.waiting)
        self._over -= count
        self._at += count
        return not self._over

    def drop(self) -> None:
        """Let go of everything: the connection is over."""
        self._context.bodies.give_back(self.held)
        self._head = self._body = self._growing = self._chunks = self._reading = self._last = None
        self._data, self._at, self._over = b"", 0, 0
