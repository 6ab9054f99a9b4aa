"""Report how a folder of MLServer is supported, from its files, without running any of its code."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from dragoman.core.documents import read_json
from dragoman.core.errors import InvalidInput
from dragoman.core.remarks import PICKLE_NOTE, Remark
from dragoman_mlserver.fields import MODEL, PARAMETERS, SERVER, remarks_on
from dragoman_mlserver.files import (
    MERGED_MODULES,
    MODEL_PREFIX,
    PREFIX,
    RUNTIME_PACKAGES,
    file_of,
    known_implementation,
    model_variables,
    server_variables,
    unsupported_reason,
    variables,
    with_environment,
)

_PICKLED = (".joblib", ".pkl", ".pickle")
_HANDLER = "health checks take precedence over its path; invalid arguments are a 400 instead of a 422"
_METRIC = "exported at /metrics on the HTTP port if the package prometheus-client is installed"
_HEADERS = (
    "the model gets the request headers that --forward-headers names, never credentials; headers that it sets in a "
    "response are sent over HTTP"
)
_MODULE = Path(__file__).parent / "mlserver"


def survey(path: Path) -> list[Remark]:
    """Return all remarks on a folder: on the environment, its settings, its models and their code; or on a script."""
    if path.is_file():
        return list(_code(path, path.name))
    described = sorted(path.rglob("model-settings.json"))
    remarks = [*_environment(path), *_server(path, is_mlserver=bool(described))]
    for file in described:
        remarks += _model(file, path)
    for file in sorted(path.rglob("*.py")):
        remarks += _code(file, str(file.relative_to(path)))
    return remarks


def _environment(folder: Path) -> Iterator[Remark]:
    given = variables(folder)
    model = model_variables(given)
    tables = (
        (PREFIX, server_variables(given), SERVER),
        (MODEL_PREFIX, model, MODEL),
        (MODEL_PREFIX, model.get("parameters") or {}, PARAMETERS),
    )
    for prefix, values, table in tables:
        for remark in remarks_on(values, table, "environment"):
            yield replace(remark, subject=prefix + remark.subject.upper())


def _server(folder: Path, *, is_mlserver: bool) -> Iterator[Remark]:
    path = folder / "settings.json"
    if path.is_file():
        yield from remarks_on(_read(path), SERVER, "settings.json")
    if (is_mlserver or path.is_file()) and "host" not in (_read(path) if path.is_file() else {}):
        yield Remark("settings.json" if path.is_file() else ".", "host", "different", SERVER["host"].note)


def _model(path: Path, root: Path) -> Iterator[Remark]:
    location = str(path.relative_to(root))
    given = _read(path)
    try:
        merged = with_environment(given, path.parent)
    except InvalidInput:  # which loading it reports
        return
    yield from remarks_on(given, MODEL, location)
    yield from remarks_on(given.get("parameters") or {}, PARAMETERS, location, "parameters.")
    named = str(merged.get("implementation") or "")
    yield from _implementation(named, location, path.parent)
    uri = path.parent / str(merged["parameters"].get("uri") or "")
    files = [uri] if uri.is_file() else list(path.parent.glob("model.*"))
    if any(f.suffix in _PICKLED for f in files) and (known_implementation(named) is not None or not named):
        yield Remark(location, "parameters.uri", "different", PICKLE_NOTE)


def _implementation(named: str, location: str, folder: Path) -> Iterator[Remark]:
    known = known_implementation(named)
    if unsupported_reason(named):
        yield Remark(location, "implementation", "rejected", unsupported_reason(named))
    elif known is not None:
        note = "answers as in MLServer" if known.has_class else f"uses Dragoman's runtime {known.runtime}"
        note += "; start with --allow-pickle if you trust its files" if known.runtime == "mlflow" else ""
        yield Remark(location, "implementation", "same", note)
    elif named and file_of(named, folder) is None:
        note = f"'{named}' is not in a file beside its settings: it must be importable by the server"
        yield Remark(location, "implementation", "different", note)


def _read(path: Path) -> dict[str, Any]:
    try:
        value = read_json(path)
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


# --- code ------------------------------------------------------------------------------------------------------


def _code(path: Path, location: str) -> Iterator[Remark]:
    """Return remarks on the imports of `mlserver` in a Python file."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError) as error:
        yield Remark(location, "code", "missing", f"cannot be parsed: {error}")
        return
    for module, names in _imports(tree):
        top = module.partition(".")[0]
        if top.startswith("mlserver_") and top not in RUNTIME_PACKAGES:
            note = f"the package '{top}' is not included: derive the class from mlserver.MLModel"
            yield Remark(location, f"import {module}", "missing", note)
        elif top == "mlserver" and not _is_ours(module):
            note = "this module is not included: install the package mlserver if it is needed"
            yield Remark(location, f"import {module}", "missing", note)
        elif top == "mlserver":
            if "custom_handler" in names:
                yield Remark(location, "custom_handler", "different", _HANDLER)
            if names & {"register", "log"} and module in ("mlserver", "mlserver.metrics"):
                yield Remark(location, "metrics", "different", _METRIC)
    if any(isinstance(node, ast.Attribute) and node.attr == "headers" for node in ast.walk(tree)):
        yield Remark(location, "parameters.headers", "different", _HEADERS)


def _imports(tree: ast.AST) -> Iterator[tuple[str, set[str]]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module, {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            yield from ((alias.name, set[str]()) for alias in node.names)


def _is_ours(module: str) -> bool:
    rest = module.partition(".")[2]
    location = _MODULE.joinpath(*rest.split(".")) if rest else _MODULE
    return rest in MERGED_MODULES or location.is_dir() or location.with_suffix(".py").is_file()
