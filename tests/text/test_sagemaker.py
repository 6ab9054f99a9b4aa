"""SageMaker's contract, by one flag, of a server process as a container would start it."""

from pathlib import Path

from e2e.served import Served, free_ports

_MODEL = """
import dragoman
from dragoman import Generate, Generation, Text


class Model(dragoman.Model):
    placement = "inline"

    def generate(self, call: Generate) -> Generation:
        return Generation(tuple(Text(i, 0, "yes", (), 1, "eos_token", whole="yes") for i in range(len(call.prompts))))
"""


def container(folder: Path) -> Served:
    """One with a model, which is about to start."""
    (folder / "model.py").write_text(_MODEL)
    (port,) = free_ports(1)
    served = Served(str(folder), "--sagemaker", environment={"SAGEMAKER_BIND_TO_PORT": str(port)})
    served.http_port = port
    return served


def test_one_flag(tmp_path: Path) -> None:
    served = container(tmp_path)
    try:
        served.until_status("/ping", 200)
        status, answer, _ = served.ask("POST", "/invocations", {"inputs": "a"}, {"content-type": "application/json"})
        assert (status, answer) == (200, {"generated_text": "yes"})
        assert "gRPC" not in served.log()
        served.terminate()
        assert served.ended() == 0
    finally:
        served.reap()


def test_it_looks_where_sagemaker_puts_models() -> None:
    served = Served(environment={"DRAGOMAN_SAGEMAKER": "true"})
    try:
        assert served.ended() == 2
        assert "'/opt/ml/model' is not there" in served.log()
    finally:
        served.reap()


def test_an_endpoint_of_many_models(tmp_path: Path) -> None:
    """SageMaker starts the container without a model, loads each when it is first asked for, and sends no token."""
    for name in ("a", "b"):
        (tmp_path / name / "model").mkdir(parents=True)
        (tmp_path / name / "model" / "model.py").write_text(_MODEL.replace("yes", name))
    (port,) = free_ports(1)
    environment = {
        "SAGEMAKER_MULTI_MODEL": "true",
        "SAGEMAKER_BIND_TO_PORT": str(port),
        "DRAGOMAN_MODEL_FOLDERS": str(tmp_path),
    }
    served = Served("--sagemaker", environment=environment)
    served.http_port = port
    sent = {"content-type": "application/json", "accept": "application/json"}
    try:
        served.until_status("/ping", 200)
        for name in ("a", "b"):
            url = f"{tmp_path}/{name}/model"
            assert served.ask("POST", "/models", {"model_name": name, "url": url}, sent)[0] == 200
            assert served.ask("POST", "/models", {"model_name": name, "url": url}, sent)[0] == 409
            status, answer, _ = served.ask("POST", f"/models/{name}/invoke", {"inputs": "x"}, sent)
            assert (status, answer) == (200, {"generated_text": name})
        assert served.status("/ping") == 200
        assert [m["modelName"] for m in served.ask("GET", "/models")[1]["models"]] == ["a", "b"]
        assert served.ask("DELETE", "/models/a")[0] == 200
        assert served.ask("POST", "/models/a/invoke", {"inputs": "x"}, sent)[0] == 404
        assert served.status("/models/a") == 404
        assert "no model is loaded yet" in served.log()
    finally:
        served.reap()


def test_a_container_of_one_model_lets_nobody_load_others(tmp_path: Path) -> None:
    served = container(tmp_path)
    try:
        served.until_status("/ping", 200)
        assert served.ask("POST", "/models", {"model_name": "a", "url": "/opt/ml/models/a/model"})[0] == 403
    finally:
        served.reap()
