"""The vocabulary that protocols and transports share: requests, replies and tables, free of any library.

A protocol is a table. Each row is a pure function from what came on the wire to an exchange: the `Request` for
the engine and the `reply` that writes its answer back. What a wire must remember in between (which outputs are
binary, say) is closed over in `reply`.

What is made for each request is a struct of msgspec: frozen like a dataclass, and made ten times as fast.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any, Generic, TypeVar
from urllib.parse import urlsplit

import msgspec
import orjson

from dragoman.core.calls import Request, Response
from dragoman.core.errors import DragomanError, Forbidden
from dragoman.formats.body import HEADER_LENGTH
from dragoman.formats.policy import Buffer as Buffer
from dragoman.formats.policy import Policy as Policy

A = TypeVar("A")
Out = TypeVar("Out")
Headers = tuple[tuple[str, str], ...]
_MOST_DIGITS = 18


class Exchange(msgspec.Struct, Generic[A, Out], frozen=True):
    """One question and how its one answer is written; `fault` writes what went wrong with it, None leaves that to the
    protocol's own error table."""

    request: Request[A]
    reply: Callable[[Response[A]], Out]
    fault: Callable[[DragomanError], Out] | None = None


# --- HTTP ------------------------------------------------------------------------------------------------


class HttpRequest(msgspec.Struct, frozen=True):
    """A whole request: `params` are the pattern's parts, percent-decoded; header names are in lower case; the
    body is decompressed; `query` is what follows the question mark, still encoded."""

    method: str
    path: str
    params: Mapping[str, str]
    headers: Mapping[str, str]
    body: Buffer
    query: str = ""

    @property
    def text_size(self) -> int:
        """Bytes of the body that have to be parsed: all but the tensors that Open Inference has behind the JSON."""
        size, header = len(self.body), self.headers.get(HEADER_LENGTH, "")
        return min(int(header), size) if header.isdecimal() and len(header) <= _MOST_DIGITS else size


class HttpResponse(msgspec.Struct, frozen=True):
    """A whole response; the buffers of `body` are sent one after the other."""

    status: int
    body: Sequence[Buffer] = ()
    headers: Headers = ()


class HttpStream(msgspec.Struct, Generic[A], frozen=True):
    """One question and how each piece of its answer is written.

    `closing` writes what follows the last piece where no fault came; `end` follows either. `error` writes a fault that
    comes after the first piece; one that comes before is written by `fault`, or where that is None by the protocol's
    own error table, with its status.
    """

    request: Request[A]
    piece: Callable[[Response[A]], bytes]
    error: Callable[[DragomanError], bytes]
    end: bytes = b""
    headers: Headers = ()
    fault: Callable[[DragomanError], HttpResponse] | None = None
    closing: Callable[[], bytes] = bytes


class Inquiry(msgspec.Struct, Generic[A], frozen=True):
    """A question that the protocol has itself before it can put the caller's: what its answer leads to is `then`."""

    request: Request[A]
    then: "Callable[[Response[A]], Asked]"


class Later(msgspec.Struct, frozen=True):
    """A question whose caller does not wait: `started` tells the token by which to fetch the answer, into which `error`
    writes what went wrong."""

    asked: "Asked"
    error: "Callable[[DragomanError | HttpFault], HttpResponse]"
    started: Callable[[str], HttpResponse]


class FetchedPart(msgspec.Struct, frozen=True):
    """What there is of an answer that is fetched; `status` is 0 as long as there is nothing.

    `following` is the token of what comes after it, "" where nothing does; `broken` tells that the end is missing.
    """

    status: int
    headers: Headers
    body: Sequence[Buffer]
    following: str
    broken: bool = False


class Fetch(msgspec.Struct, frozen=True):
    """Whoever comes back for an answer, or for `most` parts of one; `told` writes it, None being no such token."""

    token: str
    most: int
    told: Callable[[FetchedPart | None], HttpResponse]


# What a request becomes. A response alone needs no engine.
Asked = Exchange[Any, HttpResponse] | HttpStream[Any] | Inquiry[Any] | HttpResponse | Later | Fetch
Endpoint = Callable[[HttpRequest], Asked]


@dataclass(frozen=True, slots=True)
class Route:
    """`pattern` is a path whose parts in braces are parameters: `/v2/models/{model}/infer`.

    `health` marks a health check, which is answered on connections beyond the limits too.
    """

    method: str
    pattern: str
    endpoint: Endpoint
    health: bool = False


class HttpFault(Exception):
    """A fault of HTTP itself, before any protocol has a say: no such path, body too large and the like.

    `protocol` is the one whose clients come to such a path, where that is known.
    """

    def __init__(
        self, status: int, message: str, headers: Headers = (), protocol: "HttpProtocol | None" = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.headers = headers
        self.protocol = protocol


@dataclass(frozen=True, slots=True)
class HttpProtocol:
    """A protocol over HTTP: its routes and how it writes an error. `fallback` is asked where no route of any protocol
    fits a path."""

    name: str
    routes: tuple[Route, ...]
    error: Callable[[DragomanError | HttpFault], HttpResponse]
    fallback: Endpoint | None = None


JSON_TYPE = ("content-type", "application/json")


def bearer_token(headers: Mapping[str, str]) -> str:
    """The token of `authorization: Bearer <token>`, "" where there is none."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def control_token(headers: Mapping[str, str]) -> str:
    """The token of a request over HTTP that loads, unloads or lists models.

    Raises Forbidden where a web page asks without one, unless it comes from this very server by an address that is no
    name: browsers send such requests for any page, to whatever address its name has been bound to (DNS rebinding).
    """
    token, origin = bearer_token(headers), headers.get("origin")
    if not token and origin is not None and not _is_own_page(origin, headers.get("host", "")):
        raise Forbidden(f"model control from a web page needs a control token, got none and Origin {origin[:256]!r}")
    return token


def _is_own_page(origin: str, host: str) -> bool:
    """Whether a page comes from the host that it asks, and that is an address or this machine itself."""
    try:
        url = urlsplit(origin)
        if url.scheme not in ("http", "https") or url.netloc != host:
            return False
        return url.hostname == "localhost" or bool(ip_address(url.hostname or ""))
    except ValueError:
        return False


def retry_after(fault: DragomanError) -> Headers:
    """The header that says when to try again, where that is of use."""
    return () if fault.retry_after_s is None else (("retry-after", str(math.ceil(fault.retry_after_s))),)


def row_of(fault: DragomanError, table: Iterable[tuple[Any, ...]]) -> tuple[Any, ...] | None:
    """What a protocol's table says of a fault: the rest of the first row whose class of error it is."""
    return next((row[1:] for row in table if isinstance(fault, row[0])), None)


def sendable(text: str) -> str:
    """The text as UTF-8 can hold it: a model may quote a file name, say, that it cannot."""
    return text.encode(errors="replace").decode()


def json_response(value: Any, status: int = 200, headers: Headers = ()) -> HttpResponse:
    return HttpResponse(status, (orjson.dumps(value),), (JSON_TYPE, *headers))


# --- gRPC ------------------------------------------------------------------------------------------------


class GrpcRequest(msgspec.Struct, frozen=True):
    """One message; `deadline_s` is the caller's deadline on the monotonic clock."""

    body: Buffer
    metadata: Mapping[str, str] = {}
    deadline_s: float | None = None


class GrpcStream(msgspec.Struct, Generic[A], frozen=True):
    """One message of a stream and how each piece of its answer is written; `end` follows the last one."""

    request: Request[A]
    piece: Callable[[Response[A]], bytes]
    end: bytes | None = None


class GrpcAnswer(msgspec.Struct, frozen=True):
    """A message to send, and the metadata that goes after it."""

    message: bytes | Sequence[Buffer]
    metadata: Headers


# A message to send; the parts of a large one follow one another on the wire.
GrpcReply = bytes | Sequence[Buffer] | GrpcAnswer


@dataclass(frozen=True, slots=True)
class GrpcMethod:
    """A unary method: one message in, one out. `health` marks a health check, which no limit on calls stops."""

    name: str
    endpoint: Callable[[GrpcRequest], Exchange[Any, bytes] | Exchange[Any, GrpcReply]]
    health: bool = False


@dataclass(frozen=True, slots=True)
class GrpcStreamMethod:
    """A method with streams both ways; each message that comes in is answered by any number, in order.

    `fault` writes into the stream what went wrong with one message, be it with reading or with answering it; the
    stream then goes on. None in its place ends the stream with a status.
    """

    name: str
    endpoint: Callable[[GrpcRequest], GrpcStream[Any]]
    fault: Callable[[GrpcRequest, DragomanError], bytes | None]


@dataclass(frozen=True, slots=True)
class GrpcProtocol:
    """A protocol over gRPC: a service, its methods and how it writes an error.

    `status` gives the name of a gRPC status code. `descriptors` is the serialized FileDescriptorSet that server
    reflection shows.
    """

    service: str
    methods: tuple[GrpcMethod | GrpcStreamMethod, ...]
    status: Callable[[DragomanError], str]
    descriptors: bytes
