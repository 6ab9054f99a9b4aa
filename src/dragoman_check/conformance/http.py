"""HTTP requests of conformance checks, recorded for the report."""

import http.client
import json
import ssl
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from dragoman.core.documents import parse_json
from dragoman.core.errors import InvalidInput, NotReady
from dragoman_check.conformance.clauses import ClauseFailed, NotOffered, NotTried, RecordedExchange, expect, fail

KEY_HINT = "give a key with --key-file FILE or the variable DRAGOMAN_API_KEY"
_MAX_SHOWN_CHARACTERS = 600
_MISSING = (404, 405, 501)  # statuses of unknown paths or methods


@dataclass(frozen=True, slots=True)
class RecordedResponse:
    """A response: status, headers with lower-case names, body."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def media_type(self) -> str:
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()

    def json(self) -> Any:
        """Return the body as JSON. Raises ClauseFailed for anything that RFC 8259 does not allow."""
        try:
            return parse_json(self.body, parse_constant=_reject_constant)
        except ValueError:
            fail("a JSON body", self.body[:200])

    def json_lines(self) -> list[Any]:
        """Return each line of the body as JSON, without empty ones."""
        return [
            RecordedResponse(self.status, self.headers, line).json() for line in self.body.splitlines() if line.strip()
        ]

    def events(self) -> list[str]:
        """Return the data of each server-sent event."""
        blocks = self.body.decode("utf-8", "replace").replace("\r\n", "\n").split("\n\n")
        lines = [
            [line[5:].removeprefix(" ") for line in block.split("\n") if line.startswith("data:")] for block in blocks
        ]
        return ["\n".join(data) for data in lines if data]

    def json_events(self) -> list[Any]:
        """Return the data of each server-sent event as JSON, without `[DONE]`."""
        return [RecordedResponse(self.status, {}, e.encode()).json() for e in self.events() if e != "[DONE]"]

    def ok(self) -> "RecordedResponse":
        """Return the response itself. Raises ClauseFailed unless its status is 200, NotTried if it asks for a key."""
        if self.status in (401, 403):
            raise NotTried(self._missing_key())
        expect(self.status == 200, "status 200", self._summary())
        return self

    def expect_offered(self, what: str) -> "RecordedResponse":
        """Return the response itself if its status is 200. Raises NotOffered if the path or method is unknown."""
        if self.status in _MISSING:
            raise NotOffered(f"{what} gets status {self.status}")
        return self.ok()

    def expect_rejected(self, low: int = 400, high: int = 599) -> "RecordedResponse":
        """Return the response itself. Raises ClauseFailed for a status outside `low` to `high`, NotTried for 401."""
        if self.status == 401:
            raise NotTried(self._missing_key())
        expect(low <= self.status <= high, f"a status from {low} to {high}", self._summary())
        return self

    def _missing_key(self) -> str:
        if self.status == 403:
            return f"the server does not permit the request: {self._summary()}"
        return f"the server rejects the request with status {self.status}: {KEY_HINT}"

    def _summary(self) -> str:
        return f"{self.status} {self.body[:160].decode('utf-8', 'replace')}"


def _reject_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


@dataclass(slots=True)
class HttpTarget:
    """The server at a URL, without a trailing slash. Each request has a connection of its own."""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict)
    ca: str = ""
    timeout_s: float = 30.0
    exchanges: list[RecordedExchange] = field(default_factory=list)
    tls: ssl.SSLContext | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.url.startswith("https:"):
            self.tls = ssl.create_default_context(cafile=self.ca or None)

    def get(self, path: str) -> RecordedResponse:
        return self.send("GET", path)

    def post(self, path: str, value: Any, headers: Mapping[str, str] | None = None) -> RecordedResponse:
        """Send a JSON value, or bytes as they are."""
        body = value if isinstance(value, bytes) else json.dumps(value, ensure_ascii=False).encode()
        return self.send("POST", path, body, {"Content-Type": "application/json"} if headers is None else headers)

    def send(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> RecordedResponse:
        """Send a request and return the response. Raises ClauseFailed if there is none."""
        address = urlsplit(self.url)
        sent = f"{method} {path}" + (f" {_text(body)}" if body else "")
        connection = self._connect(address.scheme, address.hostname or "", address.port)
        try:
            connection.request(method, address.path + path, body, {**self.headers, **(headers or {})})
            answer = connection.getresponse()
            response = RecordedResponse(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())
        except (OSError, http.client.HTTPException) as error:
            self.exchanges.append(RecordedExchange(sent, f"no response: {error or type(error).__name__}"))
            raise ClauseFailed(f"expected a response, got none: {error or type(error).__name__}") from error
        finally:
            connection.close()
        self.exchanges.append(
            RecordedExchange(sent, f"{response.status} {response.media_type} {_text(response.body)}".rstrip())
        )
        return response

    @contextmanager
    def conversation(self, path: str) -> Iterator[Callable[[Any, Callable[[Any], bool]], RecordedResponse]]:
        """Open a WebSocket; yield a function that sends a JSON value and returns the messages up to the last one.

        The messages are the lines of a response; a function of each says which is the last. Raises ClauseFailed if
        there is no server, NotOffered if it opens no WebSocket.
        """
        from dragoman_check.conformance.websocket import WebSocket

        try:
            connection = WebSocket(self.url, path, self.headers, self.tls, self.timeout_s)
        except OSError as error:
            raise ClauseFailed(f"expected a connection, got none: {error}") from error

        def send(value: Any, is_last: Callable[[Any], bool]) -> RecordedResponse:
            connection.send(value)
            messages: list[str] = []
            try:
                while not messages or not is_last(RecordedResponse(0, {}, messages[-1].encode()).json()):
                    messages.append(connection.receive())
            finally:
                data = "\n".join(messages).encode()
                self.exchanges.append(
                    RecordedExchange(f"WebSocket {path} {_text(json.dumps(value).encode())}", _text(data))
                )
            return RecordedResponse(200, {}, data)

        try:
            yield send
        finally:
            connection.close()

    def require_connection(self) -> None:
        """Raise NotReady if there is no server."""
        try:
            self.send("GET", "/v2/health/live")
        except ClauseFailed as error:
            cause = error.__cause__
            reason = getattr(cause, "strerror", None) or str(error).rpartition("none: ")[2]
            if isinstance(cause, http.client.BadStatusLine):
                reason = "the response is not HTTP/1.1"
            raise NotReady(f"no HTTP server answers at {self.url}: {reason}") from error
        self.exchanges.clear()

    def _connect(self, scheme: str, host: str, port: int | None) -> http.client.HTTPConnection:
        if scheme == "https":
            return http.client.HTTPSConnection(host, port, timeout=self.timeout_s, context=self.tls)
        return http.client.HTTPConnection(host, port, timeout=self.timeout_s)


def checked_url(url: str) -> str:
    """Return an http or https URL without a trailing slash. Raises InvalidInput."""
    url = (url if "://" in url else f"http://{url}").rstrip("/")
    try:
        address = urlsplit(url)
        valid = address.scheme in ("http", "https", "grpc") and address.hostname and address.port != 0
    except ValueError:
        valid = False
    if not valid:
        raise InvalidInput(
            f"expected a URL such as http://HOST:PORT, https://HOST:PORT or grpc://HOST:PORT, got '{url}'"
        )
    return url


def _text(body: bytes | None) -> str:
    text = (body or b"")[: 2 * _MAX_SHOWN_CHARACTERS].decode("utf-8", "backslashreplace")
    return text if len(text) <= _MAX_SHOWN_CHARACTERS else text[:_MAX_SHOWN_CHARACTERS] + "..."
