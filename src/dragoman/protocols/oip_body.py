"""What a REST request of the Open Inference Protocol says: its body, in JSON or binary form, becomes a Request."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from dragoman.core.calls import Infer, Inference, Request
from dragoman.core.datatypes import Datatype, datatype
from dragoman.core.errors import InvalidInput, NotSupported
from dragoman.core.tensor import Parameters, Tensor
from dragoman.protocols.oip import check_counts, classes_wanted, deadline_s, tensor_from_raw
from dragoman.protocols.oip_json import PARSER_FAULTS, array_from_json, told
from dragoman.protocols.wire import Buffer, HttpRequest, Policy

HEADER_LENGTH = "inference-header-content-length"

# --- the envelope, as it stands on the wire ------------------------------------------------------------------

_Parameters = dict[str, str | bool | int | float]


class _Input(msgspec.Struct):
    name: str
    shape: list[int]
    datatype: str
    parameters: _Parameters | None = None
    data: Any = msgspec.UNSET


class _RawInput(_Input):
    data: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET  # parsed once its datatype is known


class _Output(msgspec.Struct):
    name: str
    parameters: _Parameters | None = None


class _Body(msgspec.Struct):
    inputs: list[_RawInput]
    id: str | None = None
    parameters: _Parameters | None = None
    outputs: list[_Output] | None = None


class _LiteralBody(_Body):
    inputs: list[_Input]  # type: ignore[assignment]


class Control(msgspec.Struct):
    """What the index and the loading and unloading of models are told."""

    ready: bool = False
    parameters: _Parameters | None = None


_BODY = msgspec.json.Decoder(_Body)
_CONTROL = msgspec.json.Decoder(Control | None)


@dataclass(frozen=True, slots=True)
class Wanted:
    """How a caller wants the answer: its id, which outputs in binary form, and which as best classes."""

    id: str | None
    binary: bool
    outputs: Mapping[str, bool]
    classes: Mapping[str, int]

    def is_binary(self, name: str) -> bool:
        return self.outputs.get(name, self.binary)


def address(http: HttpRequest) -> tuple[str, str]:
    """The model and version in the path, "" where there is none."""
    return http.params.get("model", ""), http.params.get("version", "")


# --- reading ---------------------------------------------------------------------------------------------------


def read_infer(http: HttpRequest, policy: Policy) -> tuple[Request[Inference], Wanted]:
    """The request for inference and how its answer is wanted; InvalidInput or NotSupported names what is wrong."""
    head, rest = _divide(http)
    if not len(head) and rest is not None:  # OIP, binary extension: the body is the one input's bytes
        return Request(Infer({}, raw=bytes(rest)), *address(http)), Wanted(None, True, {}, {})
    body = _parsed(bytes(head), http, policy)
    parameters = dict(body.parameters or {})
    outputs = body.outputs or []
    wanted = _wanted(body.id, parameters.pop("binary_data_output", False), outputs)
    call = Infer(_tensors(body.inputs, rest, policy), tuple(o.name for o in outputs), parameters)
    return Request(check_counts(call, policy), *address(http), body.id or "", deadline_s(parameters)), wanted


def read_control(http: HttpRequest, policy: Policy) -> Control:
    """The body of a request about the repository, which may be left out."""
    if not len(http.body):
        return Control()
    body = bytes(http.body)
    _check_depth(body, policy)
    try:
        return _CONTROL.decode(body) or Control()
    except PARSER_FAULTS as fault:
        raise InvalidInput(f"the request is not valid: {told(fault)}") from fault


def _divide(http: HttpRequest) -> tuple[Buffer, memoryview | None]:
    """The JSON and the binary data behind it, None where the request has no binary form."""
    given = http.headers.get(HEADER_LENGTH)
    if given is None:
        if not len(http.body):
            raise InvalidInput("the request body is empty; expected an inference request")
        return http.body, None
    if re.fullmatch(r"\s*-?[0-9]{1,20}\s*", given, re.ASCII) is None:
        raise InvalidInput(f"Unable to parse Inference-Header-Content-Length, got: {given[:64]}")
    length, body = int(given), memoryview(http.body)
    if not 0 <= length <= len(body):
        raise InvalidInput(f"inference header size should be in range (0, {len(body)}), got: {length}")
    return body[:length], body[length:]


def _parsed(head: bytes, http: HttpRequest, policy: Policy) -> _Body:
    _check_depth(head, policy)
    try:
        return _BODY.decode(head.removeprefix(b"\xef\xbb\xbf"))
    except PARSER_FAULTS as fault:
        literal = _with_literals(head) if policy.nonfinite == "literal" else None
        if literal is not None:
            return literal
        hint = ""
        if HEADER_LENGTH not in http.headers and "octet-stream" in http.headers.get("content-type", ""):
            hint = "; binary tensor data needs the header Inference-Header-Content-Length"
        raise InvalidInput(f"the request is not an inference request: {told(fault)}{hint}") from fault


def _with_literals(head: bytes) -> _Body | None:
    """The request with NaN, Infinity and -Infinity written as bare words, which only Python's own parser reads."""
    try:
        found = json.loads(head)
        if b"\\u" in head:  # that parser lets through halves of characters, which no answer could repeat
            json.dumps(found, ensure_ascii=False).encode()
        return msgspec.convert(found, _LiteralBody)
    except (ValueError, RecursionError):
        return None


_ESCAPE = re.compile(rb"\\.", re.DOTALL)
_STRING = re.compile(rb'"[^"]*"')
_WITHOUT_STRUCTURE = bytes(set(range(256)) - set(b'"[]{}'))
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
_BLOCK = 1 << 20


def _check_depth(text: bytes, policy: Policy) -> None:
    """Refuse JSON that nests too deep, before any parser goes down into it."""
    if text.count(b"[") + text.count(b"{") <= policy.max_json_depth:
        return
    brackets = _STRING.sub(b"", _ESCAPE.sub(b"", text).translate(None, _WITHOUT_STRUCTURE))
    steps = np.frombuffer(brackets.translate(_STEPS), np.int8)
    depth = 0
    for start in range(0, steps.size, _BLOCK):
        depths = depth + np.cumsum(steps[start : start + _BLOCK], dtype=np.int64)
        if depths.max() > policy.max_json_depth:
            raise InvalidInput(f"JSON nests too deep; the limit is {policy.max_json_depth}")
        depth = int(depths[-1])


# --- how the answer is wanted ------------------------------------------------------------------------------------


def _wanted(id_: str | None, binary: object, outputs: Sequence[_Output]) -> Wanted:
    forms: dict[str, bool] = {}
    classes: dict[str, int] = {}
    for output in outputs:
        parameters = output.parameters or {}
        if "binary_data" in parameters:
            forms[output.name] = _flag(parameters["binary_data"], f"output '{output.name}': parameter 'binary_data'")
        if count := classes_wanted(parameters, output.name):
            classes[output.name] = count
    return Wanted(id_, _flag(binary, "parameter 'binary_data_output'"), forms, classes)


def _flag(value: object, what: str) -> bool:
    if not isinstance(value, bool):
        raise InvalidInput(f"{what}: expected true or false, got {value!r}")
    return value


# --- tensors -----------------------------------------------------------------------------------------------------


def _tensors(inputs: Sequence[_Input], rest: memoryview | None, policy: Policy) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    at, left = 0, memoryview(b"") if rest is None else rest
    for given in inputs:
        if given.name in tensors:
            raise InvalidInput(f"input '{given.name}' already exists in request")
        parameters = dict(given.parameters or {})
        if "shared_memory_region" in parameters:
            raise NotSupported(f"input '{given.name}': shared memory is not supported; send 'data' or binary data")
        kind = _datatype(given)
        size = parameters.pop("binary_data_size", None)
        if size is None:
            tensors[given.name] = _from_json(given, kind, parameters, policy)
        else:
            raw = _slice(given, size, left[at:])
            at += len(raw)
            tensors[given.name] = tensor_from_raw(given.name, kind, given.shape, raw, policy, parameters)
    if at != len(left):
        raise InvalidInput(f"unexpected additional input data: {len(left) - at} bytes are left after all inputs")
    return tensors


def _from_json(given: _Input, kind: Datatype, parameters: Parameters, policy: Policy) -> Tensor:
    if given.data is msgspec.UNSET:
        raise InvalidInput(f"input '{given.name}': expected 'data', or 'binary_data_size' in 'parameters'")
    return Tensor(array_from_json(given.name, kind, given.shape, given.data, policy), kind, parameters)


def _datatype(given: _Input) -> Datatype:
    try:
        return datatype(given.datatype)
    except InvalidInput as fault:
        raise InvalidInput(f"input '{given.name}': {fault.message}") from fault


def _slice(given: _Input, size: object, left: memoryview) -> memoryview:
    if given.data is not msgspec.UNSET:
        raise InvalidInput(
            f"input '{given.name}': Input must set only one of the following fields: 'data', 'binary_data_size' in "
            "'parameters'"
        )
    if isinstance(size, bool) or not isinstance(size, int) or size < 0:
        raise InvalidInput(f"input '{given.name}': 'binary_data_size' expects a number of bytes, got {size!r}")
    if size > len(left):
        raise InvalidInput(f"input '{given.name}': expecting {size - len(left)} additional bytes of binary data")
    return left[:size]
