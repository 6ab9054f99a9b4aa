"""Model control: load and unload versions, and their states in the index."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

import dragoman
from dragoman import errors
from dragoman.core.calls import DescribeModels, Index, Infer, Load, Request, Unload
from dragoman.core.spec import ModelSpec
from dragoman.engine.engine import Engine, ServerIdentity
from dragoman.engine.repository import Repository, Source


class Versions(Repository):
    """A repository with one model, whose versions a test sets."""

    def __init__(self, *versions: str, default: str = "") -> None:
        super().__init__()
        self.models: dict[str, Any] = {version: saying(f"{version}.0") for version in versions}
        self.default = default

    def scan(self) -> dict[str, Source]:
        return {"m": Source(self.specs, self.default)}

    def specs(self) -> list[ModelSpec]:
        return [ModelSpec(name="m", version=v, runtime="python", target=made) for v, made in self.models.items()]


def saying(what: str) -> type[dragoman.Model]:
    class Says(dragoman.Model):
        placement = "inline"

        def infer(self, call: Infer) -> Any:
            return {"what": np.array([what.encode()])}

    return Says


class Broken(dragoman.Model):
    def load(self) -> None:
        raise ValueError("bad weights")


class Hanging(dragoman.Model):
    """Loads when its gate opens."""

    placement = "inline"
    began: asyncio.Event
    gate: asyncio.Event

    async def load(self) -> None:
        type(self).began.set()
        await type(self).gate.wait()

    def infer(self, call: Infer) -> Any:
        return {}


class Slow(dragoman.Model):
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
async def repository() -> Versions:
    return Versions("1", "2", "10")


@pytest.fixture
async def engine(repository: Versions) -> AsyncIterator[Engine]:
    async with Engine(repository, ServerIdentity(control_token="secret")) as made:
        yield made


async def load(engine: Engine, version: str = "") -> None:
    await engine.call(Request(Load("secret"), "m", version))


async def unload(engine: Engine, version: str = "") -> None:
    await engine.call(Request(Unload("secret"), "m", version))


async def index(engine: Engine) -> dict[str, tuple[str, str]]:
    entries = (await engine.call(Request(Index("secret")))).answer
    assert len({(e.name, e.version) for e in entries}) == len(entries)
    return {e.version: (e.state, e.reason) for e in entries}


async def what(engine: Engine, version: str = "") -> bytes:
    found: bytes = (await engine.infer("m", {}, version=version))["what"][0]
    return found


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


async def test_loading_a_model_forgets_removed_versions(engine: Engine, repository: Versions) -> None:
    await unload(engine, "1")
    repository.models = {"11": saying("11.0")}
    await load(engine)
    assert await index(engine) == {"11": READY}


async def test_one_version_is_loaded(engine: Engine, repository: Versions) -> None:
    await unload(engine, "1")
    repository.models = {version: saying(f"{version}.1") for version in ("1", "2", "10")}
    await load(engine, "1")
    assert [await what(engine, v) for v in ("1", "2", "10", "")] == [b"1.1", b"2.0", b"10.0", b"10.0"]
    await load(engine, "10")
    assert [await what(engine, v) for v in ("1", "2", "10", "")] == [b"1.1", b"2.0", b"10.1", b"10.1"]


async def test_a_version_that_cannot_be_loaded_does_not_affect_others(engine: Engine, repository: Versions) -> None:
    repository.models["1"] = repository.models["11"] = Broken
    for version in ("1", "11"):
        with pytest.raises(errors.InvalidInput, match="bad weights"):
            await load(engine, version)
    entries = await index(engine)
    assert [entries.pop(v) for v in ("1", "2", "10")] == [READY] * 3
    assert entries["11"][0] == "UNAVAILABLE"
    assert "bad weights" in entries["11"][1]
    assert await what(engine, "1") == b"1.0"


async def test_versions_are_loaded_on_request(repository: Versions) -> None:
    async with Engine(repository, ServerIdentity(control_token="secret", load_at_start=False)) as engine:
        waits = ("UNAVAILABLE", "not loaded at the start")
        assert await index(engine) == {"1": waits, "2": waits, "10": waits}
        await load(engine, "2")
        assert await index(engine) == {"2": READY, "1": waits, "10": waits}
        assert await what(engine) == b"2.0"


async def test_the_newest_version_answers_if_the_default_is_not_loaded() -> None:
    async with Engine(Versions("1", "2", "10", default="2"), ServerIdentity(control_token="secret")) as engine:
        assert await what(engine) == b"2.0"
        await unload(engine, "2")
        assert await what(engine) == b"10.0"
        assert [m.name for m in (await engine.call(Request(DescribeModels()))).answer] == ["m"]
        await load(engine, "2")
        assert await what(engine) == b"2.0"


async def test_unloading_cancels_the_first_load_of_a_model(repository: Versions) -> None:
    Hanging.began, Hanging.gate = asyncio.Event(), asyncio.Event()
    repository.models = {"1": Hanging}
    async with Engine(repository, ServerIdentity(control_token="secret", load_at_start=False)) as engine:
        loading = asyncio.ensure_future(load(engine))
        await Hanging.began.wait()
        await unload(engine)
        with pytest.raises(errors.InvalidInput, match="it was unloaded meanwhile"):
            await loading
        assert (await index(engine))["1"][0] == "UNAVAILABLE"
        with pytest.raises(errors.ModelNotFound):
            await unload(engine)


async def test_unloading_another_version_does_not_cancel_a_load(engine: Engine, repository: Versions) -> None:
    Hanging.began, Hanging.gate = asyncio.Event(), asyncio.Event()
    repository.models["11"] = Hanging
    loading = asyncio.ensure_future(load(engine, "11"))
    await Hanging.began.wait()
    await unload(engine, "1")
    with pytest.raises(errors.ModelNotFound, match="version '7'"):
        await unload(engine, "7")
    Hanging.gate.set()
    await asyncio.wait_for(loading, 5)
    assert await index(engine) == {"2": READY, "10": READY, "11": READY, "1": UNLOADED}


async def test_unloading_twice_closes_a_model_that_was_loaded_meanwhile(repository: Versions) -> None:
    Hanging.began, Hanging.gate = asyncio.Event(), asyncio.Event()
    Slow.closing, Slow.gate, Slow.closed = asyncio.Event(), asyncio.Event(), []
    repository.models = {"1": Slow, "2": Slow, "3": Hanging}
    async with Engine(repository, ServerIdentity(control_token="secret", load_at_start=False)) as engine:
        loading = asyncio.ensure_future(load(engine))
        await Hanging.began.wait()
        unloading = [asyncio.ensure_future(unload(engine))]
        await asyncio.wait_for(Slow.closing.wait(), 5)
        unloading.append(asyncio.ensure_future(unload(engine)))
        await asyncio.sleep(0)
        Slow.gate.set()
        await asyncio.wait_for(asyncio.gather(*unloading), 5)
        with pytest.raises(errors.InvalidInput, match="it was unloaded meanwhile"):
            await loading
        assert Slow.closed == [True, True]


class Two(Repository):
    """A repository with a model that loads at once, and one that never loads."""

    def scan(self) -> dict[str, Source]:
        def source(name: str, target: Any) -> Source:
            return Source(lambda: [ModelSpec(name=name, runtime="python", target=target)])

        return {"m": source("m", saying("here")), "hangs": source("hangs", Hanging)}


async def test_a_model_is_replaced_while_another_is_still_loaded_for_the_first_time() -> None:
    Hanging.began, Hanging.gate = asyncio.Event(), asyncio.Event()
    engine = Engine(Two(), ServerIdentity(control_token="secret"))
    starting = asyncio.ensure_future(engine.start())
    await Hanging.began.wait()
    async with asyncio.timeout(5):
        await load(engine)
    assert await what(engine) == b"here"
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    await engine.close()


async def test_nothing_is_loaded_once_the_engine_is_closed(repository: Versions) -> None:
    Hanging.began, Hanging.gate = asyncio.Event(), asyncio.Event()
    async with Engine(repository, ServerIdentity(control_token="secret")) as engine:
        repository.models = {"1": Hanging}
        loading = asyncio.ensure_future(load(engine))
        await Hanging.began.wait()
        waiting = asyncio.ensure_future(load(engine))
    results = await asyncio.wait_for(asyncio.gather(loading, waiting, return_exceptions=True), 5)
    assert [type(result) for result in results] == [errors.InvalidInput, errors.NotReady]
