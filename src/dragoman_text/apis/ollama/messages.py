"""Description of the routes of Ollama's API for OpenAPI."""

from typing import Any

from dragoman.protocols.parameters import body_schema
from dragoman.protocols.wire import JSON, Operation
from dragoman_text.apis.common.messages import json_errors
from dragoman_text.apis.ollama.request import CHAT, EMBED, GENERATE
from dragoman_text.apis.ollama.request import PULL as PULL_PARAMETERS

REFERENCE = "https://docs.ollama.com/api"

LINES = "application/x-ndjson"


ERRORS = json_errors((400, 401, 403, 404, 429, 500, 503, 504))
_NAME = {"type": "string"}


def _body(**fields: Any) -> dict[str, Any]:
    return {JSON: {"type": "object", "properties": fields}}


CHAT_OPERATION = Operation(
    "Continue a chat; a stream by default", {200: {LINES: None, JSON: dict[str, Any]}}, {JSON: body_schema(CHAT)}
)
GENERATE_OPERATION = Operation(
    "Complete a prompt; a stream by default",
    {200: {LINES: None, JSON: dict[str, Any]}},
    {JSON: body_schema(GENERATE)},
)
EMBED_OPERATION = Operation("Compute embeddings of texts", {200: {JSON: dict[str, Any]}}, {JSON: body_schema(EMBED)})
EMBEDDINGS = Operation("Compute the embedding of a text", {200: {JSON: dict[str, Any]}}, {JSON: body_schema(EMBED)})
SHOW = Operation("Describe a model", {200: {JSON: dict[str, Any]}}, _body(model=_NAME, name=_NAME))
TAGS = Operation("List the text models", {200: {JSON: dict[str, Any]}})
RUNNING = Operation("List the loaded text models", {200: {JSON: dict[str, Any]}})
PULL = Operation(
    "Succeed for a model that is served; a stream by default",
    {200: {LINES: None, JSON: dict[str, Any]}},
    {JSON: body_schema(PULL_PARAMETERS)},
)
VERSION = Operation("Read the version of the server", {200: {JSON: dict[str, Any]}})
