"""Status line and headers of HTTP/1.1 responses as bytes, cached."""

import time
from email.utils import formatdate
from http import HTTPStatus

from dragoman.protocols.wire import Headers

_KNOWN = 512
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
# What has no body, and so no length.
BODILESS = (204, 304)
_CLOSE = b"connection: close\r\n"
_KEEP = b"connection: keep-alive\r\n"
_FORBIDDEN = frozenset("\r\n\0")


class ResponseHeaderWriter:
    """Writes heads. `known` are those that have been written lately, without the lines that differ."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, Headers], tuple[bytes, bool]] = {}
        self._second = 0
        self._date = b""
        self._plain: tuple[int, Headers, float, bytes] = (0, (), 0.0, b"")  # what was written last, and until when

    def plain(self, status: int, headers: Headers) -> bytes:
        """The head of an answer whose connection is kept, as `head` writes it, up to its length; nothing where such an
        answer has no length, or says that it is the last."""
        last_status, last, until, text = self._plain
        if headers is not last or status != last_status or time.time() >= until:
            unusual = status in BODILESS or ("connection", "close") in headers
            text = b"" if unusual else self.head(status, headers, 0, close=False, http10=False)[:-5]
            self._plain = status, headers, self._second + 1, text
        return text

    def head(self, status: int, headers: Headers, length: int | None, *, close: bool, http10: bool) -> bytes:
        """The head of an answer with so many bytes of body; None where that shows at its end.

        The connection is told to close where `close` says so. Raises ValueError where a header breaks its line.
        """
        start, told = self._known.get((status, headers)) or self._start(status, headers)
        second = int(time.time())
        if second != self._second:
            self._second = second
            self._date = f"date: {formatdate(second, usegmt=True)}\r\n".encode()
        connection = b"" if told or (not close and not http10) else _CLOSE if close else _KEEP
        if length is None:
            framed = b"" if http10 else b"transfer-encoding: chunked\r\n"
            return b"%b%b%b%b\r\n" % (start, self._date, connection, framed)
        if status in BODILESS:
            return b"%b%b%b\r\n" % (start, self._date, connection)
        return b"%b%b%bcontent-length: %d\r\n\r\n" % (start, self._date, connection, length)

    def _start(self, status: int, headers: Headers) -> tuple[bytes, bool]:
        """The status line and these headers, and whether they tell that the connection closes."""
        lines = [f"HTTP/1.1 {status} {_phrase(status)}\r\n"]
        for name, value in headers:
            if _FORBIDDEN.intersection(name) or _FORBIDDEN.intersection(value):
                raise ValueError(f"the header {name!r} of an answer holds what no header may")
            lines.append(f"{name}: {value}\r\n")
        found = "".join(lines).encode("latin-1", "replace"), ("connection", "close") in headers
        if len(self._known) >= _KNOWN:
            self._known.clear()
        self._known[(status, headers)] = found
        return found


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return ""
