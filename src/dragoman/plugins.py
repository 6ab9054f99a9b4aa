"""Plug-ins: find an object by its name among the entry points, or by `module:attribute` or `file.py:attribute`."""

import importlib
import importlib.util
import logging
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from dragoman import hooks
from dragoman.core.errors import ModelFailed
from dragoman.core.options import suggestion
from dragoman.core.runtime import Runtime

log = logging.getLogger("dragoman.plugins")

# Two models of one file may load at the same time.
_IMPORTING = threading.RLock()
_under_way = threading.local()


def find(group: str, name: str) -> Any:
    """Return the plug-in `name` of a group.

    Groups are `runtimes`, `pools`, `launchers`, `worker_ports`, `protocols`, `protocol_settings`, `derivatives`,
    `metric_names`, `layers`, `usage` and `codecs.input`. Plug-ins are entry points of the group `dragoman.<group>`.
    Ours go before those of other packages, and `name` may be a `module:attribute` instead. Raises ModelFailed if there
    is none, or if its module cannot be imported.
    """
    entry = hooks.entry(group, name)
    if entry is not None:
        return _resolve(f"{entry.module}:{entry.attr}", importlib.import_module)
    if ":" in name:
        return resolve(name)
    known = sorted({*hooks.own_entries(group), *hooks.other_entries(group)})
    expected = f"expected one of {', '.join(known)}{suggestion(name, known)}"
    raise ModelFailed(f"unknown {group[:-1].replace('_', ' ')} '{name}': {expected}")


def installed_names(group: str) -> list[str]:
    """Return the names of the plug-ins that other packages add to a group."""
    return list(hooks.other_entries(group))


def has(group: str, name: str) -> bool:
    """Return whether a plug-in of that name is installed, without importing it."""
    return hooks.entry(group, name) is not None


def runtime(name: str) -> Runtime:
    """Return the runtime of that name. A plug-in that is a function or a class is the loader of a runtime."""
    found = find("runtimes", name)
    return found if isinstance(found, Runtime) else Runtime(load=found, placement=_placement_of(found))


@cache
def built_in_runtimes() -> Mapping[str, Runtime]:
    """Return the runtimes of this project by name, those with the highest priority first."""
    return _importable(hooks.own_entries("runtimes"))


@cache
def other_runtimes() -> Mapping[str, Runtime]:
    """Return the runtimes of other packages."""
    return _importable(hooks.other_entries("runtimes"))


def _importable(names: Iterable[str]) -> Mapping[str, Runtime]:
    """Return the runtimes of these names. One that cannot be imported is left out, with a line in the log."""
    runtimes = {}
    for name in names:
        try:
            runtimes[name] = runtime(name)
        except ModelFailed as error:
            log.warning("runtime not available: name=%s error=%s", name, error.message)
    return _by_priority(runtimes)


def _by_priority(found: Mapping[str, Runtime]) -> Mapping[str, Runtime]:
    return dict(sorted(found.items(), key=lambda item: (-item[1].priority, item[0])))


def _placement_of(loader: Any) -> Any:
    """Return the placement that a plain loader declares: `placement_for(spec)`, or an attribute."""
    return getattr(loader, "placement_for", None) or getattr(loader, "placement", "") or "process"


def resolve(path: str) -> Any:
    """Return the object of `module:attribute` or `file.py:attribute`. Raises ModelFailed."""
    return _resolve(path, lambda name: import_file(Path(name)) if name.endswith(".py") else _import_module(name))


def _resolve(path: str, import_by_name: Callable[[str], ModuleType]) -> Any:
    module_path, _, attribute = path.rpartition(":")
    try:
        target: Any = import_by_name(module_path)
    except (ImportError, OSError, SyntaxError) as error:
        raise ModelFailed(f"cannot import '{path}': {type(error).__name__}: {error}") from error
    for part in attribute.split("."):
        try:
            target = getattr(target, part)
        except AttributeError as error:
            near = suggestion(part, [name for name in dir(target) if not name.startswith("_")])
            raise ModelFailed(f"cannot import '{path}': '{module_path}' has no '{attribute}'{near}") from error
    return target


def import_file(path: Path) -> ModuleType:
    """Import a file, once until it changes; the modules of its folder can be imported.

    Safe to call from several threads: all get the same, complete module.
    """
    path = path.resolve()
    stat = path.stat()
    name = f"dragoman_file_{abs(hash((str(path), stat.st_mtime_ns, stat.st_size))):x}_{path.stem}"
    with _IMPORTING:
        found = sys.modules.get(name)
        if found is not None:
            return found
        with _model_import(path):
            return _execute(name, path)


def importing() -> str:
    """Return the model file that this thread is importing, "" for none."""
    file: str = getattr(_under_way, "file", "")
    return file


def _import_module(name: str) -> ModuleType:
    """Import a module; one that is not ours and not imported yet may be a model's file."""
    if name in sys.modules or name.partition(".")[0] == __package__:
        return importlib.import_module(name)
    with _IMPORTING:
        spec = importlib.util.find_spec(name)
        if spec is None or not isinstance(spec.loader, SourceFileLoader):
            return importlib.import_module(name)
        with _model_import(Path(spec.loader.path)):
            return importlib.import_module(name)


@contextmanager
def _model_import(path: Path) -> Iterator[None]:
    """Import a model's file: `importing` returns its path, and `umbridge.serve_models` raises ModelFailed.

    A file that calls `serve_models` when it is imported would otherwise start a second server and never return.
    """
    outer, _under_way.file = importing(), str(path)
    package = _umbridge(path)
    original = getattr(package, "serve_models", None)
    try:
        if original is not None:
            package.serve_models = _rejecting(original)
        yield
    finally:
        if original is not None:
            package.serve_models = original
        _under_way.file = outer


def _umbridge(path: Path) -> Any:
    """Return the umbridge package if a file names it and it is installed."""
    if b"umbridge" not in path.read_bytes():
        return None
    try:
        return importlib.import_module("umbridge")
    except ImportError:
        return None  # the file's own import raises the same


def _rejecting(original: Any) -> Any:
    """Return `original` with a check that this thread is not importing a model's file."""

    def serve_models(*arguments: Any, **options: Any) -> Any:
        if not importing():
            return original(*arguments, **options)
        caller = traceback.extract_stack(limit=2)[0]
        raise ModelFailed(
            f"'{Path(caller.filename).name}' calls serve_models in line {caller.lineno}, which never returns; "
            'expected that call behind `if __name__ == "__main__":`'
        )

    return serve_models


class _Uncached(SourceFileLoader):
    """Compiles a file without Python's cache, which misses changes within one second."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


def _execute(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_loader(name, _Uncached(name, str(path)))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
