"""Description for OpenAPI of errors, and of routes of OpenAI's API that several protocols have."""

from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import msgspec

from dragoman.protocols.parameters import body_schema
from dragoman.protocols.wire import EVENT_STREAM, JSON, ErrorResponses, Operation
from dragoman_text.apis.common import chat, completions


def json_errors(statuses: Iterable[int]) -> ErrorResponses:
    """Return the description of errors with these statuses."""
    return ErrorResponses(frozenset(statuses), {JSON: dict[str, Any]})


class DetokenizeRequest(msgspec.Struct):
    tokens: Sequence[Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]]
    model: str | None = None


_MESSAGE = {
    "type": "object",
    "properties": {"role": {"type": "string", "minLength": 1}, "content": {}},
    "required": ["role", "content"],
}
MESSAGES = {"type": "array", "minItems": 1, "items": _MESSAGE}
_PROMPT = {"anyOf": [{"type": "string"}, {"type": "array"}], "description": "a string, token ids, or a list of these"}

COMPLETE = Operation(
    "Complete a prompt",
    {200: {JSON: dict[str, Any], EVENT_STREAM: None}},
    {JSON: body_schema(completions.PARAMETERS, prompt=_PROMPT)},
)
CHAT = Operation(
    "Continue a chat",
    {200: {JSON: dict[str, Any], EVENT_STREAM: None}},
    {JSON: body_schema(chat.PARAMETERS, messages=MESSAGES)},
)
DETOKENIZE = Operation("Return the text of tokens", {200: {JSON: dict[str, Any]}}, {JSON: DetokenizeRequest})
