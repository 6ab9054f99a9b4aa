"""The Containerfile keeps the rules for images, and its lock files match pyproject.toml.

No image is built here: `scripts/test-container` does that.
"""

import json
import re
import shlex
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from dragoman import __version__
from dragoman.settings import from_environment, parse_settings
from e2e.server_process import MODELS, running_server

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
COMMON = ("onnx", "sklearn", "xgboost", "lightgbm", "mlflow", "metrics", "jwt", "watch", "tracing")
LOCKS = {"container.txt": COMMON, "container-torch.txt": (*COMMON, "torch", "huggingface")}


def instructions() -> list[tuple[str, str]]:
    """Return the instructions of the Containerfile and their arguments."""
    lines = [line for line in (ROOT / "Containerfile").read_text().splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in joined.splitlines() if line.strip()]


def last(name: str) -> str:
    return [value for verb, value in instructions() if verb == name][-1]


def environment() -> dict[str, str]:
    """Return the variables of the final stage."""
    words = shlex.split(last("ENV"))
    return dict(word.split("=", 1) for word in words)


def test_the_image_is_pinned_and_runs_without_privileges() -> None:
    images = [value for verb, value in instructions() if verb == "FROM"]
    assert images == ["${PYTHON_IMAGE} AS build", "${PYTHON_IMAGE}"]
    assert re.fullmatch(r"PYTHON_IMAGE=docker\.io/library/python:3\.\d+-\S+@sha256:[0-9a-f]{64}", instructions()[0][1])
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", last("USER"))
    assert (json.loads(last("ENTRYPOINT")), json.loads(last("CMD"))) == (["dragoman", "serve"], ["/models"])
    assert f'version="{__version__}"' in last("LABEL")
    for verb, value in instructions():
        if verb == "RUN" and " install " in value:
            assert "--require-hashes" in value or "--no-index" in value


def test_variables_of_the_image_are_settings_and_paths_below_tmp() -> None:
    settings = parse_settings(from_environment(environment()))
    assert (settings.host, settings.log_format) == ("0.0.0.0", "json")
    for name in ("HOME", "HF_HOME", "TORCHINDUCTOR_CACHE_DIR"):
        assert environment()[name].startswith("/tmp")


def test_copied_files_exist_and_are_not_ignored() -> None:
    rules = (ROOT / ".dockerignore").read_text().split()
    assert rules[0] == "*"
    allowed = {rule[1:] for rule in rules if rule.startswith("!")}
    for verb, value in instructions():
        if verb == "COPY" and not value.startswith("--from"):
            for source in value.replace("${LOCK}", "requirements/container.txt").split()[:-1]:
                assert (ROOT / source).exists(), source
                assert any(fnmatch(source.split("/")[0], name) for name in allowed), source
    assert {PROJECT["readme"], *(name.split("/")[0] for name in PROJECT["license-files"])} <= allowed


def test_the_health_check_follows_the_server() -> None:
    command = json.loads(last("HEALTHCHECK").partition(" CMD ")[2])
    assert command[:2] == ["python", "-c"]
    with running_server(f"{MODELS / 'trouble.py'}:Twice") as process:
        check = [sys.executable, *command[1:]]
        variables = {"DRAGOMAN_HTTP_PORT": str(process.http_port)}
        assert subprocess.run(check, env=variables, capture_output=True).returncode == 0
        process.terminate()
        process.wait_for_exit()
        assert subprocess.run(check, env=variables, capture_output=True).returncode == 1


@pytest.mark.parametrize("name", [*LOCKS, "container-build.txt"])
def test_locked_packages_have_hashes(name: str) -> None:
    text = (ROOT / "requirements" / name).read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.strip()]
    assert lines
    for line in lines:
        assert re.match(r"[A-Za-z0-9._-]+==\S+", line), line
        assert "--hash=sha256:" in line


@pytest.mark.parametrize("name", LOCKS)
def test_lock_files_hold_what_pyproject_asks_for(name: str) -> None:
    """Fails if a dependency was added or raised and `scripts/lock` was not run."""
    text = (ROOT / "requirements" / name).read_text()
    locked = {canonicalize_name(n): v for n, v in re.findall(r"^([A-Za-z0-9._-]+)==([^\s;]+)", text, re.M)}
    expected = [*PROJECT["dependencies"]]
    for extra in LOCKS[name]:
        expected += PROJECT["optional-dependencies"][extra]
    for requirement in map(Requirement, expected):
        if requirement.marker is None or requirement.marker.evaluate():
            version = locked[canonicalize_name(requirement.name)]
            assert requirement.specifier.contains(version, prereleases=True), requirement
    script = (ROOT / "scripts" / "lock").read_text()
    assert f"common=({' '.join(COMMON)})" in script
