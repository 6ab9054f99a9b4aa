"""Check the source of a Python model without running it."""

import ast
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path

from dragoman.core.errors import ModelFailed
from dragoman.core.spec import ModelSpec
from dragoman.runtimes.preflight import check_installed


def check_source(spec: ModelSpec) -> None:
    """Raise ModelFailed if a file is missing, cannot be compiled, lacks the attribute, or imports a package that is not
    installed."""
    place, _, name = spec.uri.rpartition(":") if ".py:" in spec.uri else (spec.uri, "", "")
    path = Path(place) / "model.py" if Path(place).is_dir() else Path(place)
    if path.suffix != ".py":
        return
    try:
        tree = ast.parse(path.read_bytes())  # bytes: the file may declare its encoding
    except (OSError, SyntaxError, ValueError) as error:
        raise ModelFailed(f"cannot import '{spec.uri}': {type(error).__name__}: {error}") from error
    if name and not _names(tree) & {name.partition(".")[0], "*"}:
        raise ModelFailed(f"cannot import '{spec.uri}': '{place}' has no '{name}'")
    for module in _imported(tree):
        beside = PathFinder.find_spec(module, [str(path.resolve().parent)])  # compiled ones too
        if beside is None and module != "mlserver":  # which the package `compat` replaces
            check_installed(module, path.name)


def _names(tree: ast.AST) -> set[str]:
    """Return every name that a module may define; "*" stands for those of a star import."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    return found


def _imported(tree: ast.Module) -> Iterator[str]:
    """Yield the packages that a module imports at its top level, where no `try` allows them to be missing."""
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]
