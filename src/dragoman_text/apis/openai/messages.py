"""Messages of OpenAI's API, and the description of its routes for OpenAPI."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from dragoman.protocols.parameters import Parameter, body_schema
from dragoman.protocols.wire import EVENT_STREAM, JSON, ErrorResponses, Operation
from dragoman_text.apis.common.messages import EmbeddingList, Usage


class ModelCard(msgspec.Struct):
    """A text model, or one of its adapters."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int | None
    permission: Sequence[Any]


class ModelList(msgspec.Struct):
    object: Literal["list"]
    data: Sequence[ModelCard]


class ModelReadiness(msgspec.Struct):
    name: str
    ready: bool


class ServerVersion(msgspec.Struct):
    version: str


class ServerLoad(msgspec.Struct):
    """Number of text requests in progress."""

    server_load: int


class ResponseUsage(msgspec.Struct):
    """Tokens of input and output, those of reasoning included."""

    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: Mapping[str, int]
    output_tokens_details: Mapping[str, int]


class StoredResponse(msgspec.Struct):
    """A response of the Responses API; `output` has messages, function calls and reasoning."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete", "failed", "in_progress"]
    model: str
    output: Sequence[Mapping[str, Any]]
    parallel_tool_calls: bool
    tool_choice: Any
    tools: Sequence[Mapping[str, Any]]
    store: bool
    incomplete_details: Mapping[str, str] | None = None
    error: Mapping[str, str] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    usage: ResponseUsage | None = None


class InputTokens(msgspec.Struct):
    """Number of tokens of a prompt."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class InputItems(msgspec.Struct):
    object: Literal["list"]
    data: Sequence[Mapping[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedResponse(msgspec.Struct):
    id: str
    object: Literal["response"]
    deleted: bool


class Ranked(msgspec.Struct):
    """A document by its position in the request, best first."""

    index: int
    relevance_score: float
    document: Mapping[str, str] | None = None


class Ranking(msgspec.Struct):
    id: str
    model: str
    usage: Usage
    results: Sequence[Ranked]


class TeiRanked(msgspec.Struct):
    index: int
    score: float
    text: str | None = None


class PairScore(msgspec.Struct):
    index: int
    object: Literal["score"]
    score: float


class PairScores(msgspec.Struct):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: Sequence[PairScore]
    usage: Usage


class OpenAiError(msgspec.Struct):
    """`param` is the parameter that is wrong, `code` a reason for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class OpenAiErrorMessage(msgspec.Struct):
    error: OpenAiError


class TeiError(msgspec.Struct):
    """An error in the form of text-embeddings-inference, for requests in its form."""

    error: str
    error_type: str


def errors(statuses: Sequence[int]) -> ErrorResponses:
    """Return the description of errors with these statuses."""
    return ErrorResponses(frozenset(statuses), {JSON: OpenAiErrorMessage})


def embed(parameters: Mapping[str, Parameter]) -> Operation:
    """Return the description of embeddings with a table of parameters."""
    texts = {"anyOf": [{"type": "string", "minLength": 1}, {"type": "array", "minItems": 1}]}
    body = body_schema(parameters, input={**texts, "description": "a string, token ids, or a list of these"})
    return Operation("Compute embeddings of texts", {200: {JSON: EmbeddingList}}, {JSON: body})


def respond(parameters: Mapping[str, Parameter]) -> Operation:
    """Return the description of the creation of responses with a table of parameters."""
    body = body_schema(parameters, input=_ITEMS)
    return Operation("Create a response", {200: {JSON: StoredResponse, EVENT_STREAM: None}}, {JSON: body})


def count(parameters: Mapping[str, Parameter]) -> Operation:
    """Return the description of the count of the tokens of a response's prompt with a table of parameters."""
    return Operation(
        "Count the tokens of the input of a response",
        {200: {JSON: InputTokens}},
        {JSON: body_schema(parameters, input=_ITEMS)},
    )


def rerank(parameters: Mapping[str, Parameter], tei: Mapping[str, Parameter]) -> Operation:
    """Return the description of rerank, whose requests have `documents`, or `texts` as in TEI."""
    texts = {"type": "array", "minItems": 1}
    bodies = [body_schema(parameters, query=_TEXT, documents=texts), body_schema(tei, query=_TEXT, texts=texts)]
    return Operation(
        "Rank documents by their relevance to a query",
        {200: {JSON: (Ranking, Sequence[TeiRanked])}, 422: {JSON: TeiError}, 424: {JSON: TeiError}},
        {JSON: {"anyOf": bodies}},
    )


def embed_as_tei(parameters: Mapping[str, Parameter]) -> Operation:
    """Return the description of embeddings in the form of TEI."""
    body = body_schema(parameters, inputs=parameters["inputs"].kind.schema)
    errors = {status: {JSON: TeiError} for status in (422, 424)}
    return Operation(
        "Compute embeddings as text-embeddings-inference", {200: {JSON: list[list[float]]}, **errors}, {JSON: body}
    )


def score(parameters: Mapping[str, Parameter]) -> Operation:
    """Return the description of the scores of pairs."""
    return Operation("Score pairs of texts", {200: {JSON: PairScores}}, {JSON: body_schema(parameters)})


_TEXT = {"type": "string", "minLength": 1}
_ITEMS = {"anyOf": [_TEXT, {"type": "array", "minItems": 1}], "description": "a string, or a list of items"}
_PAGE = {"limit": {"type": "integer", "minimum": 1, "maximum": 100}, "order": {"enum": ["asc", "desc"]}, "after": {}}
RETRIEVE = Operation("Read a stored response", {200: {JSON: StoredResponse}})
DELETE = Operation("Delete a stored response", {200: {JSON: DeletedResponse}})
CANCEL = Operation("Cancel a response in the background, which this server has none of", {})
COMPACT = Operation("Compact a conversation, which this server does not do", {})
ITEMS = Operation("List the input of a stored response", {200: {JSON: InputItems}}, query=_PAGE)
MODELS = Operation("List the text models", {200: {JSON: ModelList}})
MODEL = Operation("Describe a text model, or the readiness of another", {200: {JSON: (ModelCard, ModelReadiness)}})
VERSION = Operation("Read the version of the server", {200: {JSON: ServerVersion}})
LOAD = Operation("Read the number of text requests in progress", {200: {JSON: ServerLoad}})
