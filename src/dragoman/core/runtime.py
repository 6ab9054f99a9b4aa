"""Declaration of a runtime: the model files that it loads, the packages that it needs, and its loader."""

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import Struct

from dragoman.core.dialect import Dialect
from dragoman.core.errors import ModelFailed
from dragoman.core.model import Model
from dragoman.core.spec import ModelSpec, Placement
from dragoman.system.load_steps import load_step

# Names of packages, where their modules have others.
_INSTALLED_AS = {"sklearn": "scikit-learn"}


def _any(_path: Path) -> bool:
    return True


def _none(_path: Path) -> bool:
    return False


def lazy_function(name: str) -> Callable[..., Any]:
    """Return a function that calls `module:attribute`, which is imported at the first call."""
    module, _, attribute = name.partition(":")

    def call(*arguments: Any) -> Any:
        return getattr(importlib.import_module(module), attribute)(*arguments)

    call.__module__, call.__qualname__ = module, attribute  # by which another process finds it
    return call


class PythonObjects(NamedTuple):
    """Python objects of a kind that are models, as an entry point of the group `dragoman.python_objects` names it.

    accept: returns whether an object or a class is of this kind.
    load: makes the Model of one. Raises ModelFailed.
    names_itself: returns whether the name of a model is its own, not that of its variable or its file.
    own_name: returns that name, "" if it has none. It may make an instance of a class.
    """

    accept: Callable[[Any], bool]
    load: Callable[[Any, ModelSpec], Model]
    names_itself: Callable[[Any], bool]
    own_name: Callable[[Any], str]


class Runtime(Struct, frozen=True, kw_only=True):
    """A runtime, as an entry point of the group `dragoman.runtimes` names it.

    Reading a declaration must not import the framework: `load` imports it.

    Parameters
    ----------
    load : makes the model of a spec: a subclass of `Model`, or a function.
    packages : the packages that every model of this runtime needs, by their import names.
    extra : the extra of this project that installs them.
    suffixes : files with these suffixes (lower case) are models of this runtime.
    shared_suffixes : files with these suffixes are, if `is_model_file(path)`; other files have them, too.
    expected : contents of a model file with a shared suffix, for the message that rejects another file.
    objects : the classes, as `module.Class`, whose instances `load` takes as the `target` of a spec: a pickle that
        holds one is a model of this runtime.
    folder_files : a folder that holds one of these files is a model of this runtime; so is one with
        `is_model_folder(path)`.
    priority : if several runtimes recognise a file or folder, the one with the highest priority loads it.
    own_name : returns the name that a file or folder gives its model, "" for none.
    model_names : returns the names that the models in a file, or its `attribute`, give themselves. It runs the file, so
        it is called in a process of its own.
    placement : where models run unless the operator or the model says otherwise, or a function of the spec.
    calls_models : models may call others of the server at any time, whatever they declare.
    config_file : the file in the folder of a model that holds its configuration, which a load request may replace.
    uri_is_path : the uri of a model is always a file or a folder.
    unsupported : by the name of a call that models do not support, how to serve them so that they do; it
        continues the error message.
    dialect : habits of the server that the models are written for, unless files beside them name others.
    check : raises ModelFailed if a model cannot be loaded, as far as its files show that without running code.
    """

    load: Callable[[ModelSpec], Model]
    packages: tuple[str, ...] = ()
    extra: str = ""
    suffixes: tuple[str, ...] = ()
    shared_suffixes: tuple[str, ...] = ()
    is_model_file: Callable[[Path], bool] = _any
    expected: str = ""
    objects: tuple[str, ...] = ()
    folder_files: tuple[str, ...] = ()
    is_model_folder: Callable[[Path], bool] = _none
    priority: int = 0
    own_name: Callable[[Path], str] | None = None
    model_names: Callable[[str, str], Mapping[str, Any]] | None = None
    placement: Placement | Callable[[ModelSpec], Placement] = "process"
    calls_models: bool = False
    config_file: str = ""
    uri_is_path: bool = True
    unsupported: Mapping[str, str] = {}
    check: Callable[[ModelSpec], None] | None = None
    dialect: Dialect | None = None

    def recognises(self, path: Path) -> bool:
        """Return whether a file or folder is a model of this runtime."""
        if path.is_dir():
            return any((path / name).is_file() for name in self.folder_files) or self.is_model_folder(path)
        suffix = path.suffix.lower()
        return suffix in self.suffixes or (suffix in self.shared_suffixes and self.is_model_file(path))

    def placement_for(self, spec: ModelSpec) -> Placement:
        """Return where a model runs unless the operator or the model itself says otherwise."""
        return self.placement(spec) if callable(self.placement) else self.placement

    def require(self, package: str) -> Any:
        """Import a package, untyped as most frameworks are. Raises ModelFailed that says how to install it."""
        try:
            # Also if the module is in `sys.modules`: another thread may still import it.
            with load_step(f"importing {_INSTALLED_AS.get(package.partition('.')[0], package)}"):
                return importlib.import_module(package)
        except ImportError as error:
            raise ModelFailed(
                f"this model needs the package '{package}', which cannot be imported ({error}); {self.install(package)}"
            ) from error

    def install(self, package: str) -> str:
        return f"pip install 'dragoman[{self.extra}]'" if self.extra else f"pip install {package.partition('.')[0]}"
