"""What the runtimes share: the file that a spec names, and the package that reads it."""

import importlib
import os
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dragoman.core.errors import ModelFailed
from dragoman.core.spec import ModelSpec

_TRANSFORMERS_LOADS = threading.Lock()


def package(name: str, extra: str) -> Any:
    """The imported package, untyped as most frameworks are; ModelFailed saying how to install it."""
    try:
        return importlib.import_module(name)
    except ImportError as fault:
        raise ModelFailed(
            f"this model needs the package '{name}', which cannot be imported ({fault}); "
            f"pip install 'dragoman[{extra}]'"
        ) from fault


@contextmanager
def transformers_alone(extra: str) -> Iterator[Any]:
    """The package transformers, for one model at a time and without lines of its own beside our log.

    While it loads a model it changes PyTorch for the whole process (no tied weights, tensors without memory), so that
    two models at a time would spoil each other.
    """
    # The library would otherwise report its use to its makers.
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    with _TRANSFORMERS_LOADS:
        transformers = package("transformers", extra)
        transformers.utils.logging.disable_progress_bar()
        if "TRANSFORMERS_VERBOSITY" not in os.environ:
            transformers.utils.logging.set_verbosity_error()
        yield transformers


def model_path(spec: ModelSpec) -> Path:
    """The file or folder of `spec.uri`; ModelFailed where there is none."""
    path = Path(spec.uri)
    if not spec.uri or not path.exists():
        raise ModelFailed(f"there is no file '{spec.uri}'; expected the path of the model's file as its uri")
    return path


def check_pickle(path: Path, spec: ModelSpec) -> None:
    """ModelFailed unless the operator allows files that can run code when loaded."""
    if not spec.allow_pickle:
        raise ModelFailed(
            f"'{path.name}' is not loaded: files of this kind can run code when loaded; start with --allow-pickle "
            "(DRAGOMAN_ALLOW_PICKLE=true) if you trust it"
        )


def is_torchscript(path: Path) -> bool:
    """Whether the file is a TorchScript archive, not pickled weights: it holds code beside its constants."""
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        # The first folder of every name is the archive's own name.
        names = {name.partition("/")[2] for name in archive.namelist()}
    return "constants.pkl" in names and any(name.startswith("code/") for name in names)
