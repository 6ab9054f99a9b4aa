"""Recognise scripts of KServe's custom models, and read the names of their models, without running code."""

import ast
from pathlib import Path

_PACKAGE = "kserve"
_NAME = "model_name"


def is_script(path: Path) -> bool:
    """Return whether a Python file imports kserve and has a class derived from its Model."""
    tree = parse(path)
    if tree is None or not any(imports_kserve(node) for node in ast.walk(tree)):
        return False
    return bool(_model_classes(tree)) or any(_is_call(node, "ModelServer") for node in ast.walk(tree))


def is_folder(path: Path) -> bool:
    return is_script(path / "model.py")


def own_name(path: Path) -> str:
    """Return the name that a script gives its only model; "" for a folder and where the source does not show it."""
    names = _names(path)
    return names[0] if len(names) == 1 else ""


def model_names(file: str, attribute: str = "") -> dict[str, str]:
    """Return the names of the models of a script, by themselves: "" as an attribute, or one name, selects them."""
    return {name: name for name in _names(Path(file)) if attribute in ("", name)}


def _names(path: Path) -> list[str]:
    """Return the names in the calls of the classes: the first argument, or the default of `--model_name`."""
    tree = parse(path)
    if tree is None:
        return []
    classes = _model_classes(tree)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _name_of_call(node) in classes]
    return list(dict.fromkeys(name for call in calls if (name := _first_argument(call, tree))))


def parse(path: Path) -> ast.Module | None:
    """Return the syntax tree of a file whose text contains the name kserve, else None."""
    try:
        text = path.read_bytes()
        return ast.parse(text) if _PACKAGE.encode() in text else None
    except (OSError, SyntaxError, ValueError):
        return None


def imports_kserve(node: ast.AST) -> bool:
    """Return whether a statement imports kserve or a module of it."""
    if isinstance(node, ast.Import):
        return any(alias.name.partition(".")[0] == _PACKAGE for alias in node.names)
    return isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").partition(".")[0] == _PACKAGE


def _model_classes(tree: ast.Module) -> set[str]:
    """Return the names of the classes that derive from Model, directly or not."""
    names = {"Model"}
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    for node in classes:
        if any(_last_name(base) in names for base in node.bases):
            names.add(node.name)
    return names - {"Model"}


def _last_name(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _name_of_call(call: ast.Call) -> str:
    return _last_name(call.func)


def _is_call(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Call) and _name_of_call(node) == name


def _first_argument(call: ast.Call, tree: ast.Module) -> str:
    """Return the name of a model in the call of its class, "" if the source does not show it."""
    by_keyword = [each.value for each in call.keywords if each.arg in ("name", _NAME)]
    given = next(iter((*call.args[:1], *by_keyword)), None)
    if isinstance(given, ast.Constant) and isinstance(given.value, str):
        return given.value
    if not isinstance(given, ast.Attribute) or given.attr != _NAME:
        return ""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _name_of_call(node) == "add_argument" and _is_flag(node):
            default = next((each.value for each in node.keywords if each.arg == "default"), None)
            return default.value if isinstance(default, ast.Constant) and isinstance(default.value, str) else ""
    return "model"  # KServe's default


def _is_flag(call: ast.Call) -> bool:
    return any(isinstance(each, ast.Constant) and each.value == f"--{_NAME}" for each in call.args)
