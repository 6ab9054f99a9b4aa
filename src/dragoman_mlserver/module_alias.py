"""Import our modules under the names of packages that are not installed."""

import importlib
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
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
