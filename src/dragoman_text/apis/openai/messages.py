"""Description of the routes of OpenAI's API for OpenAPI: what requests have by the tables of their parameters."""

from collections.abc import Mapping
from typing import Any

from dragoman.protocols.parameters import Parameter, body_schema
from dragoman.protocols.wire import EVENT_STREAM, JSON, Operation

REFERENCE = "https://platform.openai.com/docs/api-reference"


def embed(parameters: Mapping[str, Parameter]) -> Operation:
    """Return the description of embeddings with a table of parameters."""
    texts = {"anyOf": [{"type": "string", "minLength": 1}, {"type": "array", "minItems": 1}]}
    body = body_schema(parameters, input={**texts, "description": "a string, token ids, or a list of these"})
    return Operation("Compute embeddings of texts", {200: {JSON: dict[str, Any]}}, {JSON: body})


def respond(parameters: Mapping[str, Parameter]) -> Operation:
    """Return the description of the creation of responses with a table of parameters."""
    body = body_schema(parameters, input=_ITEMS)
    return Operation("Create a response", {200: {JSON: dict[str, Any], EVENT_STREAM: None}}, {JSON: body})


def count(parameters: Mapping[str, Parameter]) -> Operation:
    """Return the description of the count of the tokens of a response's prompt with a table of parameters."""
    return Operation(
        "Count the tokens of the input of a response",
        {200: {JSON: dict[str, Any]}},
        {JSON: body_schema(parameters, input=_ITEMS)},
    )


def compact(parameters: Mapping[str, Parameter]) -> Operation:
    """Return the description of the compaction of a conversation with a table of parameters."""
    body = body_schema(parameters, model=_TEXT)
    return Operation("Compact a conversation", {200: {JSON: dict[str, Any]}}, {JSON: body})


def rerank(parameters: Mapping[str, Parameter], tei: Mapping[str, Parameter]) -> Operation:
    """Return the description of rerank, whose requests have `documents`, or `texts` as in TEI."""
    texts = {"type": "array", "minItems": 1}
    bodies = [body_schema(parameters, query=_TEXT, documents=texts), body_schema(tei, query=_TEXT, texts=texts)]
    return Operation(
        "Rank documents by their relevance to a query",
        {200: {JSON: None}, 422: {JSON: dict[str, Any]}, 424: {JSON: dict[str, Any]}},
        {JSON: {"anyOf": bodies}},
    )


def embed_as_tei(parameters: Mapping[str, Parameter]) -> Operation:
    """Return the description of embeddings in the form of TEI."""
    body = body_schema(parameters, inputs=parameters["inputs"].kind.schema)
    errors = {status: {JSON: dict[str, Any]} for status in (422, 424)}
    return Operation("Compute embeddings as text-embeddings-inference", {200: {JSON: None}, **errors}, {JSON: body})


def score(parameters: Mapping[str, Parameter]) -> Operation:
    """Return the description of the scores of pairs."""
    return Operation("Score pairs of texts", {200: {JSON: dict[str, Any]}}, {JSON: body_schema(parameters)})


_TEXT = {"type": "string", "minLength": 1}
_ITEMS = {"anyOf": [_TEXT, {"type": "array", "minItems": 1}], "description": "a string, or a list of items"}
_PAGE = {"limit": {"type": "integer", "minimum": 1, "maximum": 100}, "order": {"enum": ["asc", "desc"]}, "after": {}}
OPEN = Operation("Open a WebSocket for responses; 426 for a request that asks for none", {})
RETRIEVE = Operation("Read a stored response", {200: {JSON: dict[str, Any]}})
DELETE = Operation("Delete a stored response", {200: {JSON: dict[str, Any]}})
CANCEL = Operation("Cancel a response in the background, which this server has none of", {})
ITEMS = Operation("List the input of a stored response", {200: {JSON: dict[str, Any]}}, query=_PAGE)
_METADATA = {"metadata": {"type": ["object", "null"]}}
_NEW_ITEMS = {"type": "array", "items": {"type": "object"}}
_CREATED: Any = {
    JSON: {"type": "object", "properties": {"items": {**_NEW_ITEMS, "type": ["array", "null"]}, **_METADATA}}
}
_ADDED: Any = {JSON: {"type": "object", "properties": {"items": _NEW_ITEMS}, "required": ["items"]}}
_OBJECT: Any = {200: {JSON: dict[str, Any]}}
CONVERSATION = Operation("Create a conversation", _OBJECT, _CREATED, is_body_required=False)
READ_CONVERSATION = Operation("Read a conversation", _OBJECT)
UPDATE_CONVERSATION = Operation(
    "Set the metadata of a conversation", _OBJECT, {JSON: {"type": "object", "properties": _METADATA}}
)
DELETE_CONVERSATION = Operation("Delete a conversation", _OBJECT)
ADD_ITEMS = Operation("Add items to a conversation", _OBJECT, _ADDED)
CONVERSATION_ITEMS = Operation("List the items of a conversation", _OBJECT, query=_PAGE)
ITEM = Operation("Read an item of a conversation", _OBJECT)
DELETE_ITEM = Operation("Delete an item of a conversation", _OBJECT)
MODELS = Operation("List the text models", {200: {JSON: dict[str, Any]}})
MODEL = Operation("Describe a text model, or the readiness of another", {200: {JSON: dict[str, Any]}})
VERSION = Operation("Read the version of the server", {200: {JSON: dict[str, Any]}})
LOAD = Operation("Read the number of text requests in progress", {200: {JSON: dict[str, Any]}})
