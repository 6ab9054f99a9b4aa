"""Import our modules under the names of packages that are not installed."""

import importlib
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


class ModuleAlias(Loader):
    """Load one module object under two names, so that its classes are identical under both."""

    def __init__(self, name: str) -> None:
        self._name = name

    def create_module(self, _spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._name)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the import system has replaced it with that of the alias


class AliasFinder(MetaPathFinder):
    """Find the modules of packages that are not installed.

    modules: our module by the name under which it is imported; parent packages must be included.
    """

    def __init__(self, modules: Mapping[str, str]) -> None:
        self.modules = dict(modules)

    def find_spec(
        self, fullname: str, _path: Sequence[str] | None = None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package = fullname.partition(".")[0]
        if fullname not in self.modules or PathFinder.find_spec(package) is not None:
            return None
        is_package = any(name.startswith(f"{fullname}.") for name in self.modules)
        return ModuleSpec(fullname, ModuleAlias(self.modules[fullname]), is_package=is_package)


def install_aliases(modules: Mapping[str, str]) -> None:
    """Add a finder of these modules to the import system, once."""
    if not any(isinstance(finder, AliasFinder) and finder.modules == modules for finder in sys.meta_path):
        sys.meta_path.insert(0, AliasFinder(modules))
