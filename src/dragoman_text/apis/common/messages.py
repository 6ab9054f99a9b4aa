"""Responses of OpenAI's API that several protocols have, and their description for OpenAPI."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec

from dragoman.protocols.parameters import body_schema
from dragoman.protocols.wire import EVENT_STREAM, JSON, Operation
from dragoman_text.apis.common import chat, completions

Reason = Literal["stop", "length", "tool_calls"] | None


class Usage(msgspec.Struct):
    """Tokens of the prompts and of the completions."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    finish_reason: Reason
    logprobs: Mapping[str, Any] | None = None
    token_ids: Sequence[int] | None = None
    prompt_token_ids: Sequence[int] | None = None


class Completion(msgspec.Struct):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: Sequence[CompletionChoice]
    usage: Usage


class ChatMessage(msgspec.Struct):
    role: str
    content: str | None = None
    tool_calls: Sequence[Mapping[str, Any]] = ()


class ChatChoice(msgspec.Struct):
    index: int
    message: ChatMessage
    finish_reason: Reason
    logprobs: Mapping[str, Any] | None = None
    token_ids: Sequence[int] | None = None


class ChatCompletion(msgspec.Struct):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: Sequence[ChatChoice]
    usage: Usage
    prompt_token_ids: Sequence[int] | None = None


class Embedding(msgspec.Struct):
    """A vector, as numbers or as float32 in base64."""

    object: Literal["embedding"]
    index: int
    embedding: Sequence[float] | str


class EmbeddingList(msgspec.Struct):
    object: Literal["list"]
    data: Sequence[Embedding]
    model: str
    usage: Usage


class TokenIds(msgspec.Struct):
    """Token ids of a text, as vLLM returns them."""

    count: int
    max_model_len: int | None
    tokens: Sequence[int]
    token_strs: Sequence[str] | None = None


class DetokenizeRequest(msgspec.Struct):
    tokens: Sequence[Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]]
    model: str | None = None


class Detokenized(msgspec.Struct):
    prompt: str


_MESSAGE = {
    "type": "object",
    "properties": {"role": {"type": "string", "minLength": 1}, "content": {}},
    "required": ["role", "content"],
}
MESSAGES = {"type": "array", "minItems": 1, "items": _MESSAGE}
_PROMPT = {"anyOf": [{"type": "string"}, {"type": "array"}], "description": "a string, token ids, or a list of these"}

COMPLETE = Operation(
    "Complete a prompt",
    {200: {JSON: Completion, EVENT_STREAM: None}},
    {JSON: body_schema(completions.PARAMETERS, prompt=_PROMPT)},
)
CHAT = Operation(
    "Continue a chat",
    {200: {JSON: ChatCompletion, EVENT_STREAM: None}},
    {JSON: body_schema(chat.PARAMETERS, messages=MESSAGES)},
)
DETOKENIZE = Operation("Return the text of tokens", {200: {JSON: Detokenized}}, {JSON: DetokenizeRequest})
