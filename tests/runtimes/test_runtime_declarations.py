"""Declarations of runtimes and other plug-ins agree with entry points, recognition, messages and docs."""

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path

import pytest

from dragoman import plugins
from dragoman.core.errors import ModelFailed
from dragoman.core.runtime import Runtime
from dragoman.core.spec import ModelSpec
from dragoman.runtimes.files import preflight_check
from dragoman.runtimes.recognise import recognise, refusal

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
GROUPS: dict[str, dict[str, str]] = PROJECT["entry-points"]


def test_the_installed_entry_points_are_those_of_the_project() -> None:
    there = {(e.group, e.name, e.value) for e in distribution("dragoman").entry_points if e.group in GROUPS}
    declared = {(group, name, value) for group, entries in GROUPS.items() for name, value in entries.items()}
    assert there == declared, "pyproject.toml has changed: run ./scripts/setup"


@pytest.mark.parametrize("group", GROUPS)
def test_every_entry_point_can_be_resolved(group: str) -> None:
    for name in GROUPS[group]:
        if not group.startswith("dragoman.codecs"):  # codecs import their packages
            assert callable(getattr(plugins.find(group.removeprefix("dragoman."), name), "load", len)), name


def test_every_runtime_is_declared() -> None:
    for name in GROUPS["dragoman.runtimes"]:
        assert isinstance(plugins.find("runtimes", name), Runtime), name


def test_reading_the_declarations_imports_no_framework() -> None:
    packages = {p for runtime in plugins.built_in_runtimes().values() for p in runtime.packages}
    code = "import sys; from dragoman import plugins; plugins.built_in_runtimes(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert len(packages) > 10
    assert not packages & set(done.stdout.split())


def test_every_extra_is_one_of_the_project() -> None:
    for name, runtime in plugins.built_in_runtimes().items():
        assert bool(runtime.extra) == bool(runtime.packages), name
        assert not runtime.extra or runtime.extra in PROJECT["optional-dependencies"], name


def test_the_guide_lists_what_the_runtimes_declare() -> None:
    text = (ROOT / "docs" / "serving.md").read_text()
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in re.findall(r"^\|.*\|$", text, re.MULTILINE)]
    first = next(i for i, row in enumerate(rows) if row[:2] == ["file", "runtime"])
    files: dict[str, set[str]] = {}
    for row in rows[first + 2 :]:
        if len(row) != 5:
            break
        name = row[1].strip("`")
        files.setdefault(name, set()).update(re.findall(r"`([^`]+)`", row[0]))
        extra = plugins.runtime(name).extra
        assert row[2] == (f"`dragoman[{extra}]`" if extra else ""), name
    files["graph"] |= set(plugins.runtime("graph").shared_suffixes)  # graph files are recognised by full name
    files["huggingface"].discard("save_pretrained")
    files["kserve"].discard("model.py")  # recognised by its content
    unlisted = {name for name in GROUPS["dragoman.runtimes"] if name not in files}
    assert unlisted == {"vllm", "mlserver", "umbridge"}
    for name, listed in files.items():
        runtime = plugins.runtime(name)
        assert listed == {*runtime.suffixes, *runtime.shared_suffixes, *runtime.folder_files}, name


def test_a_missing_package_is_reported_with_its_extra() -> None:
    runtime = Runtime(load=plugins.runtime("onnx").load, packages=("not_there",), extra="onnx")
    with pytest.raises(ModelFailed, match=r"needs the package 'not_there.inner'.*pip install 'dragoman\[onnx\]'"):
        runtime.require("not_there.inner")


# --- runtimes of other packages ------------------------------------------------------------------------------

_MODULE = """
from pathlib import Path

import dragoman
from dragoman.core.runtime import Runtime


class Lines(dragoman.Model):
    def load(self):
        self.count = len(Path(self.spec.uri).read_text().splitlines())


RUNTIME = Runtime(
    load=Lines,
    packages=("lines_framework",),
    suffixes=(".lines",),
    shared_suffixes=(".joblib", ".txt"),
    is_model_file=lambda path: path.read_bytes().startswith(b"lines"),
    expected="a file of lines",
    placement="thread",
)
"""


@pytest.fixture
def other_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installed package with two runtimes, one of which cannot be imported, and a plain loader."""
    folder = tmp_path / "site"
    (folder / "lines-1.0.dist-info").mkdir(parents=True)
    (folder / "lines-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: lines\nVersion: 1.0\n")
    (folder / "lines-1.0.dist-info" / "entry_points.txt").write_text(
        "[dragoman.runtimes]\nlines = lines_runtime:RUNTIME\n"
        "plain = lines_runtime:Lines\nbroken = lines_absent:RUNTIME\n"
        "onnx = lines_absent:RUNTIME\n"
    )
    (folder / "lines_runtime.py").write_text(_MODULE)
    monkeypatch.syspath_prepend(str(folder))
    plugins.other_runtimes.cache_clear()
    yield
    plugins.other_runtimes.cache_clear()
    sys.modules.pop("lines_runtime", None)


@pytest.mark.usefixtures("other_package")
def test_a_runtime_of_another_package(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name, content, runtime in (
        ("a.lines", b"1\n2\n", "lines"),
        ("a.txt", b"lines\n", "lines"),
        ("b.txt", b"tree\n", "lightgbm"),
        ("a.joblib", b"lines\n", "sklearn"),  # built-in runtimes have priority
        ("c.txt", b"text", None),
    ):
        (tmp_path / name).write_bytes(content)
        assert recognise(tmp_path / name) == runtime, name
    assert caplog.messages == [
        "runtime not available: name=broken error=cannot import 'lines_absent:RUNTIME': "
        "ModuleNotFoundError: No module named 'lines_absent'"
    ]
    assert refusal(tmp_path / "c.txt") == (
        "'c.txt' is not a model: expected a text file of save_model of LightGBM or a JSON or UBJSON file of save_model "
        "of XGBoost or a file of lines"
    )
    spec = ModelSpec(name="a", runtime="lines", uri=str(tmp_path / "a.lines"))
    with pytest.raises(ModelFailed, match=r"^it needs the package 'lines_framework'.*; pip install lines_framework$"):
        preflight_check(spec)
    assert plugins.runtime("lines").placement_for(spec) == "thread"
    assert plugins.runtime("plain").placement_for(spec) == "process"
    for name in ("lines", "plain"):
        model = plugins.runtime(name).load(spec)
        model.load()
        assert vars(model)["count"] == 2
    assert plugins.runtime("onnx").extra == "onnx"  # the built-in one
    with pytest.raises(
        ModelFailed, match=r"^unknown runtime 'x': expected one of broken, .*, lines, .*plain, .*xgboost$"
    ):
        plugins.runtime("x")


def test_a_runtime_beside_a_model_is_not_run_by_the_preflight_check(tmp_path: Path) -> None:
    (tmp_path / "m.bin").touch()
    preflight_check(ModelSpec(name="m", runtime=f"{tmp_path}/absent.py:load", uri=str(tmp_path / "m.bin")))
