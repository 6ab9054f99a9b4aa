"""Canary: every protocol follows the weights of versions, and a load request changes them."""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.grpc import service_pb2, service_pb2_grpc

from e2e.server_process import ServerProcess, running_server, wait_until

VECTORS = """
import numpy as np
import dragoman

class M(dragoman.Model):
    placement = "inline"
    inputs = (dragoman.TensorSpec("x", dragoman.FP64, (1,)),)
    outputs = (dragoman.TensorSpec("y", dragoman.FP64, (1,)),)

    def infer(self, call):
        return {"y": np.array([%s])}

    def gradient(self, call):
        return np.array([%s])
"""
TEXT = """
import dragoman
from dragoman import Generation, Text

class T(dragoman.Model):
    placement = "inline"

    def generate(self, call):
        return Generation((Text(0, 0, "%s", (), 1, "eos_token", whole="%s"),))
"""
AUTHORIZATION = {"authorization": "Bearer t"}
X = {"name": "x", "datatype": "FP64", "shape": [1], "data": [0.0]}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("models")
    for name, text in (("m", VECTORS), ("t", TEXT)):
        for version in ("1", "2"):
            (folder / name / version).mkdir(parents=True)
            (folder / name / version / "model.py").write_text(text % (version, version))
        (folder / name / "dragoman.toml").write_text('[model.version_weights]\n"1" = 1\n"2" = 0\n')
    return folder


@pytest.fixture(scope="module")
def process(models: Path) -> Iterator[ServerProcess]:
    with running_server(
        str(models), "--placement", "inline", "--control-token", "t", "--version-weights-file", "-"
    ) as process:
        yield process


def answering_versions(process: ServerProcess) -> dict[str, Any]:
    """Return the version that answers, as a number or text, by protocol."""

    def post(path: str, body: Any) -> Any:
        status, response, _ = process.request("POST", path, body)
        assert status == 200, response
        return response

    point, chat = {"name": "m", "input": [[0.0]], "config": {}}, [{"role": "user", "content": "?"}]
    with triton.InferenceServerClient(process.grpc_url) as client:
        tensor = triton.InferInput("x", [1], "FP64")
        tensor.set_data_from_numpy(np.zeros(1))
        result = client.infer("m", [tensor])
    rest = post("/v2/models/m/infer", {"inputs": [X]})
    return {
        "REST": rest["outputs"][0]["data"][0],
        "REST, model_version": int(rest["model_version"]),
        "gRPC": result.as_numpy("y")[0],
        "gRPC, model_version": int(result.get_response().model_version),
        "UM-Bridge": post("/Evaluate", point)["output"][0][0],
        "UM-Bridge, gradient": post("/Gradient", {**point, "outWrt": 0, "inWrt": 0, "sens": [1.0]})["output"][0],
        "KServe V1": post("/v1/models/m:predict", {"instances": [0.0]})["predictions"][0],
        "OpenAI": int(post("/v1/completions", {"model": "t", "prompt": "?"})["choices"][0]["text"]),
        "OpenAI, chat": int(
            post("/v1/chat/completions", {"model": "t", "messages": chat})["choices"][0]["message"]["content"]
        ),
        "TGI": int(post("/generate", {"inputs": "?"})["generated_text"]),
        "LMI": int(post("/predictions/t", {"inputs": "?"})["generated_text"]),
        "Open Inference, generate": int(post("/v2/models/t/generate", {"text_input": "?"})["text_output"]),
    }


def load(process: ServerProcess, model: str, weights: Any) -> tuple[int, Any]:
    parameters = {"parameters": {"version_weights": weights}}
    return process.request("POST", f"/v2/repository/models/{model}/load", parameters, AUTHORIZATION)[:2]


def grpc_load(process: ServerProcess, **value: Any) -> None:
    parameter = service_pb2.ModelRepositoryParameter(**value)
    request = service_pb2.RepositoryModelLoadRequest(model_name="m", parameters={"version_weights": parameter})
    with grpc.insecure_channel(process.grpc_url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        stub.RepositoryModelLoad(request, metadata=[("authorization", "Bearer t")])


def test_every_protocol_follows_the_weights(process: ServerProcess) -> None:
    first = answering_versions(process)
    assert first == dict.fromkeys(first, 1)
    assert [load(process, model, "1=0,2=1")[0] for model in ("m", "t")] == [200, 200]
    second = answering_versions(process)
    assert second == dict.fromkeys(first, 2)
    _, body, _ = process.request("POST", "/v2/models/m/versions/1/infer", {"inputs": [X]})
    assert (body["model_version"], body["outputs"][0]["data"]) == ("1", [1])
    metrics = process.request("GET", "/metrics")[1].decode()
    assert 'dragoman_version_share_ratio{model="m",version="2"} 1' in metrics
    assert 'dragoman_calls_total{model="m",version="1",call="Infer",outcome="ok"}' in metrics


def test_weights_over_grpc(process: ServerProcess) -> None:
    grpc_load(process, string_param="1=1")
    assert process.request("POST", "/v2/models/m/infer", {"inputs": [X]})[1]["model_version"] == "1"
    with pytest.raises(grpc.RpcError, match="parameter 'version_weights': expected text such as '1=90,2=10', got 5"):
        grpc_load(process, int64_param=5)


def test_weights_in_the_file_are_read_again_by_a_signal(process: ServerProcess, models: Path) -> None:
    assert process.request("POST", "/v2/repository/models/m/load", {}, AUTHORIZATION)[0] == 200

    def version() -> Any:
        return process.request("POST", "/v2/models/m/infer", {"inputs": [X]})[1]["model_version"]

    assert version() == "1"
    (models / "m" / "dragoman.toml").write_text('[model.version_weights]\n"1" = 0\n"2" = 1\n')
    process.popen.send_signal(signal.SIGHUP)
    wait_until(lambda: version() == "2", "an answer of version 2")


def test_invalid_weights_are_rejected(process: ServerProcess) -> None:
    message = "parameter 'version_weights': expected text such as '1=90,2=10', got 5"
    assert load(process, "m", 5) == (400, {"error": message})
    status, body = load(process, "m", "1=1,9=1")
    assert (status, body["error"]) == (
        400,
        "model 'm': version_weights: version '9' is not among the versions that are served: 1, 2",
    )
    assert load(process, "unknown", "1=1")[0] == 404
