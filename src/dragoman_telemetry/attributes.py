"""Attributes that spans and metrics share, by OpenTelemetry's semantic conventions 1.45 and those for GenAI 0.1."""

from typing import Any, Final
from urllib.parse import urlsplit

from dragoman.system.call_times import TokenUsage
from dragoman.transports.observation import RequestRecord

PROVIDER: Final = "dragoman"
_METHODS: Final = frozenset(("GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH", "QUERY"))
# Statuses of gRPC that are errors of the server by OpenTelemetry's conventions.
_SERVER_ERRORS: Final = frozenset(
    ("UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS")
)
_OPERATIONS: Final = {"chat": "chat", "completion": "text_completion", "embedding": "embeddings"}
_FINISH: Final = {"length": "length", "eos_token": "stop", "stop_sequence": "stop", "": "error"}


def is_server_error(record: RequestRecord) -> bool:
    """Return whether a response is an error of the server, by the conventions of its protocol."""
    return is_server_status(record.status, is_grpc=record.is_grpc)


def is_server_status(status: int | str, *, is_grpc: bool) -> bool:
    """Return whether a status is an error of the server."""
    return str(status) in _SERVER_ERRORS if is_grpc else int(status) >= 500


def known_method(record: RequestRecord) -> str:
    """Return the method of an HTTP request, `_OTHER` for one that is not registered: clients may send any."""
    return record.method if record.method in _METHODS else "_OTHER"


def split_host(host: str) -> tuple[str, int | str]:
    """Return the name and the port of a `Host`, which a client may make up; "" for what is missing or invalid."""
    try:
        found = urlsplit(f"//{host}")
        return found.hostname or "", found.port or ""
    except ValueError:
        return "", ""


def operation_of(tokens: TokenUsage) -> str:
    """Return `gen_ai.operation.name`."""
    return _OPERATIONS[tokens.operation]


def gen_ai_attributes(record: RequestRecord, tokens: TokenUsage) -> dict[str, Any]:
    """Return the attributes of the span of a call of a text model: no prompts and no completions."""
    call = record.call
    found: dict[str, Any] = {
        "gen_ai.operation.name": operation_of(tokens),
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": record.named_model or record.model,
        "gen_ai.response.model": record.model,
        "gen_ai.usage.input_tokens": tokens.input,
        "error.type": str(record.status) if is_server_error(record) else "",
    }
    if tokens.operation == "embedding":
        return found
    found |= {
        "gen_ai.usage.output_tokens": tokens.output,
        "gen_ai.usage.cache_read.input_tokens": tokens.cached,
        "gen_ai.response.finish_reasons": tuple(_FINISH.get(reason, reason) for reason in tokens.finish_reasons),
    }
    optional = {
        "gen_ai.request.max_tokens": tokens.max_tokens,
        "gen_ai.request.temperature": tokens.temperature,
        "gen_ai.request.top_p": tokens.top_p,
        "gen_ai.request.stream": tokens.stream or None,
        "gen_ai.request.choice.count": len(tokens.finish_reasons) if len(tokens.finish_reasons) > 1 else None,
        "gen_ai.response.time_to_first_chunk": call.first_chunk_s - call.arrived_s if call.first_chunk_s else None,
    }
    return found | {name: value for name, value in optional.items() if value is not None}
