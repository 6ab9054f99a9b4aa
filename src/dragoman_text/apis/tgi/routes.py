"""Endpoints of the API of Text Generation Inference (TGI)."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from msgspec import structs

from dragoman.core.calls import (
    Describe,
    DescribeServer,
    Generate,
    ModelDescription,
    Ready,
    Request,
    Response,
    ServerDescription,
    Tokenize,
)
from dragoman.core.errors import (
    DeadlineExceeded,
    DragomanError,
    Forbidden,
    InvalidInput,
    InvalidOutput,
    ModelFailed,
    ModelNameMissing,
    ModelNotFound,
    NotReady,
    NotSupported,
    Overloaded,
    RateLimited,
    Unauthorized,
    WorkerLost,
)
from dragoman.core.text import Tokenized, TokenSpan
from dragoman.protocols.parameters import ParsedParameters, build_request, ignored_header, object_body
from dragoman.protocols.wire import (
    EVENT_STREAM_HEADERS,
    EndpointResult,
    EngineCall,
    HttpError,
    HttpProtocol,
    HttpRequest,
    HttpResponse,
    HttpStream,
    Policy,
    PreliminaryCall,
    Route,
    error_headers,
    find_error_row,
    json_response,
    replace_surrogates,
)
from dragoman_text.apis.common.messages import json_errors
from dragoman_text.apis.common.tokenize import is_vllm_request, parse_tokenize_request
from dragoman_text.apis.tgi import messages
from dragoman_text.apis.tgi.request import (
    TgiFormatter,
    event,
    parse_chat_to_tokenize,
    parse_request,
    parse_text_to_tokenize,
    resolve_model,
    wants_stream,
)
from dragoman_text.limits import TGI_BEST_OF, TGI_INPUTS, TGI_STOPS

_TYPES: Sequence[tuple[type[DragomanError], int, str]] = (
    (ModelNameMissing, 400, "validation"),
    (InvalidInput, 422, "validation"),
    (NotSupported, 422, "validation"),
    (ModelNotFound, 404, "not_found"),
    (Unauthorized, 401, "unauthorized"),
    (Forbidden, 403, "forbidden"),
    (NotReady, 503, "healthcheck"),
    (Overloaded, 429, "overloaded"),
    (RateLimited, 429, "overloaded"),
    (DeadlineExceeded, 504, "generation"),
    (ModelFailed, 424, "generation"),
    (InvalidOutput, 500, "incomplete_generation"),
    (WorkerLost, 500, "incomplete_generation"),
)
# TGI sends these as events of a stream, also before the first token.
_IN_STREAM = ("validation", "generation", "overloaded", "incomplete_generation")


class Tgi:
    """Endpoints of TGI."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def generate_or_stream(self, http: HttpRequest) -> EndpointResult:
        """`POST /`: stream if the body asks for it; otherwise return a list."""
        since_s = time.monotonic()
        body = object_body(http.body, self._policy)
        if wants_stream(body):
            return self._stream(body, http, since_s)
        return self._complete(body, http, since_s, listed=True)

    def generate_hub_path(self, http: HttpRequest) -> EndpointResult:
        """`POST /models/organisation/name`, as Hugging Face Hub clients address models: only the name is used."""
        return self.generate_or_stream(structs.replace(http, params={"model": http.params["version"]}))

    def generate(self, http: HttpRequest) -> EndpointResult:
        return self._complete(object_body(http.body, self._policy), http, time.monotonic(), listed=False)

    def generate_stream(self, http: HttpRequest) -> EndpointResult:
        return self._stream(object_body(http.body, self._policy), http, time.monotonic())

    def _complete(self, body: dict[str, Any], http: HttpRequest, since_s: float, *, listed: bool) -> EndpointResult:
        def then(model: str, ignored_fields: tuple[str, ...]) -> EndpointResult:
            ignored = (*ignored_fields, "stream") if wants_stream(body) else ignored_fields  # the path decides
            parsed = parse_request(body, self._policy, ignored, stream=False)
            call = Generate(prompts=parsed.inputs, sampling=parsed.sampling)
            formatter = TgiFormatter(parsed, since_s, always_listed=listed)
            return EngineCall(
                build_request(call, http, self._policy, model),
                formatter.format_complete,
                parsed.parameters.error_formatter(write_error),
            )

        return resolve_model(body, http, then)

    def _stream(self, body: dict[str, Any], http: HttpRequest, since_s: float) -> EndpointResult:
        def then(model: str, ignored_fields: tuple[str, ...]) -> EndpointResult:
            try:
                parsed = parse_request(body, self._policy, ignored_fields, stream=True)
            except InvalidInput as error:
                return _error_in_stream(error)
            call = Generate(prompts=parsed.inputs, sampling=parsed.sampling, stream=True)
            formatter = TgiFormatter(parsed, since_s)
            request, refused = (
                build_request(call, http, self._policy, model),
                parsed.parameters.error_formatter(_error_in_stream),
            )
            return HttpStream(request, formatter.format_chunk, _error_event, b"", formatter.stream_headers, refused)

        return resolve_model(body, http, then)

    # --- tokens ----------------------------------------------------------------------------------------------

    def tokenize(self, http: HttpRequest) -> EndpointResult:
        body = object_body(http.body, self._policy)
        if is_vllm_request(body):
            return parse_tokenize_request(body, http, self._policy)

        def then(model: str, ignored_fields: tuple[str, ...]) -> EndpointResult:
            text, ignored = parse_text_to_tokenize(body, self._policy, ignored_fields)

            def reply(response: Response[Tokenized]) -> HttpResponse:
                spans = [_span(token) for token in response.answer.tokens]
                return json_response(spans, 200, ignored_header(ignored))

            return EngineCall(
                build_request(Tokenize(text), http, self._policy, model), reply, _error_formatter("inputs")
            )

        return resolve_model(body, http, then)

    def chat_tokenize(self, http: HttpRequest) -> EndpointResult:
        body = object_body(http.body, self._policy)

        def then(model: str, ignored_fields: tuple[str, ...]) -> EndpointResult:
            chat, ignored = parse_chat_to_tokenize(body, self._policy, ignored_fields)

            def reply(response: Response[Tokenized]) -> HttpResponse:
                spans = [_span(token) for token in response.answer.tokens]
                value = {"tokenize_response": spans, "templated_text": response.answer.text}
                return json_response(value, 200, ignored_header(ignored))

            return EngineCall(
                build_request(Tokenize(chat), http, self._policy, model), reply, _error_formatter("messages")
            )

        return resolve_model(body, http, then)

    # --- health and information ---------------------------------------------------------------------------------------

    def health(self, http: HttpRequest) -> EngineCall[bool, HttpResponse]:
        def reply(response: Response[bool]) -> HttpResponse:
            if response.answer:
                return HttpResponse(200)
            return json_response({"error": "unhealthy", "error_type": "healthcheck"}, 503)

        return EngineCall(Request(Ready(), http.params.get("model", "")), reply)

    def info(self, http: HttpRequest) -> PreliminaryCall[ServerDescription]:
        def then(server: Response[ServerDescription]) -> EndpointResult:
            request = Request(Describe(Generate), http.params.get("model", ""))
            return EngineCall(request, lambda response: _info(response.answer, server.answer.version))

        return PreliminaryCall(Request(DescribeServer()), then)


def _info(model: ModelDescription, version: str) -> HttpResponse:
    details = model.details
    context = details.get("max_context")
    return json_response(
        {
            "model_id": details.get("model_id") or model.name,
            "model_sha": details.get("model_sha"),
            "model_dtype": details.get("dtype"),
            "model_device_type": details.get("device"),
            "model_pipeline_tag": "text-generation",
            "max_concurrent_requests": details.get("max_batch"),
            "max_best_of": TGI_BEST_OF,
            "max_stop_sequences": TGI_STOPS,
            "max_input_tokens": context - 1 if isinstance(context, int) else None,
            "max_total_tokens": context,
            "validation_workers": 1,
            "max_client_batch_size": TGI_INPUTS,
            "router": "dragoman",
            "version": version,
            "sha": None,
            "docker_label": None,
        }
    )


def _span(token: TokenSpan) -> dict[str, Any]:
    return {"id": token.id, "text": token.text, "start": token.start, "stop": token.stop}


def protocol(policy: Policy) -> HttpProtocol:
    """Return the routes of the protocol."""
    at = Tgi(policy)
    routes = [
        Route("POST", path, at.generate_or_stream, role="infer", operation=messages.GENERATE_OR_STREAM)
        for path in ("/", "/models/{model}")
    ]
    hub_path = "/models/{model}/{version}"  # of organisation and name
    routes.append(Route("POST", hub_path, at.generate_hub_path, role="infer", operation=messages.GENERATE_OR_STREAM))
    for base in ("", "/models/{model}"):
        for name, endpoint, operation in (
            ("generate", at.generate, messages.GENERATE),
            ("generate_stream", at.generate_stream, messages.GENERATE_STREAM),
            ("tokenize", at.tokenize, messages.TOKENIZE),
            ("chat_tokenize", at.chat_tokenize, messages.CHAT_TOKENIZE),
        ):
            routes.append(Route("POST", f"{base}/{name}", endpoint, role="infer", operation=operation))
        routes.append(Route("GET", f"{base}/health", at.health, health=True, operation=messages.HEALTH))
        routes.append(Route("GET", f"{base}/info", at.info, role="read", operation=messages.INFO))
    errors = json_errors([status for _, status, _ in _TYPES])
    return HttpProtocol("TGI", tuple(routes), write_error, errors=errors, reference=messages.REFERENCE)


# --- errors --------------------------------------------------------------------------------------------------


def write_error(error: DragomanError | HttpError, _request_id: str = "") -> HttpResponse:
    """Format an error as TGI does: `{"error": message, "error_type": type}`."""
    if isinstance(error, HttpError):
        kind = "validation" if error.status < 500 else "generation"
        return json_response({"error": error.message, "error_type": kind}, error.status, error.headers)
    return json_response(_error_body(error), _row(error)[0], error_headers(error))


def _row(error: DragomanError) -> tuple[int, str]:
    status, kind = find_error_row(error, _TYPES) or (500, "generation")
    return status, kind


def _error_body(error: DragomanError) -> dict[str, str]:
    kind = _row(error)[1]
    heads = {"validation": "Input validation error: ", "generation": "Request failed during generation: "}
    return {"error": replace_surrogates(heads.get(kind, "") + error.message), "error_type": kind}


def _error_formatter(prompt: str) -> Callable[[DragomanError], HttpResponse]:
    """Return a function that formats errors in which the prompt has this name."""
    return ParsedParameters(names={"prompt": prompt}).error_formatter(write_error)


def _error_event(error: DragomanError) -> bytes:
    return event(_error_body(error))


def _error_in_stream(error: DragomanError) -> HttpResponse:
    """Format an invalid streaming request as TGI does: as an event of a stream with status 200."""
    if isinstance(error, ModelNameMissing) or _row(error)[1] not in _IN_STREAM:
        return write_error(error)
    return HttpResponse(200, (_error_event(error),), EVENT_STREAM_HEADERS)
