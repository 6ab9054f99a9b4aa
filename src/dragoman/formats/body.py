"""The body of a request or answer of the Open Inference Protocol: JSON, perhaps with binary tensors behind it."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeVar

import msgspec

from dragoman.core.datatypes import Datatype, datatype
from dragoman.core.errors import DragomanError, InvalidInput, NotSupported
from dragoman.core.tensor import Parameters, Scalar, Tensor
from dragoman.formats.cut import CutMessage, cut_arrays
from dragoman.formats.json_data import json_from_tensor, tensor_from_json
from dragoman.formats.json_numbers import LONG, PARSER_ERRORS, describe_parser_error
from dragoman.formats.json_scan import check_json
from dragoman.formats.policy import Buffer, Policy
from dragoman.formats.raw import raw_from_tensor, tensor_from_raw
from dragoman.formats.request import JsonParameters, RequestBody, Requested, told_parameters
from dragoman.formats.small import plain_raw, small_tensor

Read = TypeVar("Read")

HEADER_LENGTH = "inference-header-content-length"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_DEPTH = 3  # how deep data lies in a message

# --- the envelope, as it stands on the wire ------------------------------------------------------------------


class _Tensor(msgspec.Struct):
    name: str
    shape: list[int]
    datatype: str
    parameters: JsonParameters | None = None
    data: Any = msgspec.UNSET


class _RawTensor(_Tensor):
    data: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET  # parsed once its datatype is known


class _Request(msgspec.Struct):
    inputs: list[_RawTensor]
    id: str | None = None
    parameters: JsonParameters | None = None
    outputs: list[Requested] | None = None


class _LiteralRequest(_Request):
    inputs: list[_Tensor]  # type: ignore[assignment]


class _Response(msgspec.Struct):
    outputs: list[_RawTensor]
    model_name: str = ""
    model_version: str | None = None
    id: str | None = None
    parameters: JsonParameters | None = None


class _LiteralResponse(_Response):
    outputs: list[_Tensor]  # type: ignore[assignment]


_REQUEST = msgspec.json.Decoder(_Request)
_RESPONSE = msgspec.json.Decoder(_Response)


class ResponseBody(msgspec.Struct, frozen=True):
    """An answer as it was written."""

    outputs: Mapping[str, Tensor]
    parameters: dict[str, Scalar]
    model_name: str
    model_version: str | None
    id: str | None


# --- reading ---------------------------------------------------------------------------------------------------

_LENGTH = re.compile(r"\s*-?[0-9]{1,20}\s*", re.ASCII)


def divide(body: Buffer, header: str | None) -> tuple[Buffer, memoryview | None]:
    """The JSON and the binary data behind it, None where the header that tells the JSON's length is missing.

    Raises InvalidInput where the header is no such length.
    """
    if header is None:
        return body, None
    length, view = _length(header), memoryview(body)
    if not 0 <= length <= len(view):
        raise InvalidInput(f"inference header size should be in range (0, {len(view)}), got: {length}")
    return view[:length], view[length:]


@lru_cache(maxsize=512)
def _length(header: str) -> int:
    """What the header says."""
    if _LENGTH.fullmatch(header) is None:
        raise InvalidInput(f"Unable to parse Inference-Header-Content-Length, got: {header[:64]}")
    return int(header)


def read_request(head: Buffer, rest: memoryview | None, policy: Policy) -> RequestBody:
    """The request in some JSON and the binary data behind it. Raises InvalidInput or NotSupported."""
    text = bytes(head)
    return _plain(text, policy, rest) or _once(text, rest, policy, _request)


def read_response(head: Buffer, rest: memoryview | None, policy: Policy) -> ResponseBody:
    """The answer in some JSON and the binary data behind it. Raises InvalidInput or NotSupported."""
    return _once(bytes(head), rest, policy, _response)


def _plain(text: bytes, policy: Policy, rest: Buffer | None) -> RequestBody | None:
    """A short request of small tensors of numbers with nothing unusual in it, as most are; None of any other."""
    if len(text) >= LONG or text.count(b"[") + text.count(b"{") > policy.max_json_depth:
        return None
    try:
        found = _REQUEST.decode(text)
    except PARSER_ERRORS:
        return None
    inputs: dict[str, Tensor] = {}
    at = 0
    for one in found.inputs:
        if not one.parameters:
            tensor = small_tensor(one.datatype, one.shape, one.data, policy)
        elif rest is not None and one.data is msgspec.UNSET:
            size = _sole_size(one.parameters)
            tensor = plain_raw(one.datatype, one.shape, rest[at : at + size], policy)
            at += size
        else:
            return None
        if tensor is None or one.name in inputs:
            return None
        inputs[one.name] = tensor
    if rest is not None and at != len(rest):
        return None
    return RequestBody(inputs, found.outputs or (), told_parameters(found.parameters), found.id)


def _sole_size(parameters: JsonParameters) -> int:
    """The size of binary data, if a tensor has no other parameter; else 0, which none has."""
    size = parameters.get("binary_data_size")
    return size if type(size) is int and size > 0 and len(parameters) == 1 else 0


def _request(message: CutMessage, rest: memoryview | None, policy: Policy) -> RequestBody:
    found = _parsed(message.rest, _REQUEST, _LiteralRequest, "an inference request", policy)
    inputs = _tensors(found.inputs, rest, message, "input", policy)
    return RequestBody(inputs, found.outputs or (), told_parameters(found.parameters), found.id)


def _response(message: CutMessage, rest: memoryview | None, policy: Policy) -> ResponseBody:
    found = _parsed(message.rest, _RESPONSE, _LiteralResponse, "an inference response", policy)
    outputs = _tensors(found.outputs, rest, message, "output", policy)
    parameters = told_parameters(found.parameters)
    return ResponseBody(outputs, parameters, found.model_name, found.model_version, found.id)


def _once(
    text: bytes,
    rest: memoryview | None,
    policy: Policy,
    read: Callable[[CutMessage, memoryview | None, Policy], Read],
) -> Read:
    """What `read` makes of a message; of a long one after its arrays were cut out, if nothing is wrong with it.

    What is wrong is told of the message as it came, if that is short enough to be parsed in one go.
    """
    if len(text) >= LONG and not text.startswith(_BYTE_ORDER_MARK):
        message = cut_arrays(text, (b'"data"',), LONG)
        if message.spans:
            try:
                return read(message, rest, policy)
            except DragomanError:
                if len(text) > policy.max_json_values:
                    raise
    return read(CutMessage(text, text, {}), rest, policy)


def _parsed(head: bytes, decoder: Any, literal_type: Any, what: str, policy: Policy) -> Any:
    check_json(head, policy)
    try:
        return decoder.decode(head.removeprefix(_BYTE_ORDER_MARK))
    except PARSER_ERRORS as fault:
        literal = _with_literals(head, literal_type) if policy.nonfinite == "literal" else None
        if literal is not None:
            return literal
        raise InvalidInput(f"the {what.rpartition(' ')[2]} is not {what}: {describe_parser_error(fault)}") from fault


def _with_literals(head: bytes, literal_type: Any) -> Any:
    """The message with NaN, Infinity and -Infinity written as bare words, which only Python's own parser reads."""
    try:
        found = json.loads(head)
        if b"\\u" in head:  # that parser lets through halves of characters, which no answer could repeat
            json.dumps(found, ensure_ascii=False).encode()
        return msgspec.convert(found, literal_type)
    except (ValueError, RecursionError):
        return None


# --- tensors -----------------------------------------------------------------------------------------------------


def _tensors(
    given: Sequence[_Tensor], rest: memoryview | None, message: CutMessage, noun: str, policy: Policy
) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    at, cut, left = 0, 0, memoryview(b"") if rest is None else rest
    for one in given:
        if (small := _small(one, policy)) is not None and one.name not in tensors:
            tensors[one.name] = small
            continue
        where = f"{noun} '{one.name}'"
        if one.name in tensors:
            raise InvalidInput(f"{where} already exists in request")
        parameters = told_parameters(one.parameters)
        if "shared_memory_region" in parameters:
            raise NotSupported(f"{where}: shared memory is not supported; send 'data' or binary data")
        kind = _datatype(one, where)
        size = parameters.pop("binary_data_size", None)
        if (array := message.array(one.data)) is not None:
            cut += 1
            if size is None and _DEPTH + max(len(one.shape), 1) <= policy.max_json_depth:
                one.data = msgspec.Raw(array)
        if size is None:
            tensors[one.name] = _from_json(one, where, kind, parameters, policy)
        else:
            raw = _slice(one, where, size, left[at:])
            at += len(raw)
            tensors[one.name] = tensor_from_raw(where, kind, one.shape, raw, policy, parameters)
    if at != len(left):
        raise InvalidInput(f"unexpected additional {noun} data: {len(left) - at} bytes are left after all {noun}s")
    if cut != len(message.spans):
        raise InvalidInput("an array that is no tensor's data was cut out")
    return tensors


def _small(one: _Tensor, policy: Policy) -> Tensor | None:
    """The tensor of a description with nothing unusual in it, which most are."""
    return None if one.parameters else small_tensor(one.datatype, one.shape, one.data, policy)


def _from_json(one: _Tensor, where: str, kind: Datatype, parameters: Parameters, policy: Policy) -> Tensor:
    if one.data is msgspec.UNSET:
        raise InvalidInput(f"{where}: expected 'data', or 'binary_data_size' in 'parameters'")
    return tensor_from_json(where, kind, one.shape, one.data, policy, parameters)


def _datatype(one: _Tensor, where: str) -> Datatype:
    try:
        return datatype(one.datatype)
    except InvalidInput as fault:
        raise InvalidInput(f"{where}: {fault.message}") from fault


def _slice(one: _Tensor, where: str, size: object, left: memoryview) -> memoryview:
    if one.data is not msgspec.UNSET:
        raise InvalidInput(
            f"{where}: Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters'"
        )
    if isinstance(size, bool) or not isinstance(size, int) or size < 0:
        raise InvalidInput(f"{where}: 'binary_data_size' expects a number of bytes, got {size!r}")
    if size > len(left):
        raise InvalidInput(f"{where}: expecting {size - len(left)} additional bytes of binary data")
    return left[:size]


# --- writing -------------------------------------------------------------------------------------------------------


def write_tensors(
    tensors: Mapping[str, Tensor],
    binary: Callable[[str], bool],
    policy: Policy,
    noun: str = "output",
    at_once: bool = False,
) -> tuple[list[dict[str, Any]], list[Buffer]]:
    """Tensors as orjson prints them, and the bytes that follow the JSON of those that go in binary form.

    `at_once`: see `json_from_tensor`.
    """
    written: list[dict[str, Any]] = []
    blobs: list[Buffer] = []
    for name, tensor in tensors.items():
        one: dict[str, Any] = {"name": name, "datatype": tensor.datatype.name, "shape": tensor.shape}
        raw = raw_from_tensor(tensor) if binary(name) else b""
        if len(raw):  # an empty tensor has no binary form and goes as `"data": []`
            one["parameters"] = {**tensor.parameters, "binary_data_size": len(raw)}
            blobs.append(raw)
        else:
            if tensor.parameters:
                one["parameters"] = dict(tensor.parameters)
            one["data"] = json_from_tensor(f"{noun} '{name}'", tensor, policy, at_once)
        written.append(one)
    return written, blobs
