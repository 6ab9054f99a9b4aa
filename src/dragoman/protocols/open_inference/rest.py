"""Open Inference Protocol over REST, with the binary tensor data extension."""

from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

from dragoman.core.calls import (
    Describe,
    DescribeServer,
    Index,
    Inference,
    ListModels,
    Live,
    Load,
    Ready,
    Request,
    Response,
    Unload,
)
from dragoman.core.errors import (
    DeadlineExceeded,
    DragomanError,
    Forbidden,
    InvalidInput,
    ModelNotFound,
    NotReady,
    NotSupported,
    Overloaded,
    ServerError,
    Unauthorized,
)
from dragoman.core.signature import TensorSpec
from dragoman.formats.body import HEADER_LENGTH, write_tensors
from dragoman.formats.json_print import json_chunks
from dragoman.formats.small_answer import write_answer, write_binary
from dragoman.protocols.open_inference.body import Wanted, address, read_control, read_infer
from dragoman.protocols.open_inference.custom_paths import handle
from dragoman.protocols.open_inference.derivatives import derivative, told
from dragoman.protocols.open_inference.extensions import ANY_RANK, classified, metadata_tensors
from dragoman.protocols.open_inference.headers import checked_headers
from dragoman.protocols.wire import (
    JSON_TYPE,
    EngineCall,
    Headers,
    HttpError,
    HttpProtocol,
    HttpRequest,
    HttpResponse,
    HttpStream,
    Policy,
    Route,
    control_token,
    find_error_row,
    json_response,
    replace_surrogates,
    retry_after,
)

_JSON_HEADERS: Headers = (JSON_TYPE,)
_BINARY_TYPE = ("content-type", "application/octet-stream")

_STATUS: Sequence[tuple[type[DragomanError], int]] = (
    (InvalidInput, 400),
    (NotSupported, 400),
    (ModelNotFound, 404),
    (Unauthorized, 401),
    (Forbidden, 403),
    (NotReady, 503),
    (Overloaded, 503),
    (DeadlineExceeded, 504),
    (ServerError, 500),
)


class OpenInferenceRest:
    """The endpoints. Each is a pure function of the request."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    # --- inference ---------------------------------------------------------------------------------------

    def infer(self, http: HttpRequest) -> EngineCall[Any, HttpResponse]:
        request, wanted, id_ = read_infer(http, self._policy)
        call: Any = request.call
        asked = derivative(request) if call.parameters else None
        if asked is not None:
            return EngineCall(asked, lambda response: self._write(wanted, id_, told(request, response)))
        return EngineCall(request, partial(self._write, wanted, id_))

    def infer_stream(self, http: HttpRequest) -> HttpStream[Inference]:
        """Not in the specification: the answers of a streaming model as server-sent events."""
        request, wanted, id_ = read_infer(http, self._policy)
        if wanted.binary or any(wanted.outputs.values()):
            raise InvalidInput("a stream of events carries JSON; expected no binary outputs")

        def piece(response: Response[Inference]) -> bytes:
            return b"data: " + b"".join(self._write(wanted, id_, response).body) + b"\n\n"

        def error(fault: DragomanError) -> bytes:
            return b"data: " + b"".join(write_error(fault).body) + b"\n\n"

        headers = (("content-type", "text/event-stream"), ("cache-control", "no-cache"))
        return HttpStream(request, piece, error, headers=headers)

    def _write(self, wanted: Wanted, id_: str | None, response: Response[Inference]) -> HttpResponse:
        if not (wanted.binary or wanted.outputs or wanted.classes):
            text = write_answer(response.answer, response.model, response.version, id_)
            if text is not None:
                return HttpResponse(200, (text,), _JSON_HEADERS)
        elif not wanted.classes:
            written = write_binary(response.answer, response.model, response.version, id_, wanted.is_binary)
            if written is not None:
                return HttpResponse(200, written[0], _binary_headers(written[1]))
        return self._written(wanted, id_, response)

    def _written(self, wanted: Wanted, id_: str | None, response: Response[Inference]) -> HttpResponse:
        answer = classified(response.answer, wanted.classes)
        outputs, blobs = write_tensors(answer.outputs, wanted.is_binary, self._policy)
        text = json_chunks(_envelope(response, id_, outputs))
        headers = _binary_headers(sum(map(len, text))) if blobs else _JSON_HEADERS
        if answer.metadata:
            headers += checked_headers(answer.metadata)
        return HttpResponse(200, (*text, *blobs), headers)

    # --- health and metadata -------------------------------------------------------------------------------

    def live(self, http: HttpRequest) -> EngineCall[bool, HttpResponse]:
        return EngineCall(Request(Live()), lambda r: self._health(r.answer, {"live": r.answer}))

    def ready(self, http: HttpRequest) -> EngineCall[bool, HttpResponse]:
        def reply(response: Response[bool]) -> HttpResponse:
            name = {"name": response.model} if response.model else {}
            return self._health(response.answer, {**name, "ready": response.answer})

        return EngineCall(Request(Ready(), *address(http)), reply)

    def _health(self, answer: bool, body: object) -> HttpResponse:
        # OIP: 200 is true, 4xx is false, and the body should be empty.
        status = 200 if answer else 400
        return json_response(body, status) if self._policy.health_json else HttpResponse(status)

    def server(self, http: HttpRequest) -> EngineCall[Any, HttpResponse]:
        return EngineCall(
            Request(DescribeServer()),
            lambda r: json_response(
                {"name": r.answer.name, "version": r.answer.version, "extensions": r.answer.extensions}
            ),
        )

    def models(self, http: HttpRequest) -> EngineCall[tuple[str, ...], HttpResponse]:
        return EngineCall(Request(ListModels()), lambda r: json_response({"models": r.answer}))

    def model(self, http: HttpRequest) -> EngineCall[Any, HttpResponse]:
        def reply(response: Response[Any]) -> HttpResponse:
            found = response.answer
            return json_response(
                {
                    "name": found.name,
                    **({"versions": found.versions} if found.versions else {}),
                    "platform": found.platform,
                    "inputs": _metadata(found.signature.inputs),
                    "outputs": _metadata(found.signature.outputs),
                    **({"details": found.details} if found.details else {}),
                }
            )

        return EngineCall(Request(Describe(), *address(http)), reply)

    # --- model control ---------------------------------------------------------------------------------------

    def index(self, http: HttpRequest) -> EngineCall[Any, HttpResponse]:
        call = Index(control_token(http.headers), bool(read_control(http, self._policy).ready))
        return EngineCall(
            Request(call),
            lambda r: json_response(
                [{"name": e.name, "version": e.version, "state": e.state, "reason": e.reason} for e in r.answer]
            ),
        )

    def load(self, http: HttpRequest) -> EngineCall[None, HttpResponse]:
        parameters = read_control(http, self._policy).parameters or {}
        for key in parameters:
            if key == "config" or key.startswith("file:"):
                raise NotSupported(f"parameter '{key}': models are loaded from the server's own disk as they lie there")
        return self._control(Load(control_token(http.headers)), http, parameters)

    def unload(self, http: HttpRequest) -> EngineCall[None, HttpResponse]:
        return self._control(
            Unload(control_token(http.headers)), http, read_control(http, self._policy).parameters or {}
        )

    def _control(
        self, call: Load | Unload, http: HttpRequest, parameters: Mapping[str, Any]
    ) -> EngineCall[None, HttpResponse]:
        version = parameters.get("version")
        if isinstance(version, bool | float):
            raise InvalidInput(f"parameter 'version': expected text, got {version!r}")
        version = "" if version is None else str(version)
        return EngineCall(Request(call, http.params["model"], version), lambda r: HttpResponse(200))


def protocol(policy: Policy) -> HttpProtocol:
    """The protocol's table."""
    at = OpenInferenceRest(policy)
    routes = [
        Route("GET", "/v2", at.server),
        Route("GET", "/v2/health/live", at.live, health=True),
        Route("GET", "/v2/health/ready", at.ready, health=True),
        Route("GET", "/v2/models", at.models),
        Route("POST", "/v2/repository/index", at.index),
        Route("POST", "/v2/repository/models/{model}/load", at.load),
        Route("POST", "/v2/repository/models/{model}/unload", at.unload),
    ]
    for model in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
        routes += [
            Route("GET", model, at.model),
            Route("GET", f"{model}/ready", at.ready, health=True),
            Route("POST", f"{model}/infer", at.infer),
            Route("POST", f"{model}/infer_stream", at.infer_stream),
        ]
    return HttpProtocol("Open Inference (V2)", tuple(routes), write_error, fallback=partial(handle, policy=policy))


def write_error(fault: DragomanError | HttpError) -> HttpResponse:
    """OIP: a 4xx or 5xx status and the body `{"error": message}`, on every path."""
    if isinstance(fault, HttpError):
        return json_response({"error": fault.message}, fault.status, fault.headers)
    (status,) = find_error_row(fault, _STATUS) or (500,)
    headers = (("www-authenticate", "Bearer"),) if status == 401 else retry_after(fault)
    return json_response({"error": replace_surrogates(fault.message)}, status, headers)


# --- small readers and writers ---------------------------------------------------------------------------------


@lru_cache(maxsize=512)
def _binary_headers(length: int) -> Headers:
    """Those of an answer with so many bytes of JSON before its binary data."""
    return _BINARY_TYPE, (HEADER_LENGTH, str(length))


def _envelope(response: Response[Inference], id_: str | None, outputs: list[Any]) -> dict[str, Any]:
    envelope: dict[str, Any] = {} if id_ is None else {"id": id_}
    envelope["model_name"] = response.model
    if response.version:
        envelope["model_version"] = response.version
    if response.answer.parameters:
        envelope["parameters"] = dict(response.answer.parameters)
    envelope["outputs"] = outputs
    return envelope


def _metadata(specs: tuple[TensorSpec, ...]) -> list[dict[str, Any]]:
    return [
        {"name": name, "datatype": datatype, "shape": shape, **({"parameters": {ANY_RANK: True}} if any_rank else {})}
        for name, datatype, shape, any_rank in metadata_tensors(specs)
    ]
