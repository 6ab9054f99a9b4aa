"""A request of UM-Bridge: JSON with vectors of floats, read into arrays."""

import json
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from dragoman.core.datatypes import FP64, Array
from dragoman.core.errors import InvalidInput
from dragoman.core.vector_binding import require_finite
from dragoman.formats import pieces, simd
from dragoman.formats.digits.machine import digits
from dragoman.formats.json_data import PARSER_FAULTS
from dragoman.formats.json_scan import check_json
from dragoman.formats.policy import Policy

VECTORS = ("sens", "vec")
INDICES = ("outWrt", "inWrt", "inWrt1", "inWrt2")
# More opening brackets than these are counted before anything is made of them.
_MANY = 1 << 16
# Bodies beyond are read in pieces, aside, so that others are answered meanwhile.
_VERY_LONG = 1 << 20


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


def parse_umbridge_request(text: bytes, policy: Policy) -> UmBridgeRequest | InvalidUmBridgeRequest:
    """The request in a body. Raises InvalidInput where not even its name can be read."""
    if len(text) < simd.LONG:
        if text.count(b"[") + text.count(b"{") > policy.max_json_depth:
            check_json(text, policy)
    else:
        found = _in_pieces(text, policy) if len(text) > _VERY_LONG or digits(FP64.dtype) is not None else None
        if found is None:
            check_json(text, policy)
        if found is None and len(text) <= _VERY_LONG:
            found = simd.read(text, _from_document)
        if found is not None:
            return found
    if len(text) < _MANY or counted(text, b"[", _MANY) < _MANY:
        try:
            lists = _DECODER.decode(text)
        except PARSER_FAULTS:
            return _leniently(text, policy)
        return _arrays(lists)
    return _too_many(text, policy) or _leniently(text, policy)


def _in_pieces(text: bytes, policy: Policy) -> UmBridgeRequest | InvalidUmBridgeRequest | None:
    """What a long body asks; None where that is not plain to see.

    Raises InvalidInput where there is more JSON beside the vectors than is allowed.
    """
    found = pieces.cut(text, b'"input"')
    if found is None:
        return None
    rest, others = _without_vectors(found.rest)
    if len(rest) >= simd.LONG and len(text) <= _VERY_LONG:
        return None
    check_json(rest, policy)
    try:
        lists = _DECODER.decode(rest)
    except PARSER_FAULTS:
        return None
    if lists.input != [[]] * len(found.spans) or any(getattr(lists, key) != [] for key in others):
        return None
    question = _arrays(lists)
    question.input = [pieces.vector(text, span) for span in found.spans]
    for key, vector in others.items():
        setattr(question, key, vector)
    return _finite(question, {f"input[{i}]": vector for i, vector in enumerate(question.input)} | others, policy)


def _without_vectors(text: bytes) -> tuple[bytes, dict[str, Array | None]]:
    """A message without its long vectors beside the inputs, and these, None for one that holds anything but numbers."""
    found: dict[str, Array | None] = {}
    for key in VECTORS:
        if (one := pieces.cut_flat(text, f'"{key}"'.encode())) is not None:
            found[key] = pieces.vector(text, one.spans[0])
            text = one.rest
    return text, found


def _finite(
    question: UmBridgeRequest, vectors: Mapping[str, Array | None], policy: Policy
) -> UmBridgeRequest | InvalidUmBridgeRequest | None:
    """The question if its vectors are as they should be; None where one holds anything but numbers."""
    try:
        for where, vector in vectors.items():
            if vector is None:
                return None
            check_finite(vector, where, policy)
    except InvalidInput as fault:
        return InvalidUmBridgeRequest(question.name, fault)
    return question


def _too_many(text: bytes, policy: Policy) -> InvalidUmBridgeRequest | None:
    """What is wrong with more vectors than are allowed, found before memory is taken for each."""
    try:
        outline = msgspec.json.decode(text, type=_Outline)
    except PARSER_FAULTS:
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


def _from_document(document: Any, text: bytes) -> UmBridgeRequest | None:
    """What simdjson has read; None where the other parsers might take it otherwise."""
    keys = list(document.keys())
    if len({*keys}) != len(keys):
        return None
    given: dict[str, Any] = {key: document[key] for key in keys if key in UmBridgeRequest.__struct_fields__}
    lists = 0
    for key, value in given.items():
        if key == "input":
            given[key] = [buffer(vector) for vector in value]
            lists += 1 + len(given[key])
        elif key in VECTORS:
            given[key] = buffer(value)
            lists += 1
        elif key == "config":
            given[key] = value if value is None else value.as_dict()
        elif type(value) is not (str if key == "name" else int):
            return None
    # simdjson flattens: only if there are no more lists than these, none is in the place of a number.
    return UmBridgeRequest(**given) if counted(text, b"[", lists) == lists else None


def buffer(numbers: Any) -> Array:
    """The numbers of an array of simdjson, which flattens it."""
    return np.frombuffer(numbers.as_buffer(of_type="d"), np.float64)


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
