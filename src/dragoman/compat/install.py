"""Make `import mlserver` import our module if that package is not installed."""

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
    """Add the finder of `mlserver` and its submodules; an installed package takes precedence."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, _path: Sequence[str] | None = None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        top, _, rest = fullname.partition(".")
        if top != _THEIRS or not (_is_ours(sys.modules.get(_THEIRS)) if rest else PathFinder.find_spec(top) is None):
            return None  # also for submodules that the installed package lacks
        name = f"{_OURS}.{rest}" if rest else _OURS
        found = find_spec(name)
        if found is None:
            return None
        return ModuleSpec(fullname, _Alias(name), is_package=found.submodule_search_locations is not None)


class _Alias(Loader):
    """Load one module object under two names, so that its classes are identical under both."""

    def __init__(self, name: str) -> None:
        self._name = name

    def create_module(self, _spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._name)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the import system has replaced it with that of the alias


def _is_ours(module: ModuleType | None) -> bool:
    return module is not None and module.__name__ == _OURS
