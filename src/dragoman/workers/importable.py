"""A live class or function becomes the path by which another process can import it."""

import inspect
import sys
from dataclasses import replace
from typing import Any

from dragoman import plugins
from dragoman.core.errors import ModelFailed
from dragoman.core.spec import ModelSpec


def importable(spec: ModelSpec) -> ModelSpec:
    """The spec without a live object. Raises ModelFailed where its target cannot be imported by name."""
    if spec.target is None:
        return spec
    path = _path(spec.target)
    if path is None:
        raise ModelFailed(
            f"model '{spec.name}': placement 'process' needs 'module:object' or 'file.py:object', or a class or "
            f"function that can be imported by its name; got {spec.target!r}"
        )
    return replace(spec, target=None, uri=path, runtime="python")


def _path(target: Any) -> str | None:
    if not (inspect.isclass(target) or inspect.isfunction(target)) or "<" in target.__qualname__:
        return None
    module, name = target.__module__, target.__qualname__
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is not None and (module == "__main__" or module.startswith("dragoman_file_")):
        # Neither name means anything elsewhere. Not tried here: importing the main file would run it once more.
        return f"{file}:{name}" if file.endswith(".py") else None
    path = f"{module}:{name}"
    try:
        return path if plugins.resolve(path) is target else None
    except ModelFailed:
        return None
