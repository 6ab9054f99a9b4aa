"""Parse the bytes of one HTTP/1.1 connection into requests, without I/O.

`next` takes one event after the other from the unparsed bytes, `_data` from `_at` on. A small request is there as a
whole: its headers are looked up in a cache. Headers that are incomplete are checked as they arrive, and a large body is
received where it stays (`free_space`). One of these states holds, by the fields that are set:

    the reader is    fields                         next bytes                          then
    between          none of these                  the start of headers                a request, headers, a body
    in headers       `_parser`, `_parsed`           the rest of headers                 a request, a body
    in a body        `_head`, `_body`               go into the body                    a request
    in chunks        `_head`, `_growing`, `_chunks` are decoded into the growing body   a request
    in a failed body `_head`, `_body`, `_error`     none                                a rejection, `fatal`
    skipping         `_skipping`                    are dropped: a rejected body        between

After a rejection that is `fatal` the connection calls `drop`, since the start of the next request is unknown.
"""

from collections.abc import Callable

import msgspec

from dragoman.core.errors import DragomanError
from dragoman.protocols.wire import Buffer, HttpError
from dragoman.system.request_context import running_in_thread
from dragoman.transports.application import Application
from dragoman.transports.bodies import FixedBody, GrowingBody, SpooledBody, fixed_body, growing_body, too_large
from dragoman.transports.http1.chunks import ChunkedDecoder
from dragoman.transports.http1.headers import CHUNKED, MAX_CACHED_BYTES, HeaderCache, HeaderParser, Http1Headers

# Bytes read at a time outside of bodies: all of a small request, and little of a large one.
_SCRATCH = 16 << 10
# Longer bodies of rejected requests are not skipped: the connection is closed instead.
_MAX_SKIPPED = 1 << 20


class Http1Request(msgspec.Struct):
    """A complete request."""

    head: Http1Headers
    body: Buffer


class RejectedRequest(msgspec.Struct):
    """A request that is answered with an error. `fatal`: later bytes of the connection cannot be parsed."""

    head: Http1Headers | None
    error: HttpError | DragomanError
    fatal: bool


class ExpectContinue(msgspec.Struct):
    """The client waits for `100 Continue` before it sends the body (RFC 9110, 10.1.1)."""


_CONTINUE = ExpectContinue()
RequestEvent = Http1Request | RejectedRequest | ExpectContinue


class Http1Context:
    """State that all connections of a server share."""

    def __init__(self, application: Application) -> None:
        self.application = application
        self.limits = application.limits
        self.bodies = application.bodies
        self.counters = application.counters
        self.heads = HeaderCache(application)
        self.running = running_in_thread()
        # A transport fills the buffer right after requesting it, so that connections can share one.
        self.scratch = memoryview(bytearray(_SCRATCH))


class RequestReader:
    """Parses bytes received through `free_space` and `advance`, or `append`; `next` returns requests, or None.

    `check` returns why a request with these headers is rejected before its body is received, or None.
    """

    __slots__ = (
        "_at",
        "_body",
        "_check",
        "_chunks",
        "_context",
        "_data",
        "_error",
        "_growing",
        "_head",
        "_last",
        "_parsed",
        "_parser",
        "_skipping",
    )

    def __init__(
        self, context: Http1Context, check: Callable[[Http1Headers], DragomanError | HttpError | None] | None = None
    ) -> None:
        self._context = context
        self._check = check
        self._data = b""  # unparsed from _at on
        self._at = 0
        self._parser: HeaderParser | None = None  # of incomplete headers; _parsed bytes of them so far
        self._parsed = 0
        self._head: Http1Headers | None = None  # whose body is incomplete
        self._body: FixedBody | SpooledBody | None = None
        self._growing: GrowingBody | SpooledBody | None = None
        self._chunks: ChunkedDecoder | None = None
        self._skipping = 0  # bytes of a body to skip
        self._last: tuple[bytes, Http1Headers] | None = (
            None  # headers with credentials, which are not shared between connections
        )
        self._error: HttpError | None = None

    # --- input -------------------------------------------------------------------------------------------------

    def free_space(self) -> memoryview:
        """Return where the next bytes go."""
        if self._body is None:
            return self._context.scratch
        return self._body.free_space()[: self._context.application.executor.budget.read_size()]

    def advance(self, count: int) -> bool:
        """Count bytes that were written there; return False if `next` need not be called: a body is incomplete."""
        body = self._body
        if body is None:
            self.append(bytes(self._context.scratch[:count]))
            return True
        try:
            body.advance(count)
        except HttpError as error:
            self._error = error
            return True
        return body.size == body.length

    def append(self, data: bytes) -> None:
        self._data = data if self._at == len(self._data) else self._data[self._at :] + data
        self._at = 0

    # --- state ---------------------------------------------------------------------------------------------------

    @property
    def unparsed_size(self) -> int:
        """Bytes that are not parsed yet."""
        return len(self._data) - self._at

    @property
    def in_body(self) -> bool:
        return self._head is not None or self._skipping > 0

    @property
    def body_size(self) -> int:
        """Bytes of an incomplete body, which are counted in `bodies`."""
        body = self._body or self._growing
        return body.size if body is not None else 0

    # --- output --------------------------------------------------------------------------------------------------

    def next(self) -> RequestEvent | None:
        """Return the next request, or why it is rejected; None if more bytes are needed."""
        try:
            if self._head is not None:
                return self._read_body(self._head)
            if self._skipping and not self._skip():
                return None
            data, at = self._data, self._at
            if at == len(data):
                return None
            if data[at] == 13 and self._parser is None:
                at = self._skip_empty_lines()
            end = data.find(b"\r\n\r\n", max(at, at + self._parsed - 3)) + 4
            if end < 4:
                self._parse_partial(at)
                return None
            if self._parser is None:
                raw = data[at:end]
                head = self._context.heads.get(raw) or self._parse(raw)
            else:
                head = self._parse_rest(self._parser, data[at + self._parsed : end], end - at)
            self._at = end
            return self._start_request(head)
        except HttpError as error:
            return RejectedRequest(self._head, error, fatal=True)

    def _parse(self, raw: bytes) -> Http1Headers:
        if self._last is not None and self._last[0] == raw:
            return self._last[1]
        head, is_cached = self._context.heads.parse(raw)
        self._last = None if is_cached or len(raw) > MAX_CACHED_BYTES else (raw, head)
        return head

    def _skip_empty_lines(self) -> int:
        """Ignore empty lines before a request (RFC 9112, 2.2); they stay until the headers are complete."""
        at = self._at
        while self._data.startswith(b"\r\n", at) and at - self._at <= self._context.limits.max_header_bytes:
            at += 2
        return at

    def _parse_partial(self, at: int) -> None:
        """Check incomplete headers."""
        heads = self._context.heads
        if len(self._data) - self._at > self._context.limits.max_header_bytes:
            raise heads.too_large()
        if len(self._data) - at < 2:  # perhaps the start of an empty line
            return
        if self._parser is None:
            self._parser, self._parsed, self._at = heads.parser(), 0, at
        self._parser.feed(self._data[at + self._parsed :])
        self._parsed = len(self._data) - at

    def _parse_rest(self, parser: HeaderParser, rest: bytes, size: int) -> Http1Headers:
        if size > self._context.limits.max_header_bytes:
            raise self._context.heads.too_large()
        parser.feed(rest)
        self._parser, self._parsed = None, 0
        return self._context.heads.parse_end(parser)

    def _start_request(self, head: Http1Headers) -> RequestEvent | None:
        """Headers are complete: return the request if its body is too."""
        length, spool = head.length, None if head.match is None else head.match.spool
        max_bytes = self._context.limits.max_body_bytes if spool is None else spool.max_bytes
        if head.error is not None:
            return self._reject(head, head.error)
        if self._check is not None and (error := self._check(head)) is not None:
            return self._reject(head, error)
        if not length:
            return Http1Request(head, b"")
        if length > max_bytes:
            return RejectedRequest(head, too_large(max_bytes), fatal=True)
        start, available = self._at, len(self._data) - self._at
        if 0 < length <= available:
            self._context.bodies.reserve(length)
            self._at = start + length
            return Http1Request(head, self._data[start : start + length])
        self._head = head
        if length == CHUNKED:
            self._growing = growing_body(max_bytes, self._context.bodies, spool)
            self._chunks = ChunkedDecoder(self._growing.append)
        else:
            self._body = fixed_body(length, self._context.bodies, spool)
        if head.expects_continue and not available:
            return _CONTINUE
        return self._read_body(head)

    def _read_body(self, head: Http1Headers) -> Http1Request | None:
        """Take more of the body; return the request once it is complete."""
        if self._error is not None:
            raise self._error
        if self._chunks is not None:
            self._at = self._chunks.take(self._data, self._at)
            done = self._chunks.done
        else:
            assert self._body is not None
            if self._at < len(self._data):
                part = self._data[self._at : self._at + self._body.length - self._body.size]
                self._at += len(part)
                self._body.append(part)
            done = self._body.size == self._body.length
        if not done:
            return None
        body = self._body or self._growing
        assert body is not None
        self._head = self._body = self._growing = self._chunks = None
        return Http1Request(head, body.take())

    # --- rejected requests -----------------------------------------------------------------------------------------

    def _reject(self, head: Http1Headers, error: HttpError | DragomanError) -> RejectedRequest:
        """Reject a request by its headers, and skip its body unless it is too long."""
        if head.length == CHUNKED or head.expects_continue or head.length > _MAX_SKIPPED:
            return RejectedRequest(head, error, fatal=True)
        self._skipping = head.length
        return RejectedRequest(head, error, fatal=False)

    def _skip(self) -> bool:
        count = min(self._skipping, self.unparsed_size)
        self._skipping -= count
        self._at += count
        return not self._skipping

    def take_rest(self) -> bytes:
        """Return the unparsed bytes, which follow the request that changes the protocol."""
        data, self._data, self._at = self._data[self._at :], b"", 0
        return data

    def drop(self) -> None:
        """Free everything: the connection is closed."""
        self._context.bodies.release(self.body_size)
        self._head = self._body = self._growing = self._chunks = self._parser = self._last = None
        self._data, self._at, self._skipping = b"", 0, 0
