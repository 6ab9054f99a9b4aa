"""First steps after `pip install .`: these tests need no framework and no other client."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import dragoman
from e2e.server_process import ServerProcess, running_server

ROOT = Path(__file__).parents[2]


def example(name: str) -> str:
    """Return an example file; check that the README shows its return expression."""
    code = (ROOT / "examples" / name).read_text()
    result = code.rpartition("return ")[2].strip()
    assert result in (ROOT / "README.md").read_text(), f"the README does not show examples/{name}"
    return code


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("install")
    for name in ("celsius.py", "energy.py"):
        (folder / name).write_text(example(name))
    models = ["celsius.py:celsius", "energy.py:energy", str(ROOT / "examples" / "scientific" / "banana")]
    with running_server(*models, folder=folder) as process:
        yield process


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_the_first_function_returns_outputs(server: ServerProcess, protocol: str) -> None:
    address = server.url if protocol == "http" else server.grpc_url
    with dragoman.Client(f"{protocol}://{address}") as client:
        outputs = client.infer("celsius", {"fahrenheit": np.array([32.0, 212.0])})
        (values,) = outputs.values()
        assert values.tolist() == [0.0, 100.0]
        assert client.infer("banana", {"x": [[2.0, 0.0]]})["log_density"].shape[0] == 1


def test_a_simulator_returns_its_gradient(server: ServerProcess) -> None:
    request = {"name": "energy", "input": [[1, 2]]}
    assert server.request("POST", "/Evaluate", request)[1] == {"output": [[2.5]]}
    gradient = {**request, "sens": [1], "outWrt": 0, "inWrt": 0}
    assert server.request("POST", "/Gradient", gradient)[1] == {"output": [1.0, 2.0]}
    assert server.request("POST", "/Gradient", {**gradient, "name": "banana", "input": [[2, 0]]})[0] == 200
