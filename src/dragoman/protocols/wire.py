"""Types that protocols and transports share: requests, responses and route tables, free of any network library.

A protocol is a table of routes. An endpoint is a pure function from a request on the wire to an `EngineCall`: the
`Request` for the engine and the function that formats its response. State of the wire that the response depends on
(which outputs are binary, say) is closed over in that function.

Objects made per request are `msgspec.Struct`s: frozen like a dataclass and ten times as fast to create.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from http import HTTPStatus
from types import MappingProxyType
from typing import Any, Final, Generic, Literal, Protocol, TypeVar

import msgspec

from dragoman.core.callers import ANYONE, Caller
from dragoman.core.calls import Ready, Request, Response
from dragoman.core.errors import OF_CALLS, DragomanError, RateLimited, Unauthorized
from dragoman.core.usage import RateLimits
from dragoman.formats.body import HEADER_LENGTH
from dragoman.formats.exact_json import dump_json
from dragoman.formats.policy import Buffer as Buffer
from dragoman.formats.policy import Policy as Policy
from dragoman.system.request_context import Context, request_id

A = TypeVar("A")
Out = TypeVar("Out")
Headers = tuple[tuple[str, str], ...]
# What a caller must be allowed to do: run models, read metadata and metrics, load and unload models.
Role = Literal["infer", "read", "admin"]
_MAX_DIGITS = 18
# Names of RFC 9110 that Python has since 3.13 only.
_REASON_PHRASES = {
    413: "Content Too Large",
    414: "URI Too Long",
    416: "Range Not Satisfiable",
    422: "Unprocessable Content",
}


def reason_phrase(status: int) -> str:
    """Return the name of an HTTP status, the same on every Python, or nothing for an unknown one."""
    try:
        return _REASON_PHRASES.get(status) or HTTPStatus(status).phrase
    except ValueError:
        return ""


class EngineCall(msgspec.Struct, Generic[A, Out], frozen=True):
    """A request for the engine and how its single response is formatted.

    `format_error` formats an error of this request; None uses the protocol's own error format. With `in_thread` the
    response over HTTP is formatted in a thread, because that takes long.
    """

    request: Request[A]
    format_response: Callable[[Response[A]], Out]
    format_error: Callable[[DragomanError], Out] | None = None
    in_thread: bool = False


# --- HTTP ------------------------------------------------------------------------------------------------


class HttpRequest(msgspec.Struct, frozen=True):
    """A complete request. `params` are the path parameters, percent-decoded; header names are lower case; `body` is
    decompressed; `query` is the part after the question mark, still percent-encoded; `context` has the request id;
    `caller` has sent it, from the address `client`, "" if that is not known; `version` is that of HTTP."""

    method: str
    path: str
    params: Mapping[str, str]
    headers: Mapping[str, str]
    body: Buffer
    query: str = ""
    context: Context = ()
    caller: Caller = ANYONE
    client: str = ""
    version: str = "1.1"

    @property
    def request_id(self) -> str:
        """The id of the request, from the client or generated; "" for one that no transport has received."""
        return request_id(self.context)

    @property
    def text_size(self) -> int:
        """Bytes of the body to parse: all but the binary tensors that follow the JSON in Open Inference."""
        size, header = len(self.body), self.headers.get(HEADER_LENGTH, "")
        return min(int(header), size) if header.isdecimal() and len(header) <= _MAX_DIGITS else size


class HttpResponse(msgspec.Struct, frozen=True):
    """A complete response. The buffers of `body` are sent one after the other."""

    status: int
    body: Sequence[Buffer] = ()
    headers: Headers = ()


class HttpStream(msgspec.Struct, Generic[A], frozen=True):
    """A request for the engine and how its streamed response is formatted.

    The answer of a response may be a DragomanError, after which the stream goes on: `format_late_error` formats it.
    An error before the first chunk has a status of its own: `format_error` formats it, or the protocol's own error
    format if that is None. A later one is sent in the stream, formatted by `format_late_error`. A stream without an
    error ends with `format_last_chunk()`; `end` follows in either case. Before that chunk is sent, the engine gets the
    request of `final_request`, if there is one. `format_whole` formats a first chunk that is the whole response, and
    returns None for another one.
    """

    request: Request[A]
    format_chunk: Callable[[Response[A]], bytes]
    format_late_error: Callable[[DragomanError], bytes]
    end: bytes = b""
    headers: Headers = ()
    format_error: Callable[[DragomanError], HttpResponse] | None = None
    format_last_chunk: Callable[[], bytes] = bytes
    final_request: Callable[[], Request[Any]] | None = None
    format_whole: Callable[[Response[A]], HttpResponse | None] = lambda _: None


class PreliminaryCall(msgspec.Struct, Generic[A], frozen=True):
    """A request for the engine that a protocol needs before it can serve the client's; `then` goes on from its
    response. `format_error` formats its error over HTTP; None uses the protocol's own error format."""

    request: Request[A]
    then: Callable[[Response[A]], Any]  # returns an EndpointResult, or a GrpcStream over gRPC
    format_error: Callable[[DragomanError], HttpResponse] | None = None


class BackgroundCall(msgspec.Struct, frozen=True):
    """A call whose response is stored until the client polls for it.

    `format_accepted` formats the immediate response with the token to poll with; `format_error` formats an error of
    the call, which is stored in place of its response.
    """

    call: "EndpointResult"
    format_error: "Callable[[DragomanError | HttpError], HttpResponse]"
    format_accepted: Callable[[str], HttpResponse]


class PartialResult(msgspec.Struct, frozen=True):
    """The chunks of a stored response that a poll returns; `status` is 0 while there are none.

    `next_token` is the token of the chunks that follow, empty after the last; `is_truncated` is true if the response
    broke off before its end.
    """

    status: int
    headers: Headers
    body: Sequence[Buffer]
    next_token: str
    is_truncated: bool = False


class ResultPoll(msgspec.Struct, frozen=True):
    """A poll for at most `max_chunks` of a stored response; `format_response` gets None for an unknown token."""

    token: str
    max_chunks: int
    format_response: Callable[[PartialResult | None], HttpResponse]


# The result of an endpoint. An HttpResponse needs no engine.
EndpointResult = (
    EngineCall[Any, HttpResponse] | HttpStream[Any] | PreliminaryCall[Any] | HttpResponse | BackgroundCall | ResultPoll
)
Endpoint = Callable[[HttpRequest], EndpointResult]


# Message types by media type, a tuple for alternatives; a mapping is the JSON Schema of a body, None a body that it
# does not describe.
Bodies = Mapping[str, Any]
JSON, OCTET_STREAM, EVENT_STREAM = "application/json", "application/octet-stream", "text/event-stream"
PLAIN_TEXT = "text/plain; charset=utf-8"
# Headers of a stream of events. They are UTF-8 by definition, but clients guess another charset unless it is stated.
EVENT_STREAM_HEADERS: Headers = (("content-type", f"{EVENT_STREAM}; charset=utf-8"), ("cache-control", "no-cache"))


class Operation(msgspec.Struct, frozen=True):
    """Description of a route for OpenAPI: its messages, and the parameters of its query and headers with their schemas.

    `responses` has the bodies by status; the errors are those of the protocol. `path` is that of the description, if it
    is more exact than the pattern of the route.
    """

    summary: str
    responses: Mapping[int, Bodies]
    request: Bodies = msgspec.field(default_factory=dict)
    is_body_required: bool = True
    query: Mapping[str, Any] = msgspec.field(default_factory=dict)
    headers: Mapping[str, Any] = msgspec.field(default_factory=dict)
    path: str = ""


class ErrorResponses(msgspec.Struct, frozen=True):
    """Description of the errors of a protocol for OpenAPI: their statuses and bodies."""

    statuses: frozenset[int]
    bodies: Bodies


class MessageSession(Protocol):
    """State of one WebSocket connection: its messages are requests, answered in their order."""

    def answer(self, http: HttpRequest) -> EndpointResult:
        """Return the result for a message, the body of the request, as an endpoint does.

        Each line of a stream becomes a message, in chunks that have whole lines.
        """

    def format_response(self, response: HttpResponse) -> bytes:
        """Return the lines for a response that is not streamed, such as an error."""


class Spool(msgspec.Struct, frozen=True):
    """Where the body of a large request is received: in a temporary file in a folder ("": the system's).

    max_bytes: of such a body, instead of the limit of the server.
    """

    max_bytes: int
    folder: str = ""


class Route(msgspec.Struct, frozen=True):
    """`pattern` is a path with parameters in braces, such as `/v2/models/{model}/infer`.

    `health` marks a health check, which is answered on connections beyond the limits and without a key too. `role` is
    what a caller with a key needs. `is_administrative`: with an admin port it is served there only, as are all routes
    for the role admin. `is_public`: needs no key. `calls_handlers`: its endpoint calls custom handlers itself. Without
    an `operation`, the route is not in the OpenAPI document. `spool`: large bodies go to a file. A GET over HTTP/1.1
    that asks for a WebSocket gets a `session`, if the route has one.
    """

    method: str
    pattern: str
    endpoint: Endpoint
    health: bool = False
    role: Role = "admin"
    is_administrative: bool = False
    is_public: bool = False
    calls_handlers: bool = False
    operation: Operation | None = None
    session: Callable[[HttpRequest], MessageSession] | None = None
    spool: Spool | None = None


class HttpError(Exception):
    """An error of HTTP itself, outside of any protocol: unknown path, body too large and the like.

    `protocol` is the one whose clients use such a path, if that is known.
    """

    def __init__(
        self, status: int, message: str, headers: Headers = (), protocol: "HttpProtocol | None" = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.headers = headers
        self.protocol = protocol


class HttpProtocol(msgspec.Struct, frozen=True):
    """A protocol over HTTP: its routes and its error format, which `errors` describes.

    `format_error` gets an error and the id of the request. `fallback` serves paths that match no route of any protocol,
    for callers with the role infer. `header` is one that all clients of the protocol send: it decides which protocol
    serves a path of several, and formats the error of an unknown path. `key` is its name in the setting `protocols`.
    `reference` is the address of the vendor's documentation, which describes the responses.
    """

    name: str
    routes: tuple[Route, ...]
    format_error: Callable[[DragomanError | HttpError, str], HttpResponse]
    fallback: Endpoint | None = None
    errors: ErrorResponses | None = None
    header: str = ""
    key: str = ""
    reference: str = ""

    @property
    def label(self) -> str:
        """Its name in metrics, logs and traces."""
        return self.key or self.name


# The label of the console, whose requests are in no metric, trace or list of requests: they are not those of clients.
OWN_PAGES: Final = "console"


class ErrorFormatter(Protocol):
    """A `format_error` of a protocol whose errors do not contain the id of the request."""

    def __call__(self, error: DragomanError | HttpError, _request_id: str = "") -> HttpResponse: ...


JSON_TYPE = ("content-type", JSON)


def bearer_token(headers: Mapping[str, str]) -> str:
    """Return the token of `authorization: Bearer <token>`, else `x-api-key`, else ""."""
    value = headers.get("authorization", "")
    return value[7:].strip() if value[:7].lower() == "bearer " else headers.get("x-api-key", "")


def error_headers(error: DragomanError) -> Headers:
    """Return the headers of an error response: when to retry, or how to authenticate (RFC 6750, 3)."""
    if isinstance(error, Unauthorized):
        return (("www-authenticate", "Bearer"),)
    if error.retry_after_s is None:
        return ()
    limits = rate_limit_headers(error.limits) if isinstance(error, RateLimited) else ()
    return (("retry-after", str(math.ceil(error.retry_after_s))), *limits)


def rate_limit_headers(limits: object) -> Headers:
    """Return the headers of OpenAI's API with what is left of the limits of a key, none for other objects."""
    if not isinstance(limits, RateLimits):
        return ()
    found: Headers = ()
    for name, limit, remaining, reset_s in (
        ("requests", limits.requests, limits.remaining_requests, limits.reset_requests_s),
        ("tokens", limits.tokens, limits.remaining_tokens, limits.reset_tokens_s),
    ):
        if limit is not None:
            values = {"limit": str(limit), "remaining": str(remaining), "reset": _format_duration(reset_s)}
            found += tuple((f"x-ratelimit-{kind}-{name}", value) for kind, value in values.items())
    return found


def _format_duration(seconds: float) -> str:
    """Return a duration as in 120ms, 8.5s or 1h6m0s."""
    if seconds < 1.0:
        return f"{math.ceil(seconds * 1000)}ms"
    if seconds < 60.0:
        return f"{round(seconds, 2):g}s"
    minutes, rest = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes}m{rest}s" if hours else f"{minutes}m{rest}s"


def find_error_row(error: DragomanError, table: Iterable[tuple[Any, ...]]) -> tuple[Any, ...] | None:
    """Return the rest of the first row of a protocol's error table whose class matches the error."""
    return next((row[1:] for row in table if isinstance(error, row[0])), None)


def replace_surrogates(text: str) -> str:
    """Return the text with lone surrogates, which UTF-8 cannot encode, replaced: a file name may hold some."""
    return text.encode(errors="replace").decode()


def json_response(value: Any, status: int = 200, headers: Headers = ()) -> HttpResponse:
    return HttpResponse(status, (dump_json(value),), (JSON_TYPE, *headers))


def message_response(message: object, status: int = 200, headers: Headers = ()) -> HttpResponse:
    """Return a response built from the struct, or a list of the structs, that describes it to OpenAPI."""
    return HttpResponse(status, (msgspec.json.encode(message),), (JSON_TYPE, *headers))


class ErrorMessage(msgspec.Struct):
    error: str


class ModelReadiness(msgspec.Struct):
    name: str
    ready: bool


# The statuses of a protocol that differ from those of the classes of errors; the first class that matches counts.
Statuses = Mapping[type[DragomanError], int]
_NONE: Statuses = MappingProxyType({})


def _status(error: type[DragomanError], differing: Statuses) -> int:
    return next((status for kind, status in differing.items() if issubclass(error, kind)), error.status)


def statuses(differing: Statuses = _NONE) -> frozenset[int]:
    """Return the statuses of the errors of calls in a protocol."""
    return frozenset(_status(kind, differing) for kind in OF_CALLS)


def error_responses(differing: Statuses = _NONE) -> ErrorResponses:
    """Return the description of the errors that `error_formatter` formats."""
    return ErrorResponses(statuses(differing), {JSON: ErrorMessage})


def error_formatter(differing: Statuses = _NONE) -> ErrorFormatter:
    """Return a function that formats an error as `{"error": message}`, with the statuses that differ in a protocol."""

    def format_error(error: DragomanError | HttpError, _request_id: str = "") -> HttpResponse:
        if isinstance(error, HttpError):
            return message_response(ErrorMessage(error.message), error.status, error.headers)
        message = ErrorMessage(replace_surrogates(error.message))
        return message_response(message, _status(type(error), differing), error_headers(error))

    return format_error


def read_readiness(name: str) -> EngineCall[bool, HttpResponse] | HttpResponse:
    """Return the readiness of a model as KServe's V1 protocol does; its paths that end in a verb need POST."""
    if name.endswith((":predict", ":explain")):
        error = f"method GET is not allowed for '/v1/models/{name[:256]}'; expected POST"
        return json_response({"error": error}, 405, (("allow", "OPTIONS, POST"),))

    def format_response(response: Response[bool]) -> HttpResponse:
        return message_response(ModelReadiness(name, response.answer), 200 if response.answer else 503)

    return EngineCall(Request(Ready(), name), format_response)


# --- gRPC ------------------------------------------------------------------------------------------------


class CallRecord(Protocol):
    """What records which call a request makes."""

    def set_call(self, request: Request[Any]) -> None: ...


class GrpcRequest(msgspec.Struct, frozen=True):
    """One message of a `caller`; `deadline_s` is the client's deadline on the monotonic clock, `context` has the
    request id, `record` is that of an observed call."""

    body: Buffer
    metadata: Mapping[str, str] = {}
    deadline_s: float | None = None
    context: Context = ()
    caller: Caller = ANYONE
    record: CallRecord | None = None


class GrpcStream(msgspec.Struct, Generic[A], frozen=True):
    """One message of a stream and how its response messages are formatted; that of `format_end` follows the last one.

    The answer of a response may be a DragomanError, after which the stream goes on: `format_error` formats it, or
    returns None if the client expects a status, which ends the stream. An error that ends the responses is formatted by
    the method, unless `ends_with_status`.
    """

    request: Request[A]
    format_chunk: Callable[[Response[A]], bytes]
    format_error: Callable[[DragomanError], bytes | None]
    format_end: Callable[[], bytes | None]
    ends_with_status: bool = False


class GrpcResponse(msgspec.Struct, frozen=True):
    """A message to send, with trailing metadata."""

    message: bytes | Sequence[Buffer]
    metadata: Headers


# A message to send; the buffers of a large one are sent one after the other.
GrpcResult = bytes | Sequence[Buffer] | GrpcResponse


class GrpcMethod(msgspec.Struct, frozen=True):
    """A unary method. `health` marks a health check, which no limit on calls stops; `role` as for a `Route`."""

    name: str
    endpoint: Callable[[GrpcRequest], EngineCall[Any, bytes] | EngineCall[Any, GrpcResult]]
    health: bool = False
    role: Role = "admin"


class GrpcStreamMethod(msgspec.Struct, frozen=True):
    """A bidirectional streaming method: each request message gets any number of response messages, in order.

    `format_error` formats an error of one message, in parsing or in serving it, as a message of the stream, which then
    goes on; if it returns None, the stream ends with a status.
    """

    name: str
    endpoint: Callable[[GrpcRequest], GrpcStream[Any] | PreliminaryCall[Any]]
    format_error: Callable[[GrpcRequest, DragomanError], bytes | None]
    role: Role = "admin"


class GrpcProtocol(msgspec.Struct, frozen=True):
    """A protocol over gRPC: a service and its methods.

    `status` returns the name of the gRPC status code of an error. `descriptors` is the serialized FileDescriptorSet
    for server reflection. `other_services` are further services, each with the names of the methods that it has too.
    `key` is its name in the setting `protocols`, and in metrics, logs and traces.
    """

    service: str
    methods: tuple[GrpcMethod | GrpcStreamMethod, ...]
    status: Callable[[DragomanError], str]
    descriptors: bytes
    other_services: Mapping[str, frozenset[str]] = msgspec.field(default_factory=dict)
    key: str = ""

    @property
    def services(self) -> tuple[str, ...]:
        """The names of all services."""
        return (self.service, *self.other_services)
