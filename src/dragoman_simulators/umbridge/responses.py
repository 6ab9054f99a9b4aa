"""Serialize and parse UM-Bridge responses: JSON with vectors of doubles."""

import re
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from dragoman.core.datatypes import Array
from dragoman.core.documents import parse_json
from dragoman.core.errors import InvalidOutput
from dragoman.core.tensor import Tensor
from dragoman.formats import fast_json
from dragoman.formats.json_numbers import LONG, PARSER_ERRORS
from dragoman.formats.json_text import format_numbers, json_chunks
from dragoman.formats.policy import Policy
from dragoman_simulators.umbridge.requests import parse_vector, parse_vectors

_FLOAT64 = np.dtype(np.float64)
# For fewer numbers serializing is faster than a check for NaN and infinities: 9 to 13 % of the workload evaluate-4.
_FEW = 512  # performance only

# --- parsing (clients) --------------------------------------------------------------------------------------


class _Vector(msgspec.Struct):
    output: list[float]


class _Vectors(msgspec.Struct):
    output: list[list[float]]


class _RawOutput(msgspec.Struct):
    output: msgspec.Raw


_RAW_RESPONSE = msgspec.json.Decoder(_RawOutput)
_RESPONSES: Mapping[bool, Any] = {False: msgspec.json.Decoder(_Vector), True: msgspec.json.Decoder(_Vectors)}
_PYTHON_WORDS = re.compile(rb"\b(nan|inf)\b")
_JSON_WORDS = {b"nan": b"NaN", b"inf": b"Infinity"}
# The types that parse_json returns for a number, and None, which servers in C++ print for NaN.
_NUMBERS = (float, int, type(None))


def parse_output(text: bytes, *, several: bool) -> list[Array]:
    """Parse the vectors of a response; `several` is false for a response that is one vector. Raises InvalidOutput.

    Servers in Python may write `nan` and `inf`, servers in C++ write null for NaN.
    """
    if len(text) >= LONG:
        long = _long_output(text, several)
        if long is not None:
            return long
    try:
        output = _RESPONSES[several].decode(text).output
    except PARSER_ERRORS:
        output = _lenient_output(text, several)
    try:
        return [np.array(vector, np.float64) for vector in (output if several else [output])]
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidOutput(f"the response is not a vector of numbers: {text[:200]!r}") from error


def _long_output(text: bytes, several: bool) -> list[Array] | None:
    """Parse a long response; None if a general parser has to decide."""
    try:
        output = memoryview(_RAW_RESPONSE.decode(text).output)
    except PARSER_ERRORS:
        return None
    if several:
        return parse_vectors(output)
    vector = parse_vector(output)
    return None if vector is None else [vector]


def _lenient_output(text: bytes, several: bool) -> Any:
    try:
        output = parse_json(_PYTHON_WORDS.sub(lambda word: _JSON_WORDS[word[1]], text))["output"]
    except (ValueError, TypeError, KeyError) as error:
        raise InvalidOutput(f"the response is not valid: expected an output, got {text[:200]!r}") from error
    vectors = output if several else [output]
    if not isinstance(vectors, list) or not all(isinstance(vector, list) for vector in vectors):
        expected = "a list of vectors" if several else "a vector"
        raise InvalidOutput(f"the response is not valid: expected {expected}, got {text[:200]!r}")
    for vector in vectors:
        for value in vector:
            if type(value) not in _NUMBERS:
                raise InvalidOutput(f"the response is not valid: expected numbers in 'output', got {value!r:.40}")
    floats = [[float("nan") if value is None else value for value in vector] for vector in vectors]
    return floats if several else floats[0]


# --- serializing --------------------------------------------------------------------------------------------


def serialize_evaluation(outputs: Mapping[str, Tensor], policy: Policy) -> bytes:
    """Serialize a response with these outputs. Raises InvalidOutput as `format_vector` does."""
    size, flat = 0, []
    for name in outputs:
        vector = outputs[name].data.ravel()
        size += vector.size
        flat.append(vector if vector.dtype is _FLOAT64 else vector.astype(np.float64))
    if size <= _FEW:
        text = fast_json.dumps({"output": flat})
        if b"null" not in text:  # NaN and infinities
            return text
    return _serialize([format_vector(outputs[name].data, f"output '{name}'", policy) for name in outputs])


def serialize_derivative(vector: Array, policy: Policy) -> bytes:
    """Serialize a response with one vector. Raises InvalidOutput as `format_vector` does."""
    text = _serialize(np.ascontiguousarray(vector, np.float64)) if vector.size <= _FEW else b"null"
    return text if b"null" not in text else _serialize(format_vector(vector, "output", policy))


def _serialize(output: Any) -> bytes:
    return b"".join(json_chunks({"output": output}))


def format_vector(array: Array, where: str, policy: Policy) -> Any:
    """Return a vector as a value for `json_chunks`: floats in the fewest digits that identify them, infinity as 1e999.

    JSON allows 1e999, and most parsers read it as infinity. Raises InvalidOutput naming the element for NaN, and with
    `nonfinite = "error"` also for infinities; `"literal"` writes NaN, Infinity and -Infinity instead.
    """
    flat = np.ascontiguousarray(array, np.float64).reshape(-1)
    finite = np.isfinite(flat)
    if finite.all():
        return format_numbers(flat)
    special = flat[~finite]
    if policy.nonfinite == "error" or (policy.nonfinite == "null" and np.isnan(special).any()):
        bad = ~finite if policy.nonfinite == "error" else np.isnan(flat)
        index = int(np.flatnonzero(bad)[0])
        raise InvalidOutput(f"{where}: element {index} is {flat[index]}, which JSON cannot carry")
    literal = policy.nonfinite == "literal"
    words = [_word(float(value), literal=literal) for value in special]
    parts = fast_json.dumps(flat).split(b"null")
    return fast_json.Fragment(b"".join(p + w for p, w in zip(parts, [*words, b""], strict=True)))


def _word(value: float, *, literal: bool) -> bytes:
    if value != value:
        return b"NaN"
    word = b"Infinity" if literal else b"1e999"
    return word if value > 0 else b"-" + word
