"""Endpoints of Ollama's API."""

import hashlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from dragoman.core.calls import (
    Describe,
    DescribeModels,
    DescribeServer,
    Embed,
    Embedded,
    Generate,
    ModelDescription,
    Request,
    Response,
    ServerDescription,
)
from dragoman.core.errors import DragomanError, InvalidInput, ModelNotFound
from dragoman.core.record_calls import KeepLoaded, ListLoaded, LoadedModel
from dragoman.core.sampling import format_value
from dragoman.core.text import TEMPLATE_TEXT, Generation, Prompt
from dragoman.formats import fast_json
from dragoman.protocols.parameters import build_request, object_body
from dragoman.protocols.wire import (
    JSON_TYPE,
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
    json_response,
)
from dragoman_text.apis.common.chat import ChatRequest
from dragoman_text.apis.common.embeddings import normalize_vectors, shorten_vectors
from dragoman_text.apis.common.openai_format import resolve_model, status_of
from dragoman_text.apis.ollama import messages
from dragoman_text.apis.ollama.request import (
    CHAT,
    EMBED,
    GENERATE,
    PULL,
    is_load,
    parse_chat_request,
    parse_fields,
    parse_generate_request,
)
from dragoman_text.apis.ollama.response import OllamaFormatter, error_object, now
from dragoman_text.limits import MAX_TEXTS

_LATEST = ":latest"
# The version of Ollama whose API is served, which clients compare: the first with `logprobs`.
_OLLAMA = "0.12.11"
# Ollama's names of the types of weights that are not quantized.
_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_CENTURIES_S = (1 << 63) / 1e9  # the longest duration in Go
_Parse = Callable[[Mapping[str, Any], Policy], tuple[ChatRequest, Prompt]]


class Ollama:
    """Endpoints of Ollama's API for the text models of this server."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._started = now()

    # --- text ------------------------------------------------------------------------------------------------

    def chat(self, http: HttpRequest) -> EndpointResult:
        def parse(body: Mapping[str, Any], policy: Policy) -> tuple[ChatRequest, Prompt]:
            request = parse_chat_request(body, policy)
            return request, request.chat

        return self._respond(http, parse, is_chat=True)

    def generate(self, http: HttpRequest) -> EndpointResult:
        return self._respond(http, parse_generate_request, is_chat=False)

    def _respond(self, http: HttpRequest, parse: _Parse, *, is_chat: bool) -> EndpointResult:
        body = self._body(http)

        def then(model: str) -> EndpointResult:
            if is_load(body):
                return self._load(body, model, is_chat=is_chat)
            request, prompt = parse(body, self._policy)
            parameters = request.parameters
            stream = parameters.options.get("stream", True)
            formatter = OllamaFormatter(request, is_chat=is_chat)
            call = Generate(prompts=(prompt,), sampling=request.sampling, stream=stream)
            format_error = parameters.error_formatter(write_error)
            sent = build_request(call, http, self._policy, model)
            idle_s = parameters.options.get("keep_alive")
            if stream:
                return HttpStream(
                    sent,
                    formatter.format_chunk,
                    formatter.format_late_error,
                    headers=(("content-type", messages.LINES), *parameters.headers),
                    format_error=format_error,
                    format_last_chunk=formatter.format_last_chunk,
                    final_request=None if idle_s is None else lambda: Request(KeepLoaded(idle_s), formatter.model),
                )

            def reply(response: Response[Generation]) -> HttpResponse:
                return json_response(formatter.complete(response), 200, parameters.headers)

            return _keep(EngineCall(sent, reply, format_error), idle_s)

        return resolve_model(body, http, then)

    def _load(self, body: Mapping[str, Any], model: str, *, is_chat: bool) -> EndpointResult:
        """Respond to a request without a prompt, which loads the model, or unloads it if `keep_alive` is 0."""
        parameters = parse_fields(body, CHAT if is_chat else GENERATE, self._policy)
        if "keep_alive" in parameters.ignored and not body["keep_alive"]:
            raise InvalidInput("`keep_alive` must not be 0 without a prompt, unless models are loaded on demand")
        idle_s = parameters.options.get("keep_alive")
        is_unload = idle_s == 0

        def reply(response: Response[Any]) -> HttpResponse:
            empty: dict[str, Any] = {"message": {"role": "assistant", "content": ""}} if is_chat else {"response": ""}
            reason = "unload" if is_unload else "load"
            name = response.answer.name if isinstance(response.answer, ModelDescription) else model
            value = {"model": name, "created_at": now(), **empty, "done": True}
            return json_response({**value, "done_reason": reason}, 200, parameters.headers)

        if is_unload and model:
            return EngineCall(Request(KeepLoaded(0.0), model), reply)
        return _keep(EngineCall(Request(Describe(Generate, load=True), model), reply), idle_s)

    # --- embeddings ------------------------------------------------------------------------------------------

    def embed(self, http: HttpRequest) -> EndpointResult:
        return self._embed(http, "input", lambda vectors, common: {**common, "embeddings": vectors})

    def embeddings(self, http: HttpRequest) -> EndpointResult:
        return self._embed(http, "prompt", lambda vectors, _: {"embedding": vectors[0] if len(vectors) else []})

    def _embed(
        self, http: HttpRequest, field: str, format_vectors: Callable[[Any, dict[str, Any]], dict[str, Any]]
    ) -> EndpointResult:
        body, started_ns = self._body(http), time.monotonic_ns()
        parameters = parse_fields(body, EMBED, self._policy)
        value = body.get(field)
        texts: list[Any] = value if isinstance(value, list) else [value]
        is_empty = value in (None, "", [])
        if not is_empty and (len(texts) > MAX_TEXTS or not all(isinstance(text, str) and text for text in texts)):
            raise InvalidInput(
                f"`{field}` must be a string, or a list of at most {MAX_TEXTS} strings, none empty; "
                f"got {format_value(value)}"
            )
        size, begun_ns = parameters.options.get("dimensions"), started_ns

        def reply(response: Response[Embedded]) -> HttpResponse:
            vectors = np.ascontiguousarray(response.answer.vectors.data, np.float32)
            vectors = normalize_vectors(vectors) if size is None else shorten_vectors(vectors, size)
            common = {
                "model": response.model,
                "total_duration": time.monotonic_ns() - started_ns,
                "load_duration": begun_ns - started_ns,
                "prompt_eval_count": response.answer.tokens,
            }
            result = fast_json.dumps(format_vectors(vectors, common))
            return HttpResponse(200, (result,), (JSON_TYPE, *parameters.headers))

        def load(response: Response[ModelDescription]) -> HttpResponse:
            return json_response(format_vectors([], {"model": response.answer.name}), 200, parameters.headers)

        def then(model: str) -> EndpointResult:
            nonlocal begun_ns
            begun_ns = time.monotonic_ns()
            idle_s = parameters.options.get("keep_alive")
            if is_empty:
                return _keep(EngineCall(Request(Describe(Embed, load=True), model), load), idle_s)
            call = Embed(tuple(texts), 0 if parameters.options.get("truncate", True) else None)
            return _keep(EngineCall(build_request(call, http, self._policy, model), reply), idle_s)

        return resolve_model(body, http, then)

    # --- models ----------------------------------------------------------------------------------------------

    def tags(self, http: HttpRequest) -> EndpointResult:
        return self._list(lambda loaded: {})

    def running(self, http: HttpRequest) -> EndpointResult:
        return self._list(_residence)

    def _list(self, more: Callable[[LoadedModel], dict[str, Any]]) -> EndpointResult:
        """List the text models that are loaded, with further fields."""

        def describe(listed: Response[tuple[LoadedModel, ...]]) -> EndpointResult:
            loaded = {each.name: each for each in listed.answer}

            def reply(response: Response[tuple[ModelDescription, ...]]) -> HttpResponse:
                found = [(m, loaded[m.name]) for m in response.answer if m.name in loaded and _is_text_model(m)]
                return json_response({"models": [{**self._card(*each), **more(each[1])} for each in found]})

            return EngineCall(Request(DescribeModels()), reply)

        return PreliminaryCall(Request(ListLoaded()), describe)

    def _card(self, model: ModelDescription, loaded: LoadedModel) -> dict[str, Any]:
        return {
            "name": model.name + _LATEST,
            "model": model.name + _LATEST,
            "modified_at": self._started,
            "size": loaded.file_bytes,
            "digest": hashlib.sha256(model.name.encode()).hexdigest(),
            "details": _details(model),
            "capabilities": _capabilities(model),
            "context_length": model.details.get("max_context") or 0,
        }

    def show(self, http: HttpRequest) -> EndpointResult:
        body = self._body(http)

        def then(name: str) -> EndpointResult:
            def find(response: Response[tuple[ModelDescription, ...]]) -> EndpointResult:
                model = next((each for each in response.answer if each.name == name), None)
                if model is None:
                    raise ModelNotFound(f"model {format_value(name)} not found")
                return json_response(self._describe(model))

            return PreliminaryCall(Request(DescribeModels()), find)

        return resolve_model(body, http, then)

    def _describe(self, model: ModelDescription) -> dict[str, Any]:
        details, family, defaults = _details(model), _family(model), model.details.get("default_parameters") or {}
        info = {
            "general.architecture": family,
            "general.parameter_count": model.details.get("parameters"),
            f"{family}.context_length": model.details.get("max_context"),
            f"{family}.vocab_size": model.details.get("vocabulary"),
        }
        return {
            "modelfile": "",
            "parameters": "\n".join(f"{name:<30} {value}" for name, value in defaults.items()),
            "template": model.details.get(TEMPLATE_TEXT) or "",
            "details": details,
            "model_info": {name: value for name, value in info.items() if value},
            "capabilities": _capabilities(model),
            "modified_at": self._started,
        }

    def version(self, http: HttpRequest) -> EndpointResult:
        def reply(response: Response[ServerDescription]) -> HttpResponse:
            return json_response({"version": _OLLAMA, "dragoman": response.answer.version})

        return EngineCall(Request(DescribeServer()), reply)

    def pull(self, http: HttpRequest) -> EndpointResult:
        """Succeed for a model that is served, as clients pull a model before they use it. Nothing is downloaded."""
        body = self._body(http)
        stream = parse_fields(body, PULL, self._policy).options.get("stream", True)

        def then(name: str) -> EndpointResult:
            def find(response: Response[tuple[ModelDescription, ...]]) -> HttpResponse:
                if all(each.name != name for each in response.answer):
                    served = f"model {format_value(name)} is not served here, and this server downloads no models"
                    raise ModelNotFound(f"{served}: put its folder into the folder of the models")
                kind = (("content-type", messages.LINES),) if stream else (JSON_TYPE,)
                return HttpResponse(200, (b'{"status":"success"}\n',), kind)

            return PreliminaryCall(Request(DescribeModels()), find)

        return resolve_model(body, http, then)

    def _body(self, http: HttpRequest) -> dict[str, Any]:
        """Return the body; the tag `latest` of a model's name is removed."""
        body = object_body(http.body, self._policy)
        name = body.get("model", body.get("name"))
        return {**body, "model": name.removesuffix(_LATEST) if isinstance(name, str) else name}


def _keep(call: EngineCall[Any, HttpResponse], idle_s: float | None) -> EndpointResult:
    """Return a call that sets how long the model stays loaded."""
    if idle_s is None:
        return call

    def then(response: Response[Any]) -> EndpointResult:
        result, answer = call.format_response(response), response.answer
        name = answer.name if isinstance(answer, ModelDescription) else response.model
        return EngineCall(Request(KeepLoaded(idle_s), name), lambda _: result)

    return PreliminaryCall(call.request, then, call.format_error)


def _details(model: ModelDescription) -> dict[str, Any]:
    """Return what is known of the weights: their format and quantization in the files, unless they were changed."""
    details, family = model.details, _family(model)
    changed = details.get("quantization")
    level = details.get("file_quantization") if changed in (None, "none") else changed
    dtype = str(details.get("dtype") or "")
    return {
        "parent_model": "",
        "format": str(details.get("file_format") or ""),
        "family": family,
        "families": [family],
        "parameter_size": format_count(details.get("parameters") or 0),
        "quantization_level": str(level or _DTYPES.get(dtype, dtype)),
    }


def _family(model: ModelDescription) -> str:
    return str(model.details.get("model_type") or model.platform)


def format_count(count: int) -> str:
    """Format a number of parameters as Ollama does: 8.0B, 134.52M."""
    for unit, size, digits in (("B", 10**9, 1), ("M", 10**6, 2), ("K", 10**3, 0)):
        if count >= size:
            return f"{count / size:.{0 if count % size == 0 else digits}f}{unit}"
    return str(count) if count else ""


def _is_text_model(model: ModelDescription) -> bool:
    return bool(model.calls & {Generate, Embed})


def _residence(model: LoadedModel) -> dict[str, Any]:
    """Return the bytes of a loaded model, and when it is unloaded; for "never" a date centuries ahead, as in Ollama."""
    return {"size": model.file_bytes, "size_vram": 0, "expires_at": now(min(model.unload_in_s, _CENTURIES_S))}


def _capabilities(model: ModelDescription) -> list[str]:
    """Return Ollama's names of what a model can do; of tools and thinking, what its chat template knows."""
    template = model.details.get("chat_template")
    knows = template if isinstance(template, Mapping) else {}
    has = {
        "completion": Generate in model.calls,
        "tools": Generate in model.calls and knows.get("tools") is True,
        "thinking": Generate in model.calls and knows.get("reasoning") is True,
        "embedding": Embed in model.calls,
        "vision": bool(model.details.get("vision")),
    }
    return [name for name, present in has.items() if present]


def protocol(policy: Policy) -> HttpProtocol:
    """Return the routes of the protocol."""
    at = Ollama(policy)
    routes = (
        Route("POST", "/api/chat", at.chat, role="infer", operation=messages.CHAT_OPERATION),
        Route("POST", "/api/generate", at.generate, role="infer", operation=messages.GENERATE_OPERATION),
        Route("POST", "/api/embed", at.embed, role="infer", operation=messages.EMBED_OPERATION),
        Route("POST", "/api/embeddings", at.embeddings, role="infer", operation=messages.EMBEDDINGS),
        Route("POST", "/api/show", at.show, role="read", operation=messages.SHOW),
        Route("POST", "/api/pull", at.pull, role="read", operation=messages.PULL),
        Route("GET", "/api/tags", at.tags, role="read", operation=messages.TAGS),
        Route("GET", "/api/ps", at.running, role="read", operation=messages.RUNNING),
        Route("GET", "/api/version", at.version, role="read", operation=messages.VERSION),
    )
    return HttpProtocol("Ollama", routes, write_error, errors=messages.ERRORS, reference=messages.REFERENCE)


def write_error(error: DragomanError | HttpError, _request_id: str = "") -> HttpResponse:
    """Format an error as Ollama does: `{"error": message}`."""
    if isinstance(error, HttpError):
        return json_response(error_object(error.message), error.status, error.headers)
    return json_response(error_object(error.message), status_of(error), error_headers(error))
