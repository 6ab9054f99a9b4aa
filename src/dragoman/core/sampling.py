"""Kinds and bounds of the fields of Sampling, and their conversion from JSON values."""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dragoman.core.errors import InvalidInput
from dragoman.core.text import Sampling
from dragoman.core.text_limits import (
    MOST_BIASES,
    MOST_STOPS,
    MOST_TOKEN_IDS,
    MOST_TOP,
    MOST_WORD_CHARACTERS,
    MOST_WORDS,
)

GREEDY_BELOW = 1e-5  # at lower temperatures FP32 cannot distinguish the logits
_MOST_INTEGER = (1 << 31) - 1
_TOKEN_ID = re.compile("0|[1-9][0-9]{0,9}")  # one spelling only: of two keys for a token one would win
_MOST_SEED = (1 << 64) - 1


class InvalidValueError(ValueError):
    """A value of the wrong kind."""


@dataclass(frozen=True, slots=True)
class ValueKind:
    """A kind of value: its description, and `convert`, which converts a value or raises InvalidValueError.

    `schema` is its JSON Schema; empty if that accepts anything. `unnamed_most` is a maximum that the description does
    not name; the error of a larger value does.
    """

    description: str
    convert: Callable[[Any], Any]
    schema: Mapping[str, Any] = field(default_factory=dict)
    unnamed_most: float | None = None


def check_value(name: str, value: Any, kind: ValueKind) -> Any:
    """Convert a value to its kind. Raises InvalidInput naming the field, the expected kind and the value."""
    try:
        return kind.convert(value)
    except InvalidValueError:
        most = kind.unnamed_most
        limit = f" and <= {most}" if isinstance(value, int | float) and most is not None and value > most else ""
        raise InvalidInput(f"`{name}` must be {kind.description}{limit}; got {format_value(value)}") from None


def format_value(value: Any) -> str:
    """Format a value as JSON for an error message, truncated to 80 characters."""
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= 80 else f"{text[:80]}..."


# --- kinds -----------------------------------------------------------------------------------------------


def flag() -> ValueKind:
    def convert(value: Any) -> bool:
        if not isinstance(value, bool):
            raise InvalidValueError
        return value

    return ValueKind("true or false", convert, {"type": "boolean"})


def integer(least: int, most: int = _MOST_INTEGER) -> ValueKind:
    """An integer; 5.0 is accepted, because some clients only have floats."""

    def convert(value: Any) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise InvalidValueError
        return value

    schema = {"type": "integer", "minimum": least, "maximum": most}
    if most >= _MOST_INTEGER:
        text = "an integer that is strictly positive" if least == 1 else f"an integer >= {least}"
        return ValueKind(text, convert, schema, most)
    return ValueKind(f"an integer >= {least} and <= {most}", convert, schema)


def number(least: float, most: float = math.inf, *, above: bool = False, below: bool = False) -> ValueKind:
    """A number from `least` to `most`; `above` and `below` exclude the bounds."""

    def convert(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise InvalidValueError
        if not least <= value <= most or (above and value == least) or (below and value == most):
            raise InvalidValueError
        return float(value)

    sides = [f"{'>' if above else '>='} {least}"] if math.isfinite(least) else []
    sides += [f"{'<' if below else '<='} {most}"] if math.isfinite(most) else []
    bounds = {"exclusiveMinimum" if above else "minimum": least, "exclusiveMaximum" if below else "maximum": most}
    schema = {"type": "number", **{name: bound for name, bound in bounds.items() if math.isfinite(bound)}}
    if above and least == 0 and most >= 1e6:
        return ValueKind("a number that is strictly positive", convert, schema, most if math.isfinite(most) else None)
    return ValueKind(" ".join(["a number", " and ".join(sides)]).strip(), convert, schema)


def _positive(least: float, most: float) -> ValueKind:
    """A number above 0 by which FP32 can multiply and divide."""
    size = number(least, most)
    return ValueKind(f"a number that is strictly positive, from {least:g} to {most:g}", size.convert, size.schema)


def texts(most: int) -> ValueKind:
    """A list of non-empty texts, or one text."""

    def convert(value: Any) -> tuple[str, ...]:
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, list | tuple) or len(items) > most:
            raise InvalidValueError
        if not all(isinstance(text, str) and 0 < len(text) <= MOST_WORD_CHARACTERS for text in items):
            raise InvalidValueError
        return tuple(items)

    one = {"type": "string", "minLength": 1, "maxLength": MOST_WORD_CHARACTERS}
    schema = {"anyOf": [one, {"type": "array", "items": one, "maxItems": most}]}
    text = f"a list of at most {most} texts that are not empty, of at most {MOST_WORD_CHARACTERS} characters each"
    return ValueKind(text, convert, schema)


def text() -> ValueKind:
    def convert(value: Any) -> str:
        if not isinstance(value, str):
            raise InvalidValueError
        return value

    return ValueKind("a text", convert, {"type": "string"})


def token_ids(most: int, least: int = 0) -> ValueKind:
    whole = integer(0)

    def convert(value: Any) -> tuple[int, ...]:
        if not isinstance(value, list | tuple) or not least <= len(value) <= most:
            raise InvalidValueError
        return tuple(whole.convert(each) for each in value)

    schema = {"type": "array", "items": whole.schema, "minItems": least, "maxItems": most}
    return ValueKind(f"a list of {f'{least} to' if least else 'at most'} {most} token ids", convert, schema)


def biases(bound: float = 100.0) -> ValueKind:
    """An object from token ids, which are strings in JSON, to the numbers added to their logits."""
    size = number(-bound, bound)

    def convert(value: Any) -> dict[int, float]:
        if not isinstance(value, Mapping) or len(value) > MOST_BIASES:
            raise InvalidValueError
        if not all(_TOKEN_ID.fullmatch(str(key)) and int(key) <= _MOST_INTEGER for key in value):
            raise InvalidValueError
        return {int(key): size.convert(each) for key, each in value.items()}

    keys = {"pattern": f"^({_TOKEN_ID.pattern})$"}
    schema = {
        "type": "object",
        "maxProperties": MOST_BIASES,
        "propertyNames": keys,
        "additionalProperties": size.schema,
    }
    text = f"an object of at most {MOST_BIASES} token ids, each with a number from {-bound:g} to {bound:g}"
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
    "seed": integer(0, _MOST_SEED),
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
    "stop": texts(MOST_STOPS),
    "stop_token_ids": token_ids(MOST_TOKEN_IDS),
    "include_stop": flag(),
    "ignore_eos": flag(),
    "bad_words": texts(MOST_WORDS),
    "logit_bias": biases(),
    "allowed_token_ids": token_ids(MOST_TOKEN_IDS, least=1),
    "top_logprobs": integer(0, MOST_TOP),
    "prompt_logprobs": integer(0, MOST_TOP),
    "truncate": integer(1),
    "truncation_side": truncation_side(),
    "prompt_token_ids": flag(),
    "skip_special_tokens": flag(),
    "spaces_between_special_tokens": flag(),
    "adapter": text(),
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


def without_effect(made: Sampling, fields: Mapping[str, Any]) -> list[str]:
    """Return the fields with a value that changes nothing in a Sampling made of them: sampling parameters of greedy
    decoding, parameters of beams without a beam search, and the side of a truncation without one."""
    names = [
        *(() if made.do_sample else _OF_SAMPLING),
        *(_OF_BEAMS if made.num_beams == 1 else ()),
        *(("truncation_side",) if made.truncate is None else ()),
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


def sampling(fields: Mapping[str, Any], names: Mapping[str, str], most: int) -> Sampling:
    """Build a Sampling from converted fields; `names` are the client's names of fields.

    A temperature or top_p of (nearly) 0 means greedy decoding. most: maximum number of sequences of a prompt. Raises
    InvalidInput if fields contradict each other.
    """
    parameters = Sampling(**fields)
    if parameters.temperature < GREEDY_BELOW or parameters.top_p == 0:
        parameters = Sampling(**{**fields, "do_sample": False, "temperature": 1.0, "top_p": 1.0})
    if parameters.n > 1 or parameters.best_of > 1 or parameters.num_beams > 1:
        _check_sequences(parameters, names, most)
    if parameters.max_new_tokens is not None and parameters.min_new_tokens > parameters.max_new_tokens:
        least, limit = (f"`{names.get(field, field)}`" for field in ("min_new_tokens", "max_new_tokens"))
        raise InvalidInput(
            f"{least} must be <= {limit}; got {parameters.min_new_tokens} and {parameters.max_new_tokens}"
        )
    return parameters


def _check_sequences(made: Sampling, names: Mapping[str, str], most: int) -> None:
    n, best_of, beams = (f"`{names.get(field, field)}`" for field in ("n", "best_of", "num_beams"))
    for name, count in ((n, made.n), (best_of, made.best_of), (beams, made.num_beams)):
        if count > most:
            raise InvalidInput(f"{name} must be <= {most}; got {count}")
    if made.best_of and made.best_of < made.n:
        raise InvalidInput(f"{best_of} must be >= {n}; got {made.best_of} and {made.n}")
    if made.num_beams > 1:
        if made.do_sample:
            raise InvalidInput(f"{beams} > 1 is a beam search, which does not sample")
        for name, count in ((n, made.n), (best_of, made.best_of)):
            if count > made.num_beams:
                raise InvalidInput(f"{name} must be <= {beams}; got {count} and {made.num_beams}")
