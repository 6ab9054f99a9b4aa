"""Make Dragoman importable on a bare machine: missing packages from a folder of wheels, and the source's plug-ins."""

import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.processes import ROOT

WHEELS = ROOT / "benchmarks" / "gpu" / "wheels"
_EXTRAS = ("text", "grpc", "onnx", "torch")
# Of the clients, and what these need.
_CLIENTS = ("tritonclient", "python-rapidjson")


def required() -> Sequence[str]:
    """Return the names of the packages that the kit needs, with the versions that pyproject.toml asks for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [each for name in _EXTRAS for each in project["optional-dependencies"][name]]
    return [*project["dependencies"], *extras, *_CLIENTS]


def prepare(site: Path, wheels: Path = WHEELS) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """Install into `site` what is missing. Return the environment of processes, and what is missing all the same."""
    missing = dict(filter(None, map(_unmet, required())))
    found = [path for path in sorted(wheels.glob("*.whl")) if _normal(path.name.split("-")[0]) in missing]
    if found:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
        subprocess.run([*command, "--upgrade", "--target", str(site), *map(str, found)], check=True)
    _write_plugins(site)
    paths = [str(site), str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    names = {_normal(path.name.split("-")[0]) for path in found}
    return environment, {name: reason for name, reason in missing.items() if name not in names}


def _unmet(requirement: str) -> tuple[str, str] | None:
    """Return the name of a package that is not installed as required, and why; None if it is."""
    from packaging.requirements import Requirement

    parsed = Requirement(requirement)
    if parsed.marker is not None and not parsed.marker.evaluate():
        return None
    try:
        version = importlib.metadata.version(parsed.name)
    except importlib.metadata.PackageNotFoundError:
        return _normal(parsed.name), "not installed"
    return None if parsed.specifier.contains(version, prereleases=True) else (_normal(parsed.name), version)


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _write_plugins(site: Path) -> None:
    """Write the entry points of pyproject.toml as those of an installed package, since the source is not installed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    folder = site / "dragoman-0+source.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    groups = {"console_scripts": project["scripts"], **project["entry-points"]}
    lines = [
        line for name, group in groups.items() for line in (f"[{name}]", *(f"{k} = {v}" for k, v in group.items()))
    ]
    (folder / "entry_points.txt").write_text("\n".join(lines) + "\n")
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: dragoman\nVersion: 0+source\n")
