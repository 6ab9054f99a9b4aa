"""Readiness follows remote UM-Bridge servers: they are retried while down, and checked while up."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import umbridge

import dragoman
from dragoman import Infer, ModelSpec, Tensor, errors
from dragoman.core.calls import Index, Load, Request, Unload
from dragoman.engine.engine import Engine, ServerIdentity
from dragoman.engine.repository import Repository
from e2e.server_process import free_ports, started_server
from features.simulators.test_umbridge_remote import POINT, running

FIELD = """
import dragoman

@dragoman.vector_function(inputs=[2], derivatives=None)
def same(x):
    return x
"""
GRAPH = """
edges = ["same -> far.0"]
outputs = {{ y = "far.0" }}
bind = {{ "far.1" = [3.0, 4.0, 5.0] }}
[nodes]
same = {{ fn = "field.py:same" }}
far = {{ umbridge = "{url}", model = "forward", check_s = 0.1 }}
"""


@pytest.fixture(autouse=True)
def short_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dragoman.engine.control._FIRST_RETRY_S", 0.05)
    monkeypatch.setattr("dragoman.workers.local._AVAILABILITY_INTERVAL_S", 0.05)


def remote_spec(url: str, **parameters: Any) -> ModelSpec:
    parameters_ = {"urls": url, "model": "forward", "check_s": 0.1, **parameters}
    return ModelSpec(name="remote", runtime="umbridge", parameters=parameters_)


def engine(*specs: ModelSpec) -> Engine:
    return Engine(Repository(specs), ServerIdentity(control_open=True))


async def wait_until(condition: Callable[[], object], description: str) -> None:
    for _ in range(6000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"{description} did not happen")


def graph_of(folder: Path, url: str) -> ModelSpec:
    """Write a graph with a Python node and a remote one, for a worker process."""
    (folder / "field.py").write_text(FIELD)
    (folder / "g.graph.toml").write_text(GRAPH.format(url=url))
    return ModelSpec(name="g", runtime="graph", uri=str(folder / "g.graph.toml"), heartbeat_s=0.5)


async def evaluate(engine: Engine, name: str, *point: Tensor) -> list[float]:
    response = (await engine.call(Request(Infer({}, positional=point), name))).answer
    return [value for tensor in response.outputs.values() for value in tensor.data.tolist()]


def test_a_remote_that_is_down_at_startup_is_served_once_it_is_up(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    (tmp_path / "remote").mkdir()
    (tmp_path / "remote" / "dragoman.toml").write_text(
        f'[model]\nruntime = "umbridge"\n[model.parameters]\nurls = "http://127.0.0.1:{port}"\n'
    )
    with started_server(str(tmp_path)) as process:
        process.wait_for_log("it is loaded again until that works")
        assert process.status("/v2/health/ready") != 200
        assert process.status("/v2/models/far/ready") != 200
        assert umbridge.supported_models(f"http://{process.url}") == []
        with running(port):
            process.wait_until_ready()
            model = umbridge.HTTPModel(f"http://{process.url}", "remote")
            assert model([[1.0, 2.0], [3.0, 4.0, 5.0]]) == [[1.0, 4.0], [53.0]]


@pytest.mark.parametrize("kind", ["remote", "graph", "graph of a served model"])
async def test_readiness_follows_a_remote_that_stops_and_restarts(tmp_path: Path, kind: str) -> None:
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    point, expected = (POINT, [1.0, 4.0, 53.0]) if kind == "remote" else (POINT[:1], [1.0, 4.0])
    name = "remote" if kind == "remote" else "g"
    specs = [graph_of(tmp_path, url)] if kind == "graph" else [remote_spec(url)]
    if kind == "graph of a served model":
        text = GRAPH.format(url="").replace('umbridge = "", model = "forward", check_s = 0.1', 'served = "remote"')
        (tmp_path / "field.py").write_text(FIELD)
        (tmp_path / "g.graph.toml").write_text(text)
        specs.append(ModelSpec(name="g", runtime="graph", uri=str(tmp_path / "g.graph.toml")))
    async with engine(*specs) as engine_:
        (deployment,) = [d for d in engine_.deployments() if d.spec.name == name]
        assert not deployment.ready
        assert deployment.retries
        with running(port):
            await wait_until(engine_.ready, "the first load")
            assert await evaluate(engine_, name, *point) == expected
        await wait_until(lambda: not deployment.ready, "the end of readiness")
        (index,) = [e for e in (await engine_.call(Request(Index(""), ""))).answer if e.name == name]
        assert index.state == "UNAVAILABLE"
        assert "no server of" in index.reason or "model 'far' is not ready" in index.reason
        if kind != "remote":
            assert "node 'far': " in index.reason
        with pytest.raises(errors.NotReady):
            await evaluate(engine_, name, *point)
        with running(port):
            await wait_until(engine_.ready, "readiness after the restart")
            assert await evaluate(engine_, name, *point) == expected


async def test_permanent_errors_are_not_retried() -> None:
    (port,) = free_ports(1)
    async with engine(remote_spec(f"http://127.0.0.1:{port}", model="backward")) as engine_:
        (deployment,) = engine_.deployments()
        assert deployment.retries
        with running(port):
            await wait_until(
                lambda: not deployment.retries and "has no model 'backward'" in deployment.reason, "the fault"
            )
        assert deployment.state == "UNAVAILABLE"


async def test_a_model_that_is_retried_can_be_loaded_and_unloaded() -> None:
    (port,) = free_ports(1)
    async with engine(remote_spec(f"http://127.0.0.1:{port}")) as engine_:
        async with asyncio.timeout(60):
            with pytest.raises(errors.NotReady, match="no server of"):
                await engine_.call(Request(Load(""), "remote"))
            await engine_.call(Request(Unload(""), "remote"))
        assert engine_.deployments() == []
        with running(port):
            for _ in range(500):
                try:
                    await engine_.call(Request(Load(""), "remote"))
                    break
                except errors.NotReady:
                    await asyncio.sleep(0.05)
            assert await evaluate(engine_, "remote", *POINT) == [1.0, 4.0, 53.0]


async def test_without_checks_a_failed_call_ends_readiness() -> None:
    (port,) = free_ports(1)
    async with engine(remote_spec(f"http://127.0.0.1:{port}", check_s=0)) as engine_:
        with running(port):
            await wait_until(engine_.ready, "the first load")
        with pytest.raises(errors.NotReady):
            await evaluate(engine_, "remote", *POINT)
        await wait_until(lambda: not engine_.ready(), "the end of readiness")


async def test_models_may_report_that_they_are_unavailable() -> None:
    class SometimesUnavailable(dragoman.Model):
        reason = ""

        def infer(self, call: Infer) -> Any:
            return dict(call.inputs)

        def unavailable(self) -> str:
            if self.reason == "raise":
                raise RuntimeError("unknown")
            return self.reason

    for placement in ("thread", "inline"):
        spec = ModelSpec(name="moody", runtime="python", target=SometimesUnavailable, placement=placement)
        async with engine(spec) as engine_:
            for reason, ready in (("the licence is in use", False), ("raise", True), ("again", False), ("", True)):
                SometimesUnavailable.reason = reason
                change = asyncio.ensure_future(engine_.wait_for_change())
                await wait_until(lambda ready=ready: engine_.ready() is ready, reason)  # type: ignore[misc]
                async with asyncio.timeout(60):
                    await change  # readiness is pushed to those who watch it
