"""Kinds and bounds of the fields of Sampling, and their conversion from JSON values."""

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from dragoman.core.errors import InvalidInput
from dragoman.core.text import Sampling
from dragoman.core.text_limits import (
    MAX_BIASES,
    MAX_STOPS,
    MAX_TOKEN_IDS,
    MAX_TOP,
    MAX_WORD_CHARACTERS,
    MAX_WORDS,
)

GREEDY_BELOW = 1e-5  # at lower temperatures FP32 cannot distinguish the logits
_MAX_INTEGER = (1 << 31) - 1
_TOKEN_ID = re.compile("0|[1-9][0-9]{0,9}")  # one spelling only: of two keys for a token one would win
_MAX_SEED = (1 << 64) - 1
_MAX_SALT = 1024
_ENCODER = json.JSONEncoder(ensure_ascii=False, default=repr)
_SHOWN = 80  # characters of a value in an error message


class InvalidValueError(ValueError):
    """A value of the wrong kind."""


class ValueKind(msgspec.Struct, frozen=True):
    """A kind of value: its description, and `convert`, which converts a value or raises InvalidValueError.

    `schema` is its JSON Schema; empty if any value is valid. `implied_maximum` is a maximum that the description omits;
    the error of a larger value states it.
    """

    description: str
    convert: Callable[[Any], Any]
    schema: Mapping[str, Any] = msgspec.field(default_factory=dict)
    implied_maximum: float | None = None


def check_value(name: str, value: Any, kind: ValueKind) -> Any:
    """Convert a value to its kind. Raises InvalidInput naming the field, the expected kind and the value."""
    try:
        return kind.convert(value)
    except InvalidValueError:
        maximum = kind.implied_maximum
        limit = (
            f" and <= {maximum}" if isinstance(value, int | float) and maximum is not None and value > maximum else ""
        )
        raise InvalidInput(f"`{name}` must be {kind.description}{limit}; got {format_value(value)}") from None


def format_value(value: Any) -> str:
    """Format a value as JSON for an error message, truncated to 80 characters. What follows is not formatted."""
    text = ""
    for part in _ENCODER.iterencode(value[:_SHOWN] if isinstance(value, str) else value):
        text += part[: _SHOWN + 1]
        if len(text) > _SHOWN:
            return f"{text[:_SHOWN]}..."
    return text


# --- kinds -----------------------------------------------------------------------------------------------


def flag() -> ValueKind:
    def convert(value: Any) -> bool:
        if not isinstance(value, bool):
            raise InvalidValueError
        return value

    return ValueKind("true or false", convert, {"type": "boolean"})


def integer(minimum: int, maximum: int = _MAX_INTEGER) -> ValueKind:
    """An integer; 5.0 is accepted, because some clients only have floats."""

    def convert(value: Any) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            raise InvalidValueError
        return value

    schema = {"type": "integer", "minimum": minimum, "maximum": maximum}
    if maximum >= _MAX_INTEGER:
        text = "an integer that is strictly positive" if minimum == 1 else f"an integer >= {minimum}"
        return ValueKind(text, convert, schema, maximum)
    return ValueKind(f"an integer >= {minimum} and <= {maximum}", convert, schema)


def number(minimum: float, maximum: float = math.inf, *, above: bool = False, below: bool = False) -> ValueKind:
    """A number from `minimum` to `maximum`; `above` and `below` exclude the bounds."""

    def convert(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise InvalidValueError
        if not minimum <= value <= maximum or (above and value == minimum) or (below and value == maximum):
            raise InvalidValueError
        return float(value)

    sides = [f"{'>' if above else '>='} {minimum}"] if math.isfinite(minimum) else []
    sides += [f"{'<' if below else '<='} {maximum}"] if math.isfinite(maximum) else []
    bounds = {"exclusiveMinimum" if above else "minimum": minimum, "exclusiveMaximum" if below else "maximum": maximum}
    schema = {"type": "number", **{name: bound for name, bound in bounds.items() if math.isfinite(bound)}}
    if above and minimum == 0 and maximum >= 1e6:
        return ValueKind(
            "a number that is strictly positive", convert, schema, maximum if math.isfinite(maximum) else None
        )
    return ValueKind(" ".join(["a number", " and ".join(sides)]).strip(), convert, schema)


def _positive(minimum: float, maximum: float) -> ValueKind:
    """A number above 0 by which FP32 can multiply and divide."""
    size = number(minimum, maximum)
    return ValueKind(f"a number that is strictly positive, from {minimum:g} to {maximum:g}", size.convert, size.schema)


def texts(maximum: int) -> ValueKind:
    """A list of non-empty strings, or one string."""

    def convert(value: Any) -> tuple[str, ...]:
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, list | tuple) or len(items) > maximum:
            raise InvalidValueError
        if not all(isinstance(text, str) and 0 < len(text) <= MAX_WORD_CHARACTERS for text in items):
            raise InvalidValueError
        return tuple(items)

    one = {"type": "string", "minLength": 1, "maxLength": MAX_WORD_CHARACTERS}
    schema = {"anyOf": [one, {"type": "array", "items": one, "maxItems": maximum}]}
    text = f"a list of at most {maximum} non-empty strings, of at most {MAX_WORD_CHARACTERS} characters each"
    return ValueKind(text, convert, schema)


def text() -> ValueKind:
    def convert(value: Any) -> str:
        if not isinstance(value, str):
            raise InvalidValueError
        return value

    return ValueKind("a string", convert, {"type": "string"})


def token_ids(maximum: int, minimum: int = 0) -> ValueKind:
    whole = integer(0)

    def convert(value: Any) -> tuple[int, ...]:
        if not isinstance(value, list | tuple) or not minimum <= len(value) <= maximum:
            raise InvalidValueError
        return tuple(whole.convert(each) for each in value)

    schema = {"type": "array", "items": whole.schema, "minItems": minimum, "maxItems": maximum}
    return ValueKind(f"a list of {f'{minimum} to' if minimum else 'at most'} {maximum} token ids", convert, schema)


def biases(bound: float = 100.0) -> ValueKind:
    """An object from token ids, which are strings in JSON, to the numbers added to their logits."""
    size = number(-bound, bound)

    def convert(value: Any) -> dict[int, float]:
        if not isinstance(value, Mapping) or len(value) > MAX_BIASES:
            raise InvalidValueError
        if not all(_TOKEN_ID.fullmatch(str(key)) and int(key) <= _MAX_INTEGER for key in value):
            raise InvalidValueError
        return {int(key): size.convert(each) for key, each in value.items()}

    keys = {"pattern": f"^({_TOKEN_ID.pattern})$"}
    schema = {
        "type": "object",
        "maxProperties": MAX_BIASES,
        "propertyNames": keys,
        "additionalProperties": size.schema,
    }
    text = f"an object of at most {MAX_BIASES} token ids, each with a number from {-bound:g} to {bound:g}"
    return ValueKind(text, convert, schema)


def _early_stopping() -> ValueKind:
    def convert(value: Any) -> Any:
        if not isinstance(value, bool) and value != "never":
            raise InvalidValueError
        return value

    schema = {"anyOf": [{"type": "boolean"}, {"type": "string", "enum": ["never"]}]}
    return ValueKind('true, false or "never"', convert, schema)


def _top_k() -> ValueKind:
    whole = integer(-1)
    text = f"{whole.description} (-1 and 0: all)"
    return replace(whole, description=text, convert=lambda value: max(0, whole.convert(value)))


def _salt() -> ValueKind:
    """A salt of the prefix cache, as vLLM takes it."""

    def convert(value: Any) -> str:
        if not isinstance(value, str) or not 0 < len(value) <= _MAX_SALT:
            raise InvalidValueError
        return value

    schema = {"type": "string", "minLength": 1, "maxLength": _MAX_SALT}
    return ValueKind(f"a string of 1 to {_MAX_SALT} characters", convert, schema)


def truncation_side() -> ValueKind:
    """The side on which tokens are removed."""

    def convert(value: Any) -> str:
        if not isinstance(value, str) or value not in ("left", "right"):
            raise InvalidValueError
        return value

    return ValueKind('"left" or "right"', convert, {"type": "string", "enum": ["left", "right"]})


KINDS: Mapping[str, ValueKind] = {
    "max_new_tokens": integer(1),
    "min_new_tokens": integer(0),
    "do_sample": flag(),
    "seed": integer(0, _MAX_SEED),
    "temperature": number(0.0, 1e6),
    "top_k": _top_k(),
    "top_p": number(0.0, 1.0),
    "min_p": number(0.0, 1.0),
    "typical_p": number(0.0, 1.0, above=True),
    "repetition_penalty": _positive(1e-4, 1e4),
    "presence_penalty": number(-2.0, 2.0),
    "frequency_penalty": number(-2.0, 2.0),
    "n": integer(1),
    "best_of": integer(1),
    "num_beams": integer(1),
    "length_penalty": number(-100.0, 100.0),
    "early_stopping": _early_stopping(),
    "stop": texts(MAX_STOPS),
    "stop_token_ids": token_ids(MAX_TOKEN_IDS),
    "include_stop": flag(),
    "ignore_eos": flag(),
    "bad_words": texts(MAX_WORDS),
    "logit_bias": biases(),
    "allowed_token_ids": token_ids(MAX_TOKEN_IDS, minimum=1),
    "top_logprobs": integer(0, MAX_TOP),
    "prompt_logprobs": integer(0, MAX_TOP),
    "truncate": integer(1),
    "truncation_side": truncation_side(),
    "prompt_token_ids": flag(),
    "skip_special_tokens": flag(),
    "spaces_between_special_tokens": flag(),
    "adapter": text(),
    "cache_salt": _salt(),
}

# Fields for which a model may have defaults of its own, as in vLLM.
MODEL_DEFAULTS = frozenset(
    {
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "max_new_tokens",
        "skip_special_tokens",
    }
)
_OF_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p", "seed")
_OF_BEAMS = ("length_penalty", "early_stopping")


def ineffective_fields(parameters: Sampling, fields: Mapping[str, Any]) -> list[str]:
    """Return the names of fields without effect: sampling parameters with greedy decoding, beam parameters without a
    beam search, and the side of a truncation without one."""
    names = [
        *(() if parameters.do_sample else _OF_SAMPLING),
        *(_OF_BEAMS if parameters.num_beams == 1 else ()),
        *(("truncation_side",) if parameters.truncate is None else ()),
    ]
    default = Sampling()
    return [
        name
        for name in names
        if fields.get(name, getattr(default, name)) != getattr(default, name)
        and not (name == "temperature" and fields[name] < GREEDY_BELOW)  # these ask for greedy decoding
        and not (name == "top_p" and fields[name] == 0)
    ]


# --- together ----------------------------------------------------------------------------------------------


def sampling(fields: Mapping[str, Any], names: Mapping[str, str], max_sequences: int) -> Sampling:
    """Build a Sampling from converted fields; `names` are the client's names of fields.

    A temperature or top_p of (nearly) 0 means greedy decoding. max_sequences: limit per prompt. Raises InvalidInput if
    fields contradict each other.
    """
    parameters = Sampling(**fields)
    if parameters.temperature < GREEDY_BELOW or parameters.top_p == 0:
        parameters = Sampling(**{**fields, "do_sample": False, "temperature": 1.0, "top_p": 1.0})
    if parameters.n > 1 or parameters.best_of > 1 or parameters.num_beams > 1:
        _check_sequences(parameters, names, max_sequences)
    if parameters.max_new_tokens is not None and parameters.min_new_tokens > parameters.max_new_tokens:
        lower, limit = (f"`{names.get(field, field)}`" for field in ("min_new_tokens", "max_new_tokens"))
        raise InvalidInput(
            f"{lower} must be <= {limit}; got {parameters.min_new_tokens} and {parameters.max_new_tokens}"
        )
    return parameters


def _check_sequences(parameters: Sampling, names: Mapping[str, str], max_sequences: int) -> None:
    n, best_of, beams = (f"`{names.get(field, field)}`" for field in ("n", "best_of", "num_beams"))
    for name, count in ((n, parameters.n), (best_of, parameters.best_of), (beams, parameters.num_beams)):
        if count > max_sequences:
            raise InvalidInput(f"{name} must be <= {max_sequences}; got {count}")
    if parameters.best_of and parameters.best_of < parameters.n:
        raise InvalidInput(f"{best_of} must be >= {n}; got {parameters.best_of} and {parameters.n}")
    if parameters.num_beams > 1:
        if parameters.do_sample:
            raise InvalidInput(f"{beams} > 1 is a beam search, which does not sample")
        for name, count in ((n, parameters.n), (best_of, parameters.best_of)):
            if count > parameters.num_beams:
                raise InvalidInput(f"{name} must be <= {beams}; got {count} and {parameters.num_beams}")
