"""Description of the routes of TGI's API for OpenAPI."""

from collections.abc import Mapping
from typing import Any

from dragoman.protocols.parameters import body_schema
from dragoman.protocols.wire import EVENT_STREAM, JSON, Operation
from dragoman_text.apis.common.messages import MESSAGES
from dragoman_text.apis.tgi.request import PARAMETERS
from dragoman_text.limits import TGI_INPUTS

REFERENCE = "https://huggingface.github.io/text-generation-inference/"


_TEXT = {"type": "string", "minLength": 1}
_TEXTS = {"anyOf": [_TEXT, {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": TGI_INPUTS}]}
_CHAT = body_schema({}, messages=MESSAGES)


def _body(**fields: Mapping[str, Any]) -> dict[str, Any]:
    parameters = {"anyOf": [body_schema(PARAMETERS), {"type": "null"}]}
    schema = body_schema({}, **fields)
    return {**schema, "properties": {**schema["properties"], "parameters": parameters}}


_PROMPT = {JSON: _body(inputs=_TEXTS)}
_PROMPT_OR_STREAM = _body(inputs=_TEXTS)
_PROMPT_OR_STREAM["properties"]["stream"] = {"anyOf": [{"type": "boolean"}, {"type": "null"}]}
_TOKENIZED = {"anyOf": [_body(inputs=_TEXT), body_schema({}, prompt={"type": "string"}), _CHAT]}

GENERATE_OR_STREAM = Operation(
    "Complete a prompt, as a stream if the body asks for it",
    {200: {JSON: None, EVENT_STREAM: None}},
    {JSON: _PROMPT_OR_STREAM},
)
GENERATE = Operation("Complete a prompt", {200: {JSON: None}}, _PROMPT)
GENERATE_STREAM = Operation("Complete a prompt as a stream", {200: {EVENT_STREAM: None}}, {JSON: _body(inputs=_TEXT)})
TOKENIZE = Operation("Split a text into tokens", {200: {JSON: None}}, {JSON: _TOKENIZED})
CHAT_TOKENIZE = Operation("Split a chat into tokens", {200: {JSON: None}}, {JSON: _CHAT})
INFO = Operation("Describe the text model", {200: {JSON: None}})
HEALTH = Operation("Check whether the model can answer", {200: {}})
