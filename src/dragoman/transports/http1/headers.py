"""Parse the request line and headers of HTTP/1.1 strictly."""

import re
from collections.abc import Mapping
from urllib.parse import unquote

import httptools
import msgspec

from dragoman.protocols.wire import HttpError
from dragoman.transports.application import Application
from dragoman.transports.host import is_host
from dragoman.transports.routing import Match

CHUNKED = -1
_CLOSE = (("connection", "close"),)
# What a proxy is told to give whole: the path begins behind the authority.
_ABSOLUTE = re.compile(r"https?://([^/?]*)", re.ASCII | re.IGNORECASE)

# Clients that keep their connection send the same head again and again. So many are kept, none longer than this.
_KNOWN = 512
KNOWN_BYTES = 2048
_SECRET = ("authorization", "cookie", "proxy-authorization")  # heads that hold one are for one connection to know


class Http1Headers(msgspec.Struct, frozen=True):
    """A head that was understood. `length` is that of the body, or CHUNKED.

    `match` is None where `fault` tells why nothing answers it. `plain` where its answer may be there at once; one that
    is kept for all tells then its bytes too, and how many there are of the `whole` request.
    """

    method: str
    path: str
    query: str
    headers: Mapping[str, str]
    length: int
    keep_alive: bool
    http10: bool
    expects_continue: bool
    match: Match | None
    fault: HttpError | None
    plain: bool = False
    raw: bytes = b""
    whole: int = -1


NO_HEAD = Http1Headers("", "", "", {}, 0, False, False, False, None, None)


def not_http(why: str = "") -> HttpError:
    return HttpError(400, f"the request is not valid HTTP/1.1{': ' if why else ''}{why}", _CLOSE)


class HeaderParser:
    """A head that comes in; httptools looks at each byte of it as soon as it is there."""

    def __init__(self, max_headers: int) -> None:
        self._parser = httptools.HttpRequestParser(self)
        self._max_headers = max_headers
        self._line: bytes | None = b""  # what there is of the request line, until all of it is there
        self._url = b""
        self._headers: list[tuple[str, str]] = []
        self._keep_alive = False
        self._complete = False

    def feed(self, data: bytes) -> None:
        """Some more of the head, and nothing behind it. Raises HttpError 400 or 431."""
        if self._line is not None:
            self._check_line(self._line + data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # an offer to speak something else is passed over
        except httptools.HttpParserError as fault:
            inner = fault.__context__
            raise inner if isinstance(inner, HttpError) else not_http() from fault

    def _check_line(self, data: bytes) -> None:
        """RFC 9112, 3: its parts are separated by one blank each, which the parser does not insist on."""
        line, end, _ = data.lstrip(b"\r\n").partition(b"\r\n")
        if b"  " in line:
            raise not_http("two blanks in a row in the request line")
        self._line = None if end else line

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(self._headers) >= self._max_headers:
            raise HttpError(431, f"the request head has more than {self._max_headers} fields", _CLOSE)
        self._headers.append((name.decode("latin-1").lower(), value.decode("latin-1").strip(" \t")))

    def on_headers_complete(self) -> None:
        self._keep_alive = self._parser.should_keep_alive()
        self._complete = True

    def head(self, application: Application) -> Http1Headers:
        """What was read, once all of it is there. Raises HttpError 400."""
        if not self._complete:
            raise not_http()
        method, version = self._parser.get_method().decode("latin-1"), self._parser.get_http_version()
        http10 = version == "1.0"
        headers = _merged(self._headers)
        if not http10 and version != "1.1":
            raise not_http(f"version {version}")
        if method == "CONNECT":
            raise not_http("this is no proxy")
        if not http10 and "host" not in headers:
            raise not_http("no Host")
        if not is_host(headers.get("host", "")):
            raise not_http(f"Host {headers['host'][:64]!r}")
        length = _length(headers, http10)
        path, query = _target(self._url.decode("latin-1"))
        match, fault = _match(application, method, path)
        expects = headers.get("expect", "").lower() == "100-continue" and not http10 and length != 0
        # `Connection: upgrade` alone asks for no close.
        keep_alive = self._keep_alive and "close" not in headers.get("connection", "").lower()
        short = method in ("GET", "POST") and 0 <= length <= application.limits.max_body_bytes
        plain = short and keep_alive and not (http10 or expects) and application.plain(match, headers)
        path = unquote(path) if "%" in path else path
        return Http1Headers(method, path, query, headers, length, keep_alive, http10, expects, match, fault, plain)


def _match(application: Application, method: str, path: str) -> tuple[Match | None, HttpError | None]:
    try:
        return application.match(method, path), None
    except HttpError as fault:
        return None, fault


def _merged(fields: list[tuple[str, str]]) -> dict[str, str]:
    """Return the fields by name; those of one name are one list (RFC 9110, 5.3), which no Host may be."""
    headers: dict[str, str] = {}
    for name, value in fields:
        if name not in headers:
            headers[name] = value
        else:
            headers[name] += f", {value}"
    return headers


def _length(headers: Mapping[str, str], http10: bool) -> int:
    """RFC 9112, 6.1 and 6.3. The parser has rejected two lengths, and lengths that are not digits."""
    coding = headers.get("transfer-encoding")
    if coding is not None:
        if coding.lower() != "chunked" or http10 or "content-length" in headers:
            raise not_http(f"transfer-encoding {coding[:64]!r}")
        return CHUNKED
    told = headers.get("content-length")
    if told is None:
        return 0
    return int(told)


def _target(url: str) -> tuple[str, str]:
    """RFC 9112, 3.2: path and query of an origin or absolute form, still percent-encoded."""
    absolute = _ABSOLUTE.match(url)
    if absolute is not None:
        if not absolute[1] or not is_host(absolute[1]):
            raise not_http(f"the host {absolute[1][:64]!r} of the target")
        url = url[absolute.end() :] or "/"
        url = url if url.startswith("/") else f"/{url}"
    elif not url.startswith("/") and url != "*":
        raise not_http("the target is no path")
    path, _, query = url.partition("#")[0].partition("?")
    return path, query


class HeaderCache:
    """Reads heads that came in one piece, and knows those that came lately."""

    def __init__(self, application: Application) -> None:
        self._application = application
        self._limits = application.limits
        self._known: dict[bytes, Http1Headers] = {}
        self.known = self._known.get

    def read(self, raw: bytes) -> tuple[Http1Headers, bool]:
        """The head in these bytes, up to and with its empty line, and whether it is known from now on.

        Raises HttpError 400 or 431.
        """
        if len(raw) > self._limits.max_header_bytes:
            raise self.too_large()
        reading = self.reading()
        reading.feed(raw)
        head = self.finished(reading)
        if len(raw) > KNOWN_BYTES or any(name in head.headers for name in _SECRET):
            return head, False
        if head.plain:
            head = msgspec.structs.replace(head, raw=raw, whole=len(raw) + head.length)
        if len(self._known) >= _KNOWN:
            self._known.clear()
        self._known[raw] = head
        return head, True

    def reading(self) -> HeaderParser:
        """For a head that comes in pieces."""
        return HeaderParser(self._limits.max_headers)

    def finished(self, reading: HeaderParser) -> Http1Headers:
        return reading.head(self._application)

    def too_large(self) -> HttpError:
        text = f"the request head is larger than the limit of {self._limits.max_header_bytes} bytes"
        return HttpError(431, text, _CLOSE)
