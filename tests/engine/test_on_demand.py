"""Models that calls load: one load for many calls, room for another model, and what clients see of unloaded ones."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from dragoman import errors
from dragoman.core.calls import (
    Describe,
    DescribeModels,
    Generate,
    Index,
    Infer,
    Load,
    Measure,
    Ready,
    Request,
    Unload,
)
from dragoman.core.tensor import Tensor
from dragoman.engine.engine import Engine
from dragoman.engine_setup import open_engine

MODEL = """
import asyncio
import pathlib
import numpy as np
import dragoman

FOLDER = pathlib.Path(__file__).parent

class Model(dragoman.Model):
    placement = "inline"
    inputs = (dragoman.TensorSpec("x", dragoman.FP64, (-1,)),)
    outputs = (dragoman.TensorSpec("y", dragoman.FP64, (-1,)),)

    async def load(self):
        with (FOLDER / "log.txt").open("a") as log:
            log.write("loaded\\n")
        while (FOLDER / "wait").exists():
            await asyncio.sleep(0.002)
        if (FOLDER / "broken").exists():
            raise ValueError("bad weights")

    async def infer(self, call):
        x = call.inputs["x"].data
        while x[0] < 0 and not (FOLDER / "go").exists():
            await asyncio.sleep(0.002)
        return {"y": x}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.py").write_text(MODEL)
    return tmp_path


@asynccontextmanager
async def serve(folder: Path, **settings: Any) -> AsyncIterator[Engine]:
    settings = {"control_open": True, "placement": "inline", **settings}
    async with open_engine(folder, load_on_demand=True, **settings) as engine:
        yield engine


async def infer(engine: Engine, model: str, x: float = 1.0, *, timeout_s: float = 10.0) -> float:
    deadline_s = time.monotonic() + timeout_s
    response = await engine.call(Request(Infer({"x": Tensor.of([x])}), model, deadline_s=deadline_s))
    return float(response.answer.outputs["y"].data[0])


async def loaded(engine: Engine) -> list[str]:
    entries = (await engine.call(Request(Index("")))).answer
    return [e.name for e in entries if (e.state, e.reason) == ("READY", "")]


async def reason(engine: Engine, model: str) -> tuple[str, str]:
    entries = (await engine.call(Request(Index("")))).answer
    return next((e.state, e.reason) for e in entries if e.name == model)


def loads(folder: Path, model: str) -> int:
    log = folder / model / "log.txt"
    return len(log.read_text().split()) if log.exists() else 0


NOT_LOADED = ("READY", "not loaded: the next request loads it")


async def test_calls_load_a_model_once_and_others_are_not_delayed(folder: Path) -> None:
    async with serve(folder) as engine:
        assert engine.ready()
        assert (await engine.call(Request(Ready(), "a"))).answer
        assert await reason(engine, "a") == NOT_LOADED
        (folder / "a" / "wait").touch()
        waiting = [asyncio.create_task(infer(engine, "a", float(n))) for n in range(10)]
        assert await infer(engine, "b", 5.0) == 5.0
        assert await reason(engine, "a") == ("READY", "loading")
        assert engine.ready()
        (folder / "a" / "wait").unlink()
        assert await asyncio.gather(*waiting) == [float(n) for n in range(10)]
        assert loads(folder, "a") == 1
        assert await loaded(engine) == ["a", "b"]
        assert loads(folder, "c") == 0


async def test_a_stream_loads_a_model(folder: Path) -> None:
    async with serve(folder) as engine:
        stream = engine.stream(Request(Infer({"x": Tensor.of([3.0])}), "a"))
        assert [float(r.answer.outputs["y"].data[0]) async for r in stream] == [3.0]


async def test_a_call_waits_no_longer_than_its_deadline_and_the_load_continues(folder: Path) -> None:
    async with serve(folder, timeout_s=0.05) as engine:
        (folder / "a" / "wait").touch()
        with pytest.raises(errors.DeadlineExceeded):
            await infer(engine, "a", timeout_s=0.05)
        with pytest.raises(errors.DeadlineExceeded):  # the model's own deadline
            await engine.infer("a", {"x": [1.0]})
        (folder / "a" / "wait").unlink()
        assert await infer(engine, "a") == 1.0
        assert loads(folder, "a") == 1


async def test_max_queue_limits_the_calls_that_wait_for_a_load(folder: Path) -> None:
    async with serve(folder, max_queue=2) as engine:
        (folder / "a" / "wait").touch()
        waiting = [asyncio.create_task(infer(engine, "a")) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(errors.Overloaded, match="Exceeds maximum queue size of 2"):
            await infer(engine, "a")
        (folder / "a" / "wait").unlink()
        assert await asyncio.gather(*waiting) == [1.0, 1.0]


async def test_the_least_recently_used_model_makes_room(folder: Path) -> None:
    async with serve(folder, max_loaded_models=2) as engine:
        for model in ("a", "b", "a", "c"):
            await infer(engine, model)
        assert await loaded(engine) == ["a", "c"]
        await infer(engine, "b")
        assert await loaded(engine) == ["b", "c"]
        assert await infer(engine, "a", 4.0) == 4.0
        assert loads(folder, "a") == 2


async def test_the_bytes_of_files_limit_the_loaded_models(folder: Path) -> None:
    (folder / "a" / "weights").write_bytes(bytes(10_000))
    (folder / "b" / "weights").write_bytes(bytes(10_000))
    async with serve(folder, max_loaded_bytes=15_000) as engine:
        for model in ("a", "c", "b"):
            await infer(engine, model)
        assert await loaded(engine) == ["b", "c"]
    (folder / "a" / "weights").write_bytes(bytes(20_000))
    async with serve(folder, max_loaded_bytes=15_000) as engine:
        with pytest.raises(errors.NotReady, match=r"max_loaded_bytes = 15000 leaves no room: .* has 20... bytes"):
            await infer(engine, "a")
        assert await infer(engine, "b") == 1.0


async def test_a_busy_model_is_not_unloaded(folder: Path) -> None:
    async with serve(folder, max_loaded_models=1, load_wait_s=1.0) as engine:
        busy = asyncio.create_task(infer(engine, "a", -1.0))
        while await loaded(engine) != ["a"]:
            await asyncio.sleep(0.002)
        with pytest.raises(errors.NotReady, match=r"model 'b' is not ready: no room to load it within 1 s"):
            await infer(engine, "b")
        with pytest.raises(errors.DeadlineExceeded):
            await infer(engine, "b", timeout_s=0.05)
        waiting = asyncio.create_task(infer(engine, "b", 2.0))
        await asyncio.sleep(0.05)
        (folder / "a" / "go").touch()
        assert await busy == -1.0
        assert await waiting == 2.0
        assert await loaded(engine) == ["b"]
        assert await reason(engine, "a") == NOT_LOADED


async def test_alternating_calls_from_many_clients_all_succeed(folder: Path) -> None:
    async def client(number: int) -> list[float]:
        return [await infer(engine, "abc"[(number + n) % 3], float(n)) for n in range(5)]

    async with serve(folder, max_loaded_models=1) as engine:
        answers = await asyncio.gather(*map(client, range(6)))
        assert answers == [[0.0, 1.0, 2.0, 3.0, 4.0]] * 6
        assert len(await loaded(engine)) == 1


async def test_pinned_models_are_loaded_at_the_start_and_stay(folder: Path) -> None:
    (folder / "a" / "dragoman.toml").write_text("[model]\npinned = true\n")
    async with serve(folder, max_loaded_models=2) as engine:
        assert await loaded(engine) == ["a"]
        for model in ("b", "c", "b"):
            await infer(engine, model)
        assert await loaded(engine) == ["a", "b"]
        assert loads(folder, "a") == 1
    async with serve(folder, max_loaded_models=1) as engine:
        with pytest.raises(errors.NotReady, match="max_loaded_models = 1 leaves no room: 1 loaded models are"):
            await infer(engine, "b")


async def test_a_pinned_model_that_fails_makes_the_server_unready(folder: Path) -> None:
    (folder / "a" / "dragoman.toml").write_text("[model]\npinned = true\n")
    (folder / "a" / "broken").touch()
    async with serve(folder) as engine:
        assert not engine.ready()


async def test_a_failed_load_is_not_tried_again_at_once(folder: Path) -> None:
    (folder / "a" / "broken").touch()
    async with serve(folder) as engine:
        for _ in range(3):
            with pytest.raises(errors.NotReady, match=r"^model 'a' is not ready: UNAVAILABLE; the reason"):
                await infer(engine, "a")
        with pytest.raises(errors.NotReady, match="next attempt in"):
            await infer(engine, "a")
        assert loads(folder, "a") == 1
        assert (await reason(engine, "a"))[0] == "UNAVAILABLE"
        assert "bad weights" in (await reason(engine, "a"))[1]
        assert not (await engine.call(Request(Ready(), "a"))).answer
        assert engine.ready()  # a client's call does not change that
        (folder / "a" / "broken").unlink()
        end_s = time.monotonic() + 60
        while time.monotonic() < end_s:  # after a second
            try:
                assert await infer(engine, "a", 6.0) == 6.0
                break
            except errors.NotReady:
                await asyncio.sleep(0.05)
        assert loads(folder, "a") == 2
        assert await loaded(engine) == ["a"]


async def test_metadata_stay_known_when_a_model_is_unloaded(folder: Path) -> None:
    async with serve(folder, max_loaded_models=1) as engine:
        description = (await engine.call(Request(Describe(), "a"))).answer  # loads it: nothing was known
        assert [tensor.name for tensor in description.signature.inputs] == ["x"]
        await infer(engine, "b")
        assert (await engine.call(Request(Describe(), "a"))).answer == description
        assert loads(folder, "a") == 1
        assert await loaded(engine) == ["b"]


async def test_a_model_that_was_never_loaded_is_listed_for_every_protocol(folder: Path) -> None:
    async with serve(folder) as engine:
        await infer(engine, "a")
        models = {m.name: m.calls for m in (await engine.call(Request(DescribeModels()))).answer}
        assert list(models) == ["a", "b", "c"]
        assert Generate not in models["a"]
        assert {Generate, Infer} <= models["b"]
        with pytest.raises(errors.ModelNameMissing, match="expected one of a, b, c"):
            await engine.infer("", {"x": [1.0]})
        with pytest.raises(errors.ModelNameMissing, match="expected one of b, c"):
            await engine.call(Request(Generate(prompts=()), ""))


async def test_idle_models_are_unloaded(folder: Path) -> None:
    async with serve(folder, unload_idle_s=0.1) as engine:
        await infer(engine, "a")
        busy = asyncio.create_task(infer(engine, "b", -1.0))
        while await loaded(engine) != ["b"]:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        assert await loaded(engine) == ["b"]
        (folder / "b" / "go").touch()
        assert await busy == -1.0
        while await loaded(engine):
            await asyncio.sleep(0.01)
        assert await infer(engine, "a", 7.0) == 7.0


async def test_control_loads_and_unloads(folder: Path) -> None:
    async with serve(folder, max_loaded_models=1) as engine:
        await engine.call(Request(Load(""), "a"))
        assert await loaded(engine) == ["a"]
        await engine.call(Request(Load(""), "b"))
        assert await loaded(engine) == ["b"]
        (folder / "b" / "broken").touch()
        with pytest.raises(errors.InvalidInput, match="bad weights"):
            await engine.call(Request(Load(""), "b"))
        assert await infer(engine, "b") == 1.0  # the old one
        await engine.call(Request(Unload(""), "b"))
        with pytest.raises(errors.ModelNotFound):
            await infer(engine, "b")
        assert await infer(engine, "a", 2.0) == 2.0


async def test_unloading_ends_the_wait_for_a_load(folder: Path) -> None:
    async with serve(folder) as engine:
        (folder / "a" / "wait").touch()
        waiting = asyncio.create_task(infer(engine, "a"))
        while not loads(folder, "a"):
            await asyncio.sleep(0.002)
        await engine.call(Request(Unload(""), "a"))
        with pytest.raises(errors.NotReady, match="model 'a' is unloading"):
            await waiting


async def test_metrics_count_loads_and_unloads(folder: Path) -> None:
    (folder / "c" / "broken").touch()
    async with serve(folder, max_loaded_models=1) as engine:
        for model in ("a", "b"):
            await infer(engine, model)
        with pytest.raises(errors.NotReady):
            await infer(engine, "c")
        families = (await engine.call(Request(Measure()))).answer
        values = {(s.name, *s.labels.values()): s.value for f in families for s in f.flat}
        assert values["dragoman_models_loaded",] == 0
        assert [values["dragoman_model_loads_total", o] for o in ("ok", "failed")] == [2, 1]
        assert [values["dragoman_model_unloads_total", r] for r in ("room", "idle", "removed")] == [2, 0, 0]
        assert values["dragoman_model_load_duration_seconds_count",] == 2
        assert values["dragoman_calls_total", "a", "", "Infer", "ok"] == 1  # also while it is unloaded


@pytest.mark.parametrize("settings", [{"max_loaded_models": 1}, {"max_loaded_bytes": 1}, {"unload_idle_s": 1}])
async def test_limits_need_load_on_demand(folder: Path, settings: dict[str, Any]) -> None:
    with pytest.raises(errors.InvalidInput, match=f"setting '{next(iter(settings))}': expected 'load_on_demand'"):
        open_engine(folder, **settings)


async def test_load_on_demand_excludes_no_load_at_start(folder: Path) -> None:
    with pytest.raises(errors.InvalidInput, match="got both"):
        open_engine(folder, load_on_demand=True, load_at_start=False)


async def test_a_model_that_describes_another_loads_it(folder: Path) -> None:
    async with serve(folder) as engine, asyncio.timeout(60):
        description = await asyncio.to_thread(engine.siblings("caller").describe, "a")
        assert [tensor.name for tensor in description.signature.inputs] == ["x"]
        assert await loaded(engine) == ["a"]


async def test_versions_that_share_requests_are_compared_when_they_are_loaded(folder: Path) -> None:
    for version, datatype in (("1", "FP64"), ("2", "FP32")):
        (folder / "m" / version).mkdir(parents=True)
        source = MODEL.replace('TensorSpec("y", dragoman.FP64', f'TensorSpec("y", dragoman.{datatype}')
        (folder / "m" / version / "model.py").write_text(source)
    (folder / "m" / "dragoman.toml").write_text('[model.version_weights]\n"1" = 1\n"2" = 1\n')
    message = "model 'm'.*: versions '1' and '2' differ in outputs: expected 'y' FP64 .-1., got 'y' FP32"
    call = Infer({"x": Tensor.of([1.0])})
    async with serve(folder) as engine:
        await engine.call(Request(call, "m", "1"))
        for _ in range(2):
            with pytest.raises(errors.NotReady, match=r"^model 'm' is not ready: U"):
                await engine.call(Request(call, "m", "2"))
        with pytest.raises(errors.NotReady, match=message):  # no version is chosen at random
            await engine.call(Request(call, "m"))
        assert (await engine.call(Request(call, "m", "1"))).answer.outputs["y"].data == [1.0]
        entries = {e.version: e for e in (await engine.call(Request(Index("")))).answer if e.name == "m"}
        assert (entries["1"].state, entries["1"].reason) == ("READY", "")
        assert (entries["2"].state, "differ in outputs" in entries["2"].reason) == ("UNAVAILABLE", True)
