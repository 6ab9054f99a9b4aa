"""Report how scripts of KServe's models are supported, from their source."""

import ast
from collections.abc import Iterator
from pathlib import Path

from dragoman.core.remarks import Remark
from dragoman_kserve.source import imports_kserve, parse

_STEPS = ("preprocess", "predict", "postprocess", "explain")
_OWN_ARGUMENTS = ("registered_models", "predictor_config")  # settings of ModelServer that are also settings of Dragoman
_HEADERS = "has content-type, ce-* and the headers that --forward-headers names, never credentials"
_STREAM = "the chunks of a V1 response are sent together at their end"
_REPOSITORY = "the server loads models itself: a folder with a model.py for each, or the repository API"


def survey(path: Path) -> list[Remark]:
    """Return remarks on the scripts in a folder, or on one script, that import kserve."""
    files = [path] if path.is_file() else sorted(path.rglob("*.py"))
    root = path.parent if path.is_file() else path
    return [remark for file in files for remark in _remarks(file, str(file.relative_to(root)))]


def _remarks(file: Path, location: str) -> Iterator[Remark]:
    tree = parse(file)
    if tree is None or not any(imports_kserve(node) for node in ast.walk(tree)):
        return
    for node in ast.walk(tree):
        yield from _remarks_on(node, location)


def _remarks_on(node: ast.AST, location: str) -> Iterator[Remark]:
    match node:
        case ast.Call(func=ast.Attribute(attr="add_middleware")):
            yield Remark(
                location, "add_middleware", "unused", "there is no FastAPI application; for CORS see --cors-origins"
            )
        case ast.Call(func=ast.Name(id="ModelServer") | ast.Attribute(attr="ModelServer")):
            for each in node.keywords:
                if each.arg not in _OWN_ARGUMENTS:
                    yield Remark(location, f"ModelServer({each.arg})", "unused", "see the settings of `dragoman serve`")
        case ast.ClassDef():
            bases = {base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "") for base in node.bases}
            methods = [each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
            if "ModelRepository" in bases and any(each.name == "load" for each in methods):
                yield Remark(location, f"{node.name}.load", "missing", _REPOSITORY)
            for method in methods if "Model" in bases else ():
                yield from _remarks_on_step(method, location, node.name)


def _remarks_on_step(
    method: ast.FunctionDef | ast.AsyncFunctionDef, location: str, class_name: str
) -> Iterator[Remark]:
    if method.name not in _STEPS:
        return
    subject = f"{class_name}.{method.name}"
    if any(isinstance(each, ast.Yield | ast.YieldFrom) for each in ast.walk(method)):
        yield Remark(location, subject, "different", _STREAM)
    if any(isinstance(each, ast.Name) and each.id == "headers" for each in ast.walk(method)):
        yield Remark(location, f"{subject}, headers", "different", _HEADERS)
