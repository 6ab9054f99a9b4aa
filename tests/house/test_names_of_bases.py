"""Classes that extend those of other packages use no name that belongs to the base, on any Python that is installed.

A base may get new private attributes with each release: `threading.Thread` has had `_handle` since Python 3.13, and a
subclass with a method of that name could not be started any more.
"""

import ast
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

SOURCE = Path(__file__).parents[2] / "src"
# Bases whose attributes are meant to be replaced in subclasses, or that are never instantiated.
FORMS = {"Protocol", "NamedTuple", "TypedDict", "Generic", "ABC"}
# Names that a base lets its subclasses define. All others that a base has are its own.
OVERRIDDEN = {
    "argparse.ArgumentParser": {"add_argument", "epilog", "error", "parse_args"},
    "asyncio.BufferedProtocol": {
        *("connection_made", "connection_lost", "pause_writing", "resume_writing"),
        *("get_buffer", "buffer_updated", "eof_received"),
    },
    "asyncio.Protocol": {"connection_made", "connection_lost", "data_received", "eof_received"},
    "collections.abc.Coroutine": {"send", "throw", "close"},
    "collections.abc.Generator": {"send", "throw", "close"},
    "concurrent.futures.Executor": {"submit", "shutdown"},
    "ctypes.Structure": {"_fields_"},
    "importlib.abc.Loader": {"create_module", "exec_module"},
    "importlib.abc.MetaPathFinder": {"find_spec"},
    "importlib.machinery.SourceFileLoader": {"get_code", "set_data", "cache_from_source"},
    "jinja2.ext.Extension": {"tags", "parse"},
    "jinja2.sandbox.ImmutableSandboxedEnvironment": {"intercepted_binops", "call_binop"},
    "json.JSONEncoder": {"default"},
    "logging.Filter": {"filter"},
    "logging.Formatter": {"format", "formatException", "formatMessage", "formatStack", "formatTime"},
    "numpy.ndarray": {"astype"},
    "torch.nn.Module": {"forward"},
    "transformers.pipelines.Pipeline": {
        *("_sanitize_parameters", "preprocess", "_forward", "postprocess"),
        *("_load_processor", "_load_image_processor", "_load_video_processor", "_load_feature_extractor"),
        "_load_tokenizer",
    },
    "urllib.request.HTTPRedirectHandler": {"redirect_request"},
}
# Prints the names that each base has: those of its class, and those that the methods of the class assign to `self`.
NAMES = """
import ast, importlib, inspect, json, sys, textwrap

def names(path):
    parts, found = path.split("."), None
    for count in range(len(parts) - 1, 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for name in parts[count:]:
            found = getattr(found, name, None)
        break
    if not isinstance(found, type):  # not installed, or a variable
        return None
    result = set(dir(found))
    for base in found.__mro__:
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError):  # written in C: `dir` has all
            continue
        for node in ast.walk(tree):
            match node:
                case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                    result.add(name)
    return sorted(result)

print(json.dumps({path: names(path) for path in json.loads(sys.argv[1])}))
"""


class OwnClass(NamedTuple):
    """A class of ours: where it is, its bases by their full names, and the names that it defines."""

    place: str
    bases: tuple[str, ...]
    names: frozenset[str]


def imported_names(nodes: Iterable[ast.AST]) -> dict[str, str]:
    found: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {(each.asname or each.name).split(".")[0]: each.name.split(".")[0] for each in node.names}
            found |= {each.asname: each.name for each in node.names if each.asname}
        elif isinstance(node, ast.ImportFrom):
            found |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
    return found


def defined_names(node: ast.ClassDef) -> Iterator[str]:
    """Yield the names of a class and those that its methods assign to `self`."""
    for statement in node.body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            yield statement.name
        elif isinstance(statement, ast.Assign):
            yield from (target.id for target in statement.targets if isinstance(target, ast.Name))
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            yield statement.target.id
    for each in ast.walk(node):
        match each:
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                yield name


def own_classes() -> dict[str, OwnClass]:
    """Return the classes of the project by their full names."""
    classes: dict[str, OwnClass] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        module = ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
        text = path.read_text()
        nodes = [*ast.walk(ast.parse(text))] if "class " in text else []
        imports = imported_names(nodes)
        local = {node.name for node in nodes if isinstance(node, ast.ClassDef)}
        for node in nodes:
            if isinstance(node, ast.ClassDef):
                bases = []
                for base in node.bases:
                    named = base.value if isinstance(base, ast.Subscript) else base
                    head, _, rest = ast.unparse(named).partition(".")
                    full = imports.get(head) or (f"{module}.{head}" if head in local else f"builtins.{head}")
                    bases.append(f"{full}.{rest}" if rest else full)
                names = frozenset(name for name in defined_names(node) if not name.startswith("__"))
                classes[f"{module}.{node.name}"] = OwnClass(f"{module}:{node.name}", tuple(bases), names)
    return classes


def outside_bases(own: OwnClass, classes: dict[str, OwnClass]) -> set[str]:
    """Return the bases from other packages, also those of bases that are ours."""
    found: set[str] = set()
    for base in own.bases:
        if base in classes:
            found |= outside_bases(classes[base], classes)
        elif not base.startswith("dragoman") and base.rpartition(".")[2] not in FORMS:
            found.add(base)
    return found


def interpreters() -> list[str]:
    """Return this Python and each newer one that is installed, of which only the standard library is looked at."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found: dict[str, str] = {}
    for minor in range(sys.version_info.minor + 1, sys.version_info.minor + 6):
        paths = [*sorted(pyenv.glob(f"3.{minor}.*/bin/python3.{minor}")), shutil.which(f"python3.{minor}")]
        found |= {f"3.{minor}": str(path) for path in reversed(paths) if path and can_run(path)}
    return [sys.executable, *found.values()]


def can_run(python: str | Path) -> bool:
    """Return whether it is a Python: pyenv's own `python3.13` fails where that version is not chosen."""
    return subprocess.run([python, "-c", ""], capture_output=True).returncode == 0


@pytest.fixture(scope="module")
def extended() -> list[tuple[OwnClass, str]]:
    """Each class of ours that extends one of another package, with that."""
    classes = own_classes()
    return [(own, base) for own in classes.values() for base in sorted(outside_bases(own, classes))]


@pytest.mark.parametrize("interpreter", interpreters())
def test_no_name_is_one_of_the_base(interpreter: str, extended: list[tuple[OwnClass, str]]) -> None:
    bases = json.dumps(sorted({base for _, base in extended}))
    command = [interpreter, "-I", "-W", "ignore", "-c", NAMES, bases]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert "_style" in found["logging.Formatter"], "attributes of instances are known too"
    clashes = {
        f"{own.place}.{name} is a name of {base}"
        for own, base in extended
        for name in own.names & set(found[base] or ()) - OVERRIDDEN.get(base, set())
    }
    assert not clashes, "\n".join(sorted(clashes))
