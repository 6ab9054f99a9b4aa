"""Changes of models on disk: which are found, when they are applied, and what is replaced."""

import asyncio
import itertools
import os
import shutil
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NoReturn

import pytest

from dragoman import errors
from dragoman.core.calls import IndexEntry, Infer, Request
from dragoman.core.file_states import file_states
from dragoman.core.tensor import Tensor
from dragoman.engine.control import ModelControl
from dragoman.engine.folder_watch import Changes, FolderSync, FolderWatch
from dragoman.engine.registry import ModelRegistry
from dragoman.engine.repository import DiskRepository
from dragoman.engine_setup import open_engine
from dragoman.system.coroutines import complete
from e2e.foreign_errors import ERRORS

MODEL = """
import pathlib
import numpy as np
import dragoman

class Model(dragoman.Model):
    inputs = (dragoman.TensorSpec("x", dragoman.FP64, (-1,)),)

    def load(self):
        self.value = float((pathlib.Path(__file__).parent / "value.txt").read_text())

    def infer(self, call):
        return {"value": np.array([self.value])}
"""


def write(folder: Path, value: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "model.py").exists():
        (folder / "model.py").write_text(MODEL)
    replace_file(folder / "value.txt", str(value))


def replace_file(path: Path, text: str) -> None:
    """Write as editors do: a new file, renamed."""
    new = path.with_name(f".{path.name}.new")
    new.write_text(text)
    new.replace(path)


class Models:
    """Models in a folder, and the control that serves them."""

    def __init__(self, folder: Path, *, loads_new_models: bool = True) -> None:
        self.folder = folder
        self.registry = ModelRegistry()
        repository = DiskRepository(
            [str(folder)], {"placement": "inline"}, "all", folders=[str(folder.parent)], may_be_empty=True
        )
        self.control = ModelControl(repository, self.registry, lambda: None, loads_new_models=loads_new_models)
        self._sync = FolderSync(repository, self.control)

    async def sync(self, seen: Changes | None = None) -> Changes:
        """Sync, and wait for the loads that it has started."""
        waiting = await self._sync.run(seen)
        while not all(map(self.control.can_update, [*self.control.on_disk])):
            await asyncio.sleep(0.002)
        return waiting

    async def value(self, name: str, version: str = "") -> float:
        call = Infer({"x": Tensor.of([1.0])})
        response = await complete(self.registry.find(name, version).begin(Request(call, name, version)))
        return float(response.answer.outputs["value"].data[0])

    def index(self) -> dict[tuple[str, str], tuple[str, str]]:
        def entry(e: IndexEntry) -> tuple[str, str]:
            return e.state, e.reason

        return {(e.name, e.version): entry(e) for e in self.control.index(ready=False)}


@pytest.fixture
async def models(tmp_path: Path) -> AsyncIterator[Models]:
    write(tmp_path / "models" / "m" / "1", 1)
    models = Models(tmp_path / "models")
    await models.control.start()
    yield models
    await models.control.close()


READY = ("READY", "")


async def test_new_changed_and_removed_models_and_versions(models: Models) -> None:
    assert await models.sync() == {}
    write(models.folder / "m" / "2", 2)
    write(models.folder / "new", 3)
    await models.sync()
    assert models.index() == {("m", "1"): READY, ("m", "2"): READY, ("new", ""): READY}
    assert [await models.value("m"), await models.value("m", "1"), await models.value("new")] == [2, 1, 3]
    shutil.rmtree(models.folder / "m" / "1")
    write(models.folder / "m" / "2", 2.5)
    shutil.rmtree(models.folder / "new")
    await models.sync()
    assert models.index() == {("m", "2"): READY}
    assert await models.value("m") == 2.5


async def test_versions_that_have_not_changed_are_not_loaded_again(models: Models) -> None:
    before = models.registry.find("m", "1")
    write(models.folder / "m" / "2", 2)
    await models.sync()
    assert models.registry.find("m", "1") is before
    (models.folder / "m" / "dragoman.toml").write_text('[model]\ndefault_version = "1"\n')
    await models.sync()
    assert models.registry.find("m", "1") is before
    assert await models.value("m") == 1
    (models.folder / "m" / "dragoman.toml").write_text("[model]\nmax_queue = 7\n")  # settings of every version
    await models.sync()
    assert models.registry.find("m", "1").spec.max_queue == 7
    assert await models.value("m") == 2


async def test_a_model_is_loaded_once_its_files_have_not_changed_between_two_looks(models: Models) -> None:
    write(models.folder / "m" / "1", "")  # cannot be loaded yet
    write(models.folder / "other", 5)
    seen = await models.sync({})
    assert set(seen) == {"m", "other"}
    write(models.folder / "m" / "1", "4")  # is still being written
    seen = await models.sync(seen)
    assert set(seen) == {"m"}
    assert models.index() == {("m", "1"): READY, ("other", ""): READY}
    assert await models.value("m") == 1
    assert await models.sync(seen) == {}
    assert await models.value("m") == 4


async def test_a_failed_update_keeps_the_old_version_until_the_files_are_right(models: Models) -> None:
    write(models.folder / "m" / "1", "no number")
    await models.sync()
    state, reason = models.index()["m", "1"]
    assert state == "READY"
    assert reason.startswith("update failed: failed to load 'm', ValueError: could not convert")
    assert await models.value("m") == 1
    assert await models.sync() == {}  # it is not tried again before the files change
    write(models.folder / "m" / "1", 6)
    await models.sync()
    assert models.index() == {("m", "1"): READY}
    assert await models.value("m") == 6


async def test_a_new_model_that_cannot_be_loaded_has_its_reason_in_the_index(models: Models) -> None:
    write(models.folder / "new", "no number")
    (models.folder / "bad").mkdir()
    (models.folder / "bad" / "dragoman.toml").write_text("[model]\nmax_queu = 1\n")
    await models.sync()
    index = models.index()
    assert index["new", ""][0] == index["bad", ""][0] == "UNAVAILABLE"
    assert "could not convert" in index["new", ""][1]
    assert "unknown model setting 'max_queu'" in index["bad", ""][1]
    assert index["m", "1"] == READY


async def test_settings_that_become_invalid_are_reported_for_the_version_that_serves(models: Models) -> None:
    (models.folder / "m" / "dragoman.toml").write_text("[model]\nmax_queu = 1\n")
    await models.sync()
    assert models.index()["m", "1"][0] == "READY"
    assert "unknown model setting 'max_queu'" in models.index()["m", "1"][1]
    (models.folder / "m" / "dragoman.toml").unlink()
    await models.sync()
    assert models.index() == {("m", "1"): READY}


async def test_a_repository_that_cannot_be_read_leaves_the_models_as_they_are(
    models: Models, caplog: pytest.LogCaptureFixture
) -> None:
    (models.folder / "dragoman.toml").write_text("[models.m")
    write(models.folder / "m" / "1", 7)
    for _ in range(2):
        assert await models.sync() == {}
    assert caplog.text.count("models are unchanged: the repository cannot be read") == 1
    assert await models.value("m") == 1
    (models.folder / "dragoman.toml").unlink()
    await models.sync()
    assert await models.value("m") == 7


async def test_the_watch_goes_on_after_errors_of_every_kind(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    write(models.folder / "m" / "1", 7)
    with monkeypatch.context() as patch:
        for error in (make() for make in ERRORS):

            def scan(_: DiskRepository, error: BaseException = error) -> NoReturn:
                raise error

            patch.setattr(DiskRepository, "scan", scan)
            assert await models.sync() == {}
    assert await models.value("m") == 1
    await models.sync()
    assert await models.value("m") == 7


async def test_a_model_that_was_unloaded_stays_unloaded_until_it_changes(models: Models) -> None:
    await models.control.unload("m")
    await models.sync()
    assert models.index()["m", "1"] == ("UNAVAILABLE", "unloaded")
    write(models.folder / "m" / "1", 8)
    await models.sync()
    assert await models.value("m") == 8


async def test_a_model_that_was_loaded_by_a_client_is_not_loaded_again(models: Models) -> None:
    write(models.folder / "m" / "1", 9)
    await models.control.load("m")
    loaded = models.registry.find("m", "1")
    await models.sync()
    assert models.registry.find("m", "1") is loaded


async def test_scaled_replicas_are_no_change(models: Models) -> None:
    (models.folder / "m" / "dragoman.toml").write_text('[model]\nplacement = "process"\n')
    await models.sync()
    await models.control.scale("m", "1", 2)
    (models.folder / "m" / "dragoman.toml").write_text('[model]\nplacement = "process"\ndefault_version = "1"\n')
    await models.sync()
    assert models.registry.find("m", "1").spec.replicas == 2


async def test_links_of_a_kubernetes_config_map_are_followed(models: Models) -> None:
    volume = models.folder / "mounted"
    for revision, value in (("..1", 1), ("..2", 2)):
        write(volume / revision, value)
    (volume / "..data").symlink_to("..1")
    for name in ("model.py", "value.txt"):
        (volume / name).symlink_to(f"..data/{name}")
    await models.sync()
    assert await models.value("mounted") == 1
    (volume / "..new").symlink_to("..2")
    (volume / "..new").replace(volume / "..data")
    await models.sync()
    assert await models.value("mounted") == 2


async def test_replicas_in_the_settings_are_a_change(models: Models) -> None:
    (models.folder / "m" / "dragoman.toml").write_text("[model]\nreplicas = 3\n")
    await models.sync()
    assert models.registry.find("m", "1").spec.replicas == 3


async def test_a_new_model_is_listed_while_it_is_loaded_and_does_not_count_for_readiness(models: Models) -> None:
    write(models.folder / "new", 3)
    changing = asyncio.create_task(models.sync())
    seen = set()
    while not changing.done():
        seen.add((models.index().get(("new", "")), "new" in models.registry.names()))
        await asyncio.sleep(0)
    assert seen <= {(None, False), (("LOADING", ""), False), (READY, True)}
    assert (("LOADING", ""), False) in seen
    assert models.index()["new", ""] == READY


async def test_a_model_that_is_not_ready_yet_is_tried_again(models: Models, tmp_path: Path) -> None:
    (models.folder / "later").mkdir()
    (models.folder / "later" / "model.py").write_text(
        f"import pathlib\n{MODEL}".replace(
            "    def load(self):",
            f"    def load(self):\n        if not pathlib.Path({str(tmp_path / 'up')!r}).exists():\n"
            "            raise dragoman.errors.NotReady('the database is down')",
        )
    )
    (models.folder / "later" / "value.txt").write_text("1")
    await models.sync()
    assert models.index()["later", ""][0] == "UNAVAILABLE"
    assert "the database is down" in models.index()["later", ""][1]
    (tmp_path / "up").touch()
    await models.sync()
    assert models.index()["later", ""] == READY


async def test_new_models_are_only_listed_if_models_are_loaded_on_request(tmp_path: Path) -> None:
    write(tmp_path / "m", 1)
    models = Models(tmp_path, loads_new_models=False)
    await models.control.start(loads_all=False)
    write(tmp_path / "new", 2)
    await models.sync()
    not_loaded = ("UNAVAILABLE", "not loaded at the start")
    assert models.index() == {("m", ""): not_loaded, ("new", ""): not_loaded}
    await models.control.load("m")
    write(tmp_path / "m", 3)
    await models.sync()
    assert await models.value("m") == 3
    await models.control.close()


async def test_a_model_that_was_loaded_from_a_url_stays(models: Models, tmp_path: Path) -> None:
    write(tmp_path / "elsewhere", 5)
    await models.control.load("registered", url=str(tmp_path / "elsewhere"))
    write(models.folder / "registered", 6)
    await models.sync()
    assert await models.value("registered") == 5
    shutil.rmtree(models.folder / "registered")
    await models.sync()
    assert await models.value("registered") == 5


def test_files_of_a_model(tmp_path: Path) -> None:
    model, linked = tmp_path / "model", tmp_path / "linked"
    write(model, 1)
    write(linked / "1", 2)
    write(model / "other", 3)
    (model / "other" / "model-settings.json").write_text("{}")
    (model / ".hidden").touch()
    (model / "weights").symlink_to(linked)
    (linked / "loop").symlink_to(model / "weights")
    names = [Path(path).relative_to(tmp_path).as_posix() for path, *_ in file_states(model)]
    assert names == [f"model/{name}" for name in ("model.py", "value.txt", "weights/1/model.py", "weights/1/value.txt")]
    (tmp_path / "a.onnx").write_text("model")
    assert [(Path(path).name, size) for path, _, size, _ in file_states(tmp_path / "a.onnx")] == [("a.onnx", 5)]
    (tmp_path / "a.onnx.data").write_text("weights")
    assert [size for *_, size, _ in file_states(tmp_path / "a.onnx")] == [5, 7]


async def test_the_warm_up_file_is_a_file_of_the_model(models: Models, tmp_path: Path) -> None:
    (models.folder / "m" / "dragoman.toml").write_text('[model]\nwarmup = "../../warmup.json"\n')
    (tmp_path / "warmup.json").write_text("[]")
    await models.sync()
    (tmp_path / "warmup.json").write_text("[1]")
    await models.sync()
    assert "warm-up: request 1" in models.index()["m", "1"][1]


async def test_the_files_of_class_labels_are_files_of_the_model(models: Models) -> None:
    (models.folder / "m" / "dragoman.toml").write_text('[model.labels]\nvalue = "labels.txt"\n')
    replace_file(models.folder / "m" / "labels.txt", "cat")
    await models.sync()
    replace_file(models.folder / "m" / "labels.txt", "dog")
    await models.sync()
    assert models.index() == {("m", "1"): READY}
    assert models.registry.find("m", "1").labels["value"].names == ("dog",)


async def test_calls_of_sync_are_apart_however_often_files_change(tmp_path: Path) -> None:
    times: list[float] = []

    async def sync(_: Changes) -> Changes:
        times.append(time.monotonic())
        return {}

    watching = asyncio.create_task(FolderWatch([str(tmp_path)], 0.1, sync).run())
    end_s = time.monotonic() + 60
    while len(times) < 5 and time.monotonic() < end_s:
        (tmp_path / "file").write_text(str(time.monotonic_ns()))
        await asyncio.sleep(0.002)
    watching.cancel()
    assert len(times) == 5
    assert min(after - before for before, after in itertools.pairwise(times)) >= 0.1


async def test_a_folder_that_is_replaced_is_watched_further(tmp_path: Path) -> None:
    served, synced = tmp_path / "models", asyncio.Event()
    served.mkdir()

    async def sync(_: Changes) -> Changes:
        synced.set()
        return {}

    async def change(file: Path) -> None:
        await asyncio.sleep(0.2)  # the watch is at rest
        synced.clear()
        file.write_text("x")
        async with asyncio.timeout(60):
            await synced.wait()

    watching = asyncio.create_task(FolderWatch([str(served)], 0.05, sync).run())
    await change(served / "a")
    os.rename(served, tmp_path / "old")
    served.mkdir()
    await change(served / "b")
    await change(served / "c")
    watching.cancel()


async def test_a_missing_path_is_an_error_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(errors.InvalidInput, match="missing' not found"):
        open_engine(tmp_path / "missing", watch=True)
    async with open_engine(tmp_path, watch=True) as engine:
        assert engine.ready()
