"""A request of UM-Bridge: JSON with vectors of floats, read into arrays."""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import numpy as np

from dragoman.core.datatypes import FP64, Array
from dragoman.core.errors import InvalidInput
from dragoman.core.vector_binding import require_finite
from dragoman.formats.cut import cut_arrays
from dragoman.formats.json_numbers import LONG, PARSER_ERRORS, parse_numbers
from dragoman.formats.json_scan import BLOCK, check_json
from dragoman.formats.policy import Policy

VECTORS = ("sens", "vec")
INDICES = ("outWrt", "inWrt", "inWrt1", "inWrt2")
# More opening brackets than these are counted before anything is made of them.
_MANY = 1 << 16
_VECTOR_KEYS = frozenset((b'"input"', b'"sens"', b'"vec"'))
_SPACE = re.compile(rb"[ \t\r\n]*")


class UmBridgeRequest(msgspec.Struct):
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


class InvalidUmBridgeRequest(msgspec.Struct):
    """A request whose name can be read, and what is wrong with the rest of it."""

    name: str
    fault: InvalidInput


class _Lists(UmBridgeRequest):
    input: list[list[float]] | msgspec.UnsetType = msgspec.UNSET
    sens: list[float] | msgspec.UnsetType = msgspec.UNSET
    vec: list[float] | msgspec.UnsetType = msgspec.UNSET


class _RawVectors(UmBridgeRequest):
    input: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET  # type: ignore[assignment]
    sens: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    vec: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class _Outline(msgspec.Struct):
    name: str
    input: msgspec.Raw = msgspec.Raw(b"")


_DECODER = msgspec.json.Decoder(_Lists)
_RAW_DECODER = msgspec.json.Decoder(_RawVectors)
_VECTOR, _VECTORS = msgspec.json.Decoder(list[float]), msgspec.json.Decoder(list[list[float]])
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


def parse_umbridge_request(text: bytes, policy: Policy) -> UmBridgeRequest | InvalidUmBridgeRequest:
    """The request in a body. Raises InvalidInput where not even its name can be read."""
    if len(text) < LONG:
        if text.count(b"[") + text.count(b"{") > policy.max_json_depth:
            check_json(text, policy)
    elif (found := _with_long_arrays(text, policy)) is not None:
        return found
    else:
        check_json(text, policy)
    if len(text) < _MANY or counted(text, b"[", _MANY) < _MANY:
        try:
            lists = _DECODER.decode(text)
        except PARSER_ERRORS:
            return _leniently(text, policy)
        return _arrays(lists)
    return _too_many(text, policy) or _leniently(text, policy)


def _with_long_arrays(text: bytes, policy: Policy) -> UmBridgeRequest | InvalidUmBridgeRequest | None:
    """Parse a request whose long arrays are cut out; None if it has none or a general parser has to decide.

    Raises InvalidInput where there is more JSON beside the arrays than is allowed.
    """
    message = cut_arrays(text, _VECTOR_KEYS, LONG)
    if not message.spans:
        return None
    check_json(message.rest, policy)
    try:
        found: Any = _RAW_DECODER.decode(message.rest)
        given = {key: raw for key in ("input", *VECTORS) if (raw := getattr(found, key)) is not msgspec.UNSET}
        spans = {key: message.span(raw) for key, raw in given.items()}
        if sum(span is not None for span in spans.values()) != len(message.spans):
            return None
        for key, raw in given.items():
            span = spans[key]
            if key != "input":
                value: Any = parse_vector(memoryview(text)[slice(*span)] if span else memoryview(raw))
            elif span:
                value = parse_vectors(text, span, policy.max_tensors)
            else:
                value = [np.array(vector, np.float64) for vector in _VECTORS.decode(raw)]
            if value is None:
                return None
            setattr(found, key, value)
    except PARSER_ERRORS:
        return None
    return _checked_values(found, given, policy)


def _checked_values(
    question: UmBridgeRequest, keys: Iterable[str], policy: Policy
) -> UmBridgeRequest | InvalidUmBridgeRequest:
    """The request if the numbers in its vectors are as the policy requires."""
    try:
        for key in keys:
            value = getattr(question, key)
            named = {key: value} if key != "input" else {f"input[{i}]": vector for i, vector in enumerate(value)}
            for where, vector in named.items():
                check_finite(vector, where, policy)
    except InvalidInput as error:
        return InvalidUmBridgeRequest(question.name, error)
    return question


def parse_vectors(text: bytes, span: tuple[int, int], most: int = 1 << 62) -> list[Array] | None:
    """Parse a long array of vectors that begins and ends there; None if it holds anything else, or more than `most`."""
    vectors: list[Array] = []
    at, stop = _past_space(text, span[0] + 1), span[1] - 1
    while len(vectors) < most:
        end = text.find(b"]", at, stop) + 1
        vector = parse_vector(memoryview(text)[at:end]) if end and text[at : at + 1] == b"[" else None
        if vector is None:
            return None
        vectors.append(vector)
        at = _past_space(text, end)
        if at == stop:
            return vectors
        if text[at : at + 1] != b",":
            return None
        at = _past_space(text, at + 1)
    return None


def parse_vector(text: memoryview) -> Array | None:
    """Parse a flat array of numbers in JSON, also NaN, Infinity and 1e999; None if it holds anything else."""
    try:
        if len(text) < LONG:
            return np.array(_VECTOR.decode(text), np.float64)
        codes = np.frombuffer(text, np.uint8)
        portions = (codes[at : at + BLOCK] for at in range(0, codes.size, BLOCK))  # with little memory for each
        count = sum(int(np.count_nonzero(portion == ord(","))) for portion in portions) + 1
        array = parse_numbers("", FP64, text, count, literal=True, null=False)
    except (InvalidInput, *PARSER_ERRORS):
        return None
    return array if array.size == count else None


def _past_space(text: bytes, at: int) -> int:
    found = _SPACE.match(text, at)
    assert found is not None
    return found.end()


def _too_many(text: bytes, policy: Policy) -> InvalidUmBridgeRequest | None:
    """What is wrong with more vectors than are allowed, found before memory is taken for each."""
    try:
        outline = msgspec.json.decode(text, type=_Outline)
    except PARSER_ERRORS:
        return None
    if counted(bytes(outline.input), b"[", policy.max_tensors + 1) <= policy.max_tensors + 1:
        return None
    return InvalidUmBridgeRequest(
        outline.name, InvalidInput(f"'input': expected at most {policy.max_tensors} vectors, got more")
    )


def counted(text: bytes, sought: bytes, most: int) -> int:
    """How often one byte occurs; beyond `most` it is not counted further. Much quicker than to count long texts."""
    found, at = 0, text.find(sought)
    while at >= 0 and found <= most:
        found += 1
        at = text.find(sought, at + 1)
    return found


def _arrays(lists: _Lists) -> UmBridgeRequest:
    found: UmBridgeRequest = lists
    if lists.input is not msgspec.UNSET:
        found.input = [np.array(v, np.float64) for v in lists.input]
    if lists.sens is not msgspec.UNSET:
        found.sens = np.array(lists.sens, np.float64)
    if lists.vec is not msgspec.UNSET:
        found.vec = np.array(lists.vec, np.float64)
    return found


def _leniently(text: bytes, policy: Policy) -> UmBridgeRequest | InvalidUmBridgeRequest:
    """What a parser reads that knows NaN, Infinity and 1e999, and tells what is wrong of anything else."""
    check_json(text, policy)
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
        return InvalidUmBridgeRequest(name, fault)


def _checked(name: str, given: Mapping[str, Any], policy: Policy) -> UmBridgeRequest:
    found = UmBridgeRequest(name)
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
    check_finite(array, where, policy)
    return array


def check_finite(array: Array, where: str, policy: Policy) -> None:
    """Raises InvalidInput where a number is not finite and the policy is to reject those."""
    if policy.nonfinite == "error":
        require_finite(array, where)


def _told(value: Any) -> str:
    kind = _KINDS.get(type(value), type(value).__name__)
    return f"{value!r:.40}" if isinstance(value, float | str | int) and not isinstance(value, bool) else kind
