"""Endpoints of LMI's inference API and of the SageMaker contract."""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from dragoman.core.calls import (
    Describe,
    DescribeModels,
    Embed,
    Generate,
    Infer,
    ModelDescription,
    Request,
    Response,
)
from dragoman.core.errors import DragomanError, InvalidInput, ServerError
from dragoman.core.text import Generation
from dragoman.formats.json_numbers import PARSER_ERRORS
from dragoman.formats.json_scan import check_json
from dragoman.protocols.custom_handlers import handler_call
from dragoman.protocols.metrics import routes as metrics
from dragoman.protocols.parameters import build_request
from dragoman.protocols.wire import (
    BackgroundCall,
    EndpointResult,
    EngineCall,
    Headers,
    HttpError,
    HttpProtocol,
    HttpRequest,
    HttpResponse,
    HttpStream,
    PartialResult,
    Policy,
    PreliminaryCall,
    ResultPoll,
    Route,
    json_response,
)
from dragoman_text.apis.common.messages import json_errors
from dragoman_text.apis.common.openai_format import split_model
from dragoman_text.apis.lmi import control, messages
from dragoman_text.apis.lmi.arrays import READERS, parse_arrays_request
from dragoman_text.apis.lmi.csv_arrays import CSV
from dragoman_text.apis.lmi.formats import Formatter, LmiErrors, format_dynamic, parse_codes
from dragoman_text.apis.lmi.model import lmi_model
from dragoman_text.apis.lmi.request import (
    ANY_MODEL,
    LmiRequest,
    attributes,
    is_form,
    is_openai_request,
    media_type,
    model_name,
    parse_request,
    with_version,
)
from dragoman_text.apis.lmi.schemas import parse_bedrock_request, parse_embeddings_request, parse_openai_request

_METRICS_PATH = "/server/metrics"
_SYNCHRONOUS = "x-synchronous"
_STARTING = "x-starting-token"
_NEXT = "x-next-token"
_MAX_ITEMS = "x-max-items"
_ATTRIBUTES = "x-amzn-sagemaker-custom-attributes"
_ALL = 1 << 31


def parse_result_poll(
    http: HttpRequest, error: Callable[[DragomanError | HttpError], HttpResponse]
) -> ResultPoll | None:
    """Return the fetch of an earlier response; None for a new request. Raises InvalidInput for an invalid number."""
    token = _header(http, _STARTING)
    if not token:
        return None
    most = _header(http, _MAX_ITEMS) or "-1"
    if not most.removeprefix("-").isdecimal() or len(most) > 9:
        raise InvalidInput(f"`{_MAX_ITEMS}` must be an integer; got '{most[:64]}'")

    def format_response(part: PartialResult | None) -> HttpResponse:
        if part is None:
            return error(HttpError(400, f"Invalid {_STARTING}: {token[:64]}"))
        if part.status == 0:
            pending = {"code": 202, "message": "The model result is not yet available"}
            return json_response(pending, 202, _next(part.next_token))
        if part.is_truncated:
            return error(HttpError(500, "the response was truncated"))
        return HttpResponse(part.status, part.body, (*part.headers, *_next(part.next_token)))

    return ResultPoll(token, int(most) if int(most) > 0 else _ALL, format_response)


def in_background(
    http: HttpRequest, result: EndpointResult, error: Callable[[DragomanError | HttpError], HttpResponse]
) -> EndpointResult:
    """Return the request unchanged, or as a background call if its headers request one."""
    if _header(http, _SYNCHRONOUS).lower() != "false":
        return result
    return BackgroundCall(result, error, lambda token: HttpResponse(200, (), _next(token)))


def _header(http: HttpRequest, name: str) -> str:
    """Return a header, or the same property in SageMaker's custom attributes."""
    return http.headers.get(name) or attributes(http).get(name, "")


def _next(token: str) -> Headers:
    return ((_NEXT, token), (_ATTRIBUTES, f"{_NEXT}={token}")) if token else ()


class _Body(msgspec.Struct, frozen=True):
    """The fields of a body that name a model; the others are not parsed here."""

    model: Any = None
    model_name: Any = None
    messages: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    prompt: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    inputs: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET

    def fields(self) -> list[str]:
        return [name for name in ("messages", "prompt", "inputs") if getattr(self, name) is not msgspec.UNSET]


_BODY = msgspec.json.Decoder(_Body)


def resolve_model(http: HttpRequest, policy: Policy, then: Callable[[str], EndpointResult]) -> EndpointResult:
    """Call `then` with the name of the model, "" for none.

    The field is `model_name`, or `model` in chats and completions of OpenAI. LMI ignores the latter, and its clients
    send any value: it counts only if such a model exists, or if it is a placeholder.
    """
    name = http.params.get("model", "") or model_name(http)
    if name:
        return then(name)
    named, is_model_name = _in_body(http, policy)
    if not named or (is_model_name and named not in ANY_MODEL):
        return then(named)

    def choose(response: Response[tuple[ModelDescription, ...]]) -> EndpointResult:
        return then(named if any(each.name == named for each in response.answer) else "")

    return PreliminaryCall(Request(DescribeModels()), choose)


def _in_body(http: HttpRequest, policy: Policy) -> tuple[str, bool]:
    """Return the name in a body, "" for none, and whether LMI itself uses it."""
    # The bodies of large arrays are not searched for a name.
    if media_type(http) in READERS or is_form(http) or b'"model' not in bytes(http.body):
        return "", True
    try:
        text = bytes(http.body)
        check_json(text, policy, elements=False)
        body = _BODY.decode(text)
    except (InvalidInput, *PARSER_ERRORS):  # reported when the body is parsed for its model
        return "", True
    is_openai = is_openai_request(body.fields())
    name = body.model if is_openai else body.model_name
    if not isinstance(name, str):
        return "", True
    # As at OpenAI's paths: an adapter follows a colon, and only the name of `organisation/name` is used.
    return (split_model(name)[0].rpartition("/")[2], False) if is_openai else (name, True)


# Models with a custom handler of this path answer it themselves, such as those of MLflow.
_INVOCATIONS = "/invocations"
_HANDLER = f"POST {_INVOCATIONS}"
_PATHS = (
    _INVOCATIONS,
    "/predictions/{model}",
    "/predictions/{model}/{version}",
    "/models/{model}/invoke",
    "/models/{model}/invocations",
)


class Lmi:
    """The inference endpoints."""

    def __init__(self, policy: Policy, errors: LmiErrors) -> None:
        self._policy = policy
        self._errors = errors

    def invoke(self, http: HttpRequest) -> EndpointResult:
        """Run an inference, now or later, or return the response of an earlier one."""
        return parse_result_poll(http, self._errors.write) or in_background(
            http, self._infer(with_version(http)), self._errors.write
        )

    def _infer(self, http: HttpRequest) -> EndpointResult:
        """Run an inference. The model is described first: its settings decide how the body is parsed."""

        def then(response: Response[ModelDescription]) -> EndpointResult:
            described = response.answer
            answers_itself = _HANDLER in described.handlers and http.path.endswith(_INVOCATIONS)
            if answers_itself and (media_type(http) == CSV or media_type(http) not in READERS):
                return handler_call(http, self._policy, described.name, http.params.get("version", ""), _INVOCATIONS)
            if Generate not in described.calls and Infer in described.calls:
                able = Embed in described.calls
                vectors = parse_embeddings_request(http, described, self._policy, self._errors) if able else None
                return vectors or parse_arrays_request(http, described, self._policy)
            model = lmi_model(described)
            try:
                request = parse_request(http, model, self._policy)
            except (InvalidInput, ServerError) as error:
                if model.rolling:
                    raise
                return format_dynamic(error)
            if isinstance(request, Mapping):  # as with TGI and vLLM, OpenAI's bodies are accepted at this path
                if model.bedrock and "messages" not in request:
                    return parse_bedrock_request(request, http, self._policy, model.name)
                return parse_openai_request(request, http, self._policy, self._errors, model)
            return self._generate(request, http, Formatter(request, model), model.name)

        def describe_model(name: str) -> PreliminaryCall[ModelDescription]:
            value = build_request(Generate(prompts=()), http, self._policy, name)
            return PreliminaryCall(Request(Describe(Generate, Infer), value.model, value.version), then)

        return resolve_model(http, self._policy, describe_model)

    def _generate(self, parsed: LmiRequest, http: HttpRequest, formatter: Formatter, model: str) -> EndpointResult:
        # LMI: the best of several completions is known at the end, so it is not streamed before.
        stream = formatter.streams and not formatter.ranked
        call = Generate(prompts=parsed.inputs, sampling=parsed.sampling, stream=stream)
        request: Request[Generation] = build_request(call, http, self._policy, model)

        def fault(error: DragomanError) -> HttpResponse:
            return self._errors.format_failure(error, parsed, formatter)

        if formatter.streams:
            return HttpStream(request, formatter.format_chunk, formatter.error, b"", formatter.headers, fault)
        return EngineCall(request, formatter.format_complete, fault)


def protocol(policy: Policy) -> HttpProtocol:
    errors = LmiErrors(parse_codes(policy.lmi_http_codes))
    at = Lmi(policy, errors)
    routes = [
        Route(
            "POST",
            path,
            at.invoke,
            role="infer",
            calls_handlers=path.endswith(_INVOCATIONS),
            operation=messages.INVOKE,
        )
        for path in _PATHS
    ]
    if policy.metrics_path != _METRICS_PATH:
        routes += metrics.routes(policy, _METRICS_PATH)
    described = json_errors(errors.statuses)
    return HttpProtocol(
        "LMI", (*routes, *control.routes(policy)), errors.write, errors=described, reference=messages.REFERENCE
    )
