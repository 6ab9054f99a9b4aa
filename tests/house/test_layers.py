"""Imports point down only, features import nothing of each other, and the server runs without them."""

import ast
import re
import subprocess
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import dragoman

SRC = Path(__file__).parents[2] / "src"
SERVER = SRC / "dragoman"
FILES = sorted(SRC.rglob("*.py"))

# The packages of the server from the top: each imports only those below it.
LAYERS = (
    "__main__",
    "cli",
    "server",
    "processes",
    "asgi_application",
    "engine_setup",
    "server_transports",
    "services",
    "assembly",
    "transports",
    "access",
    "engine",
    "workers",
    "runtimes",
    "pipelines",
    "protocols",
    "client",
    "codecs",
    "formats",
    "settings",
    "settings_arguments",
    "plugins",
    "hooks",
    "core",
    "system",
    "_version",
)
# Modules that the families of a package share; apart from these, a family imports nothing from another one.
SHARED = {
    "runtimes": {"class_names", "files", "recognise", "saved_sizes", "tables", "pretrained", "unserved"},
    "protocols": {"wire", "custom_handlers", "json_arrays", "parameters", "schema_keywords", "web_files"},
}


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__")


MODULES = {name_of(path): path for path in FILES}
# Below the features, beside the server: inner loops in C, which know nothing of the project.
KERNELS = "dragoman_kernels"
FEATURES = sorted({name.partition(".")[0] for name in MODULES} - {"dragoman", KERNELS})
SUBMODULES = MODULES.keys() - {"dragoman"}


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    return [*ast.walk(ast.parse(path.read_text()))]


@cache
def imports(path: Path) -> list[str]:
    """Return the modules of this project that a file imports, also inside functions."""
    modules = []
    for node in nodes_of(path):
        if isinstance(node, ast.ImportFrom) and node.module and node.module in MODULES:
            submodules = [f"{node.module}.{alias.name}" for alias in node.names]
            modules += [module if module in MODULES else node.module for module in submodules]
        elif isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names if alias.name in MODULES]
    return modules


@cache
def named_modules(path: Path) -> list[str]:
    """Return the modules of this project that a file names in strings, as for `python -m`, except names of loggers."""
    calls = [node for node in nodes_of(path) if isinstance(node, ast.Call)]
    names = [getattr(call.func, "attr", getattr(call.func, "id", "")) for call in calls]
    loggers = {id(a) for call, name in zip(calls, names, strict=True) if name == "getLogger" for a in call.args}
    return [
        node.value.partition(":")[0]
        for node in nodes_of(path)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and id(node) not in loggers
        and node.value.partition(":")[0] in SUBMODULES
    ]


def package_of(module: str) -> str:
    """Return the package of the server that a module is in."""
    return module.split(".")[1] if "." in module else "dragoman"


def test_there_are_no_import_cycles_of_files() -> None:
    graph = {name: {module for module in imports(path) if module != name} for name, path in MODULES.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


@pytest.mark.parametrize("path", sorted(SERVER.rglob("*.py")), ids=lambda path: str(path.relative_to(SRC)))
def test_the_server_imports_only_lower_layers_and_no_feature(path: Path) -> None:
    own = package_of(name_of(path))
    below = {*LAYERS} if own == "dragoman" else {*LAYERS[LAYERS.index(own) :]}
    for module in (*imports(path), *named_modules(path)):
        assert module.partition(".")[0] == "dragoman", f"the server imports the feature {module}"
        assert package_of(module) in {*below, "dragoman"}, f"{own} imports {module}"


def test_the_layers_are_the_packages_of_the_server() -> None:
    assert {package_of(name) for name in MODULES if name.startswith("dragoman.")} == {*LAYERS}
    for package, modules in SHARED.items():
        assert {m for m in modules if not [*(SERVER / package).glob(f"{m}*")]} == set()


@pytest.mark.parametrize("feature", FEATURES)
def test_features_import_only_the_server(feature: str) -> None:
    for path in (SRC / feature).rglob("*.py"):
        for module in (*imports(path), *named_modules(path)):
            assert module.partition(".")[0] in {"dragoman", KERNELS, feature}, (
                f"{path.relative_to(SRC)} imports {module}"
            )


def test_the_kernels_import_nothing_of_the_project() -> None:
    for path in (SRC / KERNELS).rglob("*.py"):
        assert {module.partition(".")[0] for module in imports(path)} <= {KERNELS}, path.name


def test_the_engine_imports_only_the_interface_of_pools() -> None:
    for path in (SERVER / "engine").glob("*.py"):
        modules = imports(path)
        assert {m for m in modules if package_of(m) == "workers"} <= {
            "dragoman.workers.pool",
            "dragoman.workers.probe",
        }, path.name
        assert {m for m in modules if package_of(m) == "runtimes"} <= {
            "dragoman.runtimes.recognise",
            "dragoman.runtimes.unserved",
        }, path.name


def test_transports_import_only_the_wire_types_of_protocols() -> None:
    for path in (SERVER / "transports").rglob("*.py"):
        assert {m for m in imports(path) if package_of(m) == "protocols"} <= {"dragoman.protocols.wire"}, path.name


@pytest.mark.parametrize("package", SHARED)
def test_families_of_a_package_import_only_its_shared_modules(package: str) -> None:
    for path in (SERVER / package).rglob("*.py"):
        family = path.relative_to(SERVER / package).parts[0].removesuffix(".py")
        for module in imports(path):
            if package_of(module) == package:
                assert module.split(".")[2] in {*SHARED[package], family}, f"{path} imports {module}"


def test_no_string_of_the_server_names_a_module_of_another_package() -> None:
    named = [(name_of(path), module) for path in SERVER.rglob("*.py") for module in named_modules(path)]
    assert named  # the modules that `python -m` starts, and those of commands
    across = {(name, module) for name, module in named if package_of(module) != package_of(name)}
    # Public names, which are imported when they are first used.
    assert across == {("dragoman", "dragoman.codecs"), ("dragoman", "dragoman.core.errors")}


def test_no_module_hides_imports_from_the_interpreter() -> None:
    assert [str(path) for path in FILES if "TYPE_CHECKING" in path.read_text()] == []


def loaded_after(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(*sys.modules)"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(process.stdout.splitlines()[-1].split())


def test_importing_the_package_imports_neither_numpy_nor_a_framework() -> None:
    heavy = {"numpy", "ml_dtypes", "uvicorn", "grpc", "torch", "sklearn", "xgboost", "lightgbm"}
    assert not loaded_after("import dragoman") & (heavy | {"onnxruntime", "tensorflow"})


def test_the_help_of_all_commands_does_not_import_numpy() -> None:
    assert "numpy" not in loaded_after("from dragoman.cli import main_parser; main_parser().format_help()")


def test_a_worker_process_imports_no_transport_protocol_or_engine() -> None:
    modules = loaded_after("import dragoman.workers.worker")
    assert not {m for m in modules if re.match(r"dragoman\.(transports|protocols|engine|server)", m)}
    assert not modules & {"uvicorn", "grpc"}


def test_type_checkers_see_every_public_name() -> None:
    stub = ast.walk(ast.parse((SERVER / "__init__.pyi").read_text()))
    assert {node.names[0].asname for node in stub if isinstance(node, ast.ImportFrom)} == set(dragoman.__all__)
    for name in dragoman.__all__:
        assert getattr(dragoman, name) is not None


def test_the_tests_that_combine_features_exist() -> None:
    """Each line of `combined.txt` is a folder, a file, or a test in a file."""
    root = SRC.parent
    for line in (root / "tests" / "combined.txt").read_text().split():
        path, _, name = line.partition("::")
        folder = Path(*Path(path).parts[:3])
        if folder.parts[:2] == ("tests", "features") and not (root / folder).exists():
            continue  # the tests of a feature that was removed
        assert (root / path).exists(), line
        assert not name or re.search(rf"^(async )?def {name}\(", (root / path).read_text(), re.M), line
