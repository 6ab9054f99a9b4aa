"""Digests of model files: the list, and models that are loaded only from files in it."""

import asyncio
import hashlib
import importlib.util
import marshal
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dragoman
from dragoman.cli import main
from dragoman.core.errors import InvalidInput, ModelFailed
from dragoman.core.model_digests import begin_load, check_folder, read_digests, with_digests, write_digests
from dragoman.core.spec import ModelSpec
from rest.rest_server import RestServer, serving

MODEL = """\
import dragoman
import helper

@dragoman.model(placement='{}')
def model(x: float) -> float:
    return helper.f(x)
"""
HELPER = "def f(x):\n    return 2 * x\n"
LOAD = "/v2/repository/models/m/load"


@pytest.fixture(autouse=True)
def compiled_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore what a load in this process changes."""
    monkeypatch.setattr(sys, "pycache_prefix", sys.pycache_prefix)


@pytest.fixture
def models(tmp_path: Path) -> Path:
    folder = tmp_path / "models" / "m"
    folder.mkdir(parents=True)
    (folder / "model.py").write_text(MODEL.format("thread"))
    (folder / "helper.py").write_text(HELPER)
    (folder / "notes").mkdir()
    (folder / "notes" / "a \\b\n.txt").write_text("text")
    (folder / ".hidden").write_text("left out")
    return folder.parent


@pytest.fixture
def listed(models: Path) -> Path:
    file = models.parent / "models.sha256"
    file.write_text("".join(f"{line}\n" for line in write_digests([str(models)])))
    return file


def spec_of(models: Path, listed: Path, **more: Any) -> ModelSpec:
    return ModelSpec(name="m", runtime="python", uri=f"{models / 'm'}", model_digests=str(listed), **more)


def plant_compiled(file: Path, source: str) -> None:
    """Write a compiled file beside a source that Python would use in its place."""
    status, compiled = file.stat(), Path(importlib.util.cache_from_source(str(file)))
    compiled.parent.mkdir(exist_ok=True)
    header = importlib.util.MAGIC_NUMBER + struct.pack("<III", 0, int(status.st_mtime), status.st_size)
    compiled.write_bytes(header + marshal.dumps(compile(source, str(file), "exec")))


async def infer(server: RestServer) -> Any:
    body = {"inputs": [{"name": "x", "shape": [1], "datatype": "FP64", "data": [2.0]}]}
    return (await server.request("POST", "/v2/models/m/infer", body)).json


# --- the list ----------------------------------------------------------------------------------------------------


def test_the_list_is_that_of_sha256sum(models: Path, listed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = read_digests(str(listed))
    assert len(found) == 3
    assert all(hashlib.sha256(Path(path).read_bytes()).hexdigest() == digest for path, digest in found.items())
    program = shutil.which("sha256sum")
    if program is None:
        pytest.skip("sha256sum is not installed")
    subprocess.run([program, "--check", "--strict", "--quiet", str(listed)], check=True)
    monkeypatch.chdir(models.parent)
    files = [os.path.relpath(path) for path in found]
    listed.write_text(subprocess.run([program, *files], check=True, capture_output=True, text=True).stdout)
    assert read_digests(str(listed)) == found  # relative to the folder of the list


def test_the_command(models: Path, listed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["digests", str(models)]) == 0
    assert capsys.readouterr().out == listed.read_text()
    assert main(["digests", str(models / "none")]) == 2
    assert "not found: expected a file or a folder of models" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "setting 'model_digests': '.*' cannot be read: No such file"),
        ("abc  file", "line 1: expected a SHA-256 and a path, as sha256sum writes them, got 'abc  file'"),
        (f"# digests\n\n{'0' * 64}  \n", "line 3: expected a SHA-256"),
        (f"{'0' * 64}  a\n{'1' * 64}  a", "line 2: another SHA-256 of the same path"),
    ],
)
async def test_invalid_lists(models: Path, tmp_path: Path, text: str | None, message: str) -> None:
    file = tmp_path / "list"
    if text is not None:
        file.write_text(text)
    with pytest.raises(InvalidInput, match=message):
        async with serving(models, model_digests=str(file)):
            pass


# --- loading -----------------------------------------------------------------------------------------------------


def _edit(folder: Path) -> None:
    (folder / "helper.py").write_text("def f(x):\n    return 3 * x\n")


def _add(folder: Path) -> None:
    (folder / "json.py").write_text("raise RuntimeError('code of a stranger')\n")


def _nest(folder: Path) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "model-settings.json").write_text("{}")


def _link(folder: Path) -> None:
    (folder / "helper.py").unlink()
    (folder / "helper.py").symlink_to(folder / "model.py")  # another file that is listed


def _remove(folder: Path) -> None:
    (folder / "notes" / "a \\b\n.txt").unlink()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_edit, "its file 'helper.py' differs from the list of digests: SHA-256 "),
        (_add, "its file 'json.py' is not in the list of digests"),
        (_nest, "its file 'model-settings.json' is not in the list of digests"),
        (_link, "its file 'helper.py' differs"),
        (_remove, "is in the list of digests, and missing"),
    ],
)
def test_other_files_are_refused(models: Path, listed: Path, change: Callable[[Path], None], message: str) -> None:
    assert with_digests(spec_of(models, listed)).digests is not None
    change(models / "m")
    with pytest.raises(ModelFailed, match=message):
        with_digests(spec_of(models, listed))


def test_links_to_the_listed_content_are_followed(models: Path, listed: Path, tmp_path: Path) -> None:
    shutil.move(models / "m" / "helper.py", tmp_path / "blob")
    (models / "m" / "helper.py").symlink_to(tmp_path / "blob")
    (models / "m" / "notes" / "loop").symlink_to(models / "m")
    assert with_digests(spec_of(models, listed)).digests is not None


def test_what_has_no_files_is_refused(models: Path, listed: Path) -> None:
    with pytest.raises(ModelFailed, match="'json:loads' has no files that can be checked"):
        with_digests(ModelSpec(name="m", runtime="python", uri="json:loads", model_digests=str(listed)))


def test_files_that_parameters_name_and_adapters(models: Path, listed: Path, tmp_path: Path) -> None:
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "config.json").write_text("{}")
    for value in ({"draft": "../../draft"}, {"a": [{"b": str(tmp_path / "draft")}]}):
        with pytest.raises(ModelFailed, match=r"its file 'config.json' is not in the list"):
            with_digests(spec_of(models, listed, parameters=value))
    assert with_digests(spec_of(models, listed, parameters={"a": "x/y", "b": "./notes"})).digests
    with pytest.raises(ModelFailed, match=r"its file 'config.json' is not in the list"):
        check_folder(str(tmp_path / "draft"), str(listed))
    check_folder(str(models / "m"), str(listed))


@pytest.mark.parametrize("when", ["between", "while"])
@pytest.mark.parametrize("restores", [False, True])
def test_a_change_between_check_and_use_is_found(models: Path, listed: Path, when: str, restores: bool) -> None:
    spec, file = with_digests(spec_of(models, listed)), models / "m" / "helper.py"
    content, status = file.read_bytes(), file.stat()

    def change() -> None:
        file.write_bytes(b"evil")
        if restores:
            file.write_bytes(content)
            os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))

    if when == "between" and not restores:
        change()
        with pytest.raises(ModelFailed, match=r"its file 'helper.py' differs"):
            begin_load(spec)
        return
    check = begin_load(spec)
    assert check is not None
    check.confirm()
    change()
    with pytest.raises(ModelFailed, match=r"its file 'helper.py' was changed while it was loaded"):
        check.confirm()
    (models / "m" / "new.py").write_text("")
    with pytest.raises(ModelFailed, match=r"its file 'new.py' was added or removed"):
        check.confirm()


@pytest.mark.parametrize("placement", ["thread", "process"])
async def test_a_server_with_a_list(models: Path, listed: Path, placement: str) -> None:
    (models / "m" / "model.py").write_text(MODEL.format(placement))
    listed.write_text("\n".join(write_digests([str(models)])))
    plant_compiled(models / "m" / "helper.py", "def f(x):\n    return 9 * x\n")
    async with serving(models, model_digests=str(listed), control_open=True) as server:
        assert (await infer(server))["outputs"][0]["data"] == [4.0]
        _edit(models / "m")
        response = await server.request("POST", LOAD, b"")
        assert (response.status, "its file 'helper.py' differs" in response.error) == (400, True)
        assert (await infer(server))["outputs"][0]["data"] == [4.0]  # the loaded model stays
        (models / "m" / "helper.py").write_text(HELPER)
        source = MODEL.format(placement).replace("helper.f(x)", "5 * helper.f(x)")
        (models / "m" / "model.py").write_text(source)
        listed.write_text("\n".join(write_digests([str(models)])))
        assert (await server.request("POST", LOAD, b"")).status == 200  # the list is read at each load
        assert (await infer(server))["outputs"][0]["data"] == [20.0]


async def test_a_worker_that_starts_again_checks_again(
    models: Path, listed: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (models / "m" / "model.py").write_text(MODEL.format("process"))
    listed.write_text("\n".join(write_digests([str(models)])))
    async with serving(models, model_digests=str(listed)) as server:
        (pid,) = [p for pool in server.dragoman.engine.deployments()[0].pools for p in pool.process_ids().values()]
        _edit(models / "m")
        os.kill(pid, 9)
        async with asyncio.timeout(60):
            while "its file 'helper.py' differs from the list" not in caplog.text:
                await asyncio.sleep(0.05)
        assert (await server.request("GET", "/v2/models/m/ready")).status != 200


async def test_no_code_runs_before_the_check(models: Path, listed: Path, tmp_path: Path) -> None:
    """A file of functions of vectors is imported for the names of its models when the server starts."""
    marker = tmp_path / "ran"
    own_names = "class M:\n    get_input_sizes = 1\n"
    (models / "m" / "model.py").write_text(f"open({str(marker)!r}, 'w')\n{MODEL.format('thread')}\n{own_names}")
    async with serving(models, model_digests=str(listed), control_open=True) as server:
        states = (await server.request("POST", "/v2/repository/index", b"")).json
    assert [each["state"] for each in states] == ["UNAVAILABLE"]
    assert not marker.exists()


def _identity(x: float) -> float:
    return x


def test_objects_of_a_program_need_no_list(listed: Path) -> None:
    with dragoman.Server(_identity, http_port=0, grpc_port=-1, model_digests=str(listed)) as server:
        assert server.engine.ready()
