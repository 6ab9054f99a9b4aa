"""`--sagemaker`: SageMaker's container contract, in a server process."""

from pathlib import Path

from e2e.server_process import ServerProcess, free_ports

_MODEL = """
import dragoman
from dragoman import Generate, Generation, Text


class Model(dragoman.Model):
    placement = "inline"

    def generate(self, call: Generate) -> Generation:
        return Generation(tuple(Text(i, 0, "yes", (), 1, "eos_token", whole="yes") for i in range(len(call.prompts))))
"""


def start_container(folder: Path) -> ServerProcess:
    """Start a server process with a model."""
    (folder / "model.py").write_text(_MODEL)
    (port,) = free_ports(1)
    process = ServerProcess(str(folder), "--sagemaker", environment={"SAGEMAKER_BIND_TO_PORT": str(port)})
    process.http_port = port
    return process


def test_sagemaker_flag(tmp_path: Path) -> None:
    process = start_container(tmp_path)
    try:
        process.wait_for_status("/ping", 200)
        status, response, _ = process.request(
            "POST", "/invocations", {"inputs": "a"}, {"content-type": "application/json"}
        )
        assert (status, response) == (200, {"generated_text": "yes"})
        assert "gRPC" not in process.log()
        process.terminate()
        assert process.wait_for_exit() == 0
    finally:
        process.kill()


def test_models_are_loaded_from_opt_ml_model() -> None:
    process = ServerProcess(environment={"DRAGOMAN_SAGEMAKER": "true"})
    try:
        assert process.wait_for_exit() == 2
        assert "'/opt/ml/model' not found" in process.log()
    finally:
        process.kill()


def test_multi_model_endpoint(tmp_path: Path) -> None:
    """SageMaker starts the container without a model, loads each at its first request, and sends no token."""
    for name in ("a", "b"):
        (tmp_path / name / "model").mkdir(parents=True)
        (tmp_path / name / "model" / "model.py").write_text(_MODEL.replace("yes", name))
    (port,) = free_ports(1)
    environment = {
        "SAGEMAKER_MULTI_MODEL": "true",
        "SAGEMAKER_BIND_TO_PORT": str(port),
        "DRAGOMAN_MODEL_FOLDERS": str(tmp_path),
    }
    process = ServerProcess("--sagemaker", environment=environment)
    process.http_port = port
    headers = {"content-type": "application/json", "accept": "application/json"}
    try:
        process.wait_for_status("/ping", 200)
        for name in ("a", "b"):
            url = f"{tmp_path}/{name}/model"
            assert process.request("POST", "/models", {"model_name": name, "url": url}, headers)[0] == 200
            assert process.request("POST", "/models", {"model_name": name, "url": url}, headers)[0] == 409
            status, response, _ = process.request("POST", f"/models/{name}/invoke", {"inputs": "x"}, headers)
            assert (status, response) == (200, {"generated_text": name})
        assert process.status("/ping") == 200
        assert [m["modelName"] for m in process.request("GET", "/models")[1]["models"]] == ["a", "b"]
        assert process.request("DELETE", "/models/a")[0] == 200
        assert process.request("POST", "/models/a/invoke", {"inputs": "x"}, headers)[0] == 404
        assert process.status("/models/a") == 404
        assert "no model is loaded yet" in process.log()
    finally:
        process.kill()


def test_registration_is_forbidden_in_a_single_model_container(tmp_path: Path) -> None:
    process = start_container(tmp_path)
    try:
        process.wait_for_status("/ping", 200)
        assert process.request("POST", "/models", {"model_name": "a", "url": "/opt/ml/models/a/model"})[0] == 403
    finally:
        process.kill()
