"""Parse UM-Bridge requests: JSON with vectors of doubles, which become arrays."""

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
_MAX_LISTS = 1 << 16  # in a request whose vectors are not counted before they are parsed
_VECTOR_KEYS = frozenset((b'"input"', b'"sens"', b'"vec"'))
_SPACE = re.compile(rb"[ \t\r\n]*")


class UmBridgeRequest(msgspec.Struct):
    """A parsed request with float64 arrays as vectors. Missing fields are UNSET; a missing config is None."""

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
    """A request with a valid name, and the error in the rest of it."""

    name: str
    error: InvalidInput


class _Lists(UmBridgeRequest):
    input: list[list[float]] | msgspec.UnsetType = msgspec.UNSET
    sens: list[float] | msgspec.UnsetType = msgspec.UNSET
    vec: list[float] | msgspec.UnsetType = msgspec.UNSET


class _FlatRequest(_Lists, forbid_unknown_fields=True):
    config: dict[str, str | bool | int | float | None] | None = None


class _RawVectors(UmBridgeRequest):
    input: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET  # type: ignore[assignment]
    sens: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    vec: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class _Outline(msgspec.Struct):
    name: str
    input: msgspec.Raw = msgspec.Raw(b"")


_DECODER = msgspec.json.Decoder(_Lists)
_FLAT_DECODER = msgspec.json.Decoder(_FlatRequest)
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


def parse_umbridge_request(text: bytes, policy: Policy) -> UmBridgeRequest | InvalidUmBridgeRequest:
    """Parse the body of a request. Raises InvalidInput if it is not JSON or has no valid name."""
    if LONG > len(text) <= policy.max_unscanned_bytes:
        try:
            return _to_arrays(_FLAT_DECODER.decode(text))
        except PARSER_ERRORS:
            pass
    if len(text) < LONG:
        check_json(text, policy)
    elif (request := _with_long_arrays(text, policy)) is not None:
        return request
    else:
        check_json(text, policy)
    if len(text) < _MAX_LISTS or count_up_to(text, b"[", _MAX_LISTS) < _MAX_LISTS:
        try:
            lists = _DECODER.decode(text)
        except PARSER_ERRORS:
            return _parse_lenient(text, policy)
        return _to_arrays(lists)
    return _check_vector_count(text, policy) or _parse_lenient(text, policy)


def _with_long_arrays(text: bytes, policy: Policy) -> UmBridgeRequest | InvalidUmBridgeRequest | None:
    """Parse a request whose long arrays are cut out; None if it has none or a general parser has to decide.

    Raises InvalidInput if the rest exceeds the limits of JSON.
    """
    message = cut_arrays(text, _VECTOR_KEYS, LONG)
    if not message.spans:
        return None
    check_json(message.rest, policy)
    try:
        request: Any = _RAW_DECODER.decode(message.rest)
        fields = {key: raw for key in ("input", *VECTORS) if (raw := getattr(request, key)) is not msgspec.UNSET}
        spans = {key: message.span(raw) for key, raw in fields.items()}
        if sum(span is not None for span in spans.values()) != len(message.spans):
            return None
        for key, raw in fields.items():
            span = spans[key]
            if key != "input":
                value: Any = parse_vector(memoryview(text)[slice(*span)] if span else memoryview(raw))
            elif span:
                value = parse_vectors(text, span, policy.max_tensors)
            else:
                value = [np.array(vector, np.float64) for vector in _VECTORS.decode(raw)]
            if value is None:
                return None
            setattr(request, key, value)
    except PARSER_ERRORS:
        return None
    return _checked_values(request, fields, policy)


def _checked_values(
    request: UmBridgeRequest, keys: Iterable[str], policy: Policy
) -> UmBridgeRequest | InvalidUmBridgeRequest:
    """Return the request unless the policy rejects a number in its vectors."""
    try:
        for key in keys:
            value = getattr(request, key)
            named = {key: value} if key != "input" else {f"input[{i}]": vector for i, vector in enumerate(value)}
            for where, vector in named.items():
                check_finite(vector, where, policy)
    except InvalidInput as error:
        return InvalidUmBridgeRequest(request.name, error)
    return request


def parse_vectors(text: bytes, span: tuple[int, int], most: int = 1 << 62) -> list[Array] | None:
    """Parse the array of vectors at this span; None if it contains anything else, or more than `most` vectors."""
    vectors: list[Array] = []
    at, stop = _skip_space(text, span[0] + 1), span[1] - 1
    while len(vectors) < most:
        end = text.find(b"]", at, stop) + 1
        vector = parse_vector(memoryview(text)[at:end]) if end and text[at : at + 1] == b"[" else None
        if vector is None:
            return None
        vectors.append(vector)
        at = _skip_space(text, end)
        if at == stop:
            return vectors
        if text[at : at + 1] != b",":
            return None
        at = _skip_space(text, at + 1)
    return None


def parse_vector(text: memoryview) -> Array | None:
    """Parse a flat array of numbers in JSON, also NaN, Infinity and 1e999; None if it holds anything else."""
    try:
        if len(text) < LONG:
            return np.array(_VECTOR.decode(text), np.float64)
        codes = np.frombuffer(text, np.uint8)
        blocks = (codes[at : at + BLOCK] for at in range(0, codes.size, BLOCK))  # with little memory for each
        count = sum(int(np.count_nonzero(block == ord(","))) for block in blocks) + 1
        array = parse_numbers("", FP64, text, count, literal=True, null=False)
    except (InvalidInput, *PARSER_ERRORS):
        return None
    return array if array.size == count else None


def _skip_space(text: bytes, at: int) -> int:
    space = _SPACE.match(text, at)
    assert space is not None
    return space.end()


def _check_vector_count(text: bytes, policy: Policy) -> InvalidUmBridgeRequest | None:
    """Return an error if there are too many vectors, without parsing them; None if there are not."""
    try:
        outline = msgspec.json.decode(text, type=_Outline)
    except PARSER_ERRORS:
        return None
    if count_up_to(bytes(outline.input), b"[", policy.max_tensors + 1) <= policy.max_tensors + 1:
        return None
    return InvalidUmBridgeRequest(
        outline.name, InvalidInput(f"'input': expected at most {policy.max_tensors} vectors, got more")
    )


def count_up_to(text: bytes, byte: bytes, most: int) -> int:
    """Count a byte, up to about `most`: faster than `count` where it is rare or the text is long."""
    count, at = 0, text.find(byte)
    while at >= 0 and count <= most:
        count += 1
        at = text.find(byte, at + 1)
    return count


def _to_arrays(lists: _Lists) -> UmBridgeRequest:
    request: UmBridgeRequest = lists
    if lists.input is not msgspec.UNSET:
        request.input = [np.array(v, np.float64) for v in lists.input]
    if lists.sens is not msgspec.UNSET:
        request.sens = np.array(lists.sens, np.float64)
    if lists.vec is not msgspec.UNSET:
        request.vec = np.array(lists.vec, np.float64)
    return request


def _parse_lenient(text: bytes, policy: Policy) -> UmBridgeRequest | InvalidUmBridgeRequest:
    """Parse NaN, Infinity and 1e999 as well, and report what is invalid."""
    check_json(text, policy)
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"the request is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise InvalidInput(f"the request is not a JSON object: got {_KINDS[type(values)]}")
    if "name" not in values:
        raise InvalidInput("'name' is missing; expected the name of a model")
    name = values["name"]
    if not isinstance(name, str):
        raise InvalidInput(f"'name': expected the name of a model, got {_KINDS[type(name)]}")
    try:
        return _build_request(name, values, policy)
    except InvalidInput as error:
        return InvalidUmBridgeRequest(name, error)


def _build_request(name: str, values: Mapping[str, Any], policy: Policy) -> UmBridgeRequest:
    request = UmBridgeRequest(name)
    if "input" in values:
        vectors = _require_type(list, values["input"], "'input'", "an array of vectors")
        if len(vectors) > policy.max_tensors:
            raise InvalidInput(f"'input': expected at most {policy.max_tensors} vectors, got {len(vectors)}")
        request.input = [_vector(v, f"input[{i}]", policy) for i, v in enumerate(vectors)]
    for key in VECTORS:
        if key in values:
            value = values[key]
            vector = [value] if type(value) in (int, float) else value  # as the MATLAB client sends it
            setattr(request, key, _vector(vector, key, policy))
    for key in INDICES:
        if key in values:
            value = values[key]
            if type(value) is not int:
                raise InvalidInput(f"'{key}': expected an integer, got {_describe(value)}")
            setattr(request, key, value)
    if values.get("config") is not None:
        request.config = _require_type(dict, values["config"], "'config'", "an object")
    return request


def _require_type(kind: type, value: Any, where: str, expected: str) -> Any:
    if type(value) is not kind:
        raise InvalidInput(f"{where}: expected {expected}, got {_describe(value)}")
    return value


def _vector(value: Any, where: str, policy: Policy) -> Array:
    numbers = _require_type(list, value, where, "an array of numbers")
    for index, number in enumerate(numbers):
        if type(number) is not float and type(number) is not int:
            raise InvalidInput(f"{where}[{index}]: expected a number, got {_describe(number)}")
    try:
        array = np.array(numbers, np.float64)
    except OverflowError as error:
        raise InvalidInput(f"{where}: an integer in it does not fit into a double") from error
    check_finite(array, where, policy)
    return array


def check_finite(array: Array, where: str, policy: Policy) -> None:
    """Raise InvalidInput if a number is not finite and the policy rejects those."""
    if policy.nonfinite == "error":
        require_finite(array, where)


def _describe(value: Any) -> str:
    kind = _KINDS.get(type(value), type(value).__name__)
    return f"{value!r:.40}" if isinstance(value, float | str | int) and not isinstance(value, bool) else kind
