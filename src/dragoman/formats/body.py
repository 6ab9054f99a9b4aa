"""Body of an Open Inference request or response: JSON, optionally followed by binary tensor data."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Any

import msgspec

from dragoman.core.datatypes import DATATYPES, datatype
from dragoman.core.documents import parse_json
from dragoman.core.errors import InvalidInput
from dragoman.core.sizes import INLINE
from dragoman.core.tensor import Scalar, Tensor
from dragoman.formats.json_data import irregular_texts, json_from_tensor, tensor_from_json
from dragoman.formats.json_numbers import PARSER_ERRORS, describe_parser_error
from dragoman.formats.json_scan import check_depth, check_size, cut_lists, find_cut_list
from dragoman.formats.policy import Buffer, Policy
from dragoman.formats.raw import raw_from_tensor, tensor_from_raw
from dragoman.formats.shared_regions import Region, pop_slice, region_names, region_sizes, require_regions
from dragoman.formats.small_messages import parse_small_tensor

HEADER_LENGTH = "inference-header-content-length"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_MESSAGE_DEPTH = 5  # of a request with data in rows, and without unknown fields
_BINARY = "; send large tensors as binary data (binary tensor data extension: binary_data_size)"
_HEADER_VALUE = re.compile(r"\s*-?[0-9]{1,20}\s*", re.ASCII)

# --- messages as they are on the wire ----------------------------------------------------------------------------

# Clients whose types have more parameters than they send write null for the rest.
JsonParameters = dict[str, str | bool | int | float | None]
_ARRAY = {"type": "array"}


class RequestedOutput(msgspec.Struct):
    """An output that a request names."""

    name: str
    parameters: JsonParameters | None = None


# Only the JSON Schema of these has the constraints: they are checked later, with errors that name the tensor.
_Length = Annotated[int, msgspec.Meta(extra_json_schema={"minimum": 0})]
_DatatypeName = Annotated[str, msgspec.Meta(extra_json_schema={"enum": list(DATATYPES)})]
_Data = Annotated[
    msgspec.Raw | msgspec.UnsetType,
    msgspec.Meta(description="Elements, nested as the shape or flat in row-major order.", extra_json_schema=_ARRAY),
]


class _LiteralTensor(msgspec.Struct):
    name: str
    shape: list[_Length]
    datatype: _DatatypeName
    parameters: JsonParameters | None = None
    data: Any = msgspec.UNSET


class InferTensor(_LiteralTensor):
    """A tensor of a request or response. Binary data after the JSON replaces `data` if the parameter
    `binary_data_size` gives its length."""

    data: _Data = msgspec.UNSET  # parsed once its datatype is known


class InferRequest(msgspec.Struct):
    """An inference request of the Open Inference Protocol."""

    inputs: list[InferTensor]
    id: str | None = None
    parameters: JsonParameters | None = None
    outputs: list[RequestedOutput] | None = None


class _LiteralRequest(InferRequest):
    inputs: list[_LiteralTensor]  # type: ignore[assignment]


class InferResponse(msgspec.Struct):
    """An inference response of the Open Inference Protocol."""

    outputs: list[InferTensor]
    model_name: str = ""
    model_version: str | None = None
    id: str | None = None
    parameters: JsonParameters | None = None


class _LiteralResponse(InferResponse):
    outputs: list[_LiteralTensor]  # type: ignore[assignment]


class _KnownTensor(InferTensor, forbid_unknown_fields=True):
    pass


class _KnownOutput(RequestedOutput, forbid_unknown_fields=True):
    pass


class _KnownRequest(InferRequest, forbid_unknown_fields=True):
    inputs: list[_KnownTensor]  # type: ignore[assignment]
    outputs: list[_KnownOutput] | None = None  # type: ignore[assignment]


_REQUEST = msgspec.json.Decoder(InferRequest)
_KNOWN_REQUEST = msgspec.json.Decoder(_KnownRequest)
_RESPONSE = msgspec.json.Decoder(InferResponse)


_ONE_FIELD = (
    "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters', "
    "'shared_memory_region' in 'parameters'"
)


class RequestBody(msgspec.Struct, frozen=True):
    """A parsed request. `regions` are those of its tensors in shared memory."""

    inputs: Mapping[str, Tensor]
    outputs: Sequence[RequestedOutput]
    parameters: dict[str, Scalar]
    id: str | None
    regions: tuple[Region, ...] = ()


class ResponseBody(msgspec.Struct, frozen=True):
    """A parsed response."""

    outputs: Mapping[str, Tensor]
    parameters: dict[str, Scalar]
    model_name: str
    model_version: str | None
    id: str | None


# --- parsing -----------------------------------------------------------------------------------------------------


def split_body(body: Buffer, header: str | None) -> tuple[Buffer, memoryview | None]:
    """Return the JSON and the binary data after it, None without the header that gives the length of the JSON.

    Raises InvalidInput if the header is not such a length.
    """
    if header is None:
        return body, None
    length, view = _parse_length(header), memoryview(body)
    if not 0 <= length <= len(view):
        raise InvalidInput(f"inference header size should be in range (0, {len(view)}), got: {length}")
    return view[:length], view[length:]


@lru_cache(maxsize=512)
def _parse_length(header: str) -> int:
    if _HEADER_VALUE.fullmatch(header) is None:
        raise InvalidInput(f"Unable to parse Inference-Header-Content-Length, got: {header[:64]}")
    return int(header)


def parse_request(text: Buffer, binary: memoryview | None, policy: Policy) -> RequestBody:
    """Parse the JSON of a request and the binary data after it. Raises InvalidInput or NotSupported."""
    text = bytes(text)
    check_size(text, policy, _BINARY)
    message: Any = None
    if policy.max_json_depth >= _MESSAGE_DEPTH:
        # Without unknown fields only the data of tensors can nest, which is checked before a parser that accepts that.
        # Counting brackets first would take 2 % of a small request.
        if len(text) > INLINE and (request := _parse_without_lists(text, binary, policy)) is not None:
            return request
        try:
            message = _KNOWN_REQUEST.decode(text)
        except PARSER_ERRORS:
            message = None
    if message is None:
        check_depth(text, policy)
        message = _decode(text, _REQUEST, _LiteralRequest, "an inference request", policy)
    return _request_body(message, binary, policy)


def _request_body(message: InferRequest, binary: memoryview | None, policy: Policy) -> RequestBody:
    inputs = _parse_tensors(message.inputs, binary, "input", policy)
    parameters, regions = parse_parameters(message.parameters), _hold_regions(message, policy)
    return RequestBody(inputs, message.outputs or (), parameters, message.id, regions)


def _parse_without_lists(text: bytes, binary: memoryview | None, policy: Policy) -> RequestBody | None:
    """Parse a request of known fields whose long lists of numbers or texts are cut out first; None if there are none,
    or for one that is rejected.

    msgspec would find the end of each list by reading its elements one by one, a third of the time of the whole.
    """
    short, lists = cut_lists(text, INLINE)
    if not lists:
        return None
    try:
        message = _KNOWN_REQUEST.decode(short)
        for one in message.inputs:
            if one.data is not msgspec.UNSET and (cut := find_cut_list(memoryview(one.data), lists)) is not None:
                one.data = msgspec.Raw(cut)
        return _request_body(message, binary, policy)
    except (*PARSER_ERRORS, InvalidInput):
        return None


def parse_response(text: Buffer, binary: memoryview | None, policy: Policy) -> ResponseBody:
    """Parse the JSON of a response and the binary data after it. Raises InvalidInput or NotSupported."""
    message = _decode(bytes(text), _RESPONSE, _LiteralResponse, "an inference response", policy)
    outputs = _parse_tensors(message.outputs, binary, "output", policy)
    parameters = parse_parameters(message.parameters)
    return ResponseBody(outputs, parameters, message.model_name, message.model_version, message.id)


def parse_parameters(parameters: JsonParameters | None) -> dict[str, Scalar]:
    """Return the parameters that are not null. Raises InvalidInput naming an integer of more than 64 bits."""
    if not parameters:
        return {}
    for key, value in parameters.items():
        if type(value) is int and not -(1 << 63) <= value < 1 << 64:
            raise InvalidInput(f"parameter '{key}': expected an integer of 64 bits, got one of {value.bit_length()}")
    return {k: v for k, v in parameters.items() if v is not None}


def _hold_regions(message: InferRequest, policy: Policy) -> tuple[Region, ...]:
    if policy.regions is None:
        return ()
    return policy.regions.hold(region_names(each.parameters for each in (*message.inputs, *(message.outputs or ()))))


def _decode(text: bytes, decoder: Any, literal_type: Any, noun: str, policy: Policy) -> Any:
    try:
        return decoder.decode(text.removeprefix(_BYTE_ORDER_MARK))
    except PARSER_ERRORS as error:
        literal = _decode_literals(text, literal_type) if policy.nonfinite == "literal" else None
        if literal is not None:
            return literal
        raise InvalidInput(f"the {noun.rpartition(' ')[2]} is not {noun}: {describe_parser_error(error)}") from error


def _decode_literals(text: bytes, literal_type: Any) -> Any:
    """Decode a message with NaN, Infinity and -Infinity as bare words, which only Python's own parser accepts."""
    try:
        values = parse_json(text)
        if b"\\u" in text:  # that parser accepts lone surrogates, which no response could repeat
            json.dumps(values, ensure_ascii=False).encode()
        return msgspec.convert(values, literal_type)
    except ValueError:
        return None


def _parse_tensors(
    descriptions: Sequence[_LiteralTensor], binary: memoryview | None, noun: str, policy: Policy
) -> dict[str, Tensor]:
    """Return the tensors by name."""
    if policy.regions is not None:
        policy.regions.check_total(region_sizes([one.parameters for one in descriptions]))
    tensors: dict[str, Tensor] = {}
    at, data = 0, b"" if binary is None else binary
    for one in descriptions:
        if not one.parameters and one.name not in tensors:
            small = parse_small_tensor(one.datatype, one.shape, one.data, policy)
            if small is not None:
                tensors[one.name] = small
                continue
        where = f"{noun} '{one.name}'"
        if one.name in tensors:
            raise InvalidInput(f"{where} already exists in request")
        parse = _parse_irregular if policy.irregular_texts else _parse_tensor
        tensors[one.name], at = parse(one, where, data, at, policy)
    if at != len(data):
        raise InvalidInput(f"unexpected additional {noun} data: {len(data) - at} bytes are left after all {noun}s")
    return tensors


def _parse_irregular(one: _LiteralTensor, where: str, binary: Buffer, at: int, policy: Policy) -> tuple[Tensor, int]:
    """As `_parse_tensor`, by the setting `irregular_texts`."""
    if one.datatype == "BYTES":
        tensor = irregular_texts(one.data, one.shape, parse_parameters(one.parameters))
        if tensor is not None:
            return tensor, at
    return _parse_tensor(one, where, binary, at, policy)


def _parse_tensor(one: _LiteralTensor, where: str, binary: Buffer, at: int, policy: Policy) -> tuple[Tensor, int]:
    """Return the tensor, whose binary data begins at `at`, and where the data of the next one begins."""
    try:
        kind = datatype(one.datatype)
    except InvalidInput as error:
        raise InvalidInput(f"{where}: {error.message}") from error
    size: Any = one.parameters and one.parameters.get("binary_data_size")
    if type(size) is int and len(one.parameters or ()) == 1:  # as in most requests
        parameters: dict[str, Scalar] = {}
    else:
        parameters = parse_parameters(one.parameters)
        size = parameters.pop("binary_data_size", None)
        if (region_slice := pop_slice(parameters, where)) is not None:
            if size is not None or one.data is not msgspec.UNSET:
                raise InvalidInput(f"{where}: {_ONE_FIELD}")
            raw = require_regions(policy.regions, where).read(region_slice, where)
            return tensor_from_raw(where, kind, one.shape, raw, policy, parameters), at
    if size is None:
        if one.data is msgspec.UNSET:
            raise InvalidInput(f"{where}: expected 'data', or 'binary_data_size' in 'parameters'")
        return tensor_from_json(where, kind, one.shape, one.data, policy, parameters), at
    if one.data is not msgspec.UNSET:
        raise InvalidInput(f"{where}: {_ONE_FIELD}")
    if type(size) is not int or size < 0:
        raise InvalidInput(f"{where}: 'binary_data_size' expects a number of bytes, got {size!r}")
    end = at + size
    if end > len(binary):
        raise InvalidInput(f"{where}: expecting {end - len(binary)} additional bytes of binary data")
    return tensor_from_raw(where, kind, one.shape, binary[at:end], policy, parameters), end


# --- serializing -------------------------------------------------------------------------------------------------


def serialize_tensors(
    tensors: Mapping[str, Tensor],
    is_binary: Callable[[str], bool],
    policy: Policy,
    noun: str = "output",
    at_once: bool = False,
) -> tuple[list[dict[str, Any]], list[Buffer]]:
    """Return tensors as values for `json_chunks`, and the binary data of those that are sent so.

    `at_once`: see `json_from_tensor`.
    """
    descriptions: list[dict[str, Any]] = []
    blobs: list[Buffer] = []
    for name, tensor in tensors.items():
        one: dict[str, Any] = {"name": name, "datatype": tensor.datatype.name, "shape": tensor.shape}
        raw = raw_from_tensor(tensor) if is_binary(name) else b""
        if len(raw):  # an empty tensor has no binary form and is sent as `"data": []`
            one["parameters"] = {**tensor.parameters, "binary_data_size": len(raw)}
            blobs.append(raw)
        else:
            if tensor.parameters:
                one["parameters"] = dict(tensor.parameters)
            one["data"] = json_from_tensor(f"{noun} '{name}'", tensor, policy, at_once)
        descriptions.append(one)
    return descriptions, blobs
