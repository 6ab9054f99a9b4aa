"""The JSON of UM-Bridge: vectors of floats read into arrays, and printed from them."""

import json
import re
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import orjson

from dragoman.core.datatypes import Array
from dragoman.core.errors import InvalidInput, InvalidOutput
from dragoman.payload import simd
from dragoman.payload.body import check_depth
from dragoman.payload.json_data import PARSER_FAULTS, printed
from dragoman.payload.policy import Policy

VECTORS = ("sens", "vec")
INDICES = ("outWrt", "inWrt", "inWrt1", "inWrt2")
# More opening brackets than these are counted before anything is made of them.
_MANY = 1 << 16
# Up to so many numbers it is quicker to print them than to look first whether all are finite.
_FEW = 512


class Question(msgspec.Struct):
    """A request, with arrays of float64 for its vectors. What is missing is UNSET; no config is None."""

    name: str
    input: list[Any] | msgspec.UnsetType = msgspec.UNSET
    config: dict[str, Any] | None = None
    outWrt: int | msgspec.UnsetType = msgspec.UNSET  # noqa: N815 - as on the wire
    inWrt: int | msgspec.UnsetType = msgspec.UNSET  # noqa: N815
    inWrt1: int | msgspec.UnsetType = msgspec.UNSET  # noqa: N815
    inWrt2: int | msgspec.UnsetType = msgspec.UNSET  # noqa: N815
    sens: Any = msgspec.UNSET
    vec: Any = msgspec.UNSET


class Misfit(msgspec.Struct):
    """A request whose name can be read, and what is wrong with the rest of it."""

    name: str
    fault: InvalidInput


class _Lists(Question):
    input: list[list[float]] | msgspec.UnsetType = msgspec.UNSET
    sens: list[float] | msgspec.UnsetType = msgspec.UNSET
    vec: list[float] | msgspec.UnsetType = msgspec.UNSET


class _Outline(msgspec.Struct):
    name: str
    input: msgspec.Raw = msgspec.Raw(b"")


_DECODER = msgspec.json.Decoder(_Lists)
_KINDS: Mapping[type, str] = {
    str: "text",
    bool: "a boolean",
    type(None): "null",
    dict: "an object",
    list: "an array",
    int: "an integer",
    float: "a number",
}


# --- reading ------------------------------------------------------------------------------------------------


def read_question(text: bytes, policy: Policy) -> Question | Misfit:
    """The request in a body. Raises InvalidInput where not even its name can be read."""
    most = policy.max_json_depth
    if len(text) < simd.LONG:
        brackets = text.count(b"[") + text.count(b"{")
    else:
        brackets = _count(text, b"[", most) + _count(text, b"{", most)
    if brackets > most:
        check_depth(text, policy)
    if len(text) >= simd.LONG:
        found = simd.read(text, _from_document)
        if found is not None:
            return found
    if len(text) < _MANY or _count(text, b"[", _MANY) < _MANY:
        try:
            lists = _DECODER.decode(text)
        except PARSER_FAULTS:
            return _leniently(text, policy)
        return _arrays(lists)
    return _too_many(text, policy) or _leniently(text, policy)


def _too_many(text: bytes, policy: Policy) -> Misfit | None:
    """What is wrong with more vectors than are allowed, found before memory is taken for each."""
    try:
        outline = msgspec.json.decode(text, type=_Outline)
    except PARSER_FAULTS:
        return None
    if _count(bytes(outline.input), b"[", policy.max_tensors + 1) <= policy.max_tensors + 1:
        return None
    return Misfit(outline.name, InvalidInput(f"'input': expected at most {policy.max_tensors} vectors, got more"))


def _count(text: bytes, sought: bytes, most: int) -> int:
    """How often one byte occurs; beyond `most` it is not counted further. Much quicker than to count long texts."""
    found, at = 0, text.find(sought)
    while at >= 0 and found <= most:
        found += 1
        at = text.find(sought, at + 1)
    return found


def _arrays(lists: _Lists) -> Question:
    found: Question = lists
    if lists.input is not msgspec.UNSET:
        found.input = [np.array(v, np.float64) for v in lists.input]
    if lists.sens is not msgspec.UNSET:
        found.sens = np.array(lists.sens, np.float64)
    if lists.vec is not msgspec.UNSET:
        found.vec = np.array(lists.vec, np.float64)
    return found


def _from_document(document: Any, text: bytes) -> Question | None:
    """What simdjson has read; None where the other parsers might take it otherwise."""
    keys = list(document.keys())
    if len({*keys}) != len(keys):
        return None
    given: dict[str, Any] = {key: document[key] for key in keys if key in Question.__struct_fields__}
    lists = 0
    for key, value in given.items():
        if key == "input":
            given[key] = [_buffer(vector) for vector in value]
            lists += 1 + len(given[key])
        elif key in VECTORS:
            given[key] = _buffer(value)
            lists += 1
        elif key == "config":
            given[key] = value if value is None else value.as_dict()
        elif type(value) is not (str if key == "name" else int):
            return None
    # simdjson flattens: only if there are no more lists than these, none is in the place of a number.
    return Question(**given) if _count(text, b"[", lists) == lists else None


def _buffer(numbers: Any) -> Array:
    return np.frombuffer(numbers.as_buffer(of_type="d"), np.float64)


def _leniently(text: bytes, policy: Policy) -> Question | Misfit:
    """What a parser reads that knows NaN, Infinity and 1e999, and tells what is wrong of anything else."""
    check_depth(text, policy)
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as fault:
        raise InvalidInput(f"the request is not valid JSON: {fault}") from fault
    if not isinstance(given, dict):
        raise InvalidInput(f"the request is not a JSON object: got {_KINDS[type(given)]}")
    if "name" not in given:
        raise InvalidInput("'name' is missing; expected the name of a model")
    name = given["name"]
    if not isinstance(name, str):
        raise InvalidInput(f"'name': expected the name of a model, got {_KINDS[type(name)]}")
    try:
        return _checked(name, given, policy)
    except InvalidInput as fault:
        return Misfit(name, fault)


def _checked(name: str, given: Mapping[str, Any], policy: Policy) -> Question:
    found = Question(name)
    if "input" in given:
        vectors = _a(list, given["input"], "'input'", "an array of vectors")
        if len(vectors) > policy.max_tensors:
            raise InvalidInput(f"'input': expected at most {policy.max_tensors} vectors, got {len(vectors)}")
        found.input = [_vector(v, f"input[{i}]", policy) for i, v in enumerate(vectors)]
    for key in VECTORS:
        if key in given:
            setattr(found, key, _vector(given[key], key, policy))
    for key in INDICES:
        if key in given:
            value = given[key]
            if type(value) is not int:
                raise InvalidInput(f"'{key}': expected an integer, got {_told(value)}")
            setattr(found, key, value)
    if given.get("config") is not None:
        found.config = _a(dict, given["config"], "'config'", "an object")
    return found


def _a(kind: type, value: Any, where: str, wanted: str) -> Any:
    if type(value) is not kind:
        raise InvalidInput(f"{where}: expected {wanted}, got {_told(value)}")
    return value


def _vector(value: Any, where: str, policy: Policy) -> Array:
    numbers = _a(list, value, where, "an array of numbers")
    for place, number in enumerate(numbers):
        if type(number) is not float and type(number) is not int:
            raise InvalidInput(f"{where}[{place}]: expected a number, got {_told(number)}")
    try:
        array = np.array(numbers, np.float64)
    except OverflowError as fault:
        raise InvalidInput(f"{where}: an integer in it does not fit into a double") from fault
    if policy.nonfinite == "error" and not np.isfinite(array).all():
        place = int(np.flatnonzero(~np.isfinite(array))[0])
        raise InvalidInput(f"{where}[{place}]: expected a finite number, got {array[place]}")
    return array


def _told(value: Any) -> str:
    kind = _KINDS.get(type(value), type(value).__name__)
    return f"{value!r:.40}" if isinstance(value, float | str | int) and not isinstance(value, bool) else kind


# --- reading what a server says -----------------------------------------------------------------------------


class _Vector(msgspec.Struct):
    output: list[float]


class _Vectors(msgspec.Struct):
    output: list[list[float]]


_ANSWERS: Mapping[bool, Any] = {False: msgspec.json.Decoder(_Vector), True: msgspec.json.Decoder(_Vectors)}
_PYTHONS = re.compile(rb"\b(nan|inf)\b")
_JSONS = {b"nan": b"NaN", b"inf": b"Infinity"}


def read_output(text: bytes, *, several: bool) -> list[Array]:
    """The vectors of an answer; the only one where it is not one of several. Raises InvalidOutput.

    Servers in Python print NaN and infinities in Python's own words, those in C++ print null.
    """
    if len(text) >= simd.LONG:
        long = simd.read(text, lambda document, whole: _output(document, whole, several))
        if long is not None:
            return long
    try:
        output = _ANSWERS[several].decode(text).output
    except PARSER_FAULTS:
        output = _loose_output(text, several)
    try:
        return [np.array(vector, np.float64) for vector in (output if several else [output])]
    except (TypeError, ValueError, OverflowError) as fault:
        raise InvalidOutput(f"the answer is no vector of numbers: {text[:200]!r}") from fault


def _output(document: Any, text: bytes, several: bool) -> list[Array] | None:
    found = [_buffer(vector) for vector in document["output"]] if several else [_buffer(document["output"])]
    lists = len(found) + several
    return found if _count(text, b"[", lists) == lists else None


def _loose_output(text: bytes, several: bool) -> Any:
    try:
        output = json.loads(_PYTHONS.sub(lambda word: _JSONS[word[1]], text))["output"]
    except (ValueError, TypeError, KeyError, RecursionError) as fault:
        raise InvalidOutput(f"the answer is not valid: expected an output, got {text[:200]!r}") from fault
    vectors = output if several else [output]
    if not isinstance(vectors, list) or not all(isinstance(vector, list) for vector in vectors):
        wanted = "a list of vectors" if several else "a vector"
        raise InvalidOutput(f"the answer is not valid: expected {wanted}, got {text[:200]!r}")
    numbers = [[float("nan") if value is None else value for value in vector] for vector in vectors]
    return numbers if several else numbers[0]


# --- writing ------------------------------------------------------------------------------------------------


def written_output(vectors: Mapping[str, Array], policy: Policy, *, several: bool) -> bytes:
    """The answer with these vectors, each under the name by which a fault of it is told, or with the only one.

    Raises InvalidOutput as `numbers` does.
    """
    if sum(vector.size for vector in vectors.values()) <= _FEW:
        flat = [np.ascontiguousarray(vector, np.float64).reshape(-1) for vector in vectors.values()]
        text = _dumped(flat, several)
        if b"null" not in text:  # which is what orjson prints for a number that is none
            return text
    return _dumped([numbers(vector, name, policy) for name, vector in vectors.items()], several)


def _dumped(output: list[Any], several: bool) -> bytes:
    return orjson.dumps({"output": output if several else output[0]}, option=orjson.OPT_SERIALIZE_NUMPY)


def numbers(array: Array, where: str, policy: Policy) -> Any:
    """What orjson prints for a vector: floats in the fewest digits that tell them apart, infinities as 1e999.

    1e999 is what JSON allows and most parsers take for infinity. Raises InvalidOutput naming the element where there
    is a NaN, or, if the operator wants it so, an infinity; `literal` prints NaN, Infinity and -Infinity instead.
    """
    flat = np.ascontiguousarray(array, np.float64).reshape(-1)
    finite = np.isfinite(flat)
    if finite.all():
        return printed(flat)
    special = flat[~finite]
    if policy.nonfinite == "error" or (policy.nonfinite == "null" and np.isnan(special).any()):
        bad = ~finite if policy.nonfinite == "error" else np.isnan(flat)
        place = int(np.flatnonzero(bad)[0])
        raise InvalidOutput(f"{where}: element {place} is {flat[place]}, which JSON cannot carry")
    literal = policy.nonfinite == "literal"
    words = [_word(float(value), literal=literal) for value in special]
    pieces = orjson.dumps(flat, option=orjson.OPT_SERIALIZE_NUMPY).split(b"null")
    return orjson.Fragment(b"".join(p + w for p, w in zip(pieces, [*words, b""], strict=True)))


def _word(value: float, *, literal: bool) -> bytes:
    if value != value:
        return b"NaN"
    word = b"Infinity" if literal else b"1e999"
    return word if value > 0 else b"-" + word
