"""Changes that clients make end with the server, which the log says, or are kept by its state store."""

import logging
import time
from pathlib import Path
from typing import Any

import pytest

from dragoman import errors
from dragoman.core.calls import DescribeServer, Index, Load, Request, ScaleModel, Unload
from dragoman.core.record_calls import DeleteRecord, ReadRecord, SaveRecord
from dragoman.core.text_engine_calls import LoadAdapter, UnloadAdapter
from dragoman.engine import record_store
from dragoman.engine.engine import Engine
from dragoman.engine_setup import open_engine

MODEL = """
import dragoman

@dragoman.model(placement="thread")
def model(x: float) -> float:
    return x
"""


async def states(engine: Engine) -> dict[str, tuple[str, int]]:
    """Return the state and the number of replicas of each model."""
    index = (await engine.call(Request(Index()))).answer
    replicas = {d.spec.name: d.spec.replicas for d in engine.registry.all()}
    return {entry.name: (entry.state, replicas.get(entry.name, 0)) for entry in index}


async def test_changes_end_with_the_server(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("models/few", "models/gone", "others/more"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "model.py").write_text(MODEL)

    def serve() -> Engine:
        return open_engine(tmp_path / "models", control_open=True, model_folders=str(tmp_path / "others"))

    caplog.set_level("INFO", "dragoman.engine")
    async with serve() as engine:
        started = await states(engine)
        await engine.call(Request(ScaleModel("", 2), "few"))
        await engine.call(Request(Unload(), "gone"))
        await engine.call(Request(Load(url=str(tmp_path / "others" / "more")), "more"))
        assert await states(engine) == {"few": ("READY", 2), "gone": ("UNAVAILABLE", 0), "more": ("READY", 1)}
        for line in (
            "model 'few': 2 replicas until the server ends; to keep that, use --state or set replicas in",
            "model 'gone': unloaded until the server ends; to keep that, use --state or take it out of",
            "model 'more': registered until the server ends; to keep that, use --state or put it into",
        ):
            assert line in caplog.text
        caplog.clear()
        await engine.call(Request(Unload(), "more"))
        await engine.call(Request(ScaleModel("", 2), "few"))  # which changes nothing
        assert "until the server ends" not in caplog.text
    async with serve() as engine:
        assert await states(engine) == started == {"few": ("READY", 1), "gone": ("READY", 1)}


def write(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).mkdir(parents=True)
        (folder / name / "model.py").write_text(MODEL)


async def test_changes_are_kept_by_the_state_store(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    models, others = tmp_path / "models", tmp_path / "others"
    write(models, "few", "gone", "back", "versions/1", "versions/2")
    write(others, "more", "dropped")
    (models / "few" / "dragoman.toml").write_text("[model]\nplacement = 'process'\n")

    def serve(**settings: Any) -> Engine:
        settings |= {"control_open": True, "model_folders": str(others), "state": str(tmp_path / "state")}
        return open_engine(models, version_policy="all", placement="inline", **settings)

    caplog.set_level("INFO", "dragoman.engine")
    async with serve() as engine:
        for name in ("gone", "back"):
            await engine.call(Request(Unload(), name))
        await engine.call(Request(Load(), "back"))
        await engine.call(Request(Unload(), "versions", "2"))
        await engine.call(Request(ScaleModel("", 2), "few"))
        for name in ("more", "dropped"):
            await engine.call(Request(Load(url=str(others / name)), name))
        await engine.call(Request(Unload(), "dropped"))
        assert "until the server ends" not in caplog.text
        changed = await states(engine)
        before = {(e.name, e.version, e.state) for e in (await engine.call(Request(Index()))).answer}
        assert changed == {
            "few": ("READY", 2),
            "gone": ("UNAVAILABLE", 0),
            "back": ("READY", 1),
            "more": ("READY", 1),
            "versions": ("UNAVAILABLE", 1),
        }
    async with serve() as engine:
        assert engine.ready()
        assert await states(engine) == changed
        index = (await engine.call(Request(Index()))).answer
        assert {(e.name, e.version, e.state) for e in index} == before
    write(models / "versions", "3")  # a version that the client has not unloaded
    async with serve() as engine:
        assert engine.registry.versions("versions") == ["1", "3"]
        for name in ("gone", "few", "versions"):  # back to what is on disk
            await engine.call(Request(Load(), name))
        await engine.call(Request(Unload(), "more"))
    (others / "more" / "model.py").unlink()
    async with serve() as engine:
        assert engine.ready()
        names = ("back", "few", "gone", "versions")
        assert await states(engine) == dict.fromkeys(names, ("READY", 1))


async def test_loaded_models_are_loaded_again_by_a_server_that_loads_none_at_the_start(tmp_path: Path) -> None:
    write(tmp_path / "models", "asked", "other", "versions/1", "versions/2")

    def serve() -> Engine:
        settings: Any = {"control_open": True, "load_at_start": False, "state": str(tmp_path)}
        return open_engine(tmp_path / "models", version_policy="all", placement="inline", **settings)

    async with serve() as engine:
        assert engine.registry.names() == []
        await engine.call(Request(Load(), "asked"))
        await engine.call(Request(Load(), "versions", "2"))
    async with serve() as engine:
        assert engine.ready()
        assert (engine.registry.names(), engine.registry.versions("versions")) == (["asked", "versions"], ["2"])
        await engine.call(Request(Unload(), "asked"))
    async with serve() as engine:
        assert engine.registry.names() == ["versions"]


ADAPTERS = """
import dragoman

class Model(dragoman.Model):
    inputs = outputs = (dragoman.TensorSpec("x", dragoman.FP64, (-1,)),)
    adapters = {"mine": "from its folder", "old": "from its folder"}

    def infer(self, call):
        return {"x": call.inputs["x"].data}

    def load_adapter(self, call):
        if call.path == "bad":
            raise dragoman.errors.InvalidInput("no such adapter")
        self.adapters = {**self.adapters, call.name: f"{call.path} {call.pinned}"}

    def unload_adapter(self, call):
        self.adapters = {name: path for name, path in self.adapters.items() if name != call.name}
"""


async def test_adapters_are_kept_until_the_model_is_loaded_again(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "model.py").write_text(ADAPTERS)

    def serve() -> Engine:
        return open_engine(tmp_path / "m", control_open=True, placement="inline", state=str(tmp_path / "state"))

    def adapters(engine: Engine) -> dict[str, str]:
        (deployment,) = engine.registry.all()
        found: dict[str, str] = deployment._pool.executor.model.adapters  # type: ignore[union-attr]
        return found

    async with serve() as engine:
        started = adapters(engine)
        await engine.call(Request(LoadAdapter("new", "adapters/new", pinned=True), "m"))
        await engine.call(Request(UnloadAdapter("old"), "m"))
        with pytest.raises(errors.InvalidInput):
            await engine.call(Request(LoadAdapter("bad", "bad"), "m"))
        changed = adapters(engine)
        assert changed == {"mine": "from its folder", "new": "adapters/new True"}
    async with serve() as engine:
        assert adapters(engine) == changed
        await engine.call(Request(Load(), "m"))
        assert adapters(engine) == started
    async with serve() as engine:
        assert adapters(engine) == started


async def test_a_registered_model_that_is_gone_is_no_outage(tmp_path: Path) -> None:
    write(tmp_path / "models", "first")
    write(tmp_path / "others", "more")
    settings: Any = {"control_open": True, "placement": "inline", "state": str(tmp_path / "state")}
    async with open_engine(tmp_path / "models", model_folders=str(tmp_path / "others"), **settings) as engine:
        await engine.call(Request(Load(url=str(tmp_path / "others" / "more")), "more"))
    async with open_engine(tmp_path / "models", **settings) as engine:  # its folder is no longer allowed
        assert engine.ready()
        assert await states(engine) == {"first": ("READY", 1), "more": ("UNAVAILABLE", 0)}


async def test_records_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "models", "model")

    def serve(count: int = 10) -> Engine:
        return open_engine(tmp_path / "models", load_at_start=False, state=str(tmp_path / "state"),
                           control_open=True, max_stored_responses=count)  # fmt: skip

    async def read(engine: Engine, owner: str, *ids: str) -> list[bytes | None]:
        return [(await engine.call(Request(ReadRecord(owner, each)))).answer for each in ids]

    async with serve() as engine:
        for n in range(12):
            await engine.call(Request(SaveRecord("key", f"r{n}", b"\xff%d" % n, {f"p{n}": b"part"})))
        await engine.call(Request(SaveRecord("other", "r11", b"theirs")))
        await engine.call(Request(DeleteRecord("key", "r11")))
    async with serve() as engine:
        assert await read(engine, "key", "r1", "r2", "r3", "r10", "r11") == [None, None, b"\xff3", b"\xff10", None]
        assert await read(engine, "other", "r3", "r11") == [None, b"theirs"]
        assert (await engine.call(Request(ReadRecord("key", "p10", is_part=True)))).answer == b"part"
    async with serve(2) as engine:  # the last ones
        assert await read(engine, "key", "r9", "r10") == [None, b"\xff10"]
    monkeypatch.setattr(record_store, "MAX_AGE_S", -1.0)
    async with serve() as engine:
        assert await read(engine, "key", "r10") == [None]


async def test_records_that_are_too_old_at_the_start_are_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "models", "model")

    def serve() -> Engine:
        return open_engine(tmp_path / "models", load_at_start=False, control_open=True, state=str(tmp_path / "state"))

    async def read(engine: Engine) -> list[bytes | None]:
        return [(await engine.call(Request(ReadRecord("key", each)))).answer for each in ("old", "new")]

    now = time.time
    async with serve() as engine:
        await engine.call(Request(SaveRecord("key", "new", b"2")))
        with monkeypatch.context() as earlier:
            earlier.setattr(time, "time", lambda: now() - record_store.MAX_AGE_S - 60.0)
            await engine.call(Request(SaveRecord("key", "old", b"1")))
        assert await read(engine) == [b"1", b"2"]
    for _ in range(2):
        async with serve() as engine:
            assert await read(engine) == [None, b"2"]


async def test_a_store_that_cannot_be_used_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path / "models", "gone")
    (tmp_path / "state").write_bytes(b"damaged" * 1000)
    caplog.set_level(logging.INFO)
    async with open_engine(
        tmp_path / "models", control_open=True, placement="inline", state=str(tmp_path / "state")
    ) as engine:
        assert engine.ready()
        await engine.call(Request(Unload(), "gone"))
        assert "unloaded until the server ends" in caplog.text
        (problem,) = (await engine.call(Request(DescribeServer()))).answer.problems
        assert problem.startswith("the state cannot be saved: ")
