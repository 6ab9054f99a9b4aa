"""What is amiss with a model, as far as its files tell without being loaded."""

import ast
import pickletools
import sys
from _compat_pickle import IMPORT_MAPPING
from collections.abc import Iterator, Mapping
from importlib.machinery import PathFinder
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

from dragoman.core.errors import ModelFailed
from dragoman.core.spec import ModelSpec
from dragoman.runtimes.files import model_path

# The packages that a runtime imports for every model, and the extra of this project that has them.
_PACKAGES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "sklearn": ("sklearn", ("sklearn", "joblib")),
    "xgboost": ("xgboost", ("xgboost",)),
    "lightgbm": ("lightgbm", ("lightgbm",)),
    "catboost": ("catboost", ("catboost",)),
    "mlflow": ("mlflow", ("mlflow", "pandas")),
    "onnx": ("onnx", ("onnxruntime",)),
    "torch": ("torch", ("torch",)),
    "tensorflow": ("tensorflow", ("tensorflow",)),
    "huggingface": ("huggingface", ("transformers", "torch")),
    "llm": ("text", ("transformers", "torch", "safetensors")),
    "vllm": ("vllm", ("vllm", "transformers")),
    "openvino_genai": ("openvino", ("openvino_genai", "transformers")),
}
# The runtimes whose uri is always a file or folder; that of a Hugging Face model may be a name.
_IN_FILES = _PACKAGES.keys() - {"huggingface"} | {"graph"}
# What a compressed file begins with: zlib, gzip, bz2, lzma, xz, lz4.
_COMPRESSED = (b"x", b"\x1f\x8b", b"BZ", b"]\x00", b"\xfd7zXZ", b"\x04\x22\x4d\x18")
# joblib writes the numbers of an array as they are behind what this module unpickles.
_ARRAYS = "joblib.numpy_pickle"
_MOST_STEPS = 1_000_000  # of a pickle, some seconds of reading


def check(spec: ModelSpec) -> None:
    """ModelFailed where it is plain, without running any code, that a model cannot be loaded: a file, a class or a
    package is not there, or a pickle cannot be read."""
    if spec.runtime in _IN_FILES:
        model_path(spec)
    extra, packages = _PACKAGES.get(spec.runtime, ("", ()))
    for name in packages:
        if not _is_installed(name):
            raise ModelFailed(f"it needs the package '{name}', which is not installed; pip install 'dragoman[{extra}]'")
    if spec.runtime == "sklearn":
        _check_pickle(Path(spec.uri))
    elif spec.runtime in ("python", "mlserver"):
        _check_code(spec)


def _is_installed(name: str) -> bool:
    return name in sys.modules or find_spec(name) is not None


def _missing(name: str) -> str:
    """What to say of a package that only the model itself asks for."""
    wanted = f"'dragoman[{name}]'" if name in _PACKAGES else f"{name}, or whichever package has it"
    return f"needs '{name}', which is not installed; pip install {wanted}"


# --- Python --------------------------------------------------------------------------------------------------


def _check_code(spec: ModelSpec) -> None:
    place, _, name = spec.uri.rpartition(":") if ".py:" in spec.uri else (spec.uri, "", "")
    path = Path(place) / "model.py" if Path(place).is_dir() else Path(place)
    if path.suffix != ".py":
        return
    try:
        tree = ast.parse(path.read_bytes())  # which may say in what characters they are written
    except (OSError, SyntaxError, ValueError) as fault:
        raise ModelFailed(f"cannot import '{spec.uri}': {type(fault).__name__}: {fault}") from fault
    if name and not _names(tree) & {name.partition(".")[0], "*"}:
        raise ModelFailed(f"cannot import '{spec.uri}': '{place}' has no '{name}'")
    for module in _imported(tree):
        beside = PathFinder.find_spec(module, [str(path.resolve().parent)])  # compiled ones too
        if beside is None and module != "mlserver" and not _is_installed(module):  # for which there is one of ours
            raise ModelFailed(f"'{path.name}' {_missing(module)}")


def _names(tree: ast.AST) -> set[str]:
    """Every name that a module may have; "*" where it imports more than can be known."""
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
    """The packages that a module cannot do without: it imports them first of all, and not only if they are there."""
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


# --- pickles -------------------------------------------------------------------------------------------------


def _check_pickle(path: Path) -> None:
    """ModelFailed where a package is not there that a pickle names, or where it is none; it is not unpickled."""
    with path.open("rb") as file:
        if file.read(8).startswith(_COMPRESSED):
            return
    try:
        for module in _modules(path):
            if not _is_installed(module.partition(".")[0]):
                raise ModelFailed(f"'{path.name}' {_missing(module.partition('.')[0])}")
    except (ValueError, MemoryError, OverflowError) as fault:  # a length that is none
        told = str(fault) or type(fault).__name__
        raise ModelFailed(f"'{path.name}' cannot be read as a pickle: {told}") from fault


def _modules(path: Path) -> Iterator[str]:
    """The modules of what a pickle names, up to its first array."""
    memo: list[str] = []
    before = top = ""  # the texts that were put on the stack last, "" where anything else was
    with path.open("rb") as file:
        for opcode, given, _ in islice(pickletools.genops(file), _MOST_STEPS):
            argument: Any = given
            module = ""
            match opcode.name:
                case "MEMOIZE":
                    memo.append(top)
                    continue
                case "BINGET" | "LONG_BINGET":
                    before, top = top, memo[argument] if argument < len(memo) else ""
                case "SHORT_BINUNICODE" | "BINUNICODE" | "BINUNICODE8":
                    before, top = top, argument
                case "STACK_GLOBAL":
                    module, before, top = before, "", ""
                case "GLOBAL":
                    module, before, top = _now(argument.partition(" ")[0]), "", ""
                case _:
                    before, top = "", ""
            if module == _ARRAYS:
                return
            if module:
                yield module


def _now(module: str) -> str:
    """What Python 3 calls a module that pickles of old protocols name as Python 2 did."""
    return IMPORT_MAPPING.get(module, module)
