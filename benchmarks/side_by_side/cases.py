"""Requests of a comparison: HTTP requests, gRPC calls, pauses, and sequences of them."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tritonclient.grpc import service_pb2
from tritonclient.utils import triton_to_np_dtype

CONTENTS = {
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "BOOL": "bool_contents",
    "INT64": "int64_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}


@dataclass(frozen=True, slots=True)
class Http:
    """An HTTP request. The id of its response is compared only if `keeps_id`; servers may generate one otherwise."""

    path: str
    method: str = "POST"
    content: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    keeps_id: bool = True


@dataclass(frozen=True, slots=True)
class Rpc:
    """A gRPC call of one message, or of several for `ModelStreamInfer`."""

    method: str
    messages: Sequence[Any]
    headers: Mapping[str, str] = field(default_factory=dict)
    keeps_id: bool = True


@dataclass(frozen=True, slots=True)
class Pause:
    """A time in seconds without requests."""

    seconds: float


Step = Http | Rpc | Pause


@dataclass(frozen=True, slots=True)
class Case:
    """Steps that are sent one after the other; the answers to all of them are compared.

    `group`: rest, grpc or sequence, the unit in which cases are counted.
    """

    group: str
    title: str
    steps: Sequence[Step]


def tensor(name: str, datatype: str, shape: Sequence[int], data: Sequence[Any], **parameters: Any) -> dict[str, Any]:
    """Return a tensor in the form of a JSON request."""
    given = {"parameters": parameters} if parameters else {}
    return {"name": name, "datatype": datatype, "shape": list(shape), "data": list(data), **given}


def post(path: str, body: Any, **more: Any) -> Http:
    """Return a request with a JSON body; bytes and text are sent as they are."""
    content = body if isinstance(body, bytes) else body.encode() if isinstance(body, str) else json.dumps(body).encode()
    return Http(path, "POST", content, {"content-type": "application/json", **more.pop("headers", {})}, **more)


def binary(path: str, body: Mapping[str, Any], *raw: bytes, length: int | None = None) -> Http:
    """Return a request whose JSON part is followed by `raw`. `length`: the length of the JSON part that is stated."""
    text = json.dumps(body).encode()
    headers = {"inference-header-content-length": str(len(text) if length is None else length)}
    return Http(path, "POST", text + b"".join(raw), {"content-type": "application/octet-stream", **headers})


def infer_message(model: str, body: Mapping[str, Any], version: str = "", raw: Sequence[bytes] = ()) -> Any:
    """Return a ModelInferRequest of the JSON form of a request. `raw`: the contents, if they are sent as bytes."""
    message = service_pb2.ModelInferRequest(model_name=model, model_version=version, id=body.get("id", ""))
    _set_parameters(message.parameters, body.get("parameters", {}))
    for one in body.get("inputs", ()):
        each = message.inputs.add(name=one["name"], datatype=one["datatype"], shape=one["shape"])
        _set_parameters(each.parameters, one.get("parameters", {}))
        if one.get("data") is not None:
            data = [value.encode() if isinstance(value, str) else value for value in one["data"]]
            getattr(each.contents, CONTENTS[one["datatype"]]).extend(data)
    for one in body.get("outputs", ()):
        _set_parameters(message.outputs.add(name=one["name"]).parameters, one.get("parameters", {}))
    message.raw_input_contents.extend(raw)
    return message


def _set_parameters(target: Any, parameters: Mapping[str, Any]) -> None:
    kinds = {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param"}
    for name, value in parameters.items():
        kind = "uint64_param" if type(value) is int and value >= 2**63 else kinds[type(value)]
        setattr(target[name], kind, value)


def packed(datatype: str, data: Sequence[Any]) -> bytes:
    """Return the binary form of the elements of a tensor."""
    if datatype == "BYTES":
        texts = [each.encode() if isinstance(each, str) else each for each in data]
        return b"".join(len(each).to_bytes(4, "little") + each for each in texts)
    return np.asarray(data, triton_to_np_dtype(datatype)).tobytes()


def unpacked(datatype: str, raw: bytes) -> list[Any]:
    """Return the elements of the binary form of a tensor; bytes become text of Latin-1."""
    if datatype != "BYTES":
        values: list[Any] = np.frombuffer(raw, triton_to_np_dtype(datatype)).tolist()
        return values
    found, at = [], 0
    while at < len(raw):
        size = int.from_bytes(raw[at : at + 4], "little")
        found.append(raw[at + 4 : at + 4 + size].decode("latin-1"))
        at += 4 + size
    return found


def numbered(cases: Iterator[Case]) -> list[Case]:
    """Return the cases. Raises ValueError if two have the same title."""
    found = list(cases)
    titles = [each.title for each in found]
    if twice := {title for title in titles if titles.count(title) > 1}:
        raise ValueError(f"titles of requests are unique: expected one of each, got several of {sorted(twice)}")
    return found
