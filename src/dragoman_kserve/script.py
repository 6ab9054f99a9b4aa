"""Run scripts of KServe's custom models with the package kserve."""

import asyncio
import importlib
import shlex
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from dragoman.core.errors import ModelFailed
from dragoman.core.spec import ModelSpec

_NAME = "model_name"
# A script changes `__main__` and the arguments of its process while it runs.
_RUNNING = threading.Lock()


class _ServerStarted(BaseException):
    """A script has started its server, which never returns there."""


@dataclass
class ScriptResult:
    """The models that a script has started, the configuration of their predictor, and the script's variables."""

    models: list[Any] = field(default_factory=list)
    predictor: Any = None
    variables: dict[str, Any] = field(default_factory=dict)


def run_script(spec: ModelSpec) -> ScriptResult:
    """Run a script as `__main__` until it starts its server. Raises ModelFailed."""
    path = script_path(spec)
    result = ScriptResult()

    def start(server: Any, models: Any) -> None:
        registered = server.registered_models.get_models().values()
        result.models = list({id(model): model for model in (*models, *registered)}.values())
        result.predictor = importlib.import_module("kserve.context").get_predictor_config()
        raise _ServerStarted

    keeps = spec.placement in ("", "process")
    arguments = _arguments(spec)
    with _RUNNING, _as_main(path, arguments, keeps=keeps) as module, _replaced_start(start, arguments):
        try:
            _run(path, module)
        except _ServerStarted:
            pass
        except SystemExit as error:
            status = f"ended with status {error.code}"
            raise ModelFailed(f"'{path.name}' {status}, before it started a ModelServer") from error
        result.variables = vars(module)
    return result


def _arguments(spec: ModelSpec) -> list[str]:
    """Return the arguments of a script: those in the settings, and the name of the model. Raises ModelFailed."""
    try:
        arguments = shlex.split(spec.script_arguments)
    except ValueError as error:
        raise ModelFailed(f"setting 'script_arguments': {error}, got {spec.script_arguments!r}") from error
    is_named = any(each.partition("=")[0] == f"--{_NAME}" for each in arguments)
    return arguments if is_named else [*arguments, f"--{_NAME}", spec.name]


@contextmanager
def _replaced_start(start: Any, arguments: Sequence[str]) -> Iterator[None]:
    """Replace the method `start` of the class of servers, and the arguments of the package's server.

    The package parses those of the process when it is imported, which may have been for another script.
    """
    package: Any = importlib.import_module("kserve.model_server")
    original, package.ModelServer.start = package.ModelServer.start, start
    parsed, package.args = package.args, package.parser.parse_known_args(arguments)[0]
    try:
        yield
    finally:
        package.ModelServer.start, package.args = original, parsed


def script_path(spec: ModelSpec) -> Path:
    """Return the path of the script of a model."""
    file = spec.uri.rpartition(":")[0] if ".py:" in spec.uri else spec.uri
    path = Path(file)
    return (path / "model.py" if path.is_dir() else path).resolve()


@contextmanager
def _as_main(path: Path, arguments: Sequence[str], *, keeps: bool) -> Iterator[ModuleType]:
    """Make a new module `__main__` for a script, with its arguments and the modules of its folder.

    keeps: they stay, as in a process of the script; else the former ones are restored.
    """
    module = ModuleType("__main__")
    module.__file__ = str(path)
    main, argv = sys.modules["__main__"], sys.argv
    sys.modules["__main__"], sys.argv = module, [str(path), *arguments]
    sys.path.insert(0, str(path.parent))
    try:
        yield module
    finally:
        if not keeps:
            sys.modules["__main__"], sys.argv = main, argv
            sys.path.remove(str(path.parent))


def _run(path: Path, module: ModuleType) -> None:
    """Run a script; in a thread of its own where an event loop runs, as scripts may start one."""
    try:
        code = compile(path.read_bytes(), str(path), "exec")
    except (OSError, SyntaxError, ValueError) as error:
        raise ModelFailed(f"cannot run '{path.name}': {type(error).__name__}: {error}") from error
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        exec(code, vars(module))  # noqa: S102 - the model's own code
        return
    with ThreadPoolExecutor(1) as executor:
        executor.submit(exec, code, vars(module)).result()
