"""The generate extension of the Open Inference Protocol: `generate` and `generate_stream` beside `infer`."""

from collections.abc import Mapping, Sequence
from typing import Any

from dragoman.core.calls import Generate, Response
from dragoman.core.errors import (
    DeadlineExceeded,
    DragomanError,
    Forbidden,
    InvalidInput,
    ModelFailed,
    ModelNotFound,
    NotReady,
    NotSupported,
    Overloaded,
    RateLimited,
    Unauthorized,
)
from dragoman.core.sampling import check_value, flag, format_value, integer, number, text, texts
from dragoman.core.text import Generation, Sampling
from dragoman.protocols.open_inference import messages
from dragoman.protocols.text_common.parameters import (
    EVENT_STREAM,
    GRAMMAR,
    RESPONSE_FORMAT,
    Parameter,
    ParsedParameters,
    build_request,
    event,
    get_object,
    object_body,
    option,
    parse_parameters,
    reject_unknown,
    sets,
)
from dragoman.protocols.wire import (
    EndpointResult,
    EngineCall,
    HttpError,
    HttpProtocol,
    HttpRequest,
    HttpResponse,
    HttpStream,
    Policy,
    Route,
    error_headers,
    find_error_row,
    json_response,
    replace_surrogates,
)

_DEFAULT_MAX_TOKENS = 20  # by the extension
_FIELDS = ("text_input", "parameters", "id")
# Parameters named like the fields of Sampling that they set.
_SAME = (
    "do_sample",
    "seed",
    "top_k",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "best_of",
    "num_beams",
    "length_penalty",
    "early_stopping",
    "truncate",
    "ignore_eos",
    "stop_token_ids",
    "bad_words",
    "logit_bias",
    "allowed_token_ids",
    "include_stop",
    "skip_special_tokens",
)
# OIP: these four and `stop` and `best_of` are named; others are allowed.
_PARAMETERS: Mapping[str, Parameter] = {
    **{name: sets(name) for name in _SAME},
    "temperature": sets("temperature"),
    "top_p": sets("top_p", number(0.0, 1.0)),
    "max_tokens": sets("max_new_tokens", integer(0, 512)),
    "max_new_tokens": sets("max_new_tokens"),
    "min_tokens": sets("min_new_tokens"),
    "stop": sets("stop", texts(5)),
    "adapter": sets("adapter", text()),
    "grammar": sets("grammar", GRAMMAR),
    "response_format": sets("grammar", RESPONSE_FORMAT),
    "stream": option("stream", flag()),
}
_NEUTRAL: Mapping[str, Any] = {
    name: getattr(Sampling(), name) for name in ("temperature", "top_p", "top_k", "min_p", "typical_p")
}
_STATUS: Sequence[tuple[type[DragomanError], int]] = (
    (InvalidInput, 422),
    (NotSupported, 422),
    (ModelNotFound, 404),
    (Unauthorized, 401),
    (Forbidden, 403),
    (NotReady, 503),
    (Overloaded, 429),
    (RateLimited, 429),
    (DeadlineExceeded, 504),
    (ModelFailed, 424),
)


class OpenInferenceGenerate:
    """The endpoints."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def generate(self, http: HttpRequest) -> EndpointResult:
        prompt, params, sampling, id_ = self._parse(http)
        is_shown = not params.options["nothing_new"]

        def format_response(response: Response[Generation]) -> HttpResponse:
            body = {**_metadata(response, id_), "text_output": response.answer.texts[0].whole * is_shown}
            return json_response(body, 200, params.headers)

        call = Generate(prompts=(prompt,), sampling=sampling)
        return EngineCall(
            build_request(call, http, self._policy), format_response, params.error_formatter(format_error)
        )

    def generate_stream(self, http: HttpRequest) -> EndpointResult:
        prompt, params, sampling, id_ = self._parse(http)
        is_shown = not params.options["nothing_new"]

        def format_chunk(response: Response[Generation]) -> bytes:
            return b"".join(
                event({**_metadata(response, id_), "text_output": each.text * is_shown, "done": bool(each.finish)})
                for each in response.answer.texts
                if each.text * is_shown or each.finish
            )

        call = Generate(prompts=(prompt,), sampling=sampling, stream=sampling.best_of <= 1 and sampling.num_beams == 1)
        headers = (*EVENT_STREAM, *params.headers)
        request = build_request(call, http, self._policy)
        return HttpStream(
            request, format_chunk, _format_error_event, b"", headers, params.error_formatter(format_error)
        )

    def _parse(self, http: HttpRequest) -> tuple[str, ParsedParameters, Sampling, str]:
        body = object_body(http.body, self._policy)
        prompt = body.get("text_input")
        if not isinstance(prompt, str) or not prompt:
            raise InvalidInput(f"`text_input` must be a text that is not empty; got {format_value(prompt)}")
        params = parse_parameters(get_object(body, "parameters"), _PARAMETERS, self._policy)
        unknown = [name for name in body if name not in _FIELDS]
        reject_unknown(unknown, _FIELDS, self._policy)
        fields = params.fields
        if "do_sample" not in fields and "num_beams" not in fields:
            fields["do_sample"] = any(fields.get(name, neutral) != neutral for name, neutral in _NEUTRAL.items())
        params.options["nothing_new"] = params.requests_no_tokens()  # OIP: 0 to 512 tokens
        sampling = params.sampling(
            self._policy, max_new_tokens=_DEFAULT_MAX_TOKENS, shorten="max_new_tokens" not in fields
        )
        id_ = check_value("id", "" if body.get("id") is None else body["id"], text())
        names = {**params.names, "prompt": "text_input"}
        return prompt, ParsedParameters(fields, params.options, names, (*unknown, *params.ignored)), sampling, id_


def _metadata(response: Response[Generation], id_: str) -> dict[str, Any]:
    version = {"model_version": response.version} if response.version else {}
    return {**({"id": id_} if id_ else {}), "model_name": response.model, **version}


def _format_error_event(error: DragomanError) -> bytes:
    return event({"error": replace_surrogates(error.message)})


def protocol(policy: Policy) -> HttpProtocol:
    """Return the routes of the protocol."""
    endpoints = OpenInferenceGenerate(policy)
    routes = []
    for model in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
        whole, stream = f"{model}/generate", f"{model}/generate_stream"
        routes.append(Route("POST", whole, endpoints.generate, role="infer", operation=messages.GENERATE))
        routes.append(
            Route("POST", stream, endpoints.generate_stream, role="infer", operation=messages.GENERATE_STREAM)
        )
    errors = messages.errors([status for _, status in _STATUS])
    return HttpProtocol("Open Inference generate", tuple(routes), format_error, errors=errors)


def format_error(error: DragomanError | HttpError) -> HttpResponse:
    """OIP: `{"error": message}`; 422 invalid request, 424 failed generation, 429 overloaded, 500 anything else."""
    if isinstance(error, HttpError):
        return json_response({"error": error.message}, error.status, error.headers)
    (status,) = find_error_row(error, _STATUS) or (500,)
    return json_response({"error": replace_surrogates(error.message)}, status, error_headers(error))
