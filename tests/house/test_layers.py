"""The arrows between the rooms go down only, and a worker process stays small."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "src" / "dragoman"

# Which packages a package may import, besides itself and `system`, which knows nothing of models.
MAY_IMPORT = {
    "core": set(),
    "system": set(),
    "plugins": {"core"},
    "native": set(),
    "formats": {"core", "native", "settings"},
    "codecs": {"core", "plugins", "formats"},
    "client": {"core", "plugins", "formats", "codecs"},
    "protocols": {"core", "plugins", "formats"},
    "settings": {"core"},
    "workers": {"core", "plugins", "codecs"},
    "compat": {"core", "plugins", "formats", "codecs"},
    "derivatives": {"core"},
    "graphs": {"core", "derivatives"},
    "generation": {"core", "native"},
    "runtimes": {"core", "plugins", "formats", "codecs", "client", "compat", "derivatives", "graphs", "generation"},
    "engine": {"core", "plugins", "settings", "workers", "compat", "runtimes", "_version"},
    "transports": {"core", "protocols", "engine", "settings"},
    "server_transports": {"core", "plugins", "formats", "engine", "transports", "settings"},
    "front_ends": {"core", "engine", "server_transports", "settings", "workers"},
    "asgi_application": {"core", "engine", "server_transports", "server", "settings", "transports"},
    "server": {
        "core",
        "plugins",
        "engine",
        "server_transports",
        "front_ends",
        "protocols",
        "runtimes",
        "settings",
    },
    "cli": {
        "compat",
        "core",
        "derivatives",
        "engine",
        "graphs",
        "plugins",
        "runtimes",
        "server",
        "settings",
        "system",
        "_version",
    },
}
# The modules that the families of a package share; otherwise a family imports nothing of another one.
SHARED = {
    "runtimes": {
        "files",
        "preflight",
        "pretrained",
        "recognise",
        "source_check",
        "tables",
        "text_infer",
        "text_model",
        "vector_model",
    },
    "protocols": {"wire", "text_common"},
}


def imports(path: Path) -> list[str]:
    """The modules below dragoman that a file imports, as dotted names without the package."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "dragoman":
            rest = node.module.split(".")[1:]
            found += [".".join(rest)] if rest else [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [a.name.partition(".")[2] for a in node.names if a.name.split(".")[0] == "dragoman"]
    return found


def named_modules(path: Path) -> list[str]:
    """The modules below dragoman that a file names in strings, as for `python -m`; names of loggers are none."""
    tree = ast.parse(path.read_text())
    loggers = {
        id(argument)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("getLogger")
        for argument in node.args
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in loggers:
            match = re.match(r"dragoman\.(\w+)[.:\w]*$", node.value)
            if match and ((ROOT / match[1]).is_dir() or (ROOT / f"{match[1]}.py").is_file()):
                found.append(node.value.partition(".")[2])
    return found


APART = {ROOT / "__init__.py", ROOT / "__main__.py", ROOT / "_version.py"}
FILES = sorted(path for path in ROOT.rglob("*.py") if path not in APART)


def room_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_rooms_import_downwards_only(path: Path) -> None:
    room = room_of(path)
    for module in imports(path):
        assert module.split(".")[0] in MAY_IMPORT[room] | {room, "system"}, f"{path.name} imports dragoman.{module}"


def test_the_engine_knows_only_the_interface_of_pools() -> None:
    for path in (ROOT / "engine").glob("*.py"):
        modules = imports(path)
        assert {m for m in modules if m.startswith("workers")} <= {"workers.pool", "workers.probe"}, path.name
        assert {m for m in modules if m.startswith("runtimes")} <= {"runtimes.recognise"}, path.name


def test_transports_know_of_protocols_only_the_vocabulary() -> None:
    for path in (ROOT / "transports").rglob("*.py"):
        assert {m for m in imports(path) if m.startswith("protocols")} <= {"protocols.wire"}, path.name


@pytest.mark.parametrize("package", SHARED)
def test_families_of_a_package_import_only_its_shared_modules(package: str) -> None:
    for path in (ROOT / package).rglob("*.py"):
        family = path.relative_to(ROOT / package).parts[0].removesuffix(".py")
        for module in imports(path):
            if module.startswith(f"{package}."):
                assert module.split(".")[1] in {*SHARED[package], family}, f"{path} imports {module}"


def test_no_module_names_one_of_another_package_by_a_string() -> None:
    named = 0
    for path in FILES:
        for module in named_modules(path):
            named += 1
            assert module.split(".")[0] == room_of(path), f"{path} names dragoman.{module}"
    assert named  # the modules that `python -m` starts


def test_no_import_is_for_type_checkers_alone() -> None:
    for path in FILES:
        assert "TYPE_CHECKING" not in path.read_text(), path.name


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_and_functions_stay_short(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 450, "a file"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0]
            doc = (first.end_lineno or 0) - first.lineno + 1 if ast.get_docstring(node) else 0
            lines = (node.end_lineno or 0) - node.lineno + 1 - doc
            assert lines <= 45, f"{node.name} has {lines} lines"


def loaded_after(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_the_package_imports_no_framework_and_not_even_numpy() -> None:
    heavy = {"numpy", "ml_dtypes", "uvicorn", "grpc", "torch", "sklearn", "xgboost", "lightgbm"}
    heavy |= {"onnxruntime", "tensorflow"}
    assert not loaded_after("import dragoman") & heavy


def test_a_worker_process_holds_no_transport_protocol_or_engine() -> None:
    modules = loaded_after("import dragoman.workers.worker")
    above = {m for m in modules if m.startswith(("dragoman.transports", "dragoman.protocols", "dragoman.engine"))}
    assert not above
    assert not modules & {"uvicorn", "grpc", "dragoman.server"}


def test_what_is_promised_is_there_for_type_checkers_too() -> None:
    import dragoman

    stub = {
        n.names[0].asname
        for n in ast.walk(ast.parse((ROOT / "__init__.pyi").read_text()))
        if isinstance(n, ast.ImportFrom)
    }
    assert stub == set(dragoman.__all__)
    for name in dragoman.__all__:
        assert getattr(dragoman, name) is not None
