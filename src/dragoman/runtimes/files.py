"""Model files: their path, the rule about pickles and the preflight check."""

import ast
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

from dragoman import plugins
from dragoman.core.errors import ModelFailed
from dragoman.core.options import suggestion
from dragoman.core.spec import ModelSpec

# Operators that an error names.
_MAX_OPERATORS = 5


def model_path(spec: ModelSpec) -> Path:
    """Return the file or folder of `spec.uri`. Raises ModelFailed if there is none."""
    path = Path(spec.uri)
    if not spec.uri or not path.exists():
        raise ModelFailed(f"file '{spec.uri}' not found; expected the path of the model's file as its uri")
    return path


def check_pickle(path: Path, spec: ModelSpec) -> None:
    """Raise ModelFailed unless the operator allows files that can run code when they are loaded."""
    if not spec.allow_pickle:
        runtime = plugins.runtime(spec.runtime) if spec.runtime and ":" not in spec.runtime else None
        missing = [each for each in runtime.packages if not is_installed(each)] if runtime is not None else []
        also = f"; it also needs {' and '.join(missing)}: {runtime.install(missing[0])}" if runtime and missing else ""
        raise ModelFailed(
            f"'{path.name}' can run code when it is loaded: start with --allow-pickle (DRAGOMAN_ALLOW_PICKLE=true) "
            f"if you trust it{also}"
        )


def check_operators(path: Path, spec: ModelSpec, find: Callable[[], Iterable[str]]) -> None:
    """Raise ModelFailed if `find` finds operators of a program that use files, processes or the network, unless the
    operator of the server allows files that can run code: what such a program does is not computation alone."""
    names = [] if spec.allow_pickle else sorted(set(find()))
    if names:
        more = f" and {len(names) - _MAX_OPERATORS} more" if len(names) > _MAX_OPERATORS else ""
        raise ModelFailed(
            f"'{path.name}' is not loaded: it uses {', '.join(names[:_MAX_OPERATORS])}{more}, by which a model can use "
            "files, processes or the network; start with --allow-pickle (DRAGOMAN_ALLOW_PICKLE=true) if you trust it"
        )


def preflight_check(spec: ModelSpec) -> None:
    """Raise ModelFailed if a model cannot be loaded because a file, a class or a package is missing, or a pickle is
    damaged. No code of the model is run."""
    if ":" in spec.runtime:
        return  # a runtime beside the model: finding it would run its code
    runtime = plugins.runtime(spec.runtime)
    if runtime.uri_is_path:
        model_path(spec)
    for package in runtime.packages:
        if not is_installed(package):
            raise ModelFailed(f"it needs the package '{package}', which is not installed; {runtime.install(package)}")
    if runtime.check is not None:
        runtime.check(spec)


def is_installed(package: str) -> bool:
    """Return whether a package can be imported, without importing it."""
    return package in sys.modules or find_spec(package) is not None


def check_installed(package: str, where: str) -> None:
    """Raise ModelFailed if a package is missing that the model itself imports in the file `where`."""
    if is_installed(package):
        return
    extras = [each.extra for each in plugins.built_in_runtimes().values() if package in each.packages[:1]]
    requirement = f"'dragoman[{extras[0]}]'" if extras else f"{package}, or the package that contains it"
    raise ModelFailed(f"'{where}' needs '{package}', which is not installed; pip install {requirement}")


def check_source(spec: ModelSpec, provided: Collection[str] = ()) -> None:
    """Check the source of a Python model. Raises ModelFailed if the file is missing, cannot be compiled, lacks the
    attribute, or imports a package that is not installed, other than those that its runtime provides."""
    source, _, name = spec.uri.rpartition(":") if ".py:" in spec.uri else (spec.uri, "", "")
    path = Path(source) / "model.py" if Path(source).is_dir() else Path(source)
    if path.suffix != ".py":
        return
    try:
        tree = ast.parse(path.read_bytes())  # bytes: the file may declare its encoding
    except (OSError, SyntaxError, ValueError) as error:
        raise ModelFailed(f"cannot import '{spec.uri}': {type(error).__name__}: {error}") from error
    defined = _defined_names(tree)
    if name and not defined & {name.partition(".")[0], "*"}:
        raise ModelFailed(f"cannot import '{spec.uri}': '{source}' has no '{name}'{suggestion(name, defined)}")
    for module in _imported_packages(tree):
        beside = PathFinder.find_spec(module, [str(path.resolve().parent)])  # compiled ones too
        if beside is None and module not in provided:
            check_installed(module, path.name)


def _defined_names(tree: ast.AST) -> set[str]:
    """Return every name that a module may define; "*" stands for those of a star import."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    return names


def _imported_packages(tree: ast.Module) -> Iterator[str]:
    """Yield the packages that a module imports at its top level, where no `try` allows them to be missing."""
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]
