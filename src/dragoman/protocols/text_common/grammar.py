"""Constraints on completions: response formats, TGI's grammars and vLLM's guided decoding."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from dragoman.core.errors import InvalidInput
from dragoman.core.sampling import InvalidValueError, ValueKind
from dragoman.core.text import Grammar
from dragoman.formats.json_scan import check_json
from dragoman.formats.policy import Policy
from dragoman.protocols.text_common.parameters import Parameter, sets

_POLICY = Policy()  # its limits hold for JSON in a text as well


def _parse_schema(value: Any) -> Grammar:
    """Parse a JSON schema, an object or its JSON string."""
    if isinstance(value, str):
        try:
            text = value.encode()
            check_json(text, _POLICY)
            value = json.loads(text)
        except (ValueError, RecursionError, InvalidInput):
            raise InvalidValueError from None
    if not isinstance(value, dict):
        raise InvalidValueError
    return Grammar("json_schema", json.dumps(value))


def _parse_regex(value: Any) -> Grammar:
    if not isinstance(value, str) or not value:
        raise InvalidValueError
    return Grammar("regex", value)


def _parse_lark(value: Any) -> Grammar:
    if not isinstance(value, str) or not value:
        raise InvalidValueError
    return Grammar("lark", value)


def _parse_choice(value: Any) -> Grammar:
    if not isinstance(value, list) or not value or not all(isinstance(text, str) for text in value):
        raise InvalidValueError
    return Grammar("choice", json.dumps(value, ensure_ascii=False))


def _parse_object(value: Any) -> Grammar | None:
    if not isinstance(value, bool):
        raise InvalidValueError
    return Grammar("json_object") if value else None


_STRUCTURED: Mapping[str, Callable[[Any], Grammar | None]] = {
    "json": _parse_schema,
    "json_object": _parse_object,
    "regex": _parse_regex,
    "choice": _parse_choice,
    "grammar": _parse_lark,
}


def _parse_structured(value: Any) -> Grammar | None:
    """Parse vLLM's `structured_outputs`, an object with one of these fields."""
    if not isinstance(value, dict):
        raise InvalidValueError
    formats = {name: each for name, each in value.items() if each is not None}
    if len(formats) != 1 or not formats.keys() <= _STRUCTURED.keys():
        raise InvalidValueError
    ((name, each),) = formats.items()
    return _STRUCTURED[name](each)


def _parse_typed(value: Any) -> Grammar | None:
    """Parse an object with a `type`: OpenAI's `response_format`, TGI's `grammar`."""
    if not isinstance(value, dict):
        raise InvalidValueError
    match value:
        case {"type": "text"}:
            return None
        case {"type": "json_schema", "json_schema": {"schema": schema}}:
            return _parse_schema(schema)
        case {"type": "json" | "json_object" | "json_schema", "value": {"schema": schema, "name": _}}:
            return _parse_schema(schema)
        case {"type": "json" | "json_object" | "json_schema", "value": schema} if schema is not None:
            return _parse_schema(schema)
        case {"type": "json_object"}:
            return Grammar("json_object")
        case {"type": "regex", "value": regex}:
            return _parse_regex(regex)
    raise InvalidValueError


RESPONSE_FORMAT = ValueKind(
    'an object: {"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "json_schema": {"schema": {...}}}',
    _parse_typed,
)
GRAMMAR = ValueKind(
    'an object: {"type": "json", "value": {a JSON schema}} or {"type": "regex", "value": "..."}', _parse_typed
)
_STRUCTURED_OUTPUTS = ValueKind(f"an object with one of {', '.join(_STRUCTURED)}", _parse_structured)

# vLLM's parameters, which its users also send to LMI.
GUIDED: Mapping[str, Parameter] = {
    "guided_json": sets("grammar", ValueKind("a JSON schema", _parse_schema)),
    "guided_regex": sets("grammar", ValueKind("a regular expression", _parse_regex)),
    "guided_choice": sets("grammar", ValueKind("a list of texts", _parse_choice)),
    "guided_grammar": sets("grammar", ValueKind("a grammar in the Lark format", _parse_lark)),
    "structured_outputs": sets("grammar", _STRUCTURED_OUTPUTS),
}
