"""The requests of the benchmarks, each with a check of its response."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dragoman.formats.grpc_messages import ModelInferRequest, ModelInferResponse

Wire = Literal["http", "grpc"]
GRPC_PATH = "/inference.GRPCInferenceService/ModelInfer"
_HEADER_LENGTH = "inference-header-content-length"


@dataclass(frozen=True, slots=True)
class Response:
    """A response; the names of headers are in lower case, and there are none over gRPC."""

    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class Workload:
    """A request: the bytes to send (a gRPC message without its frame), and the check of its response.

    `headers` are those of HTTP, or the metadata of gRPC.
    """

    name: str
    wire: Wire
    path: str
    headers: Mapping[str, str]
    body: bytes
    is_correct: Callable[[Response], bool]

    def http_request(self) -> bytes:
        """Return the request line, headers and body of a workload over HTTP."""
        lines = [f"POST {self.path} HTTP/1.1", "host: localhost", f"content-length: {len(self.body)}"]
        lines += [f"{name}: {value}" for name, value in self.headers.items()]
        return "\r\n".join([*lines, "", ""]).encode() + self.body


def identity() -> list[Workload]:
    """Return a small and a large tensor over each protocol."""
    numbers = np.random.default_rng(7)
    small = numbers.standard_normal((1, 16)).astype(np.float32)
    large = numbers.standard_normal((1, 3, 224, 224)).astype(np.float32)
    return [
        json_numbers("rest-json-small", "Identity", small),
        _rest_binary("rest-binary-small", "Identity", small),
        _grpc_raw("grpc-raw-small", "Identity", small),
        _grpc_typed("grpc-typed-small", "Identity", small),
        json_numbers("rest-json-large", "IdentityImage", large),
        _rest_binary("rest-binary-large", "IdentityImage", large),
        _grpc_raw("grpc-raw-large", "IdentityImage", large),
    ]


def small_json(name: str, model: str) -> Workload:
    """Return sixteen numbers over REST as JSON."""
    return json_numbers(name, model, np.random.default_rng(7).standard_normal((1, 16)).astype(np.float32))


# --- REST --------------------------------------------------------------------------------------------------


def json_numbers(name: str, model: str, array: NDArray[np.float32]) -> Workload:
    """Return an array over REST as JSON."""
    tensor = _describe(array) | {"data": array.ravel().tolist()}
    body = json.dumps({"inputs": [tensor]}, separators=(",", ":")).encode()
    headers = {"content-type": "application/json"}
    return Workload(name, "http", f"/v2/models/{model}/infer", headers, body, partial(_json_is_correct, array))


def _rest_binary(name: str, model: str, array: NDArray[np.float32]) -> Workload:
    tensor = _describe(array) | {"parameters": {"binary_data_size": array.nbytes}}
    output = {"name": "OUTPUT0", "parameters": {"binary_data": True}}
    head = json.dumps({"inputs": [tensor], "outputs": [output]}, separators=(",", ":")).encode()
    headers = {"content-type": "application/octet-stream", _HEADER_LENGTH: str(len(head))}
    path = f"/v2/models/{model}/infer"
    return Workload(name, "http", path, headers, head + array.tobytes(), partial(_binary_is_correct, array))


def _describe(array: NDArray[np.float32], name: str = "INPUT0") -> dict[str, Any]:
    return {"name": name, "datatype": "FP32", "shape": list(array.shape)}


def _json_is_correct(array: NDArray[np.float32], response: Response) -> bool:
    (tensor,) = json.loads(response.body)["outputs"]
    received = np.array(tensor["data"], np.float32).reshape(tensor["shape"])
    return _same_description(tensor, array) and np.array_equal(received, array)


def _binary_is_correct(array: NDArray[np.float32], response: Response) -> bool:
    length = int(response.headers[_HEADER_LENGTH])
    (tensor,) = json.loads(response.body[:length])["outputs"]
    return _same_description(tensor, array) and response.body[length:] == array.tobytes()


def _same_description(tensor: Mapping[str, Any], array: NDArray[np.float32]) -> bool:
    expected = _describe(array, "OUTPUT0")
    return {key: tensor[key] for key in expected} == expected


# --- gRPC --------------------------------------------------------------------------------------------------


def _grpc_raw(name: str, model: str, array: NDArray[np.float32]) -> Workload:
    message = ModelInferRequest(model_name=model, inputs=[_describe(array)], raw_input_contents=[array.tobytes()])
    return _grpc(name, message, array)


def _grpc_typed(name: str, model: str, array: NDArray[np.float32]) -> Workload:
    tensor = _describe(array) | {"contents": {"fp32_contents": array.ravel().tolist()}}
    return _grpc(name, ModelInferRequest(model_name=model, inputs=[tensor]), array)


def _grpc(name: str, message: Any, array: NDArray[np.float32]) -> Workload:
    return Workload(name, "grpc", GRPC_PATH, {}, message.SerializeToString(), partial(_message_is_correct, array))


def _message_is_correct(array: NDArray[np.float32], response: Response) -> bool:
    message = ModelInferResponse.FromString(response.body)
    (tensor,) = message.outputs
    typed = np.array(tensor.contents.fp32_contents, np.float32).tobytes()
    received = message.raw_output_contents[0] if message.raw_output_contents else typed
    description = {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}
    return _same_description(description, array) and received == array.tobytes()
