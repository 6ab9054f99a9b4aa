"""Replace a live class or function by the path from which a worker process can import it."""

import inspect
import sys
from dataclasses import replace
from operator import attrgetter
from typing import Any

from dragoman.core.errors import ModelFailed
from dragoman.core.spec import ModelSpec


def importable(spec: ModelSpec) -> ModelSpec:
    """Return the spec with a path instead of a live object. Raises ModelFailed if the object has no such path."""
    if spec.target is None:
        return spec
    path = _import_path(spec.target)
    if path is None:
        raise ModelFailed(
            f"model '{spec.name}': placement 'process' needs 'module:object', 'file.py:object', or a class or function "
            f"at the top level of a module or script; got {spec.target!r}; otherwise set placement 'thread'"
        )
    return replace(spec, target=None, uri=path, runtime="python")


def _import_path(target: Any) -> str | None:
    """Return `module:object` or `file.py:object`; None if another process would not find this very object there."""
    module = sys.modules.get(getattr(target, "__module__", ""))
    if module is None or not (inspect.isclass(target) or inspect.isfunction(target)):
        return None
    try:
        if attrgetter(target.__qualname__)(module) is not target:
            return None
    except AttributeError:  # defined in a function
        return None
    place = module.__name__
    if place == "__main__" and module.__spec__ is not None:
        place = module.__spec__.name  # `python -m`: its imports may be relative
    elif place == "__main__" or place.startswith("dragoman_file_"):  # names that mean nothing in another process
        place = getattr(module, "__file__", None) or ""
        if not place.endswith(".py"):
            return None
    return f"{place}:{target.__qualname__}"
