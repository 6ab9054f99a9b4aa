"""The checks of `test_new_datatype` with a table of datatypes that has FP8: print a JSON object of errors by check."""

import asyncio
import json
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import grpc
import httpx2
import ml_dtypes
import numpy as np
import pytest
import requests
import tritonclient.grpc as triton
from tritonclient.grpc import service_pb2

import dragoman
from dragoman import Infer, Tensor, TensorSpec
from dragoman.core import datatypes
from dragoman.protocols.open_inference.grpc_inference import OUTPUT_CONTENTS

FP8: datatypes.Datatype = dragoman.FP8  # type: ignore[attr-defined]  # the table has it, not the type stub
FEW = np.array([[0.5, -1.75, 448.0], [0.1015625, -0.0, np.nan]]).astype(ml_dtypes.float8_e4m3fn)
MANY = np.arange(-128, 128, 0.5).astype(ml_dtypes.float8_e4m3fn).reshape(2, -1)  # 512 values, rounded


class Inline(dragoman.Model):
    """Return the inputs, and one that was FP32 as FP8."""

    placement: Any = "inline"
    inputs = (
        TensorSpec("x", FP8, (-1, -1), accepts=frozenset({datatypes.FP32})),
        TensorSpec("t", datatypes.BYTES, (-1,), optional=True),
    )
    outputs = (TensorSpec("x", FP8, (-1, -1)), TensorSpec("t", datatypes.BYTES, (-1,), optional=True))

    def infer(self, call: Infer) -> Mapping[str, Any]:
        return {n: Tensor.of(t.data, FP8) if t.datatype is datatypes.FP32 else t for n, t in call.inputs.items()}


class Apart(Inline):
    """The same in a worker process."""

    placement: Any = "process"


def same(one: Any, other: Any) -> None:
    assert one.dtype == other.dtype == FP8.dtype
    assert one.shape == other.shape
    assert one.tobytes() == other.tobytes()


def input_of(array: Any) -> dict[str, Any]:
    wide = array.astype(np.float32).reshape(-1)
    data = [None if np.isnan(value) else float(value) for value in wide]
    return {"name": "x", "datatype": "FP8", "shape": list(array.shape), "data": data}


def binary_request(array: Any) -> tuple[bytes, dict[str, str]]:
    tensor = {
        "name": "x",
        "datatype": "FP8",
        "shape": list(array.shape),
        "parameters": {"binary_data_size": array.size},
    }
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    return head + array.tobytes(), {"inference-header-content-length": str(len(head))}


def array_of(output: Mapping[str, Any], blob: bytes) -> Any:
    assert output["datatype"] == "FP8"
    return np.frombuffer(blob, FP8.dtype).reshape(output["shape"])


def check_json(response: Mapping[str, Any], array: Any) -> None:
    (output,) = response["outputs"]
    assert (output["datatype"], output["shape"]) == ("FP8", list(array.shape))
    assert output["data"] == input_of(array)["data"]


def check_binary(content: bytes, headers: Mapping[str, str], array: Any) -> None:
    length = int(headers["inference-header-content-length"])
    (output,) = json.loads(content[:length])["outputs"]
    same(array_of(output, content[length:]), array)


class Checks:
    """Checks of a running server by name; each raises an error if it fails."""

    def __init__(self, server: dragoman.Server) -> None:
        self._server = server

    def _post(self, model: str, body: Any, headers: Mapping[str, str] | None = None) -> requests.Response:
        url = f"{self._server.http_url}/v2/models/{model}/infer"
        data = body if isinstance(body, bytes) else json.dumps(body)
        return requests.post(url, data=data, headers=dict(headers or {}), timeout=60)

    def rest_json(self, model: str) -> None:
        for array in (FEW[:1], FEW, MANY):
            response = self._post(model, {"inputs": [input_of(array)]})
            assert response.status_code == 200, response.text
            check_json(response.json(), array)

    def rest_binary(self, model: str) -> None:
        for array in (FEW, MANY):
            response = self._post(model, *binary_request(array))
            assert response.status_code == 200, response.text
            check_binary(response.content, response.headers, array)

    def grpc_raw(self, model: str) -> None:
        with triton.InferenceServerClient(self._server.grpc_url) as client:
            for array in (FEW, MANY):
                message = service_pb2.ModelInferRequest(model_name=model)
                message.inputs.add(name="x", datatype="FP8", shape=array.shape)
                message.raw_input_contents.append(array.tobytes())
                response = client._client_stub.ModelInfer(message)
                (output,) = response.outputs
                same(
                    array_of({"datatype": output.datatype, "shape": output.shape}, response.raw_output_contents[0]),
                    array,
                )

    def grpc_typed(self, model: str) -> None:
        """FP8 has no typed field: typed FP32 is answered with raw FP8, and typed FP8 is rejected."""
        with triton.InferenceServerClient(self._server.grpc_url) as client:
            message = service_pb2.ModelInferRequest(model_name=model)
            message.inputs.add(name="x", datatype="FP32", shape=FEW.shape).contents.fp32_contents.extend(
                FEW.astype(np.float32).reshape(-1)
            )
            response = client._client_stub.ModelInfer(message, metadata=[(OUTPUT_CONTENTS, "typed")])
            (output,) = response.outputs
            array = array_of({"datatype": output.datatype, "shape": output.shape}, response.raw_output_contents[0])
            assert np.array_equal(array.astype(np.float32), FEW.astype(np.float32), equal_nan=True)
            message.inputs[0].datatype = "FP8"
            with pytest.raises(grpc.RpcError, match="FP8 has no typed contents; send it in 'raw_input_contents'"):
                client._client_stub.ModelInfer(message)

    def client_rest(self, model: str) -> None:
        self._client(self._server.http_url, model)

    def client_grpc(self, model: str) -> None:
        self._client(f"grpc://{self._server.grpc_url}", model)

    def _client(self, url: str, model: str) -> None:
        with dragoman.Client(url) as client:
            for array in (FEW, MANY):
                same(client.infer(model, {"x": array})["x"], array)
            same(client.infer(model, {"x": [[0.5, 3.0]]})["x"], np.array([[0.5, 3.0]]).astype(FP8.dtype))

    def asgi(self, model: str) -> None:
        asyncio.run(self._asgi(model))

    async def _asgi(self, model: str) -> None:
        app = dragoman.asgi(Inline, Apart)
        async with app:
            transport = httpx2.ASGITransport(app=app)
            async with httpx2.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as client:
                path = f"/v2/models/{model}/infer"
                for array in (FEW, MANY):
                    response = await client.post(path, json={"inputs": [input_of(array)]})
                    assert response.status_code == 200, response.text
                    check_json(response.json(), array)
                    body, headers = binary_request(array)
                    response = await client.post(path, content=body, headers=headers)
                    assert response.status_code == 200, response.text
                    check_binary(response.content, response.headers, array)

    def with_text(self, model: str) -> None:
        """Text beside numbers takes another way to a worker process."""
        text = {"name": "t", "datatype": "BYTES", "shape": [2], "data": ["a", "ß"]}
        response = self._post(model, {"inputs": [input_of(FEW), text], "outputs": [{"name": "x"}, {"name": "t"}]})
        assert response.status_code == 200, response.text
        outputs = {output["name"]: output["data"] for output in response.json()["outputs"]}
        assert outputs == {"x": input_of(FEW)["data"], "t": ["a", "ß"]}, outputs

    def rounding(self, model: str) -> None:
        """A number above the middle of 0.5 and 0.5625 is the latter, although the nearest FP32 is that middle."""
        response = self._post(model, {"inputs": [{**input_of(FEW[:1]), "data": [0.53125, 0.53125 + 1e-12, 1.0]}]})
        assert response.json()["outputs"][0]["data"] == [0.5, 0.5625, 1.0]

    def overflow(self, model: str) -> None:
        response = self._post(model, {"inputs": [{**input_of(FEW[:1]), "data": [1, 1000, 2]}]})
        assert (response.status_code, "1000.0 does not fit into FP8" in response.text) == (400, True), response.text

    def infinity(self, model: str) -> None:
        """FP8 has no infinity, so that one must not become NaN."""
        response = self._post(
            model, b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [1e39]}]}'
        )
        assert response.status_code == 400, response.text
        array = np.array([[np.inf]], np.float32)
        inexact = pytest.raises(dragoman.errors.DragomanError, match="inf does not fit into FP8")
        with dragoman.Client(self._server.http_url) as client, inexact:
            client.infer(model, {"x": array})

    def described(self, model: str) -> None:
        url = self._server.http_url
        metadata = requests.get(f"{url}/v2/models/{model}", timeout=60).json()
        assert metadata["inputs"][0]["datatype"] == "FP8"
        schema = requests.get(f"{url}/openapi.json", timeout=60)
        assert (schema.status_code, '"FP8"' in schema.text) == (200, True)
        example = requests.post(f"{url}/v1/models/{model}:predict", json={"instances": [[0.5, 1.0]]}, timeout=60)
        assert example.json() == {"predictions": [[0.5, 1.0]]}, example.text


BOTH = ("rest_json", "rest_binary", "grpc_raw", "grpc_typed", "client_rest", "client_grpc", "asgi", "with_text")
CHECKS = [(name, model) for name in BOTH for model in ("Inline", "Apart")]
CHECKS += [(name, "Inline") for name in ("rounding", "overflow", "infinity", "described")]


def error_of(check: Callable[[str], None], model: str) -> str:
    try:
        check(model)
    except (Exception, pytest.fail.Exception):
        return traceback.format_exc()
    return ""


if __name__ == "__main__":
    assert dragoman.__file__ is not None
    assert dragoman.__file__.startswith(sys.argv[1]), dragoman.__file__
    with dragoman.Server(Inline, Apart, http_port=0, grpc_port=0) as running:
        checks = Checks(running)
        print(json.dumps({f"{name} {model}": error_of(getattr(checks, name), model) for name, model in CHECKS}))
