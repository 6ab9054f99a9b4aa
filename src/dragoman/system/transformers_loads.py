"""The lock around loads with transformers."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from dragoman.system.threads import PYTORCH_LOADS


@contextmanager
def transformers_lock(require: Callable[[str], Any]) -> Iterator[Any]:
    """Hold the lock of loads with transformers, and return what `import_transformers` returns."""
    with PYTORCH_LOADS:
        yield import_transformers(require)


def import_transformers(require: Callable[[str], Any]) -> Any:
    """Import transformers with `require` and silence its log; the caller holds the lock of its loads.

    Raises RuntimeError if a load that was given up has left transformers changed.
    """
    # Without this variable the library sends telemetry.
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    transformers = require("transformers")
    if _is_changed(transformers):
        raise RuntimeError("the load of another model never ended and has left transformers changed; restart")
    transformers.utils.logging.disable_progress_bar()
    if "TRANSFORMERS_VERBOSITY" not in os.environ:
        transformers.utils.logging.set_verbosity_error()
    return transformers


def _is_changed(transformers: Any) -> bool:
    """Return whether a method is replaced that loads replace while they run."""
    cls = transformers.PreTrainedModel
    return any(getattr(cls, name).__name__ != name for name in ("tie_weights", "init_weights"))
