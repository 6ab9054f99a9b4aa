"""Report how a script of KServe's models is supported, from its source; and the modules that stand for `kserve`."""

import ast
import importlib
from collections.abc import Iterator, Mapping
from importlib.machinery import PathFinder

from dragoman.compat.fields import Remark
from dragoman.formats import oip_messages

PACKAGE = "kserve"
_OURS = __name__.rpartition(".")[0]
# Our module for each module of KServe; the parent packages of each name are included.
MODULES: Mapping[str, str] = {
    PACKAGE: _OURS,
    **{
        f"{PACKAGE}.{name}": f"{_OURS}.{name}"
        for name in (
            *("errors", "inference_client", "logging", "model", "model_repository", "model_server", "predictor_config"),
            "storage",
        )
    },
    f"{PACKAGE}.context": f"{_OURS}.predictor_config",
    f"{PACKAGE}.constants": f"{_OURS}.predictor_config",
    f"{PACKAGE}.constants.constants": f"{_OURS}.predictor_config",
    f"{PACKAGE}.protocol": _OURS,
    f"{PACKAGE}.protocol.infer_type": f"{_OURS}.infer_type",
    f"{PACKAGE}.protocol.grpc": _OURS,
    f"{PACKAGE}.protocol.grpc.grpc_predict_v2_pb2": oip_messages.__name__,
    f"{PACKAGE}.utils": f"{_OURS}.utils",
    f"{PACKAGE}.utils.utils": f"{_OURS}.utils",
    f"{PACKAGE}.utils.numpy_codec": f"{_OURS}.numpy_codec",
    "kserve_storage": f"{_OURS}.storage",
}
_STEPS = ("preprocess", "predict", "postprocess", "explain")
_OWN_ARGUMENTS = ("registered_models", "predictor_config")  # settings of ModelServer that are also settings of Dragoman
_INSTALL = "not included: install the package kserve if it is needed"
_HEADERS = "has content-type, ce-* and the headers that --forward-headers names, never credentials"
_STREAM = "the chunks of a V1 response are sent together at their end"
_REPOSITORY = "the server loads models itself: a folder with a model.py for each, or the repository API"


def remarks(tree: ast.Module, location: str) -> Iterator[Remark]:
    """Yield remarks on a script that imports kserve; none on another one."""
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom) and _names(node)]
    if not imports:
        return
    if PathFinder.find_spec(PACKAGE) is None:
        names = [name for node in imports for name in _names(node)] + list(_attributes(tree))
        for name in dict.fromkeys(names):
            if not _is_included(name):
                yield Remark(location, name, "missing", _INSTALL)
    for node in ast.walk(tree):
        yield from _remarks_on(node, location)


def _remarks_on(node: ast.AST, location: str) -> Iterator[Remark]:
    match node:
        case ast.Call(func=ast.Attribute(attr="add_middleware")):
            yield Remark(
                location, "add_middleware", "unused", "there is no FastAPI application; for CORS see --cors-origins"
            )
        case ast.Call(func=ast.Attribute(attr="download", value=ast.Name(id="Storage"))):
            yield Remark(location, "Storage.download", "different", "local files and folders only")
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


def _names(node: ast.Import | ast.ImportFrom) -> list[str]:
    """Return the full names of what a statement imports of KServe."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    else:
        names = [f"{node.module}.{alias.name}" for alias in node.names] if not node.level else []
    return [name for name in names if name.partition(".")[0] in (PACKAGE, "kserve_storage")]


def _attributes(tree: ast.Module) -> Iterator[str]:
    """Yield the full names of what a script reads as `kserve.NAME`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == PACKAGE:
            yield f"{PACKAGE}.{node.attr}"


def _is_included(name: str) -> bool:
    module, _, attribute = name.rpartition(".")
    if name in MODULES or attribute == "*":
        return True
    return module in MODULES and hasattr(importlib.import_module(MODULES[module]), attribute)
