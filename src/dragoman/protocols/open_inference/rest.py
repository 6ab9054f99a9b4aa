"""Open Inference Protocol over REST, with the binary tensor data extension."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

from dragoman.core.calls import (
    ClassLabels,
    Describe,
    DescribeServer,
    Handled,
    Index,
    IndexEntry,
    Inference,
    ListModels,
    Live,
    Load,
    MayControl,
    ModelDescription,
    ModelStatistics,
    ReadStatistics,
    Ready,
    Request,
    Response,
    ServerDescription,
    States,
    Unload,
)
from dragoman.core.errors import (
    InvalidInput,
)
from dragoman.core.signature import TensorSpec
from dragoman.formats.body import HEADER_LENGTH, serialize_tensors
from dragoman.formats.config_override import parse_overrides
from dragoman.formats.json_text import json_chunks
from dragoman.formats.model_config import config_json
from dragoman.formats.raw import raw_from_tensor
from dragoman.formats.shared_regions import write_output
from dragoman.formats.small_messages import serialize_binary_response, serialize_small_response
from dragoman.protocols.custom_handlers import check_headers, handler_call
from dragoman.protocols.open_inference import messages, server_settings, shared_memory
from dragoman.protocols.open_inference.classification import classified_call, classify
from dragoman.protocols.open_inference.derivatives import derivative_request, inference_response
from dragoman.protocols.open_inference.extensions import (
    LOAD_PARAMETERS,
    check_unload_parameters,
    metadata_tensors,
    parse_version_weights,
    platform_and_versions,
    public_details,
)
from dragoman.protocols.open_inference.messages import (
    Liveness,
    ModelMetadata,
    ModelNames,
    ModelState,
    Readiness,
    ServerMetadata,
    TensorMetadata,
)
from dragoman.protocols.open_inference.model_config import config_message
from dragoman.protocols.open_inference.rest_request import (
    RestOutputOptions,
    parse_control_request,
    parse_infer_request,
    path_model,
)
from dragoman.protocols.open_inference.statistics import statistics_list
from dragoman.protocols.wire import (
    EVENT_STREAM_HEADERS,
    JSON,
    JSON_TYPE,
    EngineCall,
    Headers,
    HttpProtocol,
    HttpRequest,
    HttpResponse,
    HttpStream,
    Policy,
    PreliminaryCall,
    Route,
    bearer_token,
    error_formatter,
    error_responses,
    json_response,
    message_response,
)

_STATUS_PATH = "/v2/repository/status"
_JSON_HEADERS: Headers = (JSON_TYPE,)
_MAX_IRREGULAR_BYTES = 1 << 20  # of a request that is searched for texts
_BINARY_TYPE = ("content-type", "application/octet-stream")

format_error = error_formatter()


class OpenInferenceRest:
    """The endpoints. Each is a pure function of the request."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    # --- inference ---------------------------------------------------------------------------------------

    def infer(self, http: HttpRequest) -> EngineCall[Any, HttpResponse] | PreliminaryCall[ModelDescription]:
        try:
            parsed = parse_infer_request(http, self._policy)
        except InvalidInput as error:
            if self._policy.irregular_texts or b'"BYTES"' not in bytes(http.body[:_MAX_IRREGULAR_BYTES]):
                raise
            return self._infer_irregular(http, error)
        return self._infer(*parsed)

    def _infer_irregular(self, http: HttpRequest, error: InvalidInput) -> PreliminaryCall[ModelDescription]:
        """Parse an invalid request again with the rules of MLServer if its model is one of MLServer."""

        def infer(response: Response[ModelDescription]) -> EngineCall[Any, HttpResponse]:
            if not response.answer.signature.unchecked:
                raise error
            return self._infer(*parse_infer_request(http, replace(self._policy, irregular_texts=True)))

        return PreliminaryCall(Request(Describe(), *path_model(http)), infer)

    def _infer(
        self, request: Request[Inference], options: RestOutputOptions, id_: str | None
    ) -> EngineCall[Any, HttpResponse]:
        call: Any = request.call
        derivative = derivative_request(request) if call.parameters else None
        format_response = partial(self._format_shared if options.regions else self._format_infer, options, id_)
        if derivative is not None:
            return EngineCall(derivative, lambda response: format_response(inference_response(request, response)))
        if options.classes:
            return classified_call(request, options.classes, format_response)
        return EngineCall(request, format_response)

    def infer_stream(self, http: HttpRequest) -> HttpStream[Inference] | PreliminaryCall[ModelDescription]:
        """Not in the specification: the responses of a streaming model as server-sent events."""
        request, options, id_ = parse_infer_request(http, self._policy)
        if options.binary or any(options.outputs.values()) or options.regions:
            raise InvalidInput("a stream of events carries JSON; expected no outputs in binary or in shared memory")

        def stream(change: Callable[[Response[Inference]], Response[Inference]]) -> HttpStream[Inference]:
            def format_chunk(response: Response[Inference]) -> bytes:
                return _format_event(self._format_infer(options, id_, change(response)))

            return HttpStream(
                request, format_chunk, lambda error: _format_event(format_error(error)), headers=EVENT_STREAM_HEADERS
            )

        if not options.classes:
            return stream(lambda response: response)
        describe = Request(Describe(), request.model, request.version)
        return PreliminaryCall(describe, lambda r: stream(partial(classify, r.answer, options.classes)))

    def _format_infer(self, options: RestOutputOptions, id_: str | None, response: Response[Inference]) -> HttpResponse:
        if not (options.binary or options.outputs):
            text = serialize_small_response(response.answer, response.model, response.version, id_)
            if text is not None:
                return HttpResponse(200, (text,), _JSON_HEADERS)
        else:
            binary = serialize_binary_response(
                response.answer, response.model, response.version, id_, options.is_binary
            )
            if binary is not None:
                return HttpResponse(200, binary[0], _binary_headers(binary[1]))
        inference = response.answer
        outputs, blobs = serialize_tensors(inference.outputs, options.is_binary, self._policy)
        chunks = json_chunks(_envelope(response, id_, outputs))
        headers = _binary_headers(sum(map(len, chunks))) if blobs else _JSON_HEADERS
        if inference.metadata:
            headers += check_headers(inference.metadata)
        return HttpResponse(200, (*chunks, *blobs), headers)

    def _format_shared(
        self, options: RestOutputOptions, id_: str | None, response: Response[Inference]
    ) -> HttpResponse:
        """Write the outputs that have a region of shared memory into it, and format the others."""
        inference = response.answer
        written = {name for name in inference.outputs if name in options.regions}
        for name in written:
            write_output(options.regions[name], name, raw_from_tensor(inference.outputs[name]), options.held)
        rest = {name: tensor for name, tensor in inference.outputs.items() if name not in written}
        rows, blobs = serialize_tensors(rest, options.is_binary, self._policy)
        others = iter(rows)
        outputs = [
            {"name": name, "datatype": tensor.datatype.name, "shape": tensor.shape} if name in written else next(others)
            for name, tensor in inference.outputs.items()
        ]
        chunks = json_chunks(_envelope(response, id_, outputs))
        headers = _binary_headers(sum(map(len, chunks))) if blobs else _JSON_HEADERS
        return HttpResponse(200, (*chunks, *blobs), headers + check_headers(inference.metadata))

    def handle(self, http: HttpRequest) -> EngineCall[Handled, HttpResponse]:
        """A path that the model itself handles. Raises ModelNotFound if no model has a handler for it."""
        return handler_call(http, self._policy)

    # --- health and metadata -------------------------------------------------------------------------------

    def live(self, http: HttpRequest) -> EngineCall[bool, HttpResponse]:
        return EngineCall(Request(Live()), lambda r: self._health(http, r.answer, Liveness(r.answer)))

    def ready(self, http: HttpRequest) -> EngineCall[bool, HttpResponse]:
        def format_response(response: Response[bool]) -> HttpResponse:
            return self._health(http, response.answer, Readiness(response.answer, response.model))

        return EngineCall(Request(Ready(), *path_model(http)), format_response)

    def _health(self, http: HttpRequest, is_healthy: bool, body: object) -> HttpResponse:
        # OIP: 200 is true, 4xx is false, and the body should be empty. KServe's client, on httpx, parses it.
        status, headers = 200 if is_healthy else 400, http.headers
        is_kserve = headers.get("user-agent", "").startswith("python-httpx/") or headers.get("accept") == JSON
        return message_response(body, status) if self._policy.health_json or is_kserve else HttpResponse(status)

    def server(self, http: HttpRequest) -> EngineCall[Any, HttpResponse]:
        return EngineCall(
            Request(DescribeServer()),
            lambda r: message_response(ServerMetadata(r.answer.name, r.answer.version, r.answer.extensions)),
        )

    def models(self, http: HttpRequest) -> EngineCall[tuple[str, ...], HttpResponse]:
        return EngineCall(Request(ListModels()), lambda r: message_response(ModelNames(r.answer)))

    def model(self, http: HttpRequest) -> EngineCall[Any, HttpResponse]:
        def format_response(response: Response[ModelDescription]) -> HttpResponse:
            model = response.answer
            content_type = model.signature.content_type
            return message_response(
                ModelMetadata(
                    model.name,
                    inputs=_metadata(model.signature.inputs, {}),
                    outputs=_metadata(model.signature.outputs, model.labels),
                    **platform_and_versions(model),
                    parameters={"content_type": content_type} if content_type else {},
                    details=public_details(model),
                )
            )

        return EngineCall(Request(Describe(), *path_model(http)), format_response)

    def statistics(self, http: HttpRequest) -> EngineCall[tuple[ModelStatistics, ...], HttpResponse]:
        request = Request(ReadStatistics(), *path_model(http))
        return EngineCall(request, lambda r: message_response(statistics_list(r.answer)))

    def config(self, http: HttpRequest) -> EngineCall[ModelDescription, HttpResponse]:
        request = Request(Describe(), *path_model(http))
        return EngineCall(request, lambda r: json_response(config_json(config_message(r.answer))))

    # --- model control ---------------------------------------------------------------------------------------

    def index(self, http: HttpRequest) -> EngineCall[Any, HttpResponse]:
        call = Index(bearer_token(http.headers), bool(parse_control_request(http, self._policy).ready))
        return EngineCall(
            Request(call),
            lambda r: message_response([ModelState(e.name, e.version, e.state, e.reason) for e in r.answer]),
        )

    def status(self, http: HttpRequest) -> PreliminaryCall[bool]:
        """Not in the specification: states, reasons and worker processes, for `dragoman status` and the console."""
        token = bearer_token(http.headers)

        def list_states(
            ready: bool, may_control: bool, problems: tuple[str, ...]
        ) -> EngineCall[tuple[IndexEntry, ...], HttpResponse]:
            def format_response(response: Response[tuple[IndexEntry, ...]]) -> HttpResponse:
                return message_response(messages.server_status(ready, may_control, problems, response.answer))

            return EngineCall(Request(States(token)), format_response)

        def find_problems(ready: bool, may_control: bool) -> PreliminaryCall[ServerDescription]:
            return PreliminaryCall(
                Request(DescribeServer()), lambda server: list_states(ready, may_control, server.answer.problems)
            )

        def then(ready: Response[bool]) -> PreliminaryCall[bool]:
            return PreliminaryCall(Request(MayControl(token)), lambda may: find_problems(ready.answer, may.answer))

        return PreliminaryCall(Request(Ready()), then)

    def load(self, http: HttpRequest) -> EngineCall[None, HttpResponse]:
        parameters = parse_control_request(http, self._policy).parameters or {}
        config, files = parse_overrides(http.params["model"], parameters, self._policy, LOAD_PARAMETERS)
        weights = parse_version_weights(parameters)
        call = Load(bearer_token(http.headers), version_weights=weights, config=config, files=files)
        return self._control(call, http, parameters)

    def unload(self, http: HttpRequest) -> EngineCall[None, HttpResponse]:
        parameters = parse_control_request(http, self._policy).parameters or {}
        check_unload_parameters(parameters)
        return self._control(Unload(bearer_token(http.headers), may_be_unknown=True), http, parameters)

    def _control(
        self, call: Load | Unload, http: HttpRequest, parameters: Mapping[str, Any]
    ) -> EngineCall[None, HttpResponse]:
        version = parameters.get("version")
        if isinstance(version, bool | float):
            raise InvalidInput(f"parameter 'version': expected text, got {version!r}")
        version = "" if version is None else str(version)
        return EngineCall(Request(call, http.params["model"], version), lambda r: HttpResponse(200))


def protocol(policy: Policy) -> HttpProtocol:
    """Return the routes of the protocol."""
    endpoints = OpenInferenceRest(policy)
    has_body = policy.health_json
    live = messages.health("Whether the server is live", Liveness, has_body=has_body)
    ready = messages.health("Whether all models are ready", Readiness, has_body=has_body)
    model_ready = messages.health("Whether a model is ready", Readiness, has_body=has_body)
    control = "/v2/repository"
    routes = [
        Route("GET", "/v2", endpoints.server, role="read", operation=messages.SERVER),
        Route("GET", "/v2/health/live", endpoints.live, health=True, operation=live),
        Route("GET", "/v2/health/ready", endpoints.ready, health=True, operation=ready),
        Route("GET", "/v2/models", endpoints.models, role="read", operation=messages.MODELS),
        Route("GET", "/v2/models/stats", endpoints.statistics, role="read", operation=messages.STATISTICS),
        Route("GET", _STATUS_PATH, endpoints.status, role="read", is_administrative=True, operation=messages.STATUS),
        Route("POST", f"{control}/index", endpoints.index, operation=messages.INDEX),
        Route("POST", f"{control}/models/{{model}}/load", endpoints.load, operation=messages.LOAD),
        Route("POST", f"{control}/models/{{model}}/unload", endpoints.unload, operation=messages.UNLOAD),
    ]
    routes += shared_memory.routes(policy) + server_settings.routes(policy)
    for model in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
        infer, stream = f"{model}/infer", f"{model}/infer_stream"
        routes += [
            Route("GET", model, endpoints.model, role="read", operation=messages.MODEL),
            Route("GET", f"{model}/config", endpoints.config, role="read", operation=messages.CONFIG),
            Route("GET", f"{model}/stats", endpoints.statistics, role="read", operation=messages.STATISTICS),
            Route("GET", f"{model}/ready", endpoints.ready, health=True, operation=model_ready),
            Route("POST", infer, endpoints.infer, role="infer", operation=messages.INFER),
            Route("POST", stream, endpoints.infer_stream, role="infer", operation=messages.INFER_STREAM),
        ]
    errors = error_responses()
    return HttpProtocol("Open Inference (V2)", tuple(routes), format_error, fallback=endpoints.handle, errors=errors)


def _format_event(response: HttpResponse) -> bytes:
    return b"data: " + b"".join(response.body) + b"\n\n"


@lru_cache(maxsize=512)
def _binary_headers(json_size: int) -> Headers:
    return _BINARY_TYPE, (HEADER_LENGTH, str(json_size))


def _envelope(response: Response[Inference], id_: str | None, outputs: list[Any]) -> dict[str, Any]:
    envelope: dict[str, Any] = {} if id_ is None else {"id": id_}
    envelope["model_name"] = response.model
    if response.version:
        envelope["model_version"] = response.version
    if response.answer.parameters:
        envelope["parameters"] = dict(response.answer.parameters)
    envelope["outputs"] = outputs
    return envelope


def _metadata(specs: tuple[TensorSpec, ...], labels: Mapping[str, ClassLabels]) -> list[TensorMetadata]:
    return [
        TensorMetadata(name, datatype, shape, parameters)
        for name, datatype, shape, parameters in metadata_tensors(specs, labels)
    ]
