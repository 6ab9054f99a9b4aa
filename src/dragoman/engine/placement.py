"""The placement that is tried first for a model without a configured one."""

import ast
from functools import lru_cache
from pathlib import Path
from typing import get_args

from dragoman import plugins
from dragoman.core.spec import ModelSpec, Placement


def first_placement(spec: ModelSpec) -> Placement:
    """Return the configured placement, else the one that is known before the model is loaded, else "process"."""
    if spec.placement:
        return spec.placement
    if spec.target is not None:
        return "thread"  # a live object cannot leave this process
    runtime = spec.runtime or "python"
    if runtime == "python":
        return _written(spec.uri) or "process"
    return plugins.runtime(runtime).placement_for(spec)


def _written(uri: str) -> Placement:
    """Return the placement in the source of a Python file, which is not run; "" if it is not literal."""
    place, _, name = uri.rpartition(":") if uri.rpartition(":")[0].endswith(".py") else (uri, "", "")
    path = Path(place)
    try:
        return _stated((path / "model.py" if path.is_dir() else path).read_bytes(), name)
    except (OSError, SyntaxError, ValueError):
        return ""  # whoever loads it says what is wrong


@lru_cache(maxsize=16)  # many models may name one file
def _stated(text: bytes, name: str) -> Placement:
    tree = ast.parse(text)
    found = [node for node in tree.body if (_named(node) == name if name else _may_be_model(node))]
    if len(found) != 1:
        return ""
    stated = _in_class(found[0]) if isinstance(found[0], ast.ClassDef) else _in_decorator(found[0])
    return next((known for known in get_args(Placement) if known == stated), "")


def _named(node: ast.stmt) -> str:
    match node:
        case ast.Assign(targets=[ast.Name(id=name)]):
            return name
    return getattr(node, "name", "")


def _may_be_model(node: ast.stmt) -> bool:
    """Whether a file's only model can be this: a public class with a parent, or a public function with a decorator."""
    parents = getattr(node, "bases", []) or getattr(node, "decorator_list", [])
    return bool(parents) and not _named(node).startswith("_")


def _in_class(node: ast.ClassDef) -> object:
    """The value of `placement = ...` in a class that does not set it anywhere else."""
    if node.decorator_list or sum(_sets_placement(inner) for inner in ast.walk(node)) != 1:
        return None
    for statement in node.body:
        match statement:
            case ast.Assign(targets=[ast.Name(id="placement")], value=ast.Constant(value=value)):
                return value
            case ast.AnnAssign(target=ast.Name(id="placement"), value=ast.Constant(value=value)):
                return value
    return None


def _sets_placement(node: ast.AST) -> bool:
    match node:
        case ast.Name(id="placement", ctx=ast.Store()) | ast.Attribute(attr="placement", ctx=ast.Store()):
            return True
    return False


def _in_decorator(node: ast.stmt) -> object:
    """The `placement` of `@model(placement=...)` or `@vector_function(placement=...)`."""
    match getattr(node, "decorator_list", []):
        case [
            ast.Call(
                func=ast.Name(id="model" | "vector_function") | ast.Attribute(attr="model" | "vector_function"),
                keywords=keywords,
            )
        ]:
            return next(
                (k.value.value for k in keywords if k.arg == "placement" and isinstance(k.value, ast.Constant)), None
            )
    return None
