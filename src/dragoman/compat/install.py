"""Makes `import mlserver` work where that package is not installed, for the models of a folder."""

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from types import ModuleType

_THEIRS = "mlserver"
_OURS = "dragoman.compat.mlserver"


def install() -> None:
    """Let `mlserver` and what is below it be found here, unless the real package is there."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, _path: Sequence[str] | None = None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        top, _, rest = fullname.partition(".")
        if top != _THEIRS or not (_is_ours(sys.modules.get(_THEIRS)) if rest else PathFinder.find_spec(top) is None):
            return None  # a module that the real package lacks is not filled in with ours
        name = f"{_OURS}.{rest}" if rest else _OURS
        found = find_spec(name)
        if found is None:
            return None
        return ModuleSpec(fullname, _Alias(name), is_package=found.submodule_search_locations is not None)


class _Alias(Loader):
    """One module under two names, so that a class is the same whichever name it came by."""

    def __init__(self, name: str) -> None:
        self._name = name

    def create_module(self, _spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._name)
        self._own = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._own  # the import system has put the alias's in its place


def _is_ours(module: ModuleType | None) -> bool:
    return module is not None and module.__name__ == _OURS
