"""Shared by the runtimes: the file of a spec, the rule about pickles, and the lock around transformers."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dragoman.core.errors import ModelFailed
from dragoman.core.runtime import Runtime
from dragoman.core.spec import ModelSpec

_TRANSFORMERS_LOADS = threading.Lock()


@contextmanager
def transformers_lock(runtime: Runtime) -> Iterator[Any]:
    """Import transformers, silence its log, and hold a lock: for loading one model at a time.

    While it loads a model, transformers changes PyTorch for the whole process (no tied weights, tensors without
    memory), so two loads at a time would corrupt each other.
    """
    # Without this variable the library sends telemetry.
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    with _TRANSFORMERS_LOADS:
        transformers = runtime.require("transformers")
        transformers.utils.logging.disable_progress_bar()
        if "TRANSFORMERS_VERBOSITY" not in os.environ:
            transformers.utils.logging.set_verbosity_error()
        yield transformers


def model_path(spec: ModelSpec) -> Path:
    """Return the file or folder of `spec.uri`. Raises ModelFailed if there is none."""
    path = Path(spec.uri)
    if not spec.uri or not path.exists():
        raise ModelFailed(f"there is no file '{spec.uri}'; expected the path of the model's file as its uri")
    return path


def check_pickle(path: Path, spec: ModelSpec) -> None:
    """Raise ModelFailed unless the operator allows files that can run code when they are loaded."""
    if not spec.allow_pickle:
        raise ModelFailed(
            f"'{path.name}' is not loaded: files of this kind can run code when loaded; start with --allow-pickle "
            "(DRAGOMAN_ALLOW_PICKLE=true) if you trust it"
        )
