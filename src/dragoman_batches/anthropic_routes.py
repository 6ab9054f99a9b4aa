"""`/v1/messages/batches`, as Anthropic documents it."""

from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

from dragoman.core.calls import Request, Response
from dragoman.core.errors import DragomanError, InvalidInput
from dragoman.core.sampling import format_value
from dragoman.protocols.parameters import ignored_header, parse_query, reject_unknown
from dragoman.protocols.wire import (
    JSON,
    EngineCall,
    ErrorResponses,
    HttpError,
    HttpProtocol,
    HttpRequest,
    HttpResponse,
    Operation,
    Policy,
    Route,
    Spool,
    error_headers,
    message_response,
    replace_surrogates,
)
from dragoman_batches import calls
from dragoman_batches.batch import Batch
from dragoman_batches.errors import ANTHROPIC_ERRORS
from dragoman_batches.input import explain
from dragoman_batches.requests import limit_of, map_content, page

_JSONL = "application/x-jsonl"
_WINDOW_S = 24 * 3600.0
_MAX_PAGE, _PAGE = 1000, 20
_MAX_ID = 64
_STATUSES = frozenset((400, 401, 403, 404, 405, 413, 429, 500, 503, 507))


class MessageBatchErrorBody(msgspec.Struct):
    type: str
    message: str


class MessageBatchError(msgspec.Struct):
    """An error in the shape of Anthropic's API."""

    error: MessageBatchErrorBody
    request_id: str
    type: Literal["error"] = "error"


class MessageBatchRequest(msgspec.Struct):
    """A request of a batch. params: the body of a request to `/v1/messages`."""

    custom_id: str
    params: msgspec.Raw


class MessageBatchCreation(msgspec.Struct):
    requests: list[MessageBatchRequest]


class MessageBatchCounts(msgspec.Struct):
    processing: int
    succeeded: int
    errored: int
    canceled: int
    expired: int


class MessageBatch(msgspec.Struct):
    id: str
    processing_status: Literal["in_progress", "canceling", "ended"]
    request_counts: MessageBatchCounts
    created_at: str
    expires_at: str
    ended_at: str | None = None
    cancel_initiated_at: str | None = None
    results_url: str | None = None
    archived_at: None = None
    type: Literal["message_batch"] = "message_batch"


class MessageBatchList(msgspec.Struct):
    data: list[MessageBatch]
    has_more: bool
    first_id: str | None
    last_id: str | None


class DeletedMessageBatch(msgspec.Struct):
    id: str
    type: Literal["message_batch_deleted"] = "message_batch_deleted"


_BODY = {
    "type": "object",
    "properties": {
        "requests": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "properties": {
                    "custom_id": {"type": "string", "minLength": 1, "maxLength": _MAX_ID},
                    "params": {"type": "object"},
                },
                "required": ["custom_id", "params"],
            },
        }
    },
    "required": ["requests"],
}
_QUERY = {
    "after_id": {"type": "string"},
    "before_id": {"type": "string"},
    "limit": {"type": "integer", "minimum": 1, "maximum": _MAX_PAGE},
}


def protocol(policy: Policy) -> HttpProtocol:
    """Return the table of the routes."""
    api = _Routes(policy)
    path, one = "/v1/messages/batches", "/v1/messages/batches/{batch_id}"

    def route(method: str, path: str, endpoint: Any, operation: Operation, spool: Spool | None = None) -> Route:
        return Route(method, path, endpoint, role="infer", operation=operation, spool=spool)

    batch = {JSON: MessageBatch}
    create = Operation("Create a batch of messages", {200: batch}, {JSON: _BODY})
    listed = Operation("List batches of messages, the newest first", {200: {JSON: MessageBatchList}}, query=_QUERY)
    cancel = Operation("Cancel a batch of messages", {200: batch}, {JSON: {"type": "object"}}, is_body_required=False)
    delete = Operation("Delete a batch of messages that has ended", {200: {JSON: DeletedMessageBatch}})
    results = Operation("Return the results, one a line", {200: {_JSONL: None}})
    routes = (
        route("POST", path, api.create, create, Spool(policy.max_file_bytes, policy.upload_folder)),
        route("GET", path, api.list, listed),
        route("GET", one, api.read, Operation("Return a batch of messages and its progress", {200: batch})),
        route("POST", f"{one}/cancel", api.cancel, cancel),
        route("DELETE", one, api.delete, delete),
        route("GET", f"{one}/results", api.results, results),
    )
    reference = "https://docs.anthropic.com/en/api/creating-message-batches"
    errors = ErrorResponses(_STATUSES, {JSON: MessageBatchError})
    return HttpProtocol("message_batches", routes, format_error, errors=errors, reference=reference)


def format_error(error: DragomanError | HttpError, request_id: str = "") -> HttpResponse:
    """Format an error in the shape of Anthropic's API."""
    headers = error.headers if isinstance(error, HttpError) else error_headers(error)
    kind = ANTHROPIC_ERRORS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    body = MessageBatchErrorBody(kind, replace_surrogates(error.message))
    return message_response(MessageBatchError(body, request_id), error.status, (*headers, ("request-id", request_id)))


class _Routes:
    """The endpoints."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def create(self, http: HttpRequest) -> EngineCall[Batch, HttpResponse]:
        try:
            fields = msgspec.json.decode(http.body, type=dict[str, msgspec.Raw])
            body = msgspec.json.decode(http.body, type=MessageBatchCreation)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            text = explain(error)[0]
            raise InvalidInput(text if text.startswith("`") else f"the body: expected a JSON object: {text}") from error
        unknown = [name for name in fields if name != "requests"]
        reject_unknown(unknown, ("requests",), self._policy)
        headers = ignored_header(unknown)
        call = calls.CreateMessageBatch(_lines(body.requests), _WINDOW_S)
        return EngineCall(
            Request(call), lambda response: message_response(_message(response.answer, http), 200, headers)
        )

    def list(self, http: HttpRequest) -> EngineCall[list[Batch], HttpResponse]:
        query = parse_query(http.query, _QUERY)
        limit = limit_of(query, _PAGE, _MAX_PAGE)
        if "after_id" in query and "before_id" in query:
            raise InvalidInput("query parameter 'before_id': expected none beside after_id")

        def reply(response: Response[Any]) -> HttpResponse:
            chosen, more = page(response.answer[::-1], query, limit, lambda batch: batch.id)
            data = [_message(batch, http) for batch in chosen]
            first, last = (data[0].id, data[-1].id) if data else (None, None)
            return message_response(MessageBatchList(data, more, first, last))

        return EngineCall(Request(calls.ListBatches("anthropic")), reply)

    def read(self, http: HttpRequest) -> EngineCall[Batch, HttpResponse]:
        return self._of_batch(http, calls.ReadBatch(http.params["batch_id"], "anthropic"))

    def cancel(self, http: HttpRequest) -> EngineCall[Batch, HttpResponse]:
        return self._of_batch(http, calls.CancelBatch(http.params["batch_id"], "anthropic"))

    @staticmethod
    def _of_batch(http: HttpRequest, call: Any) -> EngineCall[Batch, HttpResponse]:
        return EngineCall(Request(call), lambda response: message_response(_message(response.answer, http)))

    def delete(self, http: HttpRequest) -> EngineCall[None, HttpResponse]:
        batch_id = http.params["batch_id"]
        call = calls.DeleteBatch(batch_id, "anthropic")
        return EngineCall(Request(call), lambda _: message_response(DeletedMessageBatch(batch_id)))

    def results(self, http: HttpRequest) -> EngineCall[str, HttpResponse]:
        def reply(response: Response[str]) -> HttpResponse:
            return HttpResponse(200, map_content(response.answer), (("content-type", _JSONL),))

        return EngineCall(Request(calls.OpenResults(http.params["batch_id"])), reply, in_thread=True)


def _lines(requests: "list[MessageBatchRequest]") -> "list[bytes]":
    """Return the requests as lines of an input. Raises InvalidInput."""
    if not requests:
        raise InvalidInput("`requests`: expected at least one request, got none")
    ids, lines = set[str](), list[bytes]()
    for number, request in enumerate(requests):
        custom_id, params = request.custom_id, bytes(request.params)
        if not custom_id or len(custom_id) > _MAX_ID:
            raise InvalidInput(f"`requests[{number}].custom_id`: expected 1 to {_MAX_ID} characters")
        if custom_id in ids:
            raise InvalidInput(f"`requests[{number}].custom_id`: '{custom_id}' is not unique")
        if not params.startswith(b"{"):
            got = format_value(msgspec.json.decode(params))
            raise InvalidInput(f"`requests[{number}].params`: expected an object, got {got}")
        ids.add(custom_id)
        body = params.replace(b"\n", b" ").replace(b"\r", b" ")  # white space outside of strings
        lines.append(b'{"custom_id":%b,"url":"/v1/messages","body":%b}\n' % (msgspec.json.encode(custom_id), body))
    return lines


def _message(batch: Batch, http: HttpRequest) -> MessageBatch:
    unsent = batch.expired + batch.cancelled
    processing = 0 if batch.has_ended else max(0, batch.total - batch.completed - batch.failed - unsent)
    canceled = batch.cancelled if batch.status != "failed" else 0
    status: Literal["in_progress", "canceling", "ended"] = "ended" if batch.has_ended else "in_progress"
    if batch.status == "cancelling":
        status = "canceling"
    host = http.headers.get("host", "")
    scheme = http.headers.get("x-forwarded-proto", "http")
    url = f"{scheme}://{host}{http.path.partition('/v1/')[0]}/v1/messages/batches/{batch.id}/results"
    return MessageBatch(
        batch.id,
        status,
        MessageBatchCounts(processing, batch.completed, batch.failed, canceled, batch.expired),
        _time(batch.created_s),
        _time(batch.expires_s),
        _time(batch.times_s[batch.status]) if batch.has_ended else None,
        _time(batch.times_s["cancelling"]) if "cancelling" in batch.times_s else None,
        url if batch.has_ended else None,
    )


def _time(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat().replace("+00:00", "Z")
