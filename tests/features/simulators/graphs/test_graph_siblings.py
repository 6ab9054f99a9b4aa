"""Graphs over other models of the same server, each held once."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dragoman
from dragoman import ApplyHessian, Gradient, Infer, errors
from dragoman.core.calls import Describe, Load, Request, Unload
from dragoman.engine.deployment import Deployment
from dragoman.engine.engine import Engine
from vector_calls import call_model, vector

CODE = """
import numpy as np
import dragoman

@dragoman.vector_function(
    inputs=lambda config: [config.get("n", 2)],
    outputs=lambda config: [config.get("n", 2), 1],
    gradient=lambda x, sens, output: 2 * x * sens if output == 0 else np.ones(len(x)) * sens,
    apply_jacobian=lambda x, vec, output: 2 * x * vec if output == 0 else [vec.sum()],
    apply_hessian=lambda x, sens, vec, output: 2 * sens * vec if output == 0 else np.zeros(len(x)),
    placement="PLACE",
)
def model(x, config):
    return x**2, [x.sum()]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "squares").mkdir()
    (tmp_path / "squares" / "model.py").write_text(CODE.replace("PLACE", "thread"))
    write_graph(tmp_path, "posterior", "edges = ['s.0 -> e', 's.1 -> p']\noutputs = ['e', 'p']", "s", "squares")
    return tmp_path


def write_graph(folder: Path, name: str, text: str, node: str, served: str) -> None:
    square = "p = { builtin = 'square' }" if "-> p" in text else ""
    nodes = f"[nodes]\n{node} = {{ served = '{served}' }}\ne = {{ builtin = 'exp' }}\n{square}"
    (folder / f"{name}.graph.toml").write_text(f"{text}\n{nodes}")


async def evaluate(engine: Engine, *x: float, config: Any = None, model: str = "posterior") -> list[Any]:
    result = await call_model(engine, model, Infer({}, positional=(vector(*x),), config=config or {}))
    return [t.data.tolist() for t in result.outputs.values()]


async def wait_for_readiness(deployment: Deployment, expected: bool) -> None:
    while deployment.ready != expected:
        await asyncio.sleep(0.01)


async def test_a_sibling_model_is_called_in_its_own_placement(folder: Path) -> None:
    async with dragoman.open_engine(folder) as engine:
        assert {d.spec.name: d.placement for d in engine.deployments()} == {"posterior": "inline", "squares": "thread"}
        description = await call_model(engine, "posterior", Describe())
        assert description.details["graph"]["nodes"]["s"]["gradient"] == "served by 'squares'"
        assert await evaluate(engine, 0.5, 1.0) == [[np.exp(0.25), np.e], [2.25]]
        assert await evaluate(engine, 0.0, 0.0, 1.0, config={"n": 3}) == [[1.0, 1.0, np.e], [1.0]]
        result = await call_model(engine, "posterior", Gradient(positional=(vector(0.5, 1),), output=1, sens=vector(2)))
        assert result.data.tolist() == [6.0, 6.0]
        call = ApplyHessian(positional=(vector(0.5, 1),), output=0, sens=vector(1, 1), vec=vector(1, 0))
        np.testing.assert_allclose(
            (await call_model(engine, "posterior", call)).data, [np.exp(0.25) * (2 + 4 * 0.25), 0]
        )
        # Counted like any other call of that model: one evaluation for each call above.
        (squares,) = (d for d in engine.deployments() if d.spec.name == "squares")
        assert squares.in_flight == 0


async def test_graphs_over_graphs_load_in_any_order_and_number(folder: Path) -> None:
    """More of them wait for others than may load at a time."""
    for i in range(8):
        inner = "posterior" if i == 0 else f"g{i - 1}"
        write_graph(folder, f"g{i}", "edges = ['a.1 -> e']\noutputs = { e = 'a.0', p = 'a.1' }", "a", inner)
    async with dragoman.open_engine(folder) as engine:
        assert engine.ready(), [d.reason for d in engine.deployments()]
        assert await evaluate(engine, 0.5, 1.0, model="g7") == [[np.exp(0.25), np.e], [2.25]]


async def test_models_that_wait_for_each_other_are_an_error(folder: Path) -> None:
    write_graph(folder, "left", "edges = ['s -> e']", "s", "right")
    write_graph(folder, "right", "edges = ['s -> e']", "s", "left")
    async with asyncio.timeout(60):
        async with dragoman.open_engine(folder) as engine:
            reasons = {d.spec.name: d.reason for d in engine.deployments()}
            assert reasons["posterior"] == ""
            assert sum("models wait for each other: " in reasons[n] for n in ("left", "right")) >= 1, reasons
            assert all("node 's': " in reasons[n] for n in ("left", "right")), reasons


@pytest.mark.parametrize(
    ("served", "message"),
    [
        ("nobody", "node 's': served: model 'nobody' not found on this server; serve it beside the graph"),
        ("broken", "node 's': model 'broken' is not available: failed to load 'broken'"),
        ("words", "node 's': model 'words' is not a vector function: expected only float vectors"),
        ("wrong", "node 's': models wait for each other: wrong -> wrong"),
    ],
)
async def test_a_model_that_cannot_be_a_node(folder: Path, served: str, message: str) -> None:
    (folder / "broken").mkdir()
    (folder / "broken" / "model.py").write_text("raise RuntimeError('no')")
    (folder / "words").mkdir()
    (folder / "words" / "model.py").write_text(
        "import dragoman\n@dragoman.model(placement='thread')\ndef f(a: str) -> str:\n    return a"
    )
    write_graph(folder, "wrong", "edges = ['s -> e']", "s", served)
    async with dragoman.open_engine(folder) as engine:
        (failed,) = (d for d in engine.deployments() if d.spec.name == "wrong")
        assert message in failed.reason


async def test_versions_of_a_graph_may_wait_at_the_same_time(folder: Path) -> None:
    for version in ("1", "2"):
        (folder / "versions" / version).mkdir(parents=True)
        text = "[nodes]\ns = { served = 'squares' }\n"
        (folder / "versions" / version / "graph.toml").write_text(text)
    async with dragoman.open_engine(folder, version_policy="all") as engine:
        assert engine.ready(), [d.reason for d in engine.deployments()]
        assert await evaluate(engine, 2.0, 3.0, model="versions") == [[4.0, 9.0], [5.0]]


async def test_a_graph_over_a_model_whose_weighted_versions_are_unloaded(folder: Path) -> None:
    for version in ("1", "2"):
        (folder / "weighted" / version).mkdir(parents=True)
        (folder / "weighted" / version / "model.py").write_text(CODE.replace("PLACE", "thread"))
    (folder / "weighted" / "dragoman.toml").write_text('[model.version_weights]\n"1" = 1\n"2" = 0\n')
    write_graph(folder, "over", "edges = ['s.0 -> e']\noutputs = ['e']", "s", "weighted")
    async with dragoman.open_engine(folder, control_open=True, placement="thread") as engine, asyncio.timeout(60):
        (over,) = (d for d in engine.deployments() if d.spec.name == "over")
        await wait_for_readiness(over, True)
        await engine.call(Request(Unload(""), "weighted", "1"))
        await wait_for_readiness(over, False)
        assert over.reported_reason.startswith("node 's': model 'weighted': no version with a weight is loaded: ")
        await engine.call(Request(Load(""), "weighted", "1"))
        await wait_for_readiness(over, True)
        assert await evaluate(engine, 0.0, 1.0, model="over") == [[1.0, np.e]]


async def test_a_graph_loads_its_models_on_demand(folder: Path) -> None:
    (folder / "other").mkdir()
    (folder / "other" / "model.py").write_text(CODE)
    options: dict[str, Any] = {"load_on_demand": True, "load_wait_s": 0.2, "placement": "thread"}
    async with dragoman.open_engine(folder, max_loaded_models=2, **options) as engine:
        for _ in range(2):
            assert await evaluate(engine, 0.5, 1.0) == [[np.exp(0.25), np.e], [2.25]]
            assert await evaluate(engine, 0.5, 1.0, model="other") == [[0.25, 1.0], [1.5]]
            states = {d.spec.name: d.state for d in engine.deployments()}
            assert states == {"other": "READY", "posterior": "READY", "squares": "UNLOADED"}
    async with dragoman.open_engine(folder, max_loaded_models=1, **options) as engine:
        with pytest.raises(errors.NotReady, match="is not ready: UNAVAILABLE; the reason is in the log"):
            await evaluate(engine, 0.5, 1.0)
        (reason,) = [d.reported_reason for d in engine.deployments() if d.spec.name == "posterior"]
        assert "node 's': model 'squares' is not ready: no room to load it within" in reason


async def test_sibling_models_are_not_called_on_the_event_loop(folder: Path) -> None:
    async with dragoman.open_engine(folder) as engine:
        with pytest.raises(errors.ModelFailed, match="model 'me' called another model on the event loop"):
            engine.siblings("me").describe("squares")


async def test_a_graph_in_a_worker_process_cannot_use_sibling_models(folder: Path) -> None:
    async with dragoman.open_engine(folder / "posterior.graph.toml", placement="process") as engine:
        (deployment,) = engine.deployments()
        assert "served: 'squares' is available only in the server's process" in deployment.reason


async def test_calls_in_flight_finish_while_the_server_drains(tmp_path: Path) -> None:
    """The graph asks its model when the server takes no more calls already."""
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow" / "model.py").write_text(
        "import pathlib, threading, time, dragoman\n"
        f"HERE = pathlib.Path({str(tmp_path)!r})\n"
        "@dragoman.vector_function(inputs=[1], outputs=[1], derivatives=None, placement='thread')\n"
        "def model(x):\n"
        "    (HERE / 'begun').touch()\n"
        "    while not (HERE / 'go').exists():\n"
        "        time.sleep(0.005)\n"
        "    return x + 1\n"
    )
    (tmp_path / "twice.graph.toml").write_text(
        "edges = ['a -> b']\n[nodes]\na = { served = 'slow' }\nb = { served = 'slow' }"
    )
    async with dragoman.open_engine(tmp_path) as engine:
        request = asyncio.ensure_future(evaluate(engine, 1.0, model="twice"))
        while not (tmp_path / "begun").exists():
            await asyncio.sleep(0.005)
        draining = asyncio.ensure_future(engine.drain())
        await asyncio.sleep(0)
        with pytest.raises(errors.NotReady):
            await evaluate(engine, 1.0, model="twice")
        call = Request(Infer({}, positional=(vector(4.0),)), "slow")
        responses = engine.siblings("twice").stream(call)
        (tmp_path / "go").touch()
        (response,) = await asyncio.to_thread(list, responses)
        assert [tensor.data.tolist() for tensor in response.outputs.values()] == [[5.0]]
        assert await request == [[3.0]]
        await draining


async def test_a_waiting_graph_does_not_delay_the_stop_of_the_server(tmp_path: Path) -> None:
    (tmp_path / "stuck").mkdir()
    (tmp_path / "stuck" / "model.py").write_text(
        "import asyncio, dragoman\n"
        "from dragoman import FP64, TensorSpec\n"
        "class M(dragoman.Model):\n"
        "    inputs = (TensorSpec('x', FP64, (1,)),)\n"
        "    outputs = (TensorSpec('y', FP64, (1,)),)\n"
        "    placement = 'inline'\n"
        "    async def infer(self, call):\n"
        "        await asyncio.Event().wait()\n"
    )
    (tmp_path / "g.graph.toml").write_text("[nodes]\na = { served = 'stuck' }")
    engine = dragoman.open_engine(tmp_path, trial_s=0)
    await engine.start()
    request = asyncio.ensure_future(evaluate(engine, 1.0, model="g"))
    (waiting,) = (d for d in engine.deployments() if d.spec.name == "stuck")
    while not waiting.in_flight:
        await asyncio.sleep(0.005)
    async with asyncio.timeout(60):
        await engine.close()
        with pytest.raises(errors.DragomanError):
            await request
