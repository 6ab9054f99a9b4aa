"""The generate extension: `generate` and `generate_stream`, for text models and for models of tensors."""

from collections.abc import Callable, Mapping
from typing import Any

from msgspec import structs

from dragoman.core.calls import Describe, Generate, Infer, Inference, ModelDescription, Request, Response
from dragoman.core.errors import (
    DragomanError,
    InvalidInput,
    ModelFailed,
    NotSupported,
    Overloaded,
)
from dragoman.core.sampling import (
    InvalidValueError,
    ValueKind,
    check_value,
    flag,
    format_value,
    integer,
    number,
    text,
    texts,
)
from dragoman.core.text import Generation, Sampling, Text
from dragoman.core.text_limits import MAX_STOPS, MAX_WORDS
from dragoman.formats.body import HEADER_LENGTH
from dragoman.protocols.open_inference import messages, rest
from dragoman.protocols.open_inference.generate_tensors import generate_response, infer_call, parse_generate_object
from dragoman.protocols.open_inference.rest_request import path_model
from dragoman.protocols.parameters import (
    GRAMMAR,
    RESPONSE_FORMAT,
    Parameter,
    ParsedParameters,
    build_request,
    event,
    finite,
    get_object,
    object_body,
    option,
    parse_parameters,
    sets,
)
from dragoman.protocols.wire import (
    EVENT_STREAM_HEADERS,
    JSON_TYPE,
    EndpointResult,
    EngineCall,
    HttpProtocol,
    HttpRequest,
    HttpResponse,
    HttpStream,
    Policy,
    PreliminaryCall,
    Route,
    Statuses,
    error_formatter,
    error_responses,
    json_response,
    replace_surrogates,
)

_DEFAULT_MAX_TOKENS = 20  # by the extension
_FIELDS = ("text_input", "parameters", "id")
_ONE_RESPONSE = (
    "generate expects model to produce exactly 1 response, use generate stream for model that generates various number "
    "of responses"
)
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
    "logit_bias",
    "allowed_token_ids",
    "include_stop",
    "skip_special_tokens",
)


def _words(most: int) -> ValueKind:
    """A list of texts or one text, as Triton's language models have them: an empty one is none."""
    some = texts(most)

    def convert(value: Any) -> tuple[str, ...]:
        if isinstance(value, str):
            value = [value]
        if not isinstance(value, list):
            raise InvalidValueError
        words: tuple[str, ...] = some.convert([word for word in value if word != ""])
        return words

    return ValueKind(some.description, convert)


# OIP: these four and `stop` and `best_of` are named; others are allowed. The names of Triton's backends follow.
_PARAMETERS: Mapping[str, Parameter] = {
    **{name: sets(name) for name in _SAME},
    "temperature": sets("temperature"),
    "top_p": sets("top_p", number(0.0, 1.0)),
    "max_tokens": sets("max_new_tokens", integer(0)),
    "max_new_tokens": sets("max_new_tokens"),
    "min_tokens": sets("min_new_tokens"),
    "stop": sets("stop", texts(MAX_STOPS)),
    "stop_words": sets("stop", _words(MAX_STOPS)),
    "bad_words": sets("bad_words", _words(MAX_WORDS)),
    "random_seed": sets("seed"),
    "beam_width": sets("num_beams"),
    "min_length": sets("min_new_tokens"),
    "details": option("details", flag()),
    "exclude_input_in_output": option("exclude_input", flag()),
    "adapter": sets("adapter", text()),
    "grammar": sets("grammar", GRAMMAR),
    "response_format": sets("grammar", RESPONSE_FORMAT),
    "stream": option("stream", flag()),
}
_NEUTRAL: Mapping[str, Any] = {
    name: getattr(Sampling(), name) for name in ("temperature", "top_p", "top_k", "min_p", "typical_p")
}
_STATUS: Statuses = {InvalidInput: 422, NotSupported: 422, Overloaded: 429, ModelFailed: 424}
format_error = error_formatter(_STATUS)


class OpenInferenceGenerate:
    """The endpoints."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._tensors = rest.OpenInferenceRest(policy)

    def generate(self, http: HttpRequest) -> EndpointResult:
        return self._by_model(http, self._generate_text, self._generate_tensors, self._tensors.infer)

    def generate_stream(self, http: HttpRequest) -> EndpointResult:
        return self._by_model(http, self._stream_text, self._stream_tensors, self._tensors.infer_stream)

    def _by_model(
        self,
        http: HttpRequest,
        generate_text: Callable[[HttpRequest, dict[str, Any]], EndpointResult],
        generate_tensors: Callable[[HttpRequest, ModelDescription], EndpointResult],
        infer: Callable[[HttpRequest], EndpointResult],
    ) -> EndpointResult:
        """Return the call of a text model, or of a model of tensors by its inputs, or an inference request as it is."""
        if HEADER_LENGTH in http.headers:
            return infer(http)
        body = object_body(http.body, self._policy)

        def choose(response: Response[ModelDescription]) -> EndpointResult:
            model = response.answer
            if Generate in model.calls and ("text_input" in body or Infer not in model.calls):
                return generate_text(http, body)
            try:
                is_infer_request = isinstance(body.get("inputs"), list) and model.signature.input("inputs") is None
                return infer(http) if is_infer_request else generate_tensors(http, model)
            except DragomanError as error:
                return rest.format_error(error)

        return PreliminaryCall(Request(Describe(), *path_model(http)), choose)

    # --- models of tensors -----------------------------------------------------------------------------------

    def _generate_tensors(self, http: HttpRequest, model: ModelDescription) -> EndpointResult:
        request, id_ = self._infer_request(http, model)

        def format_response(response: Response[Inference]) -> HttpResponse:
            return HttpResponse(200, (generate_response(response, id_, self._policy),), (JSON_TYPE,))

        def format_inference_error(error: DragomanError) -> HttpResponse:
            is_count = isinstance(error, NotSupported) and model.streams
            return rest.format_error(NotSupported(_ONE_RESPONSE) if is_count else error)

        return EngineCall(request, format_response, format_inference_error)

    def _stream_tensors(self, http: HttpRequest, model: ModelDescription) -> EndpointResult:
        request, id_ = self._infer_request(http, model)

        def format_chunk(response: Response[Inference]) -> bytes:
            return b"data: " + generate_response(response, id_, self._policy) + b"\n\n"

        return HttpStream(request, format_chunk, _format_error_event, b"", EVENT_STREAM_HEADERS, rest.format_error)

    def _infer_request(self, http: HttpRequest, model: ModelDescription) -> tuple[Request[Inference], str]:
        call, id_ = infer_call(parse_generate_object(bytes(http.body)), model, self._policy)
        return structs.replace(build_request(call, http, self._policy), id=id_), id_

    # --- text models -----------------------------------------------------------------------------------------

    def _generate_text(self, http: HttpRequest, body: dict[str, Any]) -> EndpointResult:
        prompt, params, sampling, id_ = self._parse(body)
        is_shown = not params.options["nothing_new"]

        def format_response(response: Response[Generation]) -> HttpResponse:
            (text, *_) = response.answer.texts
            output = prompt * (params.options.get("exclude_input") is False) + text.whole * is_shown
            details = {"details": _details(text)} if params.options.get("details") else {}
            return json_response({**_metadata(response, id_), "text_output": output, **details}, 200, params.headers)

        call = Generate(prompts=(prompt,), sampling=sampling)
        return EngineCall(
            build_request(call, http, self._policy), format_response, params.error_formatter(format_error)
        )

    def _stream_text(self, http: HttpRequest, body: dict[str, Any]) -> EndpointResult:
        prompt, params, sampling, id_ = self._parse(body)
        is_shown = not params.options["nothing_new"]

        def format_text(response: Response[Generation], text: Text) -> bytes:
            details = {"details": _details(text)} if params.options.get("details") else {}
            output = {"text_output": text.text * is_shown, "done": bool(text.finish), **details}
            return event({**_metadata(response, id_), **output})

        def format_chunk(response: Response[Generation]) -> bytes:
            return b"".join(
                format_text(response, text) for text in response.answer.texts if text.text * is_shown or text.finish
            )

        call = Generate(prompts=(prompt,), sampling=sampling, stream=sampling.best_of <= 1 and sampling.num_beams == 1)
        headers = (*EVENT_STREAM_HEADERS, *params.headers)
        request = build_request(call, http, self._policy)
        return HttpStream(
            request, format_chunk, _format_error_event, b"", headers, params.error_formatter(format_error)
        )

    def _parse(self, body: dict[str, Any]) -> tuple[str, ParsedParameters, Sampling, str]:
        prompt = body.get("text_input")
        if not isinstance(prompt, str) or not prompt:
            raise InvalidInput(f"`text_input` must be a non-empty string; got {format_value(prompt)}")
        # Triton: top-level keys are parameters as those of `parameters`, and some clients send a JSON text of others.
        parameters = {**get_object(body, "parameters"), **{k: v for k, v in body.items() if k not in _FIELDS}}
        parameters = {**_sampling_parameters(parameters.pop("sampling_parameters", None)), **parameters}
        params = parse_parameters(parameters, _PARAMETERS, self._policy)
        fields = params.fields
        if "do_sample" not in fields and "num_beams" not in fields:
            fields["do_sample"] = any(fields.get(name, neutral) != neutral for name, neutral in _NEUTRAL.items())
        params.options["nothing_new"] = params.requests_no_tokens()  # OIP: 0 to 512 tokens
        sampling = params.sampling(
            self._policy, max_new_tokens=_DEFAULT_MAX_TOKENS, shorten="max_new_tokens" not in fields
        )
        id_ = check_value("id", "" if body.get("id") is None else body["id"], text())
        names = {**params.names, "prompt": "text_input"}
        return prompt, ParsedParameters(fields, params.options, names, params.ignored), sampling, id_


def _sampling_parameters(value: Any) -> dict[str, Any]:
    """Return the parameters in a JSON text, as clients of Triton's vLLM backend send them."""
    if value is None:
        return {}
    if not isinstance(value, str):
        raise InvalidInput(f"`sampling_parameters` must be a JSON object as a string; got {format_value(value)}")
    return object_body(value.encode(errors="replace"), Policy())


def _details(text: Text) -> dict[str, Any]:
    """Return why a text ended, if it did, and its tokens."""
    tokens = [{"id": t.id, "text": t.text, "logprob": finite(t.logprob), "special": t.special} for t in text.tokens]
    return {**({"finish_reason": text.finish} if text.finish else {}), "logprobs": tokens}


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
    errors = error_responses(_STATUS)
    return HttpProtocol("Open Inference generate", tuple(routes), format_error, errors=errors)
