"""Canary: requests that name no version are divided between versions by weights."""

import asyncio
import json
import logging
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dragoman import errors
from dragoman.core.calls import (
    ConcurrentCalls,
    Describe,
    DescribeModels,
    Handle,
    Index,
    Infer,
    Load,
    Measure,
    Ready,
    Request,
    ScaleModel,
    Unload,
)
from dragoman.core.tensor import Tensor
from dragoman.engine.engine import Engine
from dragoman.engine_setup import open_engine

MODEL = """
import pathlib
import numpy as np
import dragoman
from dragoman import FP64, TensorSpec
from dragoman.core.calls import Handled

class Model(dragoman.Model):
    placement = "inline"
    inputs = (TensorSpec("x", FP64, (-1,)),)
    outputs = (TensorSpec("version", {datatype}, (-1,)),)
    {extra}

    def infer(self, call):
        return {{"version": np.full_like(call.inputs["x"].data, {version})}}

    def unavailable(self):
        return "maintenance" if pathlib.Path(__file__).with_name("down").exists() else ""
"""
HANDLER = """
    handlers = ("POST /version",)

    def handle(self, call):
        return Handled(b"{version}")
"""
GRADIENT = "def gradient(self, call): return np.zeros(1)"
X = {"x": np.zeros(1)}


def write(folder: Path, version: str, datatype: str = "dragoman.FP64", extra: str = "", source: str = "") -> None:
    (folder / version).mkdir(parents=True, exist_ok=True)
    text = MODEL.format(version=version, datatype=datatype, extra=extra.replace("{version}", version))
    (folder / version / "model.py").write_text(source or text)


def write_settings(folder: Path, weights: str = "", **settings: object) -> None:
    lines = "".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items())
    folder.mkdir(exist_ok=True)
    (folder / "dragoman.toml").write_text(f"[model]\n{lines}{weights and f'version_weights = {weights}'}\n")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model with the versions 1, 2 and 3."""
    for version in ("1", "2", "3"):
        write(tmp_path / "m", version)
    return tmp_path / "m"


async def count(engine: Engine, requests: int = 40) -> dict[str, int]:
    """Return how many of the requests each version answered."""
    found: Counter[str] = Counter()
    for _ in range(requests):
        response = await engine.call(Request(Infer({"x": Tensor.of(X["x"])}), "m"))
        assert response.answer.outputs["version"].data.tolist() == [float(response.version)]
        found[response.version] += 1
    return dict(found)


async def load(engine: Engine, version: str = "", weights: str | None = None) -> None:
    await engine.call(Request(Load("", version_weights=weights), "m", version))


async def shares(engine: Engine) -> dict[str, float]:
    families = {family.name: family for family in (await engine.call(Request(Measure()))).answer}
    family = families.get("dragoman_version_share_ratio")
    return {s.labels["version"]: s.value for s in family.flat} if family is not None else {}


async def test_requests_are_divided_in_proportion_to_the_weights(folder: Path) -> None:
    write_settings(folder, '{ "1" = 3, "2" = 1.0, "3" = 0 }')
    async with open_engine(folder, placement="inline") as engine:
        found = await count(engine, 400)
        # The standard deviation of 400 draws is 8.7: six of them are exceeded once in 5e8 runs.
        assert set(found) == {"1", "2"}
        assert abs(found["1"] - 300) < 52
        assert await shares(engine) == {"1": 0.75, "2": 0.25}
        calls = {f.name: f for f in (await engine.call(Request(Measure()))).answer}["dragoman_calls_total"]
        assert {s.labels["version"]: s.value for s in calls.flat if s.labels["outcome"] == "ok"} == {"3": 0, **found}


async def test_a_request_that_names_a_version_gets_that_version(folder: Path) -> None:
    write_settings(folder, '{ "1" = 1, "2" = 0 }')
    async with open_engine(folder, placement="inline") as engine:
        assert (await engine.infer("m", X, version="2"))["version"].tolist() == [2]
        assert await count(engine) == {"1": 40}


async def test_versions_with_weights_are_served_beside_no_others(folder: Path) -> None:
    write_settings(folder, '{ "1" = 1, "2" = 1 }')
    async with open_engine(folder, placement="inline") as engine:
        assert {d.spec.version for d in engine.deployments()} == {"1", "2"}


async def test_weights_change_at_run_time_without_a_reload(folder: Path) -> None:
    write_settings(folder, '{ "1" = 1, "2" = 0 }')
    async with open_engine(folder, control_open=True, placement="inline", version_weights_file="-") as engine:
        before = engine.deployments()
        assert await count(engine) == {"1": 40}
        await load(engine, weights="1=0, 2=5")
        assert await count(engine) == {"2": 40}
        await load(engine, weights="")  # the newest again
        assert await count(engine) == {"2": 40}
        assert await shares(engine) == {}
        await load(engine, weights="1=1")
        assert await count(engine) == {"1": 40}
        assert engine.deployments() == before


async def test_a_new_version_is_loaded_with_its_share(folder: Path) -> None:
    write_settings(folder, version_policy="1")
    async with open_engine(folder, control_open=True, placement="inline", version_weights_file="-") as engine:
        (first,) = engine.deployments()
        write_settings(folder, version_policy="all")
        await load(engine, "2", "1=1,2=0")
        assert engine.deployments()[0] is first
        assert await count(engine) == {"1": 40}
        await load(engine, "3")  # weights that a load call set are kept by loads of one version
        assert await count(engine) == {"1": 40}
        assert await shares(engine) == {"1": 1.0}
        await load(engine)  # and end when the whole model is loaded
        assert await count(engine) == {"3": 40}


async def test_weights_of_a_load_request_take_the_place_of_the_default_version(folder: Path) -> None:
    write_settings(folder, default_version="1", version_policy="all")
    async with open_engine(folder, control_open=True, placement="inline", version_weights_file="-") as engine:
        assert await count(engine, 5) == {"1": 5}
        await load(engine, weights="2=1")
        assert await count(engine, 5) == {"2": 5}
        await load(engine, weights="")
        assert await count(engine, 5) == {"1": 5}


async def test_weights_of_a_load_request_outlive_the_server(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "weights.json"

    def serve() -> Engine:
        return open_engine(folder, control_open=True, placement="inline", version_weights_file=str(file))

    write_settings(folder, version_policy="2")
    async with serve() as engine:
        write_settings(folder)  # as if version 3 were new: only the newest one is served by default
        await load(engine, "3", "2=1,3=0")
        assert await count(engine) == {"2": 40}
    async with serve() as engine:
        assert await count(engine) == {"2": 40}
        assert await shares(engine) == {"2": 1}
        await load(engine, weights="")
    async with serve() as engine:
        assert await count(engine) == {"3": 40}
        await load(engine, weights="3=1")
        assert json.loads(file.read_text()) == {"m": {"3": 1}}
        await load(engine)
        assert json.loads(file.read_text()) == {}
        await load(engine, weights="3=1")
        await engine.call(Request(Unload(), "m"))
        assert json.loads(file.read_text()) == {}


async def test_the_state_store_keeps_weights_and_takes_over_those_of_the_file(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "weights.json"

    def serve(**settings: Any) -> Engine:
        return open_engine(folder, control_open=True, placement="inline", state=str(tmp_path / "state"), **settings)

    file.write_text('{"m": {"2": 1}}')
    async with serve(version_weights_file=str(file)) as engine:
        assert "'version_weights_file' ends with the next release" in caplog.text
        assert await count(engine, 5) == {"2": 5}
    async with serve() as engine:
        assert await count(engine, 5) == {"2": 5}
        await load(engine, weights="2=1,3=0")
    async with serve(version_weights_file=str(file)) as engine:  # the store counts
        assert await shares(engine) == {"2": 1}
        await load(engine)
    async with serve() as engine:
        assert await count(engine, 5) == {"3": 5}
    assert json.loads(file.read_text()) == {"m": {"2": 1}}


async def test_saved_weights_of_a_version_that_is_gone_are_not_used(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "weights.json"
    file.write_text('{"m": {"2": 95, "9": 5}}')
    async with open_engine(folder, placement="inline", version_weights_file=str(file)) as engine:
        assert await count(engine) == {"3": 40}
    assert "got none of this name: 9" in caplog.text


async def test_weights_that_cannot_be_saved_are_reported(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    file = tmp_path / "state" / "weights.json"
    async with open_engine(folder, control_open=True, placement="inline", version_weights_file=str(file)) as engine:
        (tmp_path / "state").rmdir()
        with pytest.raises(errors.ServerError, match="could not be saved"):
            await load(engine, weights="3=1")
        (tmp_path / "state").mkdir()
        await load(engine, weights="3=1")  # the same again
        assert json.loads(file.read_text()) == {"m": {"3": 1}}


async def test_a_file_of_weights_keeps_its_mode_and_the_link_to_it(folder: Path, tmp_path: Path) -> None:
    file, link = tmp_path / "weights.json", tmp_path / "link.json"
    file.write_text("{}")
    file.chmod(0o640)
    link.symlink_to(file)
    async with open_engine(folder, control_open=True, placement="inline", version_weights_file=str(link)) as engine:
        await load(engine, weights="3=1")
    assert (link.is_symlink(), file.stat().st_mode & 0o777, json.loads(file.read_text())) == (
        True,
        0o640,
        {"m": {"3": 1}},
    )


async def test_weights_that_would_end_with_the_server_are_rejected(folder: Path) -> None:
    async with open_engine(folder, control_open=True, placement="inline", version_policy="all") as engine:
        for version in ("", "2"):
            with pytest.raises(
                errors.Forbidden, match=r"^parameter 'version_weights' is not allowed: .* version_weights_file"
            ):
                await load(engine, version, "1=95,2=5")
        assert await count(engine) == {"3": 40}
        await load(engine, weights="")  # which returns to the settings
    async with open_engine(folder, control_open=True, placement="inline", version_weights_file="-") as engine:
        await load(engine, weights="3=1")
        assert await shares(engine) == {"3": 1}


@pytest.mark.parametrize(
    "text", ["", "[]", "7", '{"m": 3}', '{"m": {"1": -1}}', '{"m": {"1": NaN}}', '{"m": {"1": "a"}}', '{"m": {"1": 0}}']
)
async def test_invalid_files_of_weights(folder: Path, tmp_path: Path, text: str) -> None:
    (tmp_path / "weights.json").write_text(text)
    with pytest.raises(errors.InvalidInput, match="version_weights_file"):
        open_engine(folder, version_weights_file=str(tmp_path / "weights.json"))
    with pytest.raises(errors.InvalidInput, match="a folder that exists"):
        open_engine(folder, version_weights_file=str(tmp_path / "nowhere" / "weights.json"))


async def test_scaling_keeps_the_weights(folder: Path) -> None:
    write_settings(folder, '{ "1" = 1, "2" = 0 }', placement="thread")
    async with open_engine(folder, control_open=True, placement="inline", version_weights_file="-") as engine:
        await engine.call(Request(ScaleModel("", 2), "m"))
        assert await count(engine, 5) == {"1": 5}


@pytest.mark.parametrize(
    ("version", "weights", "message"),
    [
        ("", "1=1,7=1", "version_weights: version '7' is not among the versions that are served: 1, 2"),
        ("2", "1=1,7=1", "version_weights: version '7' is not among the versions that are served"),
        ("", "1", "expected text such as '1=90,2=10', got '1'"),
        ("", "1=1,1=2", "expected text such as '1=90,2=10'"),
        ("", "=1", "expected text such as '1=90,2=10'"),
        ("", "1=nan", "expected text such as '1=90,2=10'"),
        ("", "1=-1", "expected text such as '1=90,2=10'"),
        ("", "1=0,2=0", "at least one above 0"),
        ("", "1=1e308,2=1e308", "at least one above 0"),
    ],
)
async def test_invalid_weights_at_run_time_change_nothing(
    folder: Path, version: str, weights: str, message: str
) -> None:
    write_settings(folder, '{ "1" = 1, "2" = 0 }')
    async with open_engine(folder, control_open=True, placement="inline", version_weights_file="-") as engine:
        with pytest.raises(errors.InvalidInput, match=message):
            await load(engine, version, weights)
        assert await count(engine, 5) == {"1": 5}
        with pytest.raises(errors.ModelNotFound):
            await engine.call(Request(Load("", version_weights="1=1"), "unknown"))


@pytest.mark.parametrize(
    ("weights", "settings", "message"),
    [
        ('{ "1" = 1, "7" = 1 }', {}, "version_weights: version '7' is not among the versions that are served: 1"),
        ('{ "7" = 1 }', {}, "version_weights: version '7' is not among the versions that are served: none"),
        ('{ "1" = 1, "2" = 1 }', {"version_policy": "latest"}, "version '1' is not among .* served: 3"),
        ('{ "1" = 1 }', {"default_version": "1"}, "expected default_version or version_weights, got both"),
        ('{ "1" = "x" }', {}, "setting 'version_weights': expected versions with numbers.* got 'x' for version '1'"),
        ('{ "1" = true }', {}, "got True for version '1'"),
        ('{ "1" = -1 }', {}, "got -1 for version '1'"),
        ('{ "1" = inf }', {}, "got inf for version '1'"),
        ('{ "1" = 0 }', {}, "at least one above 0"),
        ("3", {}, "setting 'version_weights': expected a table, got 3"),
    ],
)
async def test_invalid_weights_in_the_settings(
    folder: Path, weights: str, settings: dict[str, Any], message: str
) -> None:
    write_settings(folder, weights, **settings)
    with pytest.raises(errors.InvalidInput, match=message):
        async with open_engine(folder, placement="inline"):
            pass
    (folder / "dragoman.toml").unlink()
    async with open_engine(folder, control_open=True, placement="inline", version_weights_file="-") as engine:
        write_settings(folder, weights, **settings)
        with pytest.raises(errors.InvalidInput, match=message):
            await load(engine)
        assert await count(engine, 5) == {"3": 5}


async def test_a_version_that_is_not_ready_gets_no_requests(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_settings(folder, '{ "1" = 1, "2" = 1, "3" = 0 }')
    write(folder, "1", source="raise ValueError('bad file')")
    async with open_engine(folder, control_open=True, placement="inline", version_weights_file="-") as engine:
        with caplog.at_level(logging.WARNING, "dragoman.engine"):
            assert await count(engine) == {"2": 40}
            assert await shares(engine) == {"1": 0, "2": 1}
        warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
        assert warnings == ["shares of versions changed, those that are not ready get 0: model=m 1=0 2=1"]
        write(folder, "1")
        await load(engine, "1")
        assert set(await count(engine)) == {"1", "2"}  # all of one version: once in 5e11 runs
        await engine.call(Request(Unload(""), "m", "1"))
        assert await count(engine) == {"2": 40}
        await engine.call(Request(Unload(""), "m", "2"))
        with pytest.raises(errors.NotReady, match="no version with a weight is loaded: expected 1, 2"):
            await count(engine)
        assert (await engine.infer("m", X, version="3"))["version"].tolist() == [3]
        await load(engine, "1")
        assert await count(engine, 5) == {"1": 5}
        await engine.call(Request(Unload(""), "m", "1"))
        assert [d.name for d in (await engine.call(Request(DescribeModels()))).answer] == []


async def test_shares_follow_the_availability_of_a_version(folder: Path) -> None:
    write_settings(folder, '{ "1" = 3, "2" = 1 }')
    for version in ("1", "2"):
        (folder / version / "down").touch()
    async with open_engine(folder, placement="inline") as engine:
        while engine.deployments()[0].ready or engine.deployments()[1].ready:
            await engine.wait_for_change()
        assert not (await engine.call(Request(Ready(), "m"))).answer
        assert await shares(engine) == {"1": 0, "2": 0}
        assert await count(engine, 5) == {"1": 5}  # the largest weight, whose error or response the client gets
        (folder / "2" / "down").unlink()
        while not engine.deployments()[1].ready:
            await engine.wait_for_change()
        assert (await engine.call(Request(Ready(), "m"))).answer
        assert await count(engine, 5) == {"2": 5}


async def test_metadata_is_that_of_the_version_with_the_largest_weight(folder: Path) -> None:
    write_settings(folder, '{ "1" = 60, "2" = 40 }')
    async with open_engine(folder, placement="inline") as engine:
        assert engine.deployments()[0].spec.version == "1"
        description = (await engine.call(Request(Describe(), "m"))).answer
        assert description.path == str(folder / "1")
        assert description.versions == ("1", "2")


INCOMPATIBLE = {
    "inputs": MODEL.format(version=2, datatype="FP64", extra="").replace('"x"', '"z"'),
    "outputs: expected 'version' FP64 .-1., got 'version' FP32": MODEL.format(
        version=2, datatype="dragoman.FP32", extra=""
    ),
    "supported calls": MODEL.format(version=2, datatype="FP64", extra=GRADIENT),
    "supported calls: expected Infer, got Handle": MODEL.format(version=2, datatype="FP64", extra=HANDLER),
    "handlers: expected POST /other": MODEL.format(version=2, datatype="FP64", extra=HANDLER),
    "streaming": MODEL.format(version=2, datatype="FP64", extra="").replace("return {", "yield {"),
}


@pytest.mark.parametrize("difference", INCOMPATIBLE)
async def test_versions_that_differ_for_clients_do_not_share_requests(folder: Path, difference: str) -> None:
    message = f"model 'm': version_weights: versions '1' and '2' differ in {difference}"
    write(folder, "2", source=INCOMPATIBLE[difference])
    if difference.startswith("handlers"):
        write(folder, "1", extra=HANDLER.replace("/version", "/other"))
    write_settings(folder, '{ "1" = 1, "2" = 0 }')
    async with open_engine(folder, control_open=True, placement="inline", version_weights_file="-") as engine:
        with pytest.raises(errors.InvalidInput, match=message):
            await load(engine, weights="1=1,2=1")
        with pytest.raises(errors.InvalidInput, match=message):
            await load(engine, "2", "1=1,2=1")
        write_settings(folder, '{ "1" = 1, "2" = 1 }')
        with pytest.raises(errors.InvalidInput, match=message):
            await load(engine)
        assert await count(engine) == {"1": 40}
    async with open_engine(
        folder, control_open=True, placement="inline", version_weights_file="-"
    ) as engine:  # at the start
        with pytest.raises(errors.NotReady, match=message):
            await engine.infer("m", X)
        assert not engine.ready()
        states = (await engine.call(Request(Index("")))).answer
        assert {(e.state, e.reason[:31]) for e in states} == {("UNAVAILABLE", message[:31])}


async def test_versions_that_are_loaded_after_a_retry_are_compared(folder: Path, tmp_path: Path) -> None:
    up = tmp_path / "up"
    extra = f"""
    def load(self):
        if not pathlib.Path({str(up)!r}).exists():
            raise dragoman.errors.NotReady("the database is down")
"""
    write(folder, "2", datatype="dragoman.FP32", extra=extra)
    write_settings(folder, '{ "1" = 1, "2" = 1 }')
    async with open_engine(folder, placement="inline") as engine, asyncio.timeout(60):
        assert [d.state for d in engine.deployments()] == ["READY", "UNAVAILABLE"]
        up.touch()
        while "differ in outputs" not in engine.deployments()[0].reason:
            await engine.wait_for_change()
        assert {d.state for d in engine.deployments()} == {"UNAVAILABLE"}
        with pytest.raises(errors.NotReady, match="versions '1' and '2' differ in outputs"):
            await engine.infer("m", X)


async def test_handlers_follow_the_weights(folder: Path) -> None:
    for version in ("1", "2"):
        write(folder, version, extra=HANDLER)
    write_settings(folder, '{ "1" = 0, "2" = 1 }')
    async with open_engine(folder, control_open=True, placement="inline", version_weights_file="-") as engine:
        call = Request(Handle(method="POST", path="/version"))
        assert (await engine.call(call)).answer.content == b"2"
        await load(engine, weights="1=1")
        assert (await engine.call(call)).answer.content == b"1"
        await load(engine, weights="1=1,2=1")
        contents = {(await engine.call(call)).answer.content for _ in range(40)}
        assert contents == {b"1", b"2"}  # otherwise in one of 5e11 runs


async def test_streams_follow_the_weights(folder: Path) -> None:
    write_settings(folder, '{ "1" = 1, "2" = 1, "3" = 0 }')
    async with open_engine(folder, placement="inline") as engine:
        call = Request(Infer({"x": Tensor.of(X["x"])}), "m")
        versions = {response.version for _ in range(40) async for response in engine.stream(call)}
        assert versions == {"1", "2"}  # otherwise in one of 5e11 runs


async def test_graphs_follow_the_weights(tmp_path: Path) -> None:
    for version in ("1", "2"):
        text = (
            "import dragoman\n@dragoman.vector_function(inputs=[1], outputs=[1], placement='thread')\ndef model(x):\n"
        )
        write(tmp_path / "m", version, source=f"{text}    return [{version}.0]\n")
    write_settings(tmp_path / "m", '{ "1" = 1, "2" = 1 }')
    (tmp_path / "g.graph.toml").write_text("[nodes]\ns = { served = 'm' }\n")
    async with open_engine(tmp_path, placement="thread") as engine:
        assert engine.ready(), [d.reason for d in engine.deployments()]
        call = Request(Infer({}, positional=(Tensor.of(X["x"]),)), "g")
        answers = [await engine.call(call) for _ in range(40)]
        assert {float(t.data[0]) for a in answers for t in a.answer.outputs.values()} == {1.0, 2.0}


async def test_a_version_that_differs_answers_nothing_before_that_is_known(folder: Path) -> None:
    waiting = "async def load(self): await asyncio.sleep(0.05)"
    write(folder, "2", datatype="dragoman.FP32", extra=waiting)
    source = folder / "2" / "model.py"
    source.write_text(f"import asyncio\n{source.read_text()}")
    write_settings(folder, '{ "1" = 1e-9, "2" = 1 }')
    engine = open_engine(folder, placement="inline")
    starting, versions = asyncio.ensure_future(engine.start()), set()
    while not starting.done():
        with suppress(errors.NotReady, errors.ModelNotFound):
            versions.add((await engine.call(Request(Infer({"x": Tensor.of(X["x"])}), "m"))).version)
        await asyncio.sleep(0)
    await engine.close()
    assert versions == set()


async def test_one_version_answers_the_calls_of_one_request(folder: Path) -> None:
    write_settings(folder, '{ "1" = 1, "2" = 1 }')
    async with open_engine(folder, placement="inline") as engine:
        call = Infer({"x": Tensor.of(X["x"])})
        seen = set()
        for _ in range(20):
            several = ConcurrentCalls((Request(call, "m"), Request(call, "m"), Request(call, "m", "1")))
            first, second, third = (await engine.call(Request(several))).answer
            assert first.version == second.version
            assert third.version == "1"
            seen.add(first.version)
        assert seen == {"1", "2"}  # otherwise in one of 5e5 runs
