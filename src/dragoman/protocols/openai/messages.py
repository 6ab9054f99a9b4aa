"""Messages of OpenAI's API, and the description of its routes for OpenAPI."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from dragoman.protocols.text_common.messages import EmbeddingList
from dragoman.protocols.text_common.parameters import Parameter, body_schema
from dragoman.protocols.wire import JSON, ErrorResponses, Operation


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


class OpenAiError(msgspec.Struct):
    """`param` is the parameter that is wrong, `code` a reason for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class OpenAiErrorMessage(msgspec.Struct):
    error: OpenAiError


def errors(statuses: Sequence[int]) -> ErrorResponses:
    """Return the description of errors with these statuses."""
    return ErrorResponses(frozenset(statuses), {JSON: OpenAiErrorMessage})


def embed(parameters: Mapping[str, Parameter]) -> Operation:
    """Return the description of embeddings with a table of parameters."""
    texts = {"anyOf": [{"type": "string", "minLength": 1}, {"type": "array", "minItems": 1}]}
    body = body_schema(parameters, input={**texts, "description": "a text, token ids, or a list of these"})
    return Operation("Compute embeddings of texts", {200: {JSON: EmbeddingList}}, {JSON: body})


MODELS = Operation("List the text models", {200: {JSON: ModelList}})
MODEL = Operation("Describe a text model, or the readiness of another", {200: {JSON: (ModelCard, ModelReadiness)}})
VERSION = Operation("Read the version of the server", {200: {JSON: ServerVersion}})
LOAD = Operation("Read the number of text requests in progress", {200: {JSON: ServerLoad}})
