"""The fields of requests in the types of the clients' packages, and those that an OpenAPI document does not describe.

Dragoman describes each field that it has decided about: applied, ignored and named in the response, or rejected. A
field that a new version of a package brings is in none of its tables, so it would be ignored without a decision.
"""

import dataclasses
import importlib
import typing
from collections.abc import Iterator, Mapping
from typing import Any

# By path of the API, and of the object in its request: modules and names of the types.
TYPES: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("/v1/chat/completions", ""): (
        "openai.types.chat.completion_create_params:CompletionCreateParams",
        "huggingface_hub:ChatCompletionInput",
    ),
    ("/v1/chat/completions", "stream_options"): ("openai.types.chat:ChatCompletionStreamOptionsParam",),
    ("/v1/completions", ""): ("openai.types.completion_create_params:CompletionCreateParams",),
    ("/v1/embeddings", ""): ("openai.types.embedding_create_params:EmbeddingCreateParams",),
    ("/v1/responses", ""): ("openai.types.responses.response_create_params:ResponseCreateParams",),
    ("/v1/responses/input_tokens", ""): ("openai.types.responses.input_token_count_params:InputTokenCountParams",),
    ("/v1/responses", "stream_options"): ("openai.types.responses.response_create_params:StreamOptions",),
    ("/v1/responses", "reasoning"): ("openai.types.shared_params:Reasoning",),
    ("/v1/responses", "text"): ("openai.types.responses:ResponseTextConfigParam",),
    ("/v1/messages", ""): (
        "anthropic.types.message_create_params:MessageCreateParams",
        "anthropic.types.beta.message_create_params:MessageCreateParams",
    ),
    ("/v1/messages", "thinking"): (
        "anthropic.types:ThinkingConfigParam",
        "anthropic.types.beta:BetaThinkingConfigParam",
    ),
    ("/v1/messages", "output_config"): (
        "anthropic.types:OutputConfigParam",
        "anthropic.types.beta:BetaOutputConfigParam",
    ),
    ("/v1/messages/count_tokens", ""): (
        "anthropic.types.message_count_tokens_params:MessageCountTokensParams",
        "anthropic.types.beta.message_count_tokens_params:MessageCountTokensParams",
    ),
    ("/api/chat", ""): ("ollama._types:ChatRequest",),
    ("/api/chat", "options"): ("ollama._types:Options",),
    ("/api/generate", ""): ("ollama._types:GenerateRequest",),
    ("/api/embed", ""): ("ollama._types:EmbedRequest",),
    ("/api/embeddings", ""): ("ollama._types:EmbeddingsRequest",),
    ("/", ""): ("huggingface_hub:TextGenerationInput",),
    ("/", "parameters"): ("huggingface_hub:TextGenerationInputGenerateParameters",),
    ("/embed", ""): ("huggingface_hub:FeatureExtractionInput",),
}
# Arguments that the packages send as headers.
_HEADERS = frozenset({"betas", "user_profile_id", "workspace_id"})


def fields_of(kind: Any) -> set[str]:
    """Return the fields of a TypedDict, a dataclass or a pydantic model, or of all members of a union."""
    if typing.get_args(kind):
        return set().union(*map(fields_of, typing.get_args(kind)))
    if dataclasses.is_dataclass(kind):
        return {field.name for field in dataclasses.fields(kind)}
    if hasattr(kind, "model_fields"):
        return {field.alias or name for name, field in kind.model_fields.items()}
    return {*kind.__required_keys__, *kind.__optional_keys__}


def request_fields() -> Iterator[tuple[str, str, str, str]]:
    """Yield path, object, type and field of all types whose package is installed."""
    for (path, inside), names in TYPES.items():
        for name in names:
            module, _, kind = name.partition(":")
            try:
                found = getattr(importlib.import_module(module), kind)
            except ImportError:
                continue
            yield from ((path, inside, name, field) for field in sorted(fields_of(found) - _HEADERS))


def undescribed_fields(document: Mapping[str, Any]) -> list[str]:
    """Return the fields that an OpenAPI document does not describe."""
    return [
        f"{path} {'.'.join(filter(None, (inside, field)))} ({name})"
        for path, inside, name, field in request_fields()
        if field not in _described(document, path, inside)
    ]


def _described(document: Mapping[str, Any], path: str, inside: str) -> Mapping[str, Any]:
    schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    for name in filter(None, (inside,)):
        schema = schema["properties"][name]
        schema = next((each for each in schema.get("anyOf", ()) if "properties" in each), schema)
    properties: Mapping[str, Any] = schema["properties"]
    return properties
