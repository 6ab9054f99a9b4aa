"""An answer of UM-Bridge: JSON with vectors of floats, printed from arrays, and read again."""

import json
import re
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import orjson

from dragoman.core.datatypes import Array
from dragoman.core.errors import InvalidOutput
from dragoman.core.tensor import Tensor
from dragoman.formats.cut import cut_arrays
from dragoman.formats.json_numbers import LONG, PARSER_ERRORS
from dragoman.formats.json_text import format_numbers, json_chunks
from dragoman.formats.policy import Policy
from dragoman.formats.umbridge import parse_vector, parse_vectors

_FEW = 512  # performance only: numbers that are printed sooner than tested for NaN and infinities

# --- reading what a server says -----------------------------------------------------------------------------


class _Vector(msgspec.Struct):
    output: list[float]


class _Vectors(msgspec.Struct):
    output: list[list[float]]


class _RawVectors(msgspec.Struct):
    output: msgspec.Raw


_RAW_ANSWER = msgspec.json.Decoder(_RawVectors)
_ANSWERS: Mapping[bool, Any] = {False: msgspec.json.Decoder(_Vector), True: msgspec.json.Decoder(_Vectors)}
_PYTHONS = re.compile(rb"\b(nan|inf)\b")
_JSONS = {b"nan": b"NaN", b"inf": b"Infinity"}
# The types that json.loads returns for a number, and None, which servers in C++ print for NaN.
_NUMBERS = (float, int, type(None))


def parse_output(text: bytes, *, several: bool) -> list[Array]:
    """The vectors of an answer; the only one where it is not one of several. Raises InvalidOutput.

    Servers in Python print NaN and infinities in Python's own words, those in C++ print null.
    """
    if len(text) >= LONG:
        long = _long_output(text, several)
        if long is not None:
            return long
    try:
        output = _ANSWERS[several].decode(text).output
    except PARSER_ERRORS:
        output = _loose_output(text, several)
    try:
        return [np.array(vector, np.float64) for vector in (output if several else [output])]
    except (TypeError, ValueError, OverflowError) as fault:
        raise InvalidOutput(f"the answer is no vector of numbers: {text[:200]!r}") from fault


def _long_output(text: bytes, several: bool) -> list[Array] | None:
    """The vectors of a long response; None if a general parser has to decide."""
    message = cut_arrays(text, (b'"output"',), LONG)
    try:
        span = message.span(_RAW_ANSWER.decode(message.rest).output)
    except PARSER_ERRORS:
        return None
    if span is None or len(message.spans) != 1:
        return None
    if several:
        return parse_vectors(text, span)
    vector = parse_vector(memoryview(text)[slice(*span)])
    return None if vector is None else [vector]


def _loose_output(text: bytes, several: bool) -> Any:
    try:
        output = json.loads(_PYTHONS.sub(lambda word: _JSONS[word[1]], text))["output"]
    except (ValueError, TypeError, KeyError, RecursionError) as fault:
        raise InvalidOutput(f"the answer is not valid: expected an output, got {text[:200]!r}") from fault
    vectors = output if several else [output]
    if not isinstance(vectors, list) or not all(isinstance(vector, list) for vector in vectors):
        wanted = "a list of vectors" if several else "a vector"
        raise InvalidOutput(f"the answer is not valid: expected {wanted}, got {text[:200]!r}")
    for vector in vectors:
        for value in vector:
            if type(value) not in _NUMBERS:
                raise InvalidOutput(f"the answer is not valid: expected numbers in 'output', got {value!r:.40}")
    floats = [[float("nan") if value is None else value for value in vector] for vector in vectors]
    return floats if several else floats[0]


# --- writing ------------------------------------------------------------------------------------------------


def serialize_evaluation(outputs: Mapping[str, Tensor], policy: Policy) -> bytes:
    """The answer with these outputs, one after another. Raises InvalidOutput as `numbers` does."""
    size, flat = 0, []
    for name in outputs:
        vector = outputs[name].data
        size += vector.size
        flat.append(np.ascontiguousarray(vector, np.float64).reshape(-1))
    text = _dumped(flat) if size <= _FEW else b"null"
    if b"null" not in text:  # which is what orjson prints for a number that is none
        return text
    return _dumped([numbers(outputs[name].data, f"output '{name}'", policy) for name in outputs])


def serialize_derivative(vector: Array, policy: Policy) -> bytes:
    """The answer with this vector alone. Raises InvalidOutput as `numbers` does."""
    text = _dumped(np.ascontiguousarray(vector, np.float64)) if vector.size <= _FEW else b"null"
    return text if b"null" not in text else _dumped(numbers(vector, "output", policy))


def _dumped(output: Any) -> bytes:
    return b"".join(json_chunks({"output": output}))


def numbers(array: Array, where: str, policy: Policy) -> Any:
    """What orjson prints for a vector: floats in the fewest digits that tell them apart, infinities as 1e999.

    1e999 is what JSON allows and most parsers take for infinity. Raises InvalidOutput naming the element where there
    is a NaN, or, if the operator wants it so, an infinity; `literal` prints NaN, Infinity and -Infinity instead.
    """
    flat = np.ascontiguousarray(array, np.float64).reshape(-1)
    finite = np.isfinite(flat)
    if finite.all():
        return format_numbers(flat)
    special = flat[~finite]
    if policy.nonfinite == "error" or (policy.nonfinite == "null" and np.isnan(special).any()):
        bad = ~finite if policy.nonfinite == "error" else np.isnan(flat)
        place = int(np.flatnonzero(bad)[0])
        raise InvalidOutput(f"{where}: element {place} is {flat[place]}, which JSON cannot carry")
    literal = policy.nonfinite == "literal"
    words = [_word(float(value), literal=literal) for value in special]
    parts = orjson.dumps(flat, option=orjson.OPT_SERIALIZE_NUMPY).split(b"null")
    return orjson.Fragment(b"".join(p + w for p, w in zip(parts, [*words, b""], strict=True)))


def _word(value: float, *, literal: bool) -> bytes:
    if value != value:
        return b"NaN"
    word = b"Infinity" if literal else b"1e999"
    return word if value > 0 else b"-" + word
