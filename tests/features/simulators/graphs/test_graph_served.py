"""A graph of local nodes, nodes on a Dragoman server and on a server of umbridge, called by umbridge's client."""

import json
import re
import socket
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import umbridge

from e2e.server_process import ServerProcess, free_ports, running_server, wait_until

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")

FILES = Path(__file__).parent / "served"
MATRIX = np.array([[1.0, 0.5, 0.0], [0.0, -1.0, 2.0]])
DATA = [1.5, -0.5]


def listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


@contextmanager
def reference() -> Iterator[str]:
    """Run the server of the umbridge package in a process."""
    (port,) = free_ports(1)
    process = subprocess.Popen(
        [sys.executable, str(FILES / "powers.py"), str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        wait_until(lambda: listens(port), "the reference server listens")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def write_graph(folder: Path, served_url: str, reference_url: str) -> Path:
    """Write the graph's file and the files that it refers to."""
    (folder / "fields.py").write_text((FILES / "fields.py").read_text())
    np.save(folder / "B.npy", MATRIX)
    graph = {
        "name": "posterior",
        "nodes": {
            "field": {"fn": "fields.py:field"},
            "dragoman": {"umbridge": served_url, "model": "powers", "concurrency": 8},
            "reference": {"umbridge": reference_url, "model": "powers"},
            "obs": {"linear": "B.npy"},
            "like": {"builtin": "gaussian_loglik", "data": DATA, "cov": 0.5},
            "prior": {"builtin": "gaussian_logpdf", "dim": 3},
            "post": {"builtin": "sum", "n": 4},
            "offset": {"builtin": "identity"},
        },
        "edges": [
            "field -> dragoman",
            "dragoman.0 -> reference",
            "reference.0 -> obs -> like",
            "like -> post.0",
            "prior -> post.1",
            "dragoman.1 -> post.2",
            "offset -> post.3",
        ],
        "inputs": {"m": ["field", "prior"]},
        "outputs": {"post": "post", "cubes": "dragoman.1"},
        "bind": {"offset": [0.25]},
    }
    path = folder / "graph.json"
    path.write_text(json.dumps(graph))
    return path


def by_torch(m: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in PyTorch."""
    a = torch.exp(m / 2)
    squares, cubes = a**2, torch.sum(a**3).reshape(1)
    away = torch.from_numpy(MATRIX) @ squares**2 - torch.tensor(DATA, dtype=torch.float64)
    like = -0.5 * (away @ away) / 0.5 - np.log(2 * np.pi * 0.5)
    prior = -0.5 * (m @ m) - 1.5 * np.log(2 * np.pi)
    return (like + prior).reshape(1) + cubes + 0.25, cubes


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerProcess, ServerProcess]]:
    """The server of the graph, and the Dragoman server that it calls."""
    folder = tmp_path_factory.mktemp("graph")
    with (
        reference() as reference_url,
        running_server(f"{FILES / 'powers.py'}:Powers", "--placement", "thread") as served_url,
        running_server(str(write_graph(folder, f"http://{served_url.url}", reference_url))) as graph,
    ):
        yield graph, served_url


@pytest.fixture
def model(servers: tuple[ServerProcess, ServerProcess]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        return umbridge.HTTPModel(f"http://{servers[0].url}", "posterior")


POINT = [0.3, -0.4, 0.1]


def test_every_endpoint_with_the_umbridge_client(model: Any) -> None:
    at, vec = torch.tensor(POINT, dtype=torch.float64), torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    assert (model.get_input_sizes(), model.get_output_sizes()) == ([3], [1, 1])
    assert model.supports_evaluate()
    assert model.supports_gradient()
    assert model.supports_apply_jacobian()
    assert model.supports_apply_hessian()
    result = model([POINT])
    np.testing.assert_allclose(result, [y.numpy() for y in by_torch(at)], rtol=1e-12)
    for o in range(2):
        gradient = torch.func.grad(lambda m, o=o: 1.5 * by_torch(m)[o][0])
        slope = torch.func.jvp(lambda m, o=o: by_torch(m)[o], (at,), (vec,))[1]
        curve = torch.func.jvp(gradient, (at,), (vec,))[1]
        np.testing.assert_allclose(model.gradient(o, 0, [POINT], [1.5]), gradient(at), rtol=1e-10)
        np.testing.assert_allclose(model.apply_jacobian(o, 0, [POINT], vec.tolist()), slope, rtol=1e-10)
        np.testing.assert_allclose(model.apply_hessian(o, 0, 0, [POINT], [1.5], vec.tolist()), curve, rtol=1e-10)


def test_a_graph_over_open_inference(servers: tuple[ServerProcess, ServerProcess]) -> None:
    graph, _ = servers
    status, description, _ = graph.request("GET", "/v2/models/posterior")
    assert status == 200
    assert description["platform"] == "dragoman_graph"
    assert [(t["name"], t["shape"]) for t in (*description["inputs"], *description["outputs"])] == [
        ("m", [3]),
        ("post", [1]),
        ("cubes", [1]),
    ]
    assert description["details"]["derivatives"] == dict.fromkeys(
        ["gradient", "apply_jacobian", "apply_hessian"], "graph"
    )
    assert description["details"]["graph"]["nodes"]["reference"]["gradient"] == "remote"
    tensor = {"name": "m", "datatype": "FP64", "shape": [3], "data": POINT}
    status, response, _ = graph.request("POST", "/v2/models/posterior/infer", {"inputs": [tensor]})
    assert status == 200
    expected = by_torch(torch.tensor(POINT, dtype=torch.float64))
    np.testing.assert_allclose([t["data"] for t in response["outputs"]], [y.numpy() for y in expected], rtol=1e-12)


def test_each_remote_node_is_called_once(servers: tuple[ServerProcess, ServerProcess], model: Any) -> None:
    """A Hessian action evaluates a node once, though it is on the way of three sweeps."""

    def counts() -> dict[str, int]:
        _, page, _ = servers[1].request("GET", "/metrics")
        result = re.findall(r'dragoman_calls_total{model="powers",.*call="(\w+)",outcome="ok"} (\S+)', page.decode())
        return {call: int(float(count)) for call, count in result}

    before = counts()
    model.apply_hessian(0, 0, 0, [POINT], [1.0], [1.0, 0.0, 0.0])
    built = {key: n - before.get(key, 0) for key, n in counts().items() if n != before.get(key, 0)}
    # One tangent, of the output that the other server gets; both adjoints; of second order only the former's.
    assert built == {"Infer": 1, "ApplyJacobian": 1, "Gradient": 3, "ApplyHessian": 2}


def test_bad_input_is_rejected_with_a_message(servers: tuple[ServerProcess, ServerProcess], model: Any) -> None:
    graph, _ = servers
    bodies: list[tuple[dict[str, Any], str]] = [
        ({"input": [[1.0, 2.0]]}, "input 0 ('m'): expected 3 numbers, got 2"),
        ({"input": [[1.0, 2.0, "x"]]}, "input"),
        ({"input": []}, "expected 1 input vectors"),
    ]
    for body, message in bodies:
        status, response, _ = graph.request("POST", "/Evaluate", {"name": "posterior", **body})
        assert status == 400
        assert response["error"]["type"] == "InvalidInput"
        assert message in response["error"]["message"]
    assert len(model([POINT])) == 2
