"""Endpoints of the OpenAI API: models, completions, chat and embeddings."""

import time
from typing import Any

from dragoman.core.calls import (
    DescribeModels,
    DescribeServer,
    Embed,
    Generate,
    InFlight,
    ModelDescription,
    Ready,
    Request,
    Response,
    ServerDescription,
)
from dragoman.core.errors import DragomanError
from dragoman.protocols.openai.embeddings import parse_embedding_request
from dragoman.protocols.text_common.chat import parse_chat_request
from dragoman.protocols.text_common.completions import parse_completion_request
from dragoman.protocols.text_common.openai_format import error_body, status_of
from dragoman.protocols.text_common.parameters import object_body
from dragoman.protocols.text_common.tokenize import parse_detokenize_request
from dragoman.protocols.wire import (
    EndpointResult,
    EngineCall,
    HttpError,
    HttpProtocol,
    HttpRequest,
    HttpResponse,
    Policy,
    PreliminaryCall,
    Route,
    format_readiness,
    json_response,
    retry_after,
)


class OpenAi:
    """Endpoints of the OpenAI API, and those that vLLM adds."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._since = int(time.time())

    def models(self, http: HttpRequest) -> EngineCall[tuple[ModelDescription, ...], HttpResponse]:
        def reply(response: Response[tuple[ModelDescription, ...]]) -> HttpResponse:
            cards = [card for model in response.answer for card in self._cards(model)]
            return json_response({"object": "list", "data": cards})

        return EngineCall(Request(DescribeModels()), reply)

    def model(self, http: HttpRequest) -> PreliminaryCall[tuple[ModelDescription, ...]]:
        """Return the card of a text model; of another model its readiness, which KServe's V1 has at this path."""
        name = http.params["name"]

        def find(response: Response[tuple[ModelDescription, ...]]) -> EndpointResult:
            cards = (card for model in response.answer for card in self._cards(model))
            found = next((card for card in cards if card["id"] == name), None)
            if found is not None:
                return json_response(found)
            return EngineCall(Request(Ready(), name), lambda ready: format_readiness(name, is_ready=ready.answer))

        return PreliminaryCall(Request(DescribeModels()), find)

    def _cards(self, model: ModelDescription) -> list[dict[str, Any]]:
        """Return the card of a model and one for each of its adapters, `model:adapter`."""
        if not model.calls & {Generate, Embed}:
            return []
        card: dict[str, Any] = {
            "id": model.name,
            "object": "model",
            "created": self._since,
            "owned_by": "dragoman",
            "root": model.details.get("model_id") or model.name,
            "parent": None,
            "max_model_len": model.details.get("max_context"),
            "permission": [],
        }
        named = model.details.get("adapters") or ()
        return [card, *({**card, "id": f"{model.name}:{name}", "parent": model.name} for name in named)]

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
    routes = [Route("GET", "/v1/models", at.models), Route("GET", "/v1/models/{name}", at.model)]
    routes += [Route("GET", "/version", at.version), Route("GET", "/load", at.load)]
    routes += [Route("POST", "/detokenize", at.detokenize)]
    routes.append(Route("POST", "/models/{model}/detokenize", at.detokenize))
    for base in ("/v1", "/models/{model}/v1"):
        routes += [
            Route("POST", f"{base}/chat/completions", at.chat),
            Route("POST", f"{base}/completions", at.completions),
            Route("POST", f"{base}/embeddings", at.embeddings),
        ]
    return HttpProtocol("OpenAI", tuple(routes), write_error)


def write_error(error: DragomanError | HttpError) -> HttpResponse:
    """Format an error as OpenAI does: `{"error": {message, type, param, code}}`."""
    if isinstance(error, HttpError):
        kind = "invalid_request_error" if error.status < 500 else "server_error"
        value = {"error": {"message": error.message, "type": kind, "param": None, "code": None}}
        return json_response(value, error.status, error.headers)
    return json_response(error_body(error), status_of(error), retry_after(error))
