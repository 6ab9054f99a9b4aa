"""Model control: load and unload versions, and their states in the index."""

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dragoman
from dragoman import errors
from dragoman.core.calls import DescribeModels, Index, Infer, Load, Request, Unload
from dragoman.core.spec import ModelSpec
from dragoman.engine.engine import Engine, ServerIdentity
from dragoman.engine.repository import DiskRepository, Repository, Source
from dragoman.engine.version_routing import VersionRouting


class VersionedRepository(Repository):
    """A repository with one model, whose versions a test sets."""

    def __init__(self, *versions: str, default: str = "") -> None:
        super().__init__()
        self.models: dict[str, Any] = {version: constant_model(f"{version}.0") for version in versions}
        self.default = default

    def scan(self) -> dict[str, Source]:
        return {"m": Source(self.specs, VersionRouting(self.default))}

    def specs(self) -> list[ModelSpec]:
        return [ModelSpec(name="m", version=v, runtime="python", target=model) for v, model in self.models.items()]


def constant_model(value: str) -> type[dragoman.Model]:
    class ConstantModel(dragoman.Model):
        placement = "inline"

        def infer(self, call: Infer) -> Any:
            return {"value": np.array([value.encode()])}

    return ConstantModel


class Broken(dragoman.Model):
    def load(self) -> None:
        raise ValueError("bad weights")


class Hanging(dragoman.Model):
    """Loads once its gate is set."""

    placement = "inline"
    started: asyncio.Event
    gate: asyncio.Event

    async def load(self) -> None:
        type(self).started.set()
        await type(self).gate.wait()

    def infer(self, call: Infer) -> Any:
        return {}


class SlowToClose(dragoman.Model):
    placement = "inline"
    closing: asyncio.Event
    gate: asyncio.Event
    closed: list[bool]

    def infer(self, call: Infer) -> Any:
        return {}

    async def close(self) -> None:
        type(self).closing.set()
        await type(self).gate.wait()
        type(self).closed.append(True)


@pytest.fixture
async def repository() -> VersionedRepository:
    return VersionedRepository("1", "2", "10")


@pytest.fixture
async def engine(repository: VersionedRepository) -> AsyncIterator[Engine]:
    async with Engine(repository, ServerIdentity(control_token="secret")) as engine:
        yield engine


async def load(engine: Engine, version: str = "") -> None:
    await engine.call(Request(Load("secret"), "m", version))


async def unload(engine: Engine, version: str = "") -> None:
    await engine.call(Request(Unload("secret"), "m", version))


async def index(engine: Engine) -> dict[str, tuple[str, str]]:
    entries = (await engine.call(Request(Index("secret")))).answer
    assert len({(e.name, e.version) for e in entries}) == len(entries)
    return {e.version: (e.state, e.reason) for e in entries}


async def infer_value(engine: Engine, version: str = "") -> bytes:
    value: bytes = (await engine.infer("m", {}, version=version))["value"][0]
    return value


READY, UNLOADED = ("READY", ""), ("UNAVAILABLE", "unloaded")


async def test_the_index_lists_every_version_that_was_unloaded(engine: Engine) -> None:
    await unload(engine, "1")
    assert await index(engine) == {"2": READY, "10": READY, "1": UNLOADED}
    await unload(engine)
    assert await index(engine) == {"1": UNLOADED, "2": UNLOADED, "10": UNLOADED}
    await load(engine, "2")
    assert await index(engine) == {"2": READY, "1": UNLOADED, "10": UNLOADED}
    await load(engine)
    assert await index(engine) == {"1": READY, "2": READY, "10": READY}


async def test_loading_a_model_removes_versions_that_are_no_longer_in_the_repository(
    engine: Engine, repository: VersionedRepository
) -> None:
    await unload(engine, "1")
    repository.models = {"11": constant_model("11.0")}
    await load(engine)
    assert await index(engine) == {"11": READY}


async def test_one_version_is_loaded(engine: Engine, repository: VersionedRepository) -> None:
    await unload(engine, "1")
    repository.models = {version: constant_model(f"{version}.1") for version in ("1", "2", "10")}
    await load(engine, "1")
    assert [await infer_value(engine, v) for v in ("1", "2", "10", "")] == [b"1.1", b"2.0", b"10.0", b"10.0"]
    await load(engine, "10")
    assert [await infer_value(engine, v) for v in ("1", "2", "10", "")] == [b"1.1", b"2.0", b"10.1", b"10.1"]


async def test_a_version_that_cannot_be_loaded_does_not_affect_others(
    engine: Engine, repository: VersionedRepository
) -> None:
    repository.models["1"] = repository.models["11"] = Broken
    for version in ("1", "11"):
        with pytest.raises(errors.InvalidInput, match="bad weights"):
            await load(engine, version)
    entries = await index(engine)
    assert [entries[v] for v in ("2", "10")] == [READY] * 2
    assert entries["1"] == ("READY", "update failed: failed to load 'm', ValueError: bad weights")
    assert entries["11"][0] == "UNAVAILABLE"
    assert "bad weights" in entries["11"][1]
    assert await infer_value(engine, "1") == b"1.0"


async def test_versions_are_loaded_on_request(repository: VersionedRepository) -> None:
    async with Engine(repository, ServerIdentity(control_token="secret", load_at_start=False)) as engine:
        not_loaded = ("UNAVAILABLE", "not loaded at the start")
        assert await index(engine) == {"1": not_loaded, "2": not_loaded, "10": not_loaded}
        await load(engine, "2")
        assert await index(engine) == {"2": READY, "1": not_loaded, "10": not_loaded}
        assert await infer_value(engine) == b"2.0"


async def test_the_newest_version_is_used_if_the_default_is_not_loaded() -> None:
    async with Engine(
        VersionedRepository("1", "2", "10", default="2"), ServerIdentity(control_token="secret")
    ) as engine:
        assert await infer_value(engine) == b"2.0"
        await unload(engine, "2")
        assert await infer_value(engine) == b"10.0"
        assert [m.name for m in (await engine.call(Request(DescribeModels()))).answer] == ["m"]
        await load(engine, "2")
        assert await infer_value(engine) == b"2.0"


async def test_unloading_cancels_the_first_load_of_a_model(repository: VersionedRepository) -> None:
    Hanging.started, Hanging.gate = asyncio.Event(), asyncio.Event()
    repository.models = {"1": Hanging}
    async with Engine(repository, ServerIdentity(control_token="secret", load_at_start=False)) as engine:
        loading = asyncio.ensure_future(load(engine))
        await Hanging.started.wait()
        await unload(engine)
        with pytest.raises(errors.InvalidInput, match="it was unloaded meanwhile"):
            await loading
        assert (await index(engine))["1"][0] == "UNAVAILABLE"
        with pytest.raises(errors.ModelNotFound):
            await unload(engine)


async def test_a_load_says_why_the_files_of_that_name_are_no_model(tmp_path: Path) -> None:
    (tmp_path / "net").mkdir()
    (tmp_path / "net" / "model.xml").write_text("<net/>")
    (tmp_path / "weights.pt").write_bytes(b"")
    repository = DiskRepository([str(tmp_path)], {}, may_be_empty=True)
    async with Engine(repository, ServerIdentity(control_token="secret")) as engine:
        for name, file in (("net", "net/model.xml"), ("weights", "weights.pt")):
            with pytest.raises(errors.ModelNotFound) as caught:
                await engine.call(Request(Load("secret"), name))
            reason = f"it is not in the repository; {tmp_path.name}/{file}: "
            assert reason in caught.value.message
            assert "expected " in caught.value.message.partition(reason)[2]
        with pytest.raises(errors.ModelNotFound, match=r"it is not in the repository$"):
            await engine.call(Request(Load("secret"), "other"))


async def test_unloading_another_version_does_not_cancel_a_load(
    engine: Engine, repository: VersionedRepository
) -> None:
    Hanging.started, Hanging.gate = asyncio.Event(), asyncio.Event()
    repository.models["11"] = Hanging
    loading = asyncio.ensure_future(load(engine, "11"))
    await Hanging.started.wait()
    await unload(engine, "1")
    with pytest.raises(errors.ModelNotFound, match="version 7"):
        await unload(engine, "7")
    Hanging.gate.set()
    await asyncio.wait_for(loading, 60)
    assert await index(engine) == {"2": READY, "10": READY, "11": READY, "1": UNLOADED}


async def test_unloading_twice_closes_a_model_that_was_loaded_meanwhile(repository: VersionedRepository) -> None:
    Hanging.started, Hanging.gate = asyncio.Event(), asyncio.Event()
    SlowToClose.closing, SlowToClose.gate, SlowToClose.closed = asyncio.Event(), asyncio.Event(), []
    repository.models = {"1": SlowToClose, "2": SlowToClose, "3": Hanging}
    async with Engine(repository, ServerIdentity(control_token="secret", load_at_start=False)) as engine:
        loading = asyncio.ensure_future(load(engine))
        await Hanging.started.wait()
        unloading = [asyncio.ensure_future(unload(engine))]
        await asyncio.wait_for(SlowToClose.closing.wait(), 60)
        unloading.append(asyncio.ensure_future(unload(engine)))
        await asyncio.sleep(0)
        SlowToClose.gate.set()
        await asyncio.wait_for(asyncio.gather(*unloading), 60)
        with pytest.raises(errors.InvalidInput, match="it was unloaded meanwhile"):
            await loading
        assert SlowToClose.closed == [True, True]


class SentFilesRepository(VersionedRepository):
    """Serves folders of sent files by the model `SlowToLoad`."""

    def at_folder(self, name: str, folder: Path) -> Source:
        return Source(lambda: [ModelSpec(name=name, runtime="python", target=SlowToLoad, uri=str(folder))])


class SlowToLoad(dragoman.Model):
    placement = "inline"

    async def load(self) -> None:
        await asyncio.sleep(0.001)

    def infer(self, call: Infer) -> Any:
        return {}


async def test_sent_files_are_removed_if_loads_and_unloads_overlap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    identity = ServerIdentity(control_token="secret", load_at_start=False)
    async with Engine(SentFilesRepository(), identity) as engine:
        call = Load("secret", config="{}", files={"1/model": b""})
        changes = []
        for i in range(90):
            change = unload(engine) if i % 3 == 2 else engine.call(Request(call, "m"))
            changes.append(asyncio.ensure_future(change))
            if i % 10 == 0:
                await asyncio.sleep(0.001)
        results = await asyncio.wait_for(asyncio.gather(*changes, return_exceptions=True), 60)
        assert {type(r) for r in results if isinstance(r, Exception)} <= {errors.InvalidInput, errors.ModelNotFound}
        with suppress(errors.ModelNotFound):
            await unload(engine)
        async with asyncio.timeout(60):
            while list(tmp_path.iterdir()):
                await asyncio.sleep(0.001)


class TwoModels(Repository):
    """A repository with a model that loads at once, and one that never loads."""

    def scan(self) -> dict[str, Source]:
        def source(name: str, target: Any) -> Source:
            return Source(lambda: [ModelSpec(name=name, runtime="python", target=target)])

        return {"m": source("m", constant_model("here")), "hangs": source("hangs", Hanging)}


async def test_a_model_is_replaced_while_another_is_still_loaded_for_the_first_time() -> None:
    Hanging.started, Hanging.gate = asyncio.Event(), asyncio.Event()
    engine = Engine(TwoModels(), ServerIdentity(control_token="secret"))
    starting = asyncio.ensure_future(engine.start())
    await Hanging.started.wait()
    async with asyncio.timeout(60):
        await load(engine)
    assert await infer_value(engine) == b"here"
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    await engine.close()


async def test_loads_fail_once_the_engine_is_closed(repository: VersionedRepository) -> None:
    Hanging.started, Hanging.gate = asyncio.Event(), asyncio.Event()
    async with Engine(repository, ServerIdentity(control_token="secret")) as engine:
        repository.models = {"1": Hanging}
        loading = asyncio.ensure_future(load(engine))
        await Hanging.started.wait()
        waiting = asyncio.ensure_future(load(engine))
    results = await asyncio.wait_for(asyncio.gather(loading, waiting, return_exceptions=True), 60)
    assert [type(result) for result in results] == [errors.InvalidInput, errors.NotReady]
