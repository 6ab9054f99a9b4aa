"""`/v1/files` and `/v1/batches`, as OpenAI documents them."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from dragoman.core.calls import Request, Response
from dragoman.core.errors import DragomanError, InvalidInput
from dragoman.protocols.parameters import ignored_header, object_body, parse_query, reject_unknown
from dragoman.protocols.wire import (
    JSON,
    OCTET_STREAM,
    EngineCall,
    ErrorResponses,
    Headers,
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
from dragoman_batches.batch import Batch, BatchProblem, Status
from dragoman_batches.files import StoredFile
from dragoman_batches.multipart import FormField, parse_form
from dragoman_batches.requests import limit_of, map_content, page, parse_body

_PURPOSES = ("assistants", "batch", "evals", "fine-tune", "user_data", "vision")
_MAX_EXPIRES_S, _MIN_EXPIRES_S = 2_592_000, 3600
_WINDOW = re.compile(r"([1-9]\d{0,5})([smhd])")
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_MAX_WINDOW_S = 30 * 86400
_MAX_FILES_PAGE, _MAX_BATCHES_PAGE = 10_000, 100
# Bytes of a form besides the file in it.
_FORM_BYTES = 1 << 16
_STATUSES = frozenset((400, 401, 403, 404, 405, 413, 429, 500, 503, 507))


# --- messages --------------------------------------------------------------------------------------------


class ErrorBody(msgspec.Struct):
    message: str
    type: str
    param: str | None = None
    code: str | int | None = None


class FileError(msgspec.Struct):
    """An error in the shape of OpenAI's API."""

    error: ErrorBody


class FileObject(msgspec.Struct):
    """A file. sha256: checksum of its content, which OpenAI does not have."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    sha256: str
    expires_at: int | None = None
    object: Literal["file"] = "file"
    status: Literal["processed"] = "processed"
    status_details: None = None


class FileList(msgspec.Struct):
    data: list[FileObject]
    has_more: bool
    first_id: str | None = None
    last_id: str | None = None
    object: Literal["list"] = "list"


class DeletedFile(msgspec.Struct):
    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


class ExpiresAfter(msgspec.Struct):
    seconds: Annotated[int, msgspec.Meta(ge=_MIN_EXPIRES_S, le=_MAX_EXPIRES_S)]
    anchor: Literal["created_at"]


_Key = Annotated[str, msgspec.Meta(max_length=64)]
_Value = Annotated[str, msgspec.Meta(max_length=512)]


class BatchCreation(msgspec.Struct):
    """A request for a batch. endpoint: the `url` of all lines, or `*` for lines with different ones."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: Annotated[dict[_Key, _Value], msgspec.Meta(max_length=16)] | None = None
    output_expires_after: ExpiresAfter | None = None


class BatchErrors(msgspec.Struct):
    data: list[BatchProblem]
    object: Literal["list"] = "list"


class RequestCounts(msgspec.Struct):
    total: int
    completed: int
    failed: int


class BatchObject(msgspec.Struct):
    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    status: Status
    created_at: int
    request_counts: RequestCounts
    errors: BatchErrors | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    expires_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    metadata: Mapping[str, str] | None = None
    object: Literal["batch"] = "batch"


class BatchList(msgspec.Struct):
    data: list[BatchObject]
    has_more: bool
    first_id: str | None = None
    last_id: str | None = None
    object: Literal["list"] = "list"


def _file_object(file: StoredFile) -> FileObject:
    expires = int(file.expires_s) or None
    return FileObject(file.id, file.bytes, int(file.created_s), file.filename, file.purpose, file.sha256, expires)


def _batch_object(batch: Batch) -> BatchObject:
    times: dict[str, Any] = {f"{name}_at": int(at_s) for name, at_s in batch.times_s.items()}
    return BatchObject(
        batch.id,
        batch.endpoint,
        batch.input_file_id,
        batch.window,
        batch.status,
        int(batch.created_s),
        RequestCounts(batch.total, batch.completed, batch.failed + batch.expired),
        BatchErrors([*batch.problems]) if batch.problems else None,
        batch.output_file_id or None,
        batch.error_file_id or None,
        expires_at=int(batch.expires_s),
        metadata=batch.metadata,
        **times,
    )


# --- routes ----------------------------------------------------------------------------------------------

_FORM_FIELDS = {
    "file": {"type": "string", "format": "binary"},
    "purpose": {"enum": [*_PURPOSES]},
    "expires_after[anchor]": {"enum": ["created_at"]},
    "expires_after[seconds]": {"type": "integer", "minimum": _MIN_EXPIRES_S, "maximum": _MAX_EXPIRES_S},
}
_FORM = {"type": "object", "properties": _FORM_FIELDS, "required": ["file", "purpose"]}
_AFTER = {"type": "string"}


def _limit(most: int) -> dict[str, Any]:
    return {"type": "integer", "minimum": 1, "maximum": most}


_ORDER = {"enum": ["asc", "desc"]}
_FILE_QUERY = {"after": _AFTER, "limit": _limit(_MAX_FILES_PAGE), "order": _ORDER, "purpose": {"type": "string"}}
_BATCH_QUERY = {"after": _AFTER, "limit": _limit(_MAX_BATCHES_PAGE)}


def protocol(policy: Policy) -> HttpProtocol:
    """Return the table of the routes."""
    api = _Routes(policy)
    spool = Spool(policy.max_file_bytes + _FORM_BYTES, policy.upload_folder)

    def route(method: str, path: str, endpoint: Any, operation: Operation, spool: Spool | None = None) -> Route:
        return Route(method, path, endpoint, role="infer", operation=operation, spool=spool)

    file, batch, one = {JSON: FileObject}, {JSON: BatchObject}, "/v1/files/{file_id}"
    batch_one = "/v1/batches/{batch_id}"
    upload = Operation("Upload a file", {200: file}, {"multipart/form-data": _FORM})
    listed = Operation("List files, the newest first", {200: {JSON: FileList}}, query=_FILE_QUERY)
    content = Operation("Return the content of a file", {200: {OCTET_STREAM: None}})
    create = Operation("Create a batch of the lines of a file", {200: batch}, {JSON: BatchCreation})
    batches = Operation("List batches, the newest first", {200: {JSON: BatchList}}, query=_BATCH_QUERY)
    cancel = Operation("Cancel a batch", {200: batch}, {JSON: {"type": "object"}}, is_body_required=False)
    routes = (
        route("POST", "/v1/files", api.upload, upload, spool),
        route("GET", "/v1/files", api.list_files, listed),
        route("GET", one, api.read_file, Operation("Describe a file", {200: file})),
        route("DELETE", one, api.delete_file, Operation("Delete a file", {200: {JSON: DeletedFile}})),
        route("GET", f"{one}/content", api.content, content),
        route("POST", "/v1/batches", api.create, create),
        route("GET", "/v1/batches", api.list_batches, batches),
        route("GET", batch_one, api.read_batch, Operation("Return a batch and its progress", {200: batch})),
        route("POST", f"{batch_one}/cancel", api.cancel, cancel),
    )
    reference = "https://platform.openai.com/docs/api-reference/batch"
    errors = ErrorResponses(_STATUSES, {JSON: FileError})
    return HttpProtocol("batches", routes, format_error, errors=errors, reference=reference)


def format_error(error: DragomanError | HttpError, _request_id: str = "") -> HttpResponse:
    """Format an error in the shape of OpenAI's API."""
    status, headers = error.status, error.headers if isinstance(error, HttpError) else error_headers(error)
    kind = {401: "authentication_error", 403: "permission_error", 404: "invalid_request_error", 429: "rate_limit_error"}
    name = kind.get(status, "invalid_request_error" if status < 500 else "server_error")
    message = error.message
    param = found[1] if isinstance(error, InvalidInput) and (found := re.match(r"`([^`]+)`:", message)) else None
    body = FileError(ErrorBody(replace_surrogates(message), name, param, status))
    return message_response(body, status, headers)


class _Routes:
    """The endpoints."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    # --- files ---------------------------------------------------------------------------------------------------

    def upload(self, http: HttpRequest) -> EngineCall[StoredFile, HttpResponse]:
        fields = parse_form(http.body, http.headers.get("content-type", ""))
        known = {*_FORM_FIELDS}
        unknown = [name for name in fields if name not in known]
        reject_unknown(unknown, known, self._policy)
        file, purpose = fields.get("file"), _required(fields, "purpose")
        if file is None or not file.filename:
            raise InvalidInput("`file`: expected a file with a name in the form, got none")
        if purpose not in _PURPOSES:
            raise InvalidInput(f"`purpose`: expected one of {', '.join(_PURPOSES)}, got {purpose[:64]!r}")
        if len(file.content) > self._policy.max_file_bytes:
            most = self._policy.max_file_bytes
            raise HttpError(413, f"the file is larger than the limit max_file_bytes: expected at most {most} bytes")
        filename = file.filename.replace("\\", "/").rpartition("/")[2][:255]
        call = calls.AddFile(filename, purpose, file.content, _expires_after_s(fields))
        headers = ignored_header(unknown)
        return EngineCall(Request(call), lambda response: message_response(_file_object(response.answer), 200, headers))

    def list_files(self, http: HttpRequest) -> EngineCall[list[StoredFile], HttpResponse]:
        query = parse_query(http.query, _FILE_QUERY)
        limit = limit_of(query, _MAX_FILES_PAGE, _MAX_FILES_PAGE)
        order, purpose = query.get("order", "desc"), query.get("purpose")
        if order not in ("asc", "desc"):
            raise InvalidInput(f"query parameter 'order': expected asc or desc, got {order[:32]!r}")

        def reply(response: Response[list[StoredFile]]) -> HttpResponse:
            found = [file for file in response.answer if purpose in (None, file.purpose)]
            chosen, more = page(found if order == "asc" else found[::-1], query, limit, lambda file: file.id)
            data = [*map(_file_object, chosen)]
            return message_response(FileList(data, more, *_ends([each.id for each in data])))

        return EngineCall(Request(calls.ListFiles()), reply)

    def read_file(self, http: HttpRequest) -> EngineCall[StoredFile, HttpResponse]:
        call = calls.ReadFile(http.params["file_id"])
        return EngineCall(Request(call), lambda response: message_response(_file_object(response.answer)))

    def delete_file(self, http: HttpRequest) -> EngineCall[None, HttpResponse]:
        file_id = http.params["file_id"]
        return EngineCall(Request(calls.DeleteFile(file_id)), lambda _: message_response(DeletedFile(file_id)))

    def content(self, http: HttpRequest) -> EngineCall[tuple[StoredFile, str], HttpResponse]:
        def reply(response: Response[tuple[StoredFile, str]]) -> HttpResponse:
            return HttpResponse(200, map_content(response.answer[1]), (("content-type", OCTET_STREAM),))

        return EngineCall(Request(calls.OpenFile(http.params["file_id"])), reply, in_thread=True)

    # --- batches -------------------------------------------------------------------------------------------------

    def create(self, http: HttpRequest) -> EngineCall[Batch, HttpResponse]:
        body, headers = parse_body(object_body(http.body, self._policy), BatchCreation, self._policy)
        if body.endpoint != "*" and not body.endpoint.startswith("/"):
            got = f"got {body.endpoint[:200]!r}"
            raise InvalidInput(f"`endpoint`: expected a path, such as /v1/chat/completions, or *, {got}")
        expires = body.output_expires_after
        call = calls.CreateBatch(
            body.input_file_id,
            body.endpoint,
            body.completion_window,
            _window_s(body.completion_window),
            body.metadata,
            None if expires is None else expires.seconds,
        )
        return _batch_call(call, headers)

    def list_batches(self, http: HttpRequest) -> EngineCall[list[Batch], HttpResponse]:
        query = parse_query(http.query, _BATCH_QUERY)
        limit = limit_of(query, 20, _MAX_BATCHES_PAGE)

        def reply(response: Response[list[Batch]]) -> HttpResponse:
            chosen, more = page(response.answer[::-1], query, limit, lambda batch: batch.id)
            data = [*map(_batch_object, chosen)]
            return message_response(BatchList(data, more, *_ends([each.id for each in data])))

        return EngineCall(Request(calls.ListBatches("openai")), reply)

    def read_batch(self, http: HttpRequest) -> EngineCall[Batch, HttpResponse]:
        return _batch_call(calls.ReadBatch(http.params["batch_id"], "openai"))

    def cancel(self, http: HttpRequest) -> EngineCall[Batch, HttpResponse]:
        return _batch_call(calls.CancelBatch(http.params["batch_id"], "openai"))


def _batch_call(
    call: calls.CreateBatch | calls.ReadBatch | calls.CancelBatch, headers: Headers = ()
) -> EngineCall[Batch, HttpResponse]:
    return EngineCall(Request(call), lambda response: message_response(_batch_object(response.answer), 200, headers))


def _ends(ids: list[str]) -> tuple[str | None, str | None]:
    return (ids[0], ids[-1]) if ids else (None, None)


def _required(fields: Mapping[str, FormField], name: str) -> str:
    field = fields.get(name)
    if field is None:
        raise InvalidInput(f"`{name}`: this field is required in the form")
    return field.text()


def _expires_after_s(fields: Mapping[str, FormField]) -> int | None:
    anchor, seconds = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    if anchor is None or anchor.text() != "created_at":
        raise InvalidInput("`expires_after[anchor]`: expected created_at")
    text = "" if seconds is None else seconds.text()
    if not text.isdecimal() or len(text) > 9 or not _MIN_EXPIRES_S <= int(text) <= _MAX_EXPIRES_S:
        expected = f"an integer from {_MIN_EXPIRES_S} to {_MAX_EXPIRES_S}"
        raise InvalidInput(f"`expires_after[seconds]`: expected {expected}, got {text[:32]!r}")
    return int(text)


def _window_s(text: str) -> float:
    found = _WINDOW.fullmatch(text)
    seconds = int(found[1]) * _UNITS_S[found[2]] if found else 0
    if not 0 < seconds <= _MAX_WINDOW_S:
        expected = "a duration up to 30 days, such as 24h or 30m"
        raise InvalidInput(f"`completion_window`: expected {expected}, got {text[:32]!r}")
    return float(seconds)
