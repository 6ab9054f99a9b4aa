"""Models of every kind raise exceptions of every kind: each call is answered, the next one is right."""

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton

from e2e.foreign_errors import NAMES, RIGHT, SOURCE
from e2e.server_process import TIMEOUT_S, ServerProcess, running_server

NATIVE = """
from foreign_errors import twice

import numpy as np

import dragoman
from dragoman import Model, TensorSpec

OUTPUTS = (TensorSpec("y", dragoman.INT32, (-1,)),)


class Base(Model):
    inputs = (TensorSpec("x", dragoman.INT32, (-1,)),)
    outputs = OUTPUTS


def result(call):
    return {"y": np.array([twice(call.inputs["x"].data[0])], np.int32)}


class Function(Base):
    def infer(self, call):
        return result(call)


class Rows(Function):
    batched = True


class Coroutine(Base):
    async def infer(self, call):
        await dragoman_sleep()
        return result(call)


class Generator(Base):
    def infer(self, call):
        yield {"y": np.array([1], np.int32)}
        yield result(call)


class AsyncGenerator(Base):
    async def infer(self, call):
        yield {"y": np.array([1], np.int32)}
        await dragoman_sleep()
        yield result(call)


class Reports(Function):
    def measurements(self):
        twice(self.last)

    def infer(self, call):
        self.last = call.inputs["x"].data[0]
        return super().infer(call)

    last = 5


async def dragoman_sleep():
    import asyncio

    await asyncio.sleep(0)
"""
TRITON = """
import triton_python_backend_utils as pb_utils
from foreign_errors import twice

import numpy as np

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


def number(request):
    return int(pb_utils.get_input_tensor_by_name(request, "x").as_numpy()[0])


def response(value):
    return pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([value], np.int32))])


"""
TRITON_MODELS = {
    "sync": """
class TritonPythonModel:
    def execute(self, requests):
        return [response(twice(number(request))) for request in requests]
""",
    "async": """
import asyncio


class TritonPythonModel:
    async def execute(self, requests):
        await asyncio.sleep(0)
        return [response(twice(number(request))) for request in requests]
""",
    "in_server": """
class TritonPythonModel:  # .exec( lets it run in the server's process
    def execute(self, requests):
        return [response(twice(number(request))) for request in requests]
""",
    "caller": """
class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            inputs = request.inputs()
            call = pb_utils.InferenceRequest(model_name="sync", requested_output_names=["y"], inputs=inputs)
            responses.append(call.exec())
        return responses
""",
    "decoupled": """
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            sender.send(response(1))
            sender.send(response(twice(number(request))), FINAL)
""",
    "async_decoupled": """
class TritonPythonModel:
    async def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            sender.send(response(1))
            sender.send(response(twice(number(request))), FINAL)
""",
}
CONFIG = """
backend: "python"
input [{ name: "x" data_type: TYPE_INT32 dims: [1] }]
output [{ name: "y" data_type: TYPE_INT32 dims: [1] }]
"""
ENSEMBLE = """
platform: "ensemble"
input [{ name: "x" data_type: TYPE_INT32 dims: [1] }]
output [{ name: "y" data_type: TYPE_INT32 dims: [1] }]
ensemble_scheduling { step [{ model_name: "in_server" model_version: -1
  input_map { key: "x" value: "x" } output_map { key: "y" value: "y" } }] }
"""
MLSERVER = """
import sys

sys.path.append(FOLDER)
import numpy as np
from foreign_errors import twice
from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.handlers import custom_handler
from mlserver.types import InferenceResponse


class Twice(MLModel):
    def respond(self, values):
        outputs = [NumpyCodec.encode_output("y", np.array(values, np.int32))]
        return InferenceResponse(model_name=self.name, outputs=outputs)

    async def predict(self, payload):
        return self.respond([twice(payload.inputs[0].data[0])])

    async def predict_stream(self, payloads):
        async for payload in payloads:
            yield self.respond([1])
            yield self.respond([twice(payload.inputs[0].data[0])])

    @custom_handler(rest_path="/twice/{number}", rest_method="GET")
    async def handle(self, number: int) -> int:
        return twice(number)
"""
KSERVE = """
import sys

sys.path.append(FOLDER)
from foreign_errors import twice
from kserve import Model, ModelServer


class Twice(Model):
    def __init__(self, name):
        super().__init__(name)
        self.ready = True

    def predict(self, payload, headers=None):
        return {"predictions": [twice(payload["instances"][0])]}


if __name__ == "__main__":
    ModelServer().start([Twice("kserve")])
"""
SIMULATOR = """
from foreign_errors import twice


class Simulator:
    def get_input_sizes(self, config):
        return [1]

    def get_output_sizes(self, config):
        return [1]

    def supports_evaluate(self):
        return True

    def __call__(self, inputs, config):
        return [[float(twice(inputs[0][0]))]]
"""
NATIVE_MODELS = {
    "function_inline": ("Function", "inline"),
    "function_thread": ("Function", "thread"),
    "function_process": ("Function", "process"),
    "batched": ("Rows", "thread"),
    "coroutine": ("Coroutine", "inline"),
    "coroutine_process": ("Coroutine", "process"),
    "generator_inline": ("Generator", "inline"),
    "generator_thread": ("Generator", "thread"),
    "generator_process": ("Generator", "process"),
    "async_generator": ("AsyncGenerator", "inline"),
    "async_generator_process": ("AsyncGenerator", "process"),
    "reports": ("Reports", "inline"),
}
STREAMS = (
    *("generator_inline", "generator_thread", "generator_process", "async_generator", "async_generator_process"),
    *("decoupled", "async_decoupled", "mlserver"),
)
CALLS = (
    "function_inline",
    "function_thread",
    "function_process",
    "batched",
    "coroutine",
    "coroutine_process",
    "reports",
)


def write_models(folder: Path) -> None:
    """Write the folder of models."""

    def write(path: str, text: str) -> None:
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    lib = folder.parent / "lib"
    lib.mkdir()
    (lib / "foreign_errors.py").write_text(SOURCE)
    head = f"import sys\nsys.path.append({str(lib)!r})\n"
    for name, (kind, placement) in NATIVE_MODELS.items():
        write(f"{name}/model.py", head + NATIVE)
        settings = f'[model]\nuri = "model.py:{kind}"\nplacement = "{placement}"\n'
        write(f"{name}/dragoman.toml", settings + "max_batch_wait_s = 0.001\n" * (kind == "Rows"))
    for name, source in TRITON_MODELS.items():
        policy = "model_transaction_policy { decoupled: true }\n" if "decoupled" in name else ""
        write(f"{name}/config.pbtxt", CONFIG + policy)
        write(f"{name}/1/model.py", head + TRITON + source)
    write("ensemble/config.pbtxt", ENSEMBLE)
    write("mlserver/model-settings.json", json.dumps({"name": "mlserver", "implementation": "twice.Twice"}))
    write("mlserver/twice.py", MLSERVER.replace("FOLDER", repr(str(lib))))
    write("kserve/dragoman.toml", '[model]\nname = "kserve"\nuri = "script.py"\nruntime = "kserve"\n')
    write("kserve/script.py", KSERVE.replace("FOLDER", repr(str(lib))))
    write("simulator/dragoman.toml", '[model]\nuri = "model.py:Simulator"\nplacement = "process"\n')
    write("simulator/model.py", head + SIMULATOR)


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("served") / "models"
    write_models(folder)
    with running_server(str(folder)) as server:
        yield server


def check_ready(process: ServerProcess, model: str) -> None:
    assert process.status(f"/v2/models/{model}/ready") == 200
    assert process.status("/v2/health/ready") == 200


@pytest.mark.parametrize("model", [*CALLS, "sync", "async", "in_server", "caller", "ensemble", "mlserver"])
def test_calls_of_models_that_raise_are_answered_and_the_next_is_right(process: ServerProcess, model: str) -> None:
    for number, name in NAMES.items():
        status, body = process.infer(model, [number], "INT32")
        assert (status, list(body)) == (500, ["error"]), (name, body)
        assert name in body["error"] or name.startswith("Stop"), name  # which Python replaces by RuntimeError
        status, body = process.infer(model, [RIGHT], "INT32")
        assert status == 200, (name, body)
        assert body["outputs"][0]["data"] == [2 * RIGHT], name
    check_ready(process, model)


def stream_events(process: ServerProcess, model: str, number: int) -> list[Any]:
    """Return the events of a stream over REST."""
    connection = http.client.HTTPConnection("127.0.0.1", process.http_port, timeout=TIMEOUT_S)
    tensor = {"name": "x", "datatype": "INT32", "shape": [1], "data": [number]}
    connection.request("POST", f"/v2/models/{model}/infer_stream", json.dumps({"inputs": [tensor]}))
    response = connection.getresponse()
    assert response.status == 200
    lines = response.read().decode().splitlines()  # raises IncompleteRead if the connection is closed early
    connection.close()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line]


@pytest.mark.parametrize("model", STREAMS)
def test_streams_of_models_that_raise_end_with_an_error_and_the_next_is_right(
    process: ServerProcess, model: str
) -> None:
    for number, name in NAMES.items():
        first, last = stream_events(process, model, number)
        assert first["outputs"][0]["data"] == [1], name
        assert list(last) == ["error"], name
        assert [each["outputs"][0]["data"] for each in stream_events(process, model, RIGHT)] == [[1], [2 * RIGHT]], name
    check_ready(process, model)


def stream_over_grpc(process: ServerProcess, model: str, numbers: list[int]) -> list[Any]:
    """Return the responses to several requests on one stream: a number, or the text of an error."""
    received: list[Any] = []
    client = triton.InferenceServerClient(process.grpc_url)
    client.start_stream(lambda result, error: received.append(result if error is None else error.message()))
    for number in numbers:
        tensor = triton.InferInput("x", [1], "INT32")
        tensor.set_data_from_numpy(np.array([number], np.int32))
        client.async_stream_infer(model, [tensor])
    client.stop_stream()
    client.close()
    return [each if isinstance(each, str) else int(each.as_numpy("y")[0]) for each in received]


@pytest.mark.parametrize("model", ["function_inline", "generator_thread", "async_generator", "decoupled", "async"])
def test_one_stream_goes_on_after_each_error(process: ServerProcess, model: str) -> None:
    numbers = [each for number in NAMES for each in (number, RIGHT)]
    received = stream_over_grpc(process, model, numbers)
    before = [1] if model in STREAMS else []
    expected = [kind for _ in NAMES for kind in (*before, "error", *before, 2 * RIGHT)]
    assert ["error" if isinstance(each, str) else each for each in received] == expected
    check_ready(process, model)


def test_custom_handlers_that_raise_are_answered(process: ServerProcess) -> None:
    for number, name in NAMES.items():
        status, body, _ = process.request("GET", f"/twice/{number}")
        assert (status, list(body)) == (500, ["error"]), (name, body)
        assert process.request("GET", f"/twice/{RIGHT}")[:2] == (200, 2 * RIGHT), name


def test_kserve_models_that_raise_are_answered(process: ServerProcess) -> None:
    for number, name in NAMES.items():
        status, body, _ = process.request("POST", "/v1/models/kserve:predict", {"instances": [number]})
        assert (status, list(body)) == (500, ["error"]), (name, body)
        right = process.request("POST", "/v1/models/kserve:predict", {"instances": [RIGHT]})
        assert right[:2] == (200, {"predictions": [2 * RIGHT]}), name
    check_ready(process, "kserve")


def test_simulators_that_raise_are_answered(process: ServerProcess) -> None:
    for number, name in NAMES.items():
        status, body, _ = process.request("POST", "/Evaluate", {"name": "simulator", "input": [[number]]})
        assert (status, list(body)) == (500, ["error"]), (name, body)
        right = process.request("POST", "/Evaluate", {"name": "simulator", "input": [[RIGHT]]})
        assert right[:2] == (200, {"output": [[2 * RIGHT]]}), name
    check_ready(process, "simulator")


def test_metrics_are_exported_though_a_model_cannot_report_its_own(process: ServerProcess) -> None:
    status, body, _ = process.request("GET", "/metrics")
    assert status == 200
    assert b"dragoman_requests" in body
    assert "measurements() raised" in process.log()
