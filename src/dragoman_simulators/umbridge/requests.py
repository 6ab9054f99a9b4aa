"""Parse UM-Bridge requests: JSON with vectors of doubles, which become arrays."""

import contextlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import numpy as np

from dragoman.core.datatypes import FP64, Array, Buffer
from dragoman.core.documents import parse_json
from dragoman.core.errors import InvalidInput
from dragoman.core.vector_binding import require_finite
from dragoman.formats.json_document import explain_invalid
from dragoman.formats.json_numbers import LONG, PARSER_ERRORS, parse_array, read_with_simdjson
from dragoman.formats.json_scan import check_json, skip_space, split_members
from dragoman.formats.policy import Policy

VECTORS = ("sens", "vec")
INDICES = ("outWrt", "inWrt", "inWrt1", "inWrt2")
_OPEN, _CLOSE, _COMMA = b"[],"
_CLOSING = re.compile(rb"\]")
# Longer requests are split before they are parsed, and only others are parsed again to find out what is wrong: while a
# parser reads a text, no other thread runs, up to 100 ms for this many bytes.
_LONG_BYTES = 2 << 20
_FLAT_DEPTH = 3  # of a request whose config does not nest


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


class _Outline(UmBridgeRequest):
    """A request with its vectors and its config as text."""

    input: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET  # type: ignore[assignment]
    config: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET  # type: ignore[assignment]
    sens: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    vec: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


_FLAT_REQUEST = msgspec.json.Decoder(_FlatRequest)
_OUTLINE = msgspec.json.Decoder(_Outline)
_NAME = msgspec.json.Decoder(str)
_RAW = msgspec.json.Decoder(msgspec.Raw)
_CONFIG = msgspec.json.Decoder(dict[str, Any] | None)
_VECTOR = msgspec.json.Decoder(list[float])
_KINDS: Mapping[type, str] = {
    str: "text",
    bool: "a boolean",
    type(None): "null",
    dict: "an object",
    list: "an array",
    int: "an integer",
    float: "a number",
}


def parse_umbridge_request(text: Buffer, policy: Policy) -> UmBridgeRequest | InvalidUmBridgeRequest:
    """Parse the body of a request. Raises InvalidInput if it is not JSON or has no valid name.

    The limits of JSON hold for its config, and the limits of tensors for its vectors, which have no other form.
    """
    try:
        if len(text) < LONG and policy.max_json_depth >= _FLAT_DEPTH:
            return _to_arrays(_FLAT_REQUEST.decode(text))
    except PARSER_ERRORS:
        pass
    if LONG <= len(text) <= _LONG_BYTES and (plain := _parse_plain(bytes(text), policy)) is not None:
        return plain
    request = None
    with contextlib.suppress(*PARSER_ERRORS, ValueError):
        outline = _OUTLINE.decode(text) if len(text) <= _LONG_BYTES else _outline_of_members(text)
        request = _parse_outline(outline, policy)
    return request or _parse_lenient(bytes(text), policy)


def _parse_plain(text: bytes, policy: Policy) -> UmBridgeRequest | None:
    """Parse a request of vectors of numbers, indices and a config of plain values with simdjson; None for others.

    The general form finds the ends of the vectors before it parses them: 2.4 times as long for 10,000 numbers.
    """
    if len(text) > policy.max_json_bytes:
        return None

    def read(document: Any) -> UmBridgeRequest | None:
        if len(document) > len(UmBridgeRequest.__struct_fields__):  # performance only: with another field, it is None
            return None
        fields = {key: document[key] for key in document.keys()}  # noqa: SIM118 - it has no other iterator of keys
        config = fields.get("config")
        # simdjson finds the first of equal keys, and joins nested lists: all brackets have to be known.
        lists = [key for key in ("input", *VECTORS) if key in fields]
        if len(fields) != len(document) or not _has(text, b"{", 1 + (config is not None)):
            return None
        vectors = fields.get("input", ())
        if len(vectors) > policy.max_tensors or not _has(text, b"[", len(lists) + len(vectors)):
            return None
        if config is not None:
            if len(config) >= policy.max_json_values:
                return None
            fields["config"] = config.as_dict()
        if "input" in fields:
            fields["input"] = [_to_array(vector) for vector in vectors]
        for key in VECTORS:
            if key in fields:
                fields[key] = _to_array(fields[key])
        is_valid = type(fields.get("name")) is str and all(type(fields.get(key, 0)) is int for key in INDICES)
        return UmBridgeRequest(**fields) if is_valid else None

    return read_with_simdjson(text, read)


def _has(text: bytes, character: bytes, times: int) -> bool:
    """Return whether a text has a character so often; `bytes.count` takes ten times as long as `find`."""
    at = -1
    for _ in range(times):
        at = text.find(character, at + 1)
        if at < 0:
            return False
    return text.find(character, at + 1) < 0


def _to_array(vector: Any) -> Array:
    return np.frombuffer(vector.as_buffer(of_type="d"), np.float64)


def _outline_of_members(text: Buffer) -> _Outline:
    """Return the outline of a long request. Raises ValueError or an error of the parser."""
    others, apart = list[bytes](), dict[str, memoryview]()
    for key, value in split_members(text):
        name = _NAME.decode(key)
        if name not in ("input", "config", *VECTORS):
            others.append(key + b":" + bytes(value))
            continue
        if name in apart:  # the last one counts, but all have to be valid
            _RAW.decode(apart[name])
        apart[name] = value
    outline = _OUTLINE.decode(b"{" + b",".join(others) + b"}")
    for name, value in apart.items():
        setattr(outline, name, value)
    return outline


def _parse_outline(outline: _Outline, policy: Policy) -> UmBridgeRequest | InvalidUmBridgeRequest | None:
    """Parse the vectors and the config of a request; None if they contain anything that is not plain.

    Raises InvalidInput if the config exceeds the limits of JSON.
    """
    request: Any = outline
    fields = [key for key in ("input", *VECTORS) if getattr(request, key) is not msgspec.UNSET]
    if request.config is msgspec.UNSET:
        request.config = None
    else:
        request.config = _parse_config(bytes(request.config), policy)
    for key in fields:
        text = memoryview(getattr(request, key))
        if key != "input" and len(text) and not _is(text, 0, _OPEN):
            text = memoryview(b"[%b]" % bytes(text))  # one number, as the MATLAB client sends it
        value: Any = parse_vector(text) if key != "input" else parse_vectors(text, policy.max_tensors + 1)
        if key == "input" and value is not None and len(value) > policy.max_tensors:
            message = f"'input': expected at most {policy.max_tensors} vectors, got more"
            return InvalidUmBridgeRequest(request.name, InvalidInput(message))
        if value is None:
            return None
        setattr(request, key, value)
    return _checked_values(request, fields, policy)


def _parse_config(text: bytes, policy: Policy) -> dict[str, Any] | None:
    """Return a config, which may hold NaN and Infinity. Raises InvalidInput, ValueError or an error of the parser."""
    check_json(text, policy)
    config: dict[str, Any] | None
    try:
        config = _CONFIG.decode(text)
    except PARSER_ERRORS:
        config = msgspec.convert(parse_json(text), dict[str, Any] | None)
    return config


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


def parse_vectors(text: memoryview, most: int = 1 << 62) -> list[Array] | None:
    """Parse an array of vectors, up to `most` of them; None if it is anything else."""
    if not _is(text, 0, _OPEN):
        return None
    vectors: list[Array] = []
    at = skip_space(text, 1)
    has_more = not _is(text, at, _CLOSE)
    while has_more:
        if not _is(text, at, _OPEN) or (closing := _CLOSING.search(text, at)) is None:
            return None
        if len(vectors) == most:
            return vectors
        vector = parse_vector(text[at : closing.end()])
        if vector is None:
            return None
        vectors.append(vector)
        at = skip_space(text, closing.end())
        has_more = _is(text, at, _COMMA)
        if has_more:
            at = skip_space(text, at + 1)
    return vectors if _is(text, at, _CLOSE) and skip_space(text, at + 1) == len(text) else None


def _is(text: memoryview, at: int, character: int) -> bool:
    return at < len(text) and text[at] == character


def parse_vector(text: memoryview) -> Array | None:
    """Parse a flat array of numbers, also with 1e999; None if it is anything else."""
    if not _is(text, 0, _OPEN) or text[-1] != _CLOSE:
        return None
    try:
        if len(text) < LONG:
            return np.array(_VECTOR.decode(text), np.float64)
        return parse_array("", FP64, text, literal=True, null=False)
    except (InvalidInput, *PARSER_ERRORS):
        return None


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
    if len(text) > _LONG_BYTES:
        raise InvalidInput(
            "the request is not valid: expected an object with a 'name', vectors of numbers and a 'config' that is an "
            f"object; what is wrong with it is said for requests of at most {_LONG_BYTES} bytes"
        )
    check_json(text, policy, elements=False)
    try:
        values = parse_json(text)
    except ValueError as error:
        raise InvalidInput(f"the request is not valid JSON: {explain_invalid(text, error)}") from error
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
