"""Imports point down only, modules and functions are short, and worker processes import little."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import dragoman

ROOT = Path(__file__).parents[2] / "src" / "dragoman"
FILES = sorted(ROOT.rglob("*.py"))
TREES = {path: ast.parse(path.read_text()) for path in FILES}

# The packages that a package may import, besides itself and `system`, which does not know about models.
MAY_IMPORT: dict[str, set[str]] = {
    "__init__": {"_version"},
    "__main__": {"cli"},
    "_version": set(),
    "core": set(),
    "system": set(),
    "plugins": {"core"},
    "native": set(),
    "formats": {"core", "native", "settings"},
    "codecs": {"core", "plugins", "formats"},
    "client": {"core", "formats", "codecs"},
    "protocols": {"core", "plugins", "formats"},
    "conformance": {"core", "formats"},
    "load_test": {"conformance", "core"},
    "settings": {"core"},
    "settings_arguments": set(),
    "access": {"core", "engine", "protocols"},
    "workers": {"core", "plugins", "codecs", "_version"},
    "compat": {"core", "formats", "codecs", "client"},
    "derivatives": {"core"},
    "graphs": {"core", "derivatives"},
    "generation": {"core", "native"},
    "runtimes": {"core", "plugins", "formats", "codecs", "client", "compat", "derivatives", "graphs", "generation"},
    "engine": {"core", "formats", "plugins", "settings", "workers", "compat", "runtimes", "_version"},
    "transports": {"_version", "access", "core", "formats", "protocols", "engine", "settings"},
    "server_transports": {
        "access",
        "core",
        "plugins",
        "formats",
        "engine",
        "protocols",
        "transports",
        "settings",
        "_version",
        "workers",
    },
    "front_ends": {"access", "core", "engine", "server_transports", "settings", "workers"},
    "asgi_application": {
        "access",
        "core",
        "engine",
        "engine_setup",
        "server_transports",
        "settings",
        "settings_arguments",
        "transports",
    },
    "engine_setup": {"core", "engine", "protocols", "runtimes", "server_transports", "settings", "settings_arguments"},
    "server": {
        "core",
        "plugins",
        "engine",
        "engine_setup",
        "front_ends",
        "server_transports",
        "settings",
        "settings_arguments",
    },
    "cli": {
        "access",
        "client",
        "formats",
        "compat",
        "conformance",
        "core",
        "derivatives",
        "engine",
        "engine_setup",
        "graphs",
        "load_test",
        "plugins",
        "protocols",
        "runtimes",
        "server",
        "settings",
        "_version",
        "workers",
    },
}
# Modules that the families of a package share; apart from these, a family imports nothing from another one.
SHARED = {
    "runtimes": {"files", "module_alias", "recognise", "tables", "text_model", "vector_model"},
    "protocols": {"wire", "custom_handlers", "json_arrays", "text_common", "web_files"},
}


def package_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(path: Path) -> list[str]:
    """Return the modules of dragoman that a file imports, without the leading `dragoman.`."""
    modules = []
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "dragoman":
            rest = node.module.split(".")[1:]
            modules += [".".join(rest)] if rest else [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            modules += [a.name.partition(".")[2] for a in node.names if a.name.split(".")[0] == "dragoman"]
    return modules


def named_modules(path: Path) -> list[str]:
    """Return the modules of dragoman that a file names in strings, as for `python -m`, except names of loggers."""
    calls = [node for node in ast.walk(TREES[path]) if isinstance(node, ast.Call)]
    loggers = {id(a) for call in calls if ast.unparse(call.func).endswith("getLogger") for a in call.args}
    modules = []
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in loggers:
            match = re.match(r"dragoman\.(\w+)[.:\w]*$", node.value)
            if match and ((ROOT / match[1]).is_dir() or (ROOT / f"{match[1]}.py").is_file()):
                modules.append(node.value.partition(".")[2])
    return modules


def test_the_tables_list_exactly_the_existing_packages_and_imports() -> None:
    used: dict[str, set[str]] = {package_of(path): set() for path in FILES}
    for path in FILES:
        used[package_of(path)] |= {module.split(".")[0] for module in imports(path)}
    assert {name: packages - {name, "system"} for name, packages in used.items()} == MAY_IMPORT
    for package, modules in SHARED.items():
        assert {m for m in modules if not [*(ROOT / package).glob(f"{m}*")]} == set()


def test_the_engine_imports_only_the_interface_of_pools() -> None:
    for path in (ROOT / "engine").glob("*.py"):
        modules = imports(path)
        assert {m for m in modules if m.startswith("workers")} <= {"workers.pool", "workers.probe"}, path.name
        assert {m for m in modules if m.startswith("runtimes")} <= {"runtimes.recognise"}, path.name


def test_transports_import_only_the_wire_types_of_protocols() -> None:
    for path in (ROOT / "transports").rglob("*.py"):
        assert {m for m in imports(path) if m.startswith("protocols")} <= {"protocols.wire"}, path.name


@pytest.mark.parametrize("package", SHARED)
def test_families_of_a_package_import_only_its_shared_modules(package: str) -> None:
    for path in (ROOT / package).rglob("*.py"):
        family = path.relative_to(ROOT / package).parts[0].removesuffix(".py")
        for module in imports(path):
            if module.startswith(f"{package}."):
                assert module.split(".")[1] in {*SHARED[package], family}, f"{path} imports {module}"


def test_no_string_names_a_module_of_another_package() -> None:
    named = [(package_of(path), module) for path in FILES for module in named_modules(path)]
    assert named  # the modules that `python -m` starts
    allowed = {("__init__", "codecs"), ("__init__", "core.errors")}  # public names, imported when first used
    assert {(package, module) for package, module in named if module.split(".")[0] != package} == allowed


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_modules_and_functions_are_short(path: Path) -> None:
    text = path.read_text()
    assert "TYPE_CHECKING" not in text
    assert len(text.splitlines()) <= 600
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0]
            docstring = (first.end_lineno or 0) - first.lineno + 1 if ast.get_docstring(node) else 0
            lines = (node.end_lineno or 0) - node.lineno + 1 - docstring
            assert lines <= 45, f"{node.name} has {lines} lines"


def loaded_after(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(*sys.modules)"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(process.stdout.split())


def test_importing_the_package_imports_neither_numpy_nor_a_framework() -> None:
    heavy = {"numpy", "ml_dtypes", "uvicorn", "grpc", "torch", "sklearn", "xgboost", "lightgbm"}
    assert not loaded_after("import dragoman") & (heavy | {"onnxruntime", "tensorflow"})


def test_a_worker_process_imports_no_transport_protocol_or_engine() -> None:
    modules = loaded_after("import dragoman.workers.worker")
    assert not {m for m in modules if re.match(r"dragoman\.(transports|protocols|engine|server)", m)}
    assert not modules & {"uvicorn", "grpc"}


def test_type_checkers_see_every_public_name() -> None:
    stub = ast.walk(ast.parse((ROOT / "__init__.pyi").read_text()))
    assert {node.names[0].asname for node in stub if isinstance(node, ast.ImportFrom)} == set(dragoman.__all__)
    for name in dragoman.__all__:
        assert getattr(dragoman, name) is not None
