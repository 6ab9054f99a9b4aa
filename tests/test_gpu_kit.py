"""The GPU kit, rehearsed on a CPU: what it installs, its parts in processes of their own, and its tables."""

import importlib.metadata
import json
import os
import sys
import time
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.gpu import __main__ as kit  # noqa: E402
from benchmarks.gpu import setup  # noqa: E402


@pytest.mark.slow
def test_a_part_is_rehearsed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = tmp_path / "gpu.json"
    assert kit.main(["--rehearse", "--only", "onnx", "--into", str(result)]) == 0
    part = json.loads(result.read_text())["parts"]["onnx"]
    assert part["relative_error"] < 1e-5
    assert "| onnx |" in capsys.readouterr().out


def test_unknown_parts_are_rejected() -> None:
    with pytest.raises(SystemExit, match=r"--only: expected some of device, .*, got 'x'"):
        kit.main(["--only", "onnx,x"])


def test_a_part_that_fails_is_recorded_with_its_last_lines(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "print('working'); raise SystemExit('it is broken')"]
    found = kit._run(command, tmp_path / "part", dict(os.environ), 60)
    assert found["failed"] == "it ended with the status 1"
    assert found["last_lines"] == ["working", "it is broken"]


def test_a_part_that_takes_too_long_is_ended_with_its_processes(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)"
    )
    found = kit._run([sys.executable, "-c", code], tmp_path / "part", dict(os.environ), 5)
    assert found["failed"] == "it took more than 5 s"
    child = Path("/proc", found["last_lines"][0], "stat")
    while child.exists() and child.read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)


def test_a_missing_package_is_installed_from_a_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup, "required", lambda: ["numpy>=2", "missing-of-kit>=1", "absent-of-kit"])
    wheels, name = tmp_path / "wheels", "missing_of_kit-1.5"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / f"{name}-py3-none-any.whl", "w") as file:
        file.writestr("missing_of_kit.py", "VALUE = 5\n")
        file.writestr(f"{name}.dist-info/METADATA", "Metadata-Version: 2.1\nName: missing-of-kit\nVersion: 1.5\n")
        file.writestr(f"{name}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{name}.dist-info/RECORD", "")
    environment, missing = setup.prepare(tmp_path / "site", wheels)
    assert missing == {"absent-of-kit": "not installed"}
    assert (tmp_path / "site" / "missing_of_kit.py").read_text() == "VALUE = 5\n"
    assert environment["PYTHONPATH"].split(os.pathsep)[:3] == [str(tmp_path / "site"), str(ROOT / "src"), str(ROOT)]


def test_the_source_has_the_plug_ins_of_an_installed_package(tmp_path: Path) -> None:
    setup._write_plugins(tmp_path)
    (written,) = importlib.metadata.distributions(name="dragoman", path=[str(tmp_path)])
    installed = importlib.metadata.distribution("dragoman")
    assert sorted(map(str, written.entry_points)) == sorted(map(str, installed.entry_points))


def test_tables_have_each_part_and_the_share_of_the_limit() -> None:
    row = {"clients": 1, "tokens_per_s": 400.0, "first_ms": 9.5, "gap_ms": 2.5}
    parts = {
        "device": {"took_s": 5.0, "limits": {"copy_gb_per_s": 4000.0}},
        "texts-float32": {"texts": {"llama": {"equal": 12, "rounding": 0, "wrong": 0, "forward": "ours"}}},
        "steps": {"weight_bytes": 4_000_000_000, "rows": [{"sequences": 1, "step_ms": 2.0, "with_choice_ms": 2.25}]},
        "server": {"rows": [row, {**row, "clients": 8}]},
        "onnx": {"not_available": "no provider"},
        "torch": {"failed": "it ended with the status 1"},
    }
    text = kit.table({"parts": parts})
    assert "| onnx | 0 | no provider |" in text
    assert "| torch | 0 | it ended with the status 1 |" in text
    assert "| llama | float32 | 12 | 0 | 0 | ours |" in text
    assert "| steps | 1 | 2.000 | 2.250 | 1.000 | 0.50 |" in text
    assert "| server | 1 | 400 | 9.5 | 2.50 | 0.40 |" in text
    assert "| server | 8 | 400 | 9.5 | 2.50 |  |" in text
