"""Where a model is created first, if the operator does not say where it runs."""

import os

from dragoman import plugins
from dragoman.core.spec import ModelSpec, Placement

# What identifies the code of a model: runtime, uri, and inode, size and time of its file.
_Code = tuple[str, str, int, int, int]

_MAX_REMEMBERED = 10_000


class PreferredPlacements:
    """Remembers where the classes in Python files prefer to run.

    Without it each model of such a class starts a worker process, only to find out that it is not to run there.
    """

    def __init__(self) -> None:
        self._by_code: dict[_Code, Placement] = {}

    def first(self, spec: ModelSpec) -> Placement:
        """Return where to create a model first; it may then raise WrongPlacement before it is loaded."""
        if spec.placement:
            return spec.placement
        if spec.target is not None:
            return "thread"
        code = _code(spec)
        known = self._by_code.get(code) if code is not None else None
        return known or plugins.runtime(spec.runtime or "python").placement_for(spec)

    def remember(self, spec: ModelSpec, placement: Placement) -> None:
        """Record where a model has preferred to run."""
        code = _code(spec)
        if code is not None:
            if len(self._by_code) >= _MAX_REMEMBERED:
                self._by_code.clear()
            self._by_code[code] = placement


def _code(spec: ModelSpec) -> _Code | None:
    """Return what identifies the code of a model; None unless it is an object in a Python file, or a `model.py`."""
    file, separator, _ = spec.uri.rpartition(".py:")
    if not separator and (spec.runtime or "python") != "python":
        return None
    try:
        stat = os.stat(f"{file}.py" if separator else os.path.join(spec.uri, "model.py"))
    except OSError:
        return None
    return spec.runtime, spec.uri, stat.st_ino, stat.st_size, stat.st_mtime_ns
