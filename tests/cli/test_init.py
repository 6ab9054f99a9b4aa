"""`dragoman init`: the new project's test passes, and its README runs."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import dragoman
from dragoman.cli import main


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_new_project_passes_its_test_and_is_served(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "rain-fall"]) == 0
    out = capsys.readouterr().out.splitlines()
    files = ["models/rain-fall/model.py", "tests/test_model.py", "pytest.ini", "Containerfile", "README.md"]
    assert out[:5] == [f"rain-fall/{file}" for file in files]
    project = folder / "rain-fall"
    # Settings and the conftest.py of a folder around it are not those of the project.
    (folder / "pyproject.toml").write_text('[tool.pytest.ini_options]\naddopts = "--strict-config"\nunknown = 1\n')
    (folder / "conftest.py").write_text("import a_package_that_is_not_installed\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout
    assert "2 passed" in done.stdout
    readme = (project / "README.md").read_text()
    with dragoman.Server(project / "models", http_port=0, grpc_port=-1, placement="inline") as server:
        url = "http://127.0.0.1:8080"
        for line in re.findall(r"^dragoman (?!serve)(.*)$", readme, re.M):
            words = line.replace(url, server.http_url).split()
            assert main(words if server.http_url in words else [*words, server.http_url]) == 0
        assert capsys.readouterr().out.splitlines()[-3:] == ["y", "0", "2"]
        (code,) = re.findall(r"```python\n(.*?)```", readme, re.S)
        exec(code.replace(url, server.http_url), {})
        assert capsys.readouterr().out == "[0. 2.]\n"


def test_names(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "--json"]) == 0
    created = json.loads(capsys.readouterr().out)
    assert created["name"] == "my_model"
    assert all((folder / file).is_file() for file in created["files"])
    assert main(["init"]) == 2
    assert capsys.readouterr().err.startswith("dragoman: 'my_model' exists already: expected a NAME of no file")
    assert main(["init", "a b"]) == 2
    assert "model name 'a b' is not allowed" in capsys.readouterr().err
    (folder / "file").touch()
    assert main(["init", "file/x"]) == 2
    assert capsys.readouterr().err.startswith("dragoman: 'file/x/")
