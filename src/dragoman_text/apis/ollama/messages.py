"""Messages of Ollama's API, and the description of its routes for OpenAPI."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from dragoman.protocols.parameters import body_schema
from dragoman.protocols.wire import JSON, ErrorResponses, Operation
from dragoman_text.apis.ollama.request import CHAT, EMBED, GENERATE
from dragoman_text.apis.ollama.request import PULL as PULL_PARAMETERS

LINES = "application/x-ndjson"


class OllamaChatResponse(msgspec.Struct):
    """A message, or part of it; durations are in nanoseconds."""

    model: str
    created_at: str
    message: Mapping[str, Any]
    done: bool
    done_reason: str | None = None
    total_duration: int = 0
    load_duration: int = 0
    prompt_eval_count: int = 0
    prompt_eval_duration: int = 0
    eval_count: int = 0
    eval_duration: int = 0


class OllamaGenerateResponse(msgspec.Struct):
    """A completion, or part of it; durations are in nanoseconds."""

    model: str
    created_at: str
    response: str
    done: bool
    done_reason: str | None = None
    thinking: str | None = None
    total_duration: int = 0
    load_duration: int = 0
    prompt_eval_count: int = 0
    prompt_eval_duration: int = 0
    eval_count: int = 0
    eval_duration: int = 0


class OllamaEmbeddings(msgspec.Struct):
    model: str
    embeddings: Sequence[Sequence[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbedding(msgspec.Struct):
    embedding: Sequence[float]


class OllamaModels(msgspec.Struct):
    models: Sequence[Mapping[str, Any]]


class OllamaModel(msgspec.Struct):
    """Details of a model and what it can do."""

    details: Mapping[str, Any]
    template: str
    parameters: str
    model_info: Mapping[str, Any]
    capabilities: Sequence[str]
    modified_at: str


class OllamaVersion(msgspec.Struct):
    """`version` is that of Ollama whose API is served, `dragoman` that of the server."""

    version: str
    dragoman: str


class OllamaStatus(msgspec.Struct):
    status: str


class OllamaError(msgspec.Struct):
    error: str


ERRORS = ErrorResponses(frozenset((400, 401, 403, 404, 429, 500, 503, 504)), {JSON: OllamaError})
_NAME = {"type": "string"}


def _body(**fields: Any) -> dict[str, Any]:
    return {JSON: {"type": "object", "properties": fields}}


CHAT_OPERATION = Operation(
    "Continue a chat; a stream by default", {200: {LINES: None, JSON: OllamaChatResponse}}, {JSON: body_schema(CHAT)}
)
GENERATE_OPERATION = Operation(
    "Complete a prompt; a stream by default",
    {200: {LINES: None, JSON: OllamaGenerateResponse}},
    {JSON: body_schema(GENERATE)},
)
EMBED_OPERATION = Operation("Compute embeddings of texts", {200: {JSON: OllamaEmbeddings}}, {JSON: body_schema(EMBED)})
EMBEDDINGS = Operation("Compute the embedding of a text", {200: {JSON: OllamaEmbedding}}, {JSON: body_schema(EMBED)})
SHOW = Operation("Describe a model", {200: {JSON: OllamaModel}}, _body(model=_NAME, name=_NAME))
TAGS = Operation("List the text models", {200: {JSON: OllamaModels}})
RUNNING = Operation("List the loaded text models", {200: {JSON: OllamaModels}})
PULL = Operation(
    "Succeed for a model that is served; a stream by default",
    {200: {LINES: None, JSON: OllamaStatus}},
    {JSON: body_schema(PULL_PARAMETERS)},
)
VERSION = Operation("Read the version of the server", {200: {JSON: OllamaVersion}})
