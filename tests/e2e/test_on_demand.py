"""Load on demand in a server process: requests of every protocol load their model, and the other one is unloaded."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from e2e.server_process import ServerProcess, running_server, wait_until

# The load waits while the file `wait` exists.
VECTORS = """
import pathlib
import time
import numpy as np
import dragoman

FOLDER = pathlib.Path(__file__).parent

class Vectors(dragoman.Model):
    placement = "{placement}"
    inputs = (dragoman.TensorSpec("x", dragoman.FP64, (2,)),)
    outputs = (dragoman.TensorSpec("y", dragoman.FP64, (2,)),)

    def load(self):
        while (FOLDER / "wait").exists():
            time.sleep(0.005)
        if (FOLDER / "broken").exists():
            raise ValueError("bad weights")

    def infer(self, call):
        return {{"y": {factor} * call.inputs["x"].data}}

    def gradient(self, call):
        return {factor} * call.sens.data
"""
TEXT = """
import dragoman
from dragoman import Generation, Text

class Words(dragoman.Model):
    placement = "inline"

    def generate(self, call):
        return Generation((Text(0, 0, "hello", (), 1, "eos_token", whole="hello"),))
"""
FACTORS = {"two": 2.0, "three": 3.0}
X: dict[str, Any] = {"name": "x", "datatype": "FP64", "shape": [2], "data": [1.0, -0.5]}
NOT_LOADED = "not loaded: the next request loads it"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("models")
    for name, placement in (("two", "process"), ("three", "thread")):
        (folder / name).mkdir()
        (folder / name / "model.py").write_text(VECTORS.format(placement=placement, factor=FACTORS[name]))
    (folder / "words").mkdir()
    (folder / "words" / "model.py").write_text(TEXT)
    return folder


@pytest.fixture(scope="module")
def process(folder: Path) -> Iterator[ServerProcess]:
    arguments = ("--load-on-demand", "--max-loaded-models", "1", "--control-open")
    with running_server(str(folder), *arguments) as process:
        yield process


def index(process: ServerProcess) -> dict[str, tuple[str, str]]:
    """Return state and reason of each model."""
    entries = process.request("POST", "/v2/repository/index", {})[1]
    return {entry["name"]: (entry["state"], entry["reason"]) for entry in entries}


def states(loaded: str) -> dict[str, tuple[str, str]]:
    """Return the index with one loaded model."""
    return {name: ("READY", "" if name == loaded else NOT_LOADED) for name in ("three", "two", "words")}


def metrics(process: ServerProcess) -> dict[str, float]:
    lines = process.request("GET", "/metrics")[1].decode().splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[:1] != "#")}


def post(process: ServerProcess, path: str, body: Any) -> Any:
    status, response, _ = process.request("POST", path, body)
    assert status == 200, response
    return response


def infer_rest(process: ServerProcess, model: str) -> Any:
    return post(process, f"/v2/models/{model}/infer", {"inputs": [X]})["outputs"][0]["data"]


def infer_grpc(process: ServerProcess, model: str) -> Any:
    with triton.InferenceServerClient(process.grpc_url) as client:
        tensor = triton.InferInput("x", [2], "FP64")
        tensor.set_data_from_numpy(np.array(X["data"]))
        return client.infer(model, [tensor]).as_numpy("y").tolist()


def stream_grpc(process: ServerProcess, model: str) -> Any:
    tensor = service_pb2.ModelInferRequest.InferInputTensor(name="x", datatype="FP64", shape=[2])
    request = service_pb2.ModelInferRequest(
        model_name=model, inputs=[tensor], raw_input_contents=[np.array(X["data"]).tobytes()]
    )
    with grpc.insecure_channel(process.grpc_url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        (response,) = stub.ModelStreamInfer(iter([request]))
        assert response.error_message == ""
        return np.frombuffer(response.infer_response.raw_output_contents[0]).tolist()


def evaluate(process: ServerProcess, model: str) -> Any:
    return post(process, "/Evaluate", {"name": model, "input": [X["data"]], "config": {}})["output"][0]


def gradient(process: ServerProcess, model: str) -> Any:
    body = {"name": model, "input": [X["data"]], "config": {}, "outWrt": 0, "inWrt": 0, "sens": X["data"]}
    return post(process, "/Gradient", body)["output"]


def predict_v1(process: ServerProcess, model: str) -> Any:
    return post(process, f"/v1/models/{model}:predict", {"instances": X["data"]})["predictions"]


@pytest.mark.parametrize("send", [infer_rest, infer_grpc, stream_grpc, evaluate, gradient, predict_v1])
def test_requests_of_every_protocol_load_their_model(process: ServerProcess, send: Any) -> None:
    for model in ("two", "three"):
        assert send(process, model) == [FACTORS[model], -0.5 * FACTORS[model]]
        assert index(process) == states(loaded=model)
        assert process.status(f"/v2/models/{model}/ready") == 200
    wait_until(lambda: not process.workers(), "the exit of the worker process")


def test_text_requests_load_their_model(process: ServerProcess) -> None:
    for path, body in (
        ("/v1/completions", {"model": "words", "prompt": "?"}),
        ("/v1/chat/completions", {"model": "words", "messages": [{"role": "user", "content": "?"}]}),
        ("/v2/models/words/generate", {"text_input": "?"}),
        ("/v1/completions", {"model": "words", "prompt": "?", "stream": True}),
    ):
        infer_rest(process, "three")
        assert index(process) == states(loaded="three")
        assert "hello" in str(post(process, path, body))
        assert index(process) == states(loaded="words")


def test_metadata_and_listings_do_not_load_a_model_again(process: ServerProcess) -> None:
    for model in ("two", "words", "three"):
        assert process.status(f"/v2/models/{model}") == 200  # known from now on
    infer_rest(process, "three")
    before = metrics(process)
    assert post(process, "/ModelInfo", {"name": "two"})["support"]["Gradient"] is True
    assert process.request("GET", "/Info")[1]["models"] == ["three", "two"]
    assert [m["id"] for m in process.request("GET", "/v1/models")[1]["data"]] == ["words"]
    assert process.request("GET", "/v2/models/two")[1]["outputs"][0]["shape"] == [2]
    with triton.InferenceServerClient(process.grpc_url) as client:
        assert [i.name for i in client.get_model_metadata("two").inputs] == ["x"]
        assert client.is_model_ready("two")
    assert index(process) == states(loaded="three")
    loads = 'dragoman_model_loads_total{outcome="ok"}'
    assert metrics(process)[loads] == before[loads]


def test_several_processes_load_a_model_once(folder: Path) -> None:
    arguments = ("--load-on-demand", "--max-loaded-models", "1", "--control-open", "--processes", "2")
    with running_server(str(folder), *arguments) as process:
        for send in (infer_rest, infer_grpc, stream_grpc):
            assert send(process, "three") == [3.0, -1.5]
            assert index(process) == states(loaded="three")
            assert "hello" in str(post(process, "/v1/completions", {"model": "words", "prompt": "?"}))
            assert index(process) == states(loaded="words")
        check_concurrent_load(process, folder)


def test_concurrent_requests_cause_one_load(process: ServerProcess, folder: Path) -> None:
    check_concurrent_load(process, folder)


def check_concurrent_load(process: ServerProcess, folder: Path) -> None:
    """Send requests for a model that is loaded, over several connections; it must be loaded once."""
    infer_rest(process, "three")
    before = metrics(process)
    (folder / "two" / "wait").touch()
    with ThreadPoolExecutor() as executor:
        senders = (infer_rest, infer_grpc, evaluate, infer_rest)
        responses = [executor.submit(send, process, "two") for send in senders]
        in_flight = 'dragoman_calls_in_flight{model="two",version=""}'
        try:
            wait_until(lambda: metrics(process)[in_flight] == len(senders), "the wait of all requests")
            wait_until(lambda: index(process)["two"] == ("READY", "loading"), "room for the model")
            assert process.status("/v2/health/ready") == 200
        finally:
            (folder / "two" / "wait").unlink()
        assert [response.result() for response in responses] == [[2.0, -1.0]] * len(senders)
    assert index(process) == states(loaded="two")
    after = metrics(process)
    changes = {name: after[name] - before[name] for name in before if name.startswith("dragoman_model_")}
    assert changes['dragoman_model_loads_total{outcome="ok"}'] == 1
    assert changes['dragoman_model_loads_total{outcome="failed"}'] == 0
    assert changes['dragoman_model_unloads_total{reason="room"}'] == 1
    assert changes["dragoman_model_load_duration_seconds_count"] == 1
    assert after["dragoman_models_loaded"] == 1


def test_a_failed_load_is_an_error_in_the_shape_of_each_protocol(process: ServerProcess, folder: Path) -> None:
    infer_rest(process, "three")
    (folder / "two" / "broken").touch()
    try:
        status, body, _ = process.request("POST", "/v2/models/two/infer", {"inputs": [X]})
        message = "model 'two' is not ready: UNAVAILABLE; the reason is in the log and in the repository index"
        assert (status, body["error"].startswith(message)) == (503, True)
        with pytest.raises(InferenceServerException, match=message):
            infer_grpc(process, "two")
        status, body, _ = process.request("POST", "/Evaluate", {"name": "two", "input": [X["data"]], "config": {}})
        assert (status, body["error"]["message"].startswith(message)) == (503, True)
        assert "bad weights" in index(process)["two"][1]
        assert index(process)["two"][0] == "UNAVAILABLE"
        assert process.status("/v2/health/ready") == 200
        assert process.status("/v2/models/two/ready") != 200
    finally:
        (folder / "two" / "broken").unlink()
    wait_until(lambda: process.request("POST", "/v2/models/two/infer", {"inputs": [X]})[0] == 200, "the next attempt")
    assert index(process) == states(loaded="two")
