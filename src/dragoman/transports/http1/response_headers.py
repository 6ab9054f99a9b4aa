"""Status line and headers of HTTP/1.1 responses as bytes, cached."""

import time
from email.utils import formatdate

from dragoman.protocols.wire import Headers, reason_phrase
from dragoman.system.request_context import HEADER, PREFIX

_MAX_CACHED = 512
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
# Statuses without a body.
BODILESS = (101, 204, 304)
_CLOSE = b"connection: close\r\n"
_KEEP = b"connection: keep-alive\r\n"
_FORBIDDEN = frozenset("\r\n\0")
_REQUEST_ID = HEADER.encode()
_NO_LENGTH = b"content-length: 0\r\n\r\n"


class ResponseHeaderWriter:
    """Formats status lines and headers, and caches them without date and length."""

    def __init__(self) -> None:
        self._cache: dict[tuple[int, Headers], tuple[bytes, bool]] = {}
        self._second = 0
        self._date = b""
        # Arguments and result of the last call of `plain`, and until when on the clock of the event loop it is valid.
        self.last_plain: tuple[int, Headers, float, bytes] = (0, (), 0.0, b"")

    def plain(self, status: int, headers: Headers, now_s: float) -> bytes:
        """Return the headers of a response on a connection that is kept, up to the number in its request id.

        The number and the length follow. Returns b"" if such a response has no length or closes the connection.
        `now_s`: time of the event loop.
        """
        unusual = status in BODILESS or ("connection", "close") in headers
        head = b"" if unusual else self.head(status, headers, 0, close=False, http10=False)
        text = b"" if unusual else b"%b%b: %b" % (head.removesuffix(_NO_LENGTH), _REQUEST_ID, PREFIX)
        self.last_plain = status, headers, now_s + self._second + 1 - time.time(), text
        return text

    def head(
        self, status: int, headers: Headers, length: int | None, *, close: bool, http10: bool, request_id: str = ""
    ) -> bytes:
        """Return status line and headers of a response; `length` None if its length is not known.

        Raises ValueError if a header contains a line break.
        """
        start, is_announced = self._cache.get((status, headers)) or self._start(status, headers)
        second = int(time.time())
        if second != self._second:
            self._second = second
            self._date = f"date: {formatdate(second, usegmt=True)}\r\n".encode()
        if request_id:
            start += b"%b: %b\r\n" % (_REQUEST_ID, request_id.encode())
        connection = b"" if is_announced or (not close and not http10) else _CLOSE if close else _KEEP
        if length is None:
            framed = b"" if http10 else b"transfer-encoding: chunked\r\n"
            return b"%b%b%b%b\r\n" % (start, self._date, connection, framed)
        if status in BODILESS:
            return b"%b%b%b\r\n" % (start, self._date, connection)
        return b"%b%b%bcontent-length: %d\r\n\r\n" % (start, self._date, connection, length)

    def _start(self, status: int, headers: Headers) -> tuple[bytes, bool]:
        """Return the status line with these headers, and whether they close the connection."""
        lines = [f"HTTP/1.1 {status} {reason_phrase(status)}\r\n"]
        for name, value in headers:
            if _FORBIDDEN.intersection(name) or _FORBIDDEN.intersection(value):
                raise ValueError(f"the header {name!r} of a response contains a line break or NUL")
            lines.append(f"{name}: {value}\r\n")
        start = "".join(lines).encode("latin-1", "replace"), ("connection", "close") in headers
        if len(self._cache) >= _MAX_CACHED:
            self._cache.clear()
        self._cache[(status, headers)] = start
        return start
