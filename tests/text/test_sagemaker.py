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


def test_one_flag(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(_MODEL)
    (port,) = free_ports(1)
    served = Served(str(tmp_path), "--sagemaker", environment={"SAGEMAKER_BIND_TO_PORT": str(port)})
    served.http_port = port
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
