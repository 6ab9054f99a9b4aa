"""Endpoints of the OpenAI API: models, completions, chat, responses and embeddings, and those that vLLM adds."""

import base64
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from dragoman.core.calls import (
    DescribeModels,
    DescribeServer,
    Embed,
    Embedded,
    Generate,
    InFlight,
    ModelDescription,
    Request,
    Response,
    ServerDescription,
)
from dragoman.core.errors import DragomanError, InvalidInput
from dragoman.core.sampling import InvalidValueError, ValueKind, format_value, integer, text, truncation_side
from dragoman.formats import fast_json
from dragoman.protocols.parameters import (
    Parameter,
    anything,
    build_request,
    is_token_id,
    label,
    object_body,
    option,
    parse_parameters,
)
from dragoman.protocols.wire import (
    JSON_TYPE,
    EndpointResult,
    EngineCall,
    HttpError,
    HttpProtocol,
    HttpRequest,
    HttpResponse,
    Policy,
    PreliminaryCall,
    Route,
    error_headers,
    json_response,
    read_readiness,
)
from dragoman_text.apis.common import messages as text_messages
from dragoman_text.apis.common.chat import parse_chat_request
from dragoman_text.apis.common.completions import parse_completion_request
from dragoman_text.apis.common.embeddings import shorten_vectors
from dragoman_text.apis.common.model_ids import text_model_ids
from dragoman_text.apis.common.openai_format import STATUSES, error_body, resolve_model, status_of, truncation
from dragoman_text.apis.common.tokenize import parse_detokenize_request
from dragoman_text.apis.openai import adapters, messages, prefix_cache
from dragoman_text.apis.openai.conversations import Conversations
from dragoman_text.apis.openai.response_format import new_id
from dragoman_text.apis.openai.response_routes import Responses
from dragoman_text.apis.openai.response_session import ResponseSession
from dragoman_text.apis.openai.responses import COMPACT, COUNT, PreviousNotFound
from dragoman_text.apis.openai.responses import PARAMETERS as RESPONSE_PARAMETERS
from dragoman_text.apis.openai.scoring import RERANK, SCORE, TEI, TEI_EMBED, Scoring
from dragoman_text.limits import MAX_TEXTS


def _format() -> ValueKind:
    def read(value: Any) -> str:
        if value not in ("float", "base64"):
            raise InvalidValueError
        return str(value)

    return ValueKind('"float" or "base64"', read, {"enum": ["float", "base64"]})


_PARAMETERS: Mapping[str, Parameter] = {
    "input": option("input", anything()),
    "model": option("model", anything()),
    "user": label(),
    "encoding_format": option("encoding_format", _format()),
    "dimensions": option("dimensions", integer(1)),
    "truncate_prompt_tokens": option("truncate", truncation()),
    "truncation_side": option("truncation_side", truncation_side()),
    "prompt_name": option("prompt_name", text()),
}


def parse_embedding_request(body: Mapping[str, Any], http: HttpRequest, policy: Policy) -> EndpointResult:
    """Parse an embeddings request."""
    return resolve_model(body, http, lambda name: _embedding(body, http, policy, name))


def _embedding(body: Mapping[str, Any], http: HttpRequest, policy: Policy, model: str) -> EndpointResult:
    parameters = parse_parameters(body, _PARAMETERS, policy)
    packed = parameters.options.get("encoding_format") == "base64"
    size = parameters.options.get("dimensions")
    options = parameters.options
    call = Embed(
        _inputs(options.get("input")),
        options.get("truncate"),
        options.get("truncation_side", ""),
        options.get("prompt_name"),
    )

    def reply(response: Response[Embedded]) -> HttpResponse:
        vectors = np.ascontiguousarray(response.answer.vectors.data, np.float32)
        if size is not None:
            vectors = shorten_vectors(vectors, size)
        value = [
            {"object": "embedding", "index": i, "embedding": _format_vector(v, packed)} for i, v in enumerate(vectors)
        ]
        usage = {"prompt_tokens": response.answer.tokens, "total_tokens": response.answer.tokens}
        result = {"object": "list", "data": value, "model": response.model, "usage": usage}
        body = fast_json.dumps(result)
        return HttpResponse(200, (body,), (JSON_TYPE, *parameters.headers))

    return EngineCall(build_request(call, http, policy, model), reply, parameters.error_formatter(write_error))


def _inputs(value: Any) -> tuple[str | tuple[int, ...], ...]:
    match value:
        case str() if value:
            return (value,)
        case [*items] if items:
            if all(map(is_token_id, items)):
                return (tuple(items),)
            if len(items) <= MAX_TEXTS and all(_is_input(item) for item in items):
                return tuple(item if isinstance(item, str) else tuple(item) for item in items)
    raise InvalidInput(
        f"`input` must be a string, or a list of at most {MAX_TEXTS} strings or lists of token ids, none empty; "
        f"got {format_value(value)}"
    )


def _is_input(item: Any) -> bool:
    return isinstance(item, str | list) and bool(item) and (isinstance(item, str) or all(map(is_token_id, item)))


def _format_vector(vector: Any, packed: bool) -> Any:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode() if packed else vector


class OpenAi:
    """Endpoints of the OpenAI API, and those that vLLM adds."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._since = int(time.time())

    def models(self, http: HttpRequest) -> EngineCall[tuple[ModelDescription, ...], HttpResponse]:
        def reply(response: Response[tuple[ModelDescription, ...]]) -> HttpResponse:
            cards = [self._card(*each) for each in text_model_ids(response.answer)]
            return json_response({"object": "list", "data": cards})

        return EngineCall(Request(DescribeModels()), reply)

    def model(self, http: HttpRequest) -> PreliminaryCall[tuple[ModelDescription, ...]]:
        """Return the card of a text model; of another model its readiness, which KServe's V1 has at this path."""
        name = http.params["name"]

        def find(response: Response[tuple[ModelDescription, ...]]) -> EndpointResult:
            found = next((each for each in text_model_ids(response.answer) if each[0] == name), None)
            return read_readiness(name) if found is None else json_response(self._card(*found))

        return PreliminaryCall(Request(DescribeModels()), find)

    def _card(self, id_: str, model: ModelDescription, parent: str | None) -> dict[str, Any]:
        return {
            "id": id_,
            "object": "model",
            "created": self._since,
            "owned_by": "dragoman",
            "root": model.details.get("model_id") or model.name,
            "parent": parent,
            "max_model_len": model.details.get("max_context"),
            "permission": [],
        }

    def version(self, http: HttpRequest) -> EngineCall[ServerDescription, HttpResponse]:
        """Return the version of the server, as vLLM does."""
        return EngineCall(
            Request(DescribeServer()), lambda response: json_response({"version": response.answer.version})
        )

    def load(self, http: HttpRequest) -> EngineCall[int, HttpResponse]:
        """Return the number of text requests in progress, as vLLM does."""
        return EngineCall(
            Request(InFlight((Generate, Embed))), lambda response: json_response({"server_load": response.answer})
        )

    def chat(self, http: HttpRequest) -> EndpointResult:
        return parse_chat_request(object_body(http.body, self._policy), http, self._policy, write_error)

    def completions(self, http: HttpRequest) -> EndpointResult:
        return parse_completion_request(object_body(http.body, self._policy), http, self._policy, write_error)

    def detokenize(self, http: HttpRequest) -> EndpointResult:
        """Return the text of token ids, as vLLM does."""
        return parse_detokenize_request(object_body(http.body, self._policy), http, self._policy, write_error)

    def embeddings(self, http: HttpRequest) -> EndpointResult:
        return parse_embedding_request(object_body(http.body, self._policy), http, self._policy)


def protocol(policy: Policy) -> HttpProtocol:
    """Return the routes of the protocol."""
    at = OpenAi(policy)
    routes = [
        Route("GET", "/v1/models", at.models, role="read", operation=messages.MODELS),
        Route("GET", "/v1/models/{name}", at.model, role="read", operation=messages.MODEL),
        Route("GET", "/version", at.version, role="read", operation=messages.VERSION),
        Route("GET", "/load", at.load, role="read", operation=messages.LOAD),
    ]
    routes += [
        Route("POST", path, at.detokenize, role="infer", operation=text_messages.DETOKENIZE)
        for path in ("/detokenize", "/models/{model}/detokenize")
    ]
    embed = messages.embed(_PARAMETERS)
    for base in ("/v1", "/models/{model}/v1"):
        routes += [
            Route("POST", f"{base}/chat/completions", at.chat, role="infer", operation=text_messages.CHAT),
            Route("POST", f"{base}/completions", at.completions, role="infer", operation=text_messages.COMPLETE),
            Route("POST", f"{base}/embeddings", at.embeddings, role="infer", operation=embed),
        ]
    routes += [*adapters.routes(policy), *prefix_cache.routes(policy)]
    stored = Responses(policy, write_error)
    respond, count = messages.respond(RESPONSE_PARAMETERS), messages.count(COUNT)
    routes += [
        Route("POST", "/v1/responses", stored.create, role="infer", operation=respond),
        Route("POST", "/models/{model}/v1/responses", stored.create, role="infer", operation=respond),
        *(
            Route(
                "GET",
                path,
                stored.upgrade,
                role="infer",
                operation=messages.OPEN,
                session=lambda _: ResponseSession(stored, policy),
            )
            for path in ("/v1/responses", "/models/{model}/v1/responses")
        ),
        Route("POST", "/v1/responses/input_tokens", stored.count_tokens, role="infer", operation=count),
        Route("POST", "/v1/responses/compact", stored.compact, role="infer", operation=messages.compact(COMPACT)),
        Route("GET", "/v1/responses/{id}", stored.retrieve, role="infer", operation=messages.RETRIEVE),
        Route("DELETE", "/v1/responses/{id}", stored.delete, role="infer", operation=messages.DELETE),
        Route("POST", "/v1/responses/{id}/cancel", stored.cancel, role="infer", operation=messages.CANCEL),
        Route("GET", "/v1/responses/{id}/input_items", stored.input_items, role="infer", operation=messages.ITEMS),
    ]
    kept, path = Conversations(policy, write_error, new_id), "/v1/conversations"
    items = f"{path}/{{id}}/items"
    routes += [
        Route("POST", path, kept.create, role="infer", operation=messages.CONVERSATION),
        Route("GET", f"{path}/{{id}}", kept.retrieve, role="infer", operation=messages.READ_CONVERSATION),
        Route("POST", f"{path}/{{id}}", kept.update, role="infer", operation=messages.UPDATE_CONVERSATION),
        Route("DELETE", f"{path}/{{id}}", kept.delete, role="infer", operation=messages.DELETE_CONVERSATION),
        Route("POST", items, kept.add_items, role="infer", operation=messages.ADD_ITEMS),
        Route("GET", items, kept.list_items, role="infer", operation=messages.CONVERSATION_ITEMS),
        Route("GET", f"{items}/{{item}}", kept.item, role="infer", operation=messages.ITEM),
        Route("DELETE", f"{items}/{{item}}", kept.delete_item, role="infer", operation=messages.DELETE_ITEM),
    ]
    scoring, rerank = Scoring(policy, write_error), messages.rerank(RERANK, TEI)
    routes += [
        Route("POST", f"{base}/rerank", scoring.rerank, role="infer", operation=rerank)
        for base in ("", "/v1", "/v2", "/models/{model}")
    ]
    routes += [
        Route("POST", f"{base}/embed", scoring.embed, role="infer", operation=messages.embed_as_tei(TEI_EMBED))
        for base in ("", "/models/{model}")
    ]
    routes += [
        Route("POST", f"{base}/score", scoring.score, role="infer", operation=messages.score(SCORE))
        for base in ("", "/v1", "/models/{model}")
    ]
    errors = text_messages.json_errors(STATUSES)
    return HttpProtocol("OpenAI", tuple(routes), write_error, errors=errors, reference=messages.REFERENCE)


def write_error(error: DragomanError | HttpError, _request_id: str = "") -> HttpResponse:
    """Format an error as OpenAI does: `{"error": {message, type, param, code}}`."""
    if isinstance(error, HttpError):
        kind = "invalid_request_error" if error.status < 500 else "server_error"
        param, code = (error.param, error.code) if isinstance(error, PreviousNotFound) else (None, None)
        value = {"error": {"message": error.message, "type": kind, "param": param, "code": code}}
        return json_response(value, error.status, error.headers)
    return json_response(error_body(error), status_of(error), error_headers(error))
