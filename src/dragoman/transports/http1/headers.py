"""Parse the request line and headers of HTTP/1.1 strictly."""

import re
from collections.abc import Mapping
from urllib.parse import unquote

import httptools
import msgspec

from dragoman.formats.policy import CREDENTIALS
from dragoman.protocols.wire import HttpError
from dragoman.system.request_context import HEADER, Context, client_request_id
from dragoman.system.trace_context import PARENT
from dragoman.transports.application import Application, RequestSummary
from dragoman.transports.clients import is_host
from dragoman.transports.routing import Match

CHUNKED = -1
_CLOSE = (("connection", "close"),)
# A request line in one piece with a valid method that httptools does not know (RFC 9110, 9.1).
_UNKNOWN_METHOD = re.compile(rb"(?:\r\n)?([!#$%&'*+.^_`|~0-9A-Za-z-]+) [^ \r\n]+ HTTP/1\.[01]\r\n")
# The absolute form, which clients send to proxies, and the default ports, which may be left out.
_ABSOLUTE = re.compile(r"https?://([^/?]*)", re.ASCII | re.IGNORECASE)
_DEFAULT_PORT = re.compile(r":(?:80|443)?$", re.ASCII)

# Clients that keep their connection repeat their headers. Size of the cache, and bytes of the longest entry.
_MAX_CACHED = 512
MAX_CACHED_BYTES = 2048


class Http1Headers(msgspec.Struct, frozen=True):
    """The parsed headers of a request. `length`: of the body, or CHUNKED.

    `match` is None if there is no endpoint, and `error` is the reason. `plain`: the response may be ready at once.
    `upgrades`: it asks for a WebSocket of a route that has some.
    `request_id`: the client's, or "". If the headers are cached too, which those with a request id are not, `raw` are
    their bytes, `size` their number, and `whole` is the size of the request with its body.
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
    error: HttpError | None
    plain: bool = False
    request_id: str = ""
    raw: bytes = b""
    size: int = 0
    whole: int = -1
    upgrades: bool = False

    @property
    def version(self) -> str:
        """The version of HTTP."""
        return "1.0" if self.http10 else "1.1"

    def summary(self, context: Context, client: str) -> RequestSummary:
        """Return these headers for a request of a client's address that is rejected."""
        protocol = None if self.match is None else self.match.protocol
        return RequestSummary(self.method, self.path, self.headers, protocol, context, client, self.version)


NO_HEADERS = Http1Headers("", "", "", {}, 0, False, False, False, None, None)


def _unknown_method(method: bytes) -> HttpError:
    return HttpError(501, f"method {method[:32].decode()} is not implemented", _CLOSE)


def not_http(why: str = "") -> HttpError:
    return HttpError(400, f"the request is not valid HTTP/1.1{': ' if why else ''}{why}", _CLOSE)


class HeaderParser:
    """Parses headers as they arrive, with httptools."""

    def __init__(self, max_headers: int) -> None:
        self._parser = httptools.HttpRequestParser(self)
        self._max_headers = max_headers
        self._line: bytes | None = b""  # the request line until it is complete
        self._url = b""
        self._headers: list[tuple[str, str]] = []
        self._keep_alive = False
        self._complete = False

    def feed(self, data: bytes) -> None:
        """Parse more of the headers, and nothing behind them. Raises HttpError 400 or 431."""
        if self._line is not None:
            self._check_line(self._line + data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # offers of other protocols are ignored
        except httptools.HttpParserInvalidMethodError as error:
            found = _UNKNOWN_METHOD.match(data)
            raise _unknown_method(found[1]) if found else not_http() from error
        except httptools.HttpParserError as error:
            inner = error.__context__
            raise inner if isinstance(inner, HttpError) else not_http() from error

    def _check_line(self, data: bytes) -> None:
        """Check that single spaces separate the parts of the request line (RFC 9112, 3); httptools accepts more."""
        line, end, _ = data.lstrip(b"\r\n").partition(b"\r\n")
        if b"  " in line:
            raise not_http("two spaces in a row in the request line")
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

    def result(self, application: Application) -> Http1Headers:
        """Return the headers once they are complete. Raises HttpError 400."""
        if not self._complete:
            raise not_http()
        method, version = self._parser.get_method().decode("latin-1"), self._parser.get_http_version()
        http10 = version == "1.0"
        headers = _merge_fields(self._headers)
        if not http10 and version != "1.1":
            raise not_http(f"version {version}")
        if method == "CONNECT":
            raise _unknown_method(method.encode())
        if not http10 and "host" not in headers:
            raise not_http("no Host")
        if not is_host(headers.get("host", "")):
            raise not_http(f"Host {headers['host'][:64]!r}")
        length = _length(headers, http10)
        path, query, authority = _target(self._url.decode("latin-1"))
        host = headers.get("host", "")
        if authority and application.limits.reject_host_mismatch and not _is_same_host(authority, host):
            raise not_http(f"Host {host[:64]!r} and target {authority[:64]!r} name different hosts")
        match, error = _match(application, method, path, headers)
        expects = headers.get("expect", "").lower() == "100-continue" and not http10 and length != 0
        # `Connection: upgrade` alone does not close the connection.
        keep_alive = self._keep_alive and "close" not in headers.get("connection", "").lower()
        upgrades = match is not None and match.session is not None and method == "GET" and asks_for_websocket(headers)
        short = method in ("GET", "POST") and not upgrades and 0 <= length <= application.limits.max_body_bytes
        plain = short and keep_alive and not (http10 or expects) and application.is_plain(match, headers)
        path = unquote(path) if "%" in path else path
        request_id = client_request_id(headers)
        return Http1Headers(
            method, path, query, headers, length, keep_alive, http10, expects, match, error, plain, request_id,
            upgrades=upgrades,
        )  # fmt: skip


def asks_for_websocket(headers: Mapping[str, str]) -> bool:
    """Return whether a request asks for a WebSocket (RFC 6455, 4.2.1)."""
    return "websocket" in _tokens(headers.get("upgrade", "")) and "upgrade" in _tokens(headers.get("connection", ""))


def _tokens(value: str) -> list[str]:
    return [token.strip().lower() for token in value.split(",")]


def _match(
    application: Application, method: str, path: str, headers: Mapping[str, str]
) -> tuple[Match | None, HttpError | None]:
    try:
        return application.match(method, path, headers), None
    except HttpError as error:
        return None, error


def _merge_fields(fields: list[tuple[str, str]]) -> dict[str, str]:
    """Join fields of one name to a list (RFC 9110, 5.3), except Host."""
    headers: dict[str, str] = {}
    for name, value in fields:
        if name not in headers:
            headers[name] = value
        else:
            headers[name] += f", {value}"
    return headers


def _length(headers: Mapping[str, str], http10: bool) -> int:
    """Return the length of the body (RFC 9112, 6.1 and 6.3). The parser has rejected two lengths, and invalid ones."""
    coding = headers.get("transfer-encoding")
    if coding is not None:
        if coding.lower() != "chunked" or http10 or "content-length" in headers:
            raise not_http(f"transfer-encoding {coding[:64]!r}")
        return CHUNKED
    text = headers.get("content-length")
    if text is None:
        return 0
    return int(text)


def _target(url: str) -> tuple[str, str, str]:
    """Return path and query of a target (RFC 9112, 3.2), still percent-encoded, and the authority or ""."""
    absolute = _ABSOLUTE.match(url)
    if absolute is not None:
        if not absolute[1] or not is_host(absolute[1]):
            raise not_http(f"the host {absolute[1][:64]!r} of the target")
        url = url[absolute.end() :] or "/"
        url = url if url.startswith("/") else f"/{url}"
    elif not url.startswith("/") and url != "*":
        raise not_http("the target is not a path")
    if "#" in url:  # a proxy might see another path than this server
        raise not_http("a fragment in the target")
    path, _, query = url.partition("?")
    return path, query, "" if absolute is None else absolute[1]


def _is_same_host(authority: str, host: str) -> bool:
    return _DEFAULT_PORT.sub("", authority.lower()) == _DEFAULT_PORT.sub("", host.lower())


class HeaderCache:
    """Parses complete headers and caches them."""

    def __init__(self, application: Application) -> None:
        self._application = application
        self._limits = application.limits
        self._cache: dict[bytes, Http1Headers] = {}
        self.get = self._cache.get

    def parse(self, raw: bytes) -> tuple[Http1Headers, bool]:
        """Parse headers including the empty line at their end; return also whether they are cached now.

        Raises HttpError 400 or 431.
        """
        if len(raw) > self._limits.max_header_bytes:
            raise self.too_large()
        parser = self.parser()
        parser.feed(raw)
        head = self.parse_end(parser)
        # A request id or a trace makes headers unique.
        if len(raw) > MAX_CACHED_BYTES or HEADER in head.headers or PARENT in head.headers:
            return head, False
        if head.plain:
            head = msgspec.structs.replace(head, raw=raw, size=len(raw), whole=len(raw) + head.length)
        if any(name in head.headers for name in CREDENTIALS):
            return head, False  # not shared: the connection remembers its last headers itself
        if len(self._cache) >= _MAX_CACHED:
            self._cache.clear()
        self._cache[raw] = head
        return head, True

    def parser(self) -> HeaderParser:
        """Return a parser for headers that arrive in parts."""
        return HeaderParser(self._limits.max_headers)

    def parse_end(self, parser: HeaderParser) -> Http1Headers:
        return parser.result(self._application)

    def too_large(self) -> HttpError:
        text = f"the request head is larger than the limit of {self._limits.max_header_bytes} bytes"
        return HttpError(431, text, _CLOSE)
