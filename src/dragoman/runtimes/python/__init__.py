"""The runtime of models in Python: classes, functions and typed callables."""

from typing import Any

from dragoman.core.model import Model
from dragoman.core.runtime import Runtime
from dragoman.core.spec import ModelSpec


def _load(spec: ModelSpec) -> Model:
    from dragoman.runtimes.python.model import load

    return load(spec)


def _check(spec: ModelSpec) -> None:
    from dragoman.runtimes.files import check_source

    check_source(spec)


def model_names(file: str, attribute: str = "") -> dict[str, Any]:
    """Return the names that the models in a file give themselves; this runs the file."""
    from dragoman.runtimes.python.model import umbridge_models

    return umbridge_models(file, attribute)


RUNTIME = Runtime(
    load=_load,
    suffixes=(".py",),
    folder_files=("model.py",),
    priority=10,
    uri_is_path=False,  # it may be module:attribute
    check=_check,
    model_names=model_names,
)
