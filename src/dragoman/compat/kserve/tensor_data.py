"""Data and parameters of tensors of KServe's types, and bodies of REST with raw data after the JSON."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import orjson

from dragoman.compat.kserve.errors import InvalidInput
from dragoman.compat.mlserver.types.data import ElementText
from dragoman.core import errors
from dragoman.core.bytes_tensor import texts_of
from dragoman.core.datatypes import BYTES, Array
from dragoman.core.tensor import Tensor, object_array
from dragoman.formats import message
from dragoman.formats.policy import Policy
from dragoman.formats.raw import raw_from_tensor, tensor_from_raw

_POLICY = Policy()
BINARY_SIZE = "binary_data_size"
# The field of typed contents for each datatype.
CONTENTS = {
    "BOOL": "bool_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    "INT64": "int64_contents",
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}


def elements(tensor: Tensor) -> list[Any]:
    """Return the elements as a flat list. Those of BYTES are text, with `decode`, if all of them are valid UTF-8."""
    if tensor.datatype is not BYTES:
        return message.elements(tensor)
    try:
        return list(map(ElementText, texts_of(tensor)))
    except UnicodeDecodeError:
        values: list[Any] = tensor.data.reshape(-1).tolist()
        return values


def texts(array: Array) -> list[str]:
    """Return the elements of an array as text. Raises InvalidInput for bytes that are not UTF-8."""
    try:
        return [each.decode() if isinstance(each, bytes) else str(each) for each in array.ravel().tolist()]
    except UnicodeDecodeError as error:
        raise InvalidInput(f"bytes that are not UTF-8 cannot be sent as JSON: {error}; use binary_data=True") from error


def to_raw(array: Array) -> bytes:
    """Return an array in raw encoding, little-endian; its objects are bytes or are sent as text."""
    if array.dtype.kind not in "OSU":
        return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
    given = [each if isinstance(each, bytes) else str(each).encode() for each in array.ravel().tolist()]
    return bytes(raw_from_tensor(Tensor(object_array(given, array.shape), BYTES)))


def bytes_from_raw(name: str, shape: Sequence[int], raw: bytes) -> Array:
    """Return the elements of BYTES in raw encoding. Raises InvalidInput if they do not have this shape."""
    try:
        return np.array(tensor_from_raw(f"'{name}'", BYTES, shape, raw, _POLICY).data, object)
    except errors.InvalidInput as error:
        raise InvalidInput(error.message) from error


def is_array(data: Any) -> bool:
    return isinstance(data, np.ndarray)


# --- parameters ------------------------------------------------------------------------------------------------


def plain_parameters(parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return parameters as plain values; those of gRPC are messages."""
    return {name: _plain(value) for name, value in (parameters or {}).items()}


def _plain(value: Any) -> Any:
    return getattr(value, value.WhichOneof("parameter_choice")) if hasattr(value, "WhichOneof") else value


def write_parameters(message: Any, parameters: Mapping[str, Any] | None) -> None:
    """Write parameters into the map of a message. Raises InvalidInput for values other than text and numbers."""
    for name, value in plain_parameters(parameters).items():
        if isinstance(value, bool):
            message[name].bool_param = value
        elif isinstance(value, int):
            message[name].int64_param = value
        elif isinstance(value, float):
            message[name].double_param = value
        elif isinstance(value, str):
            message[name].string_param = value
        else:
            raise InvalidInput(f"to_grpc: invalid parameter value: {value}")


# --- messages and bodies ---------------------------------------------------------------------------------------------


def set_raw(tensors: Sequence[Any], raw: Sequence[bytes]) -> None:
    """Set the raw data of all tensors, if there are any. Raises InvalidInput unless each has some."""
    if raw and len(raw) != len(tensors):
        raise InvalidInput(f"expected raw data for each of {len(tensors)} tensors, got {len(raw)}")
    for tensor, data in zip(tensors, raw, strict=False):
        tensor.set_raw_data(data)


def from_message(make: Callable[..., Any], tensor: Any) -> Any:
    """Return a tensor of a message of gRPC; its raw data, if any, are elsewhere in the message."""
    field = CONTENTS.get(tensor.datatype)
    if field is None and tensor.datatype != "FP16":
        raise InvalidInput("invalid content type")
    data = list(getattr(tensor.contents, field)) if field else []
    return make(tensor.name, list(tensor.shape), tensor.datatype, data, plain_parameters(tensor.parameters) or None)


def write_tensors(tensors: Iterable[Any], add: Callable[[], Any]) -> list[bytes]:
    """Write tensors into messages that `add` makes; return their raw data. Raises InvalidInput."""
    raw = [tensor.to_message(add()) for tensor in tensors]
    if any(each is None for each in raw) and any(each is not None for each in raw):
        raise InvalidInput("expected raw data for all tensors or for none")
    return [each for each in raw if each is not None]


def from_body(make: Callable[..., Any], body: bytes, json_length: int, side: str) -> tuple[dict[str, Any], list[Any]]:
    """Return the JSON object of a body of REST and its tensors. Raises InvalidInput naming what is missing."""
    try:
        fields = orjson.loads(body[:json_length])
        return fields, list(_tensors(make, fields[side], memoryview(body)[json_length:]))
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise InvalidInput(f"Unrecognized request format: {error}") from error


def _tensors(make: Callable[..., Any], rows: Iterable[Mapping[str, Any]], raw: memoryview) -> Iterable[Any]:
    for row in rows:
        parameters = dict(row.get("parameters") or {})
        size = parameters.pop(BINARY_SIZE, None)
        tensor = make(row["name"], row["shape"], row["datatype"], row.get("data"), parameters or None)
        if size is not None:
            if len(raw) < size:
                raise InvalidInput(f"'{tensor.name}': expected {size} bytes of raw data, got {len(raw)}")
            tensor.set_raw_data(bytes(raw[:size]))
            if tensor.datatype != "FP16":
                tensor.set_data_from_numpy(tensor.as_numpy(), binary_data=False)
            raw = raw[size:]
        elif "data" not in row:
            raise InvalidInput(f"'data' field is missing for '{tensor.name}'")
        yield tensor


def to_body(fields: Mapping[str, Any], raw: Sequence[bytes]) -> tuple[dict[str, Any] | bytes, int | None]:
    """Return a JSON object and None; with raw data bytes, and the length of the JSON in them."""
    if not raw:
        return dict(fields), None
    text = orjson.dumps(fields)
    return b"".join([text, *raw]), len(text)
