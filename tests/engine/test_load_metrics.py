"""Metrics of loads: each outcome is counted, whatever has caused the load, and a failed update stays visible."""

import asyncio
from pathlib import Path

import pytest

from dragoman import errors
from dragoman.core.calls import Load, Measure, Request, Unload
from dragoman.engine.engine import Engine
from dragoman.engine_setup import open_engine

MODEL = """
import dragoman

class Model(dragoman.Model):
    placement = "inline"
    inputs = (dragoman.TensorSpec("x", dragoman.FP64, (-1,)),)

    def load(self):
        {load}

    def infer(self, call):
        return {{"y": call.inputs["x"].data}}
"""
BROKEN = 'raise ValueError("bad weights")'


def write(folder: Path, version: str, load: str = "pass", settings: str = "") -> None:
    (folder / "m" / version).mkdir(parents=True, exist_ok=True)
    (folder / "m" / version / "model.py").write_text(MODEL.format(load=load))
    (folder / "m" / "dragoman.toml").write_text(settings)


def gated_load(folder: Path) -> tuple[Path, Path, str]:
    """Return a file that a load creates, one that it waits for, and its code."""
    begun, gate = folder / "begun", folder / "gate"
    code = f"import pathlib, time; pathlib.Path({str(begun)!r}).touch()\n"
    return begun, gate, code + f"        while not pathlib.Path({str(gate)!r}).exists(): time.sleep(0.01)"


async def exists(path: Path) -> None:
    async with asyncio.timeout(60):
        while not path.exists():
            await asyncio.sleep(0.01)


async def measured(engine: Engine) -> tuple[int, int, dict[str, float]]:
    """Return the loads that succeeded and failed, and which models have a failed update."""
    families = {family.name: family for family in (await engine.call(Request(Measure()))).answer}
    loads = {s.labels["outcome"]: int(s.value) for s in families["dragoman_model_loads_total"].samples}
    failed = families.get("dragoman_model_update_failed")
    update = {s.labels["model"]: s.value for s in failed.samples} if failed is not None else {}
    return loads["ok"], loads["failed"], update


async def wait_for(engine: Engine, expected: tuple[int, int, dict[str, float]]) -> None:
    async with asyncio.timeout(60):
        while (found := await measured(engine)) != expected:
            assert found[:2] <= expected[:2], found
            await asyncio.sleep(0.01)


async def test_a_failed_load_through_the_api(tmp_path: Path) -> None:
    write(tmp_path, "1")
    async with open_engine(tmp_path, control_open=True) as engine:
        assert await measured(engine) == (1, 0, {"m": 0})
        write(tmp_path, "2", BROKEN)
        with pytest.raises(errors.InvalidInput):
            await engine.call(Request(Load(), "m"))
        assert await measured(engine) == (1, 1, {"m": 1})
        write(tmp_path, "2")
        await engine.call(Request(Load(), "m"))
        assert await measured(engine) == (2, 1, {"m": 0})
        with pytest.raises(errors.ModelNotFound):
            await engine.call(Request(Load(), "other"))
        assert await measured(engine) == (2, 1, {"m": 0})


async def test_invalid_settings_and_an_unload(tmp_path: Path) -> None:
    write(tmp_path, "1")
    async with open_engine(tmp_path, control_open=True) as engine:
        write(tmp_path, "1", settings="[model]\nno_such_setting = 1\n")
        with pytest.raises(errors.InvalidInput):
            await engine.call(Request(Load(), "m"))
        assert await measured(engine) == (1, 1, {"m": 1})
        await engine.call(Request(Unload(), "m"))
        assert (await measured(engine))[2] == {}


@pytest.mark.parametrize(("load_timeout_s", "succeeds"), [(0.0, True), (3600.0, True), (500.0, False)])
async def test_a_load_through_the_api_has_the_limit_of_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load_timeout_s: float, succeeds: bool
) -> None:
    write(tmp_path, "1")
    begun, gate, waits = gated_load(tmp_path)
    async with open_engine(tmp_path, control_open=True, load_timeout_s=load_timeout_s) as engine:
        write(tmp_path, "2", waits)
        load = asyncio.ensure_future(engine.call(Request(Load(), "m")))
        await exists(begun)
        loop = asyncio.get_running_loop()
        now_s = loop.time
        monkeypatch.setattr(loop, "time", lambda: now_s() + 700)  # as if the load took so long
        await asyncio.sleep(0.1)
        monkeypatch.undo()
        assert load.done() != succeeds
        gate.touch()
        if succeeds:
            await load
        else:
            with pytest.raises(errors.InvalidInput, match="took more than 500 s"):
                await load


@pytest.mark.parametrize("settings", ["", "[model]\nno_such_setting = 1\n"])
async def test_a_failed_update_of_files_on_disk(tmp_path: Path, settings: str) -> None:
    write(tmp_path, "1")
    async with open_engine(tmp_path, watch=True, watch_quiet_s=0.05) as engine:
        write(tmp_path, "2", BROKEN, settings)
        await wait_for(engine, (1, 1, {"m": 1}))
        write(tmp_path, "2")
        await wait_for(engine, (2, 1, {"m": 0}))


async def test_files_that_change_during_a_load_are_loaded_after_it(tmp_path: Path) -> None:
    write(tmp_path, "1")
    begun, gate, waits = gated_load(tmp_path)
    async with open_engine(tmp_path) as engine:
        write(tmp_path, "2", waits)
        engine.sync()
        await exists(begun)
        write(tmp_path, "3")
        engine.sync()  # as at SIGHUP, without a watch
        await asyncio.sleep(0.1)
        gate.touch()
        async with asyncio.timeout(60):  # a load counts when it ends, just before its version replaces the last one
            while [deployment.spec.version for deployment in engine.deployments() if deployment.ready] != ["3"]:
                await asyncio.sleep(0.01)
        assert await measured(engine) == (3, 0, {"m": 0})


async def test_a_model_that_fails_at_the_start(tmp_path: Path) -> None:
    write(tmp_path, "1", BROKEN)
    async with open_engine(tmp_path, control_open=True) as engine:
        assert (await measured(engine))[:2] == (0, 1)


async def test_loads_of_calls(tmp_path: Path) -> None:
    write(tmp_path, "1", BROKEN)
    async with open_engine(tmp_path, load_on_demand=True) as engine:
        assert (await measured(engine))[:2] == (0, 0)
        with pytest.raises(errors.NotReady):
            await engine.infer("m", {"x": [1.0]})
        assert (await measured(engine))[:2] == (0, 1)
