"""A name becomes an object: built in, then entry point, then `module:attribute` or `file.py:attribute`."""

import importlib
import importlib.util
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import SourceFileLoader
from importlib.metadata import entry_points
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from dragoman.core.errors import ModelFailed

# What ships with the house, by room. A room's modules are imported only when one is asked for by name.
BUILT_IN: dict[str, dict[str, str]] = {
    "runtimes": {
        "python": "dragoman.runtimes.python:load",
        "sklearn": "dragoman.runtimes.sklearn:SklearnModel",
        "xgboost": "dragoman.runtimes.xgboost:XGBoostModel",
        "lightgbm": "dragoman.runtimes.lightgbm:LightGBMModel",
        "catboost": "dragoman.runtimes.catboost:CatBoostModel",
        "mlflow": "dragoman.runtimes.mlflow:MlflowModel",
        "onnx": "dragoman.runtimes.onnx:OnnxModel",
        "torch": "dragoman.runtimes.torch:TorchModel",
        "tensorflow": "dragoman.runtimes.tensorflow:TensorFlowModel",
        "huggingface": "dragoman.runtimes.huggingface:HuggingFaceModel",
        "llm": "dragoman.runtimes.llm:LanguageModel",
        "vllm": "dragoman.runtimes.vllm:VllmModel",
        "openvino_genai": "dragoman.runtimes.openvino_genai:OpenVinoModel",
        "mlserver": "dragoman.runtimes.mlserver:load",
        "umbridge": "dragoman.runtimes.umbridge:UmBridgeModel",
        "graph": "dragoman.runtimes.graph:GraphModel",
    },
    "pools": {
        "inline": "dragoman.workers.local:InlinePool",
        "thread": "dragoman.workers.local:ThreadPool",
        "process": "dragoman.workers.process:ProcessPool",
    },
    "protocols": {
        "oip_rest": "dragoman.protocols.open_inference.rest:protocol",
        "umbridge": "dragoman.protocols.umbridge.routes:protocol",
        "umbridge_shmem": "dragoman.protocols.umbridge.shared_memory:protocol",
        "oip_generate": "dragoman.protocols.open_inference.generate:protocol",
        "oip_grpc": "dragoman.protocols.open_inference.grpc:protocol",
        "lmi": "dragoman.protocols.lmi.routes:protocol",
        "tgi": "dragoman.protocols.tgi.routes:protocol",
        "openai": "dragoman.protocols.openai.routes:protocol",
        "metrics": "dragoman.protocols.metrics.routes:protocol",
    },
    # What looks at a model's settings of a protocol when the model is loaded.
    "protocol_settings": {
        "lmi": "dragoman.protocols.lmi.model:check",
    },
}
# Two models of one file may load at the same time.
_IMPORTING = threading.RLock()
_under_way = threading.local()


def find(room: str, name: str) -> Any:
    """The object called `name` in a room: `runtimes`, `pools`, `protocols` or `protocol_settings`.

    Further ones come from entry points of the group `dragoman.<room>`, or directly as `module:attribute`.
    Raises ModelFailed where there is none, or where it cannot be imported, saying why.
    """
    path = BUILT_IN[room].get(name)
    if path is not None:
        return resolve(path)
    for entry in entry_points(group=f"dragoman.{room}", name=name):
        return entry.load()
    if ":" in name:
        return resolve(name)
    known = sorted({*BUILT_IN[room], *(e.name for e in entry_points(group=f"dragoman.{room}"))})
    raise ModelFailed(f"there is no {room[:-1]} '{name}'; there are {', '.join(known)}")


def resolve(path: str) -> Any:
    """The object that `module:attribute` or `file.py:attribute` names; ModelFailed where there is none."""
    place, _, attribute = path.rpartition(":")
    try:
        found: Any = import_file(Path(place)) if place.endswith(".py") else _import_module(place)
    except (ImportError, OSError, SyntaxError) as fault:
        raise ModelFailed(f"cannot import '{path}': {type(fault).__name__}: {fault}") from fault
    for part in attribute.split("."):
        try:
            found = getattr(found, part)
        except AttributeError as fault:
            raise ModelFailed(f"cannot import '{path}': '{place}' has no '{attribute}'") from fault
    return found


def import_file(path: Path) -> ModuleType:
    """The module in a file, imported once as long as it does not change; its folder is importable for its neighbours.

    Several threads may ask for one file: they get the same module, and none gets it half done.
    """
    path = path.resolve()
    stat = path.stat()
    name = f"dragoman_file_{abs(hash((str(path), stat.st_mtime_ns, stat.st_size))):x}_{path.stem}"
    with _IMPORTING:
        found = sys.modules.get(name)
        if found is not None:
            return found
        with _model_import(path):
            return _executed(name, path)


def importing() -> str:
    """The file that this thread imports now as a model's, "" where it does not."""
    file: str = getattr(_under_way, "file", "")
    return file


def _import_module(name: str) -> ModuleType:
    """The module of that name; one that is not ours and not imported yet may hold a model."""
    if name in sys.modules or name.partition(".")[0] == __package__:
        return importlib.import_module(name)
    with _IMPORTING:
        found = importlib.util.find_spec(name)
        if found is None or not isinstance(found.loader, SourceFileLoader):
            return importlib.import_module(name)
        with _model_import(Path(found.loader.path)):
            return importlib.import_module(name)


@contextmanager
def _model_import(path: Path) -> Iterator[None]:
    """Import a model's file: `importing` returns its path, and `umbridge.serve_models` raises ModelFailed.

    A file that calls `serve_models` when it is imported would otherwise start a second server and never return.
    """
    outer, _under_way.file = importing(), str(path)
    package = _umbridge(path)
    original = getattr(package, "serve_models", None)
    try:
        if original is not None:
            package.serve_models = _rejecting(original)
        yield
    finally:
        if original is not None:
            package.serve_models = original
        _under_way.file = outer


def _umbridge(path: Path) -> Any:
    """The umbridge package, where a file names it and it is installed."""
    if b"umbridge" not in path.read_bytes():
        return None
    try:
        return importlib.import_module("umbridge")
    except ImportError:
        return None  # the file's own import raises the same


def _rejecting(original: Any) -> Any:
    """`original`, unless this thread imports a model's file."""

    def serve_models(*arguments: Any, **options: Any) -> Any:
        if not importing():
            return original(*arguments, **options)
        caller = traceback.extract_stack(limit=2)[0]
        raise ModelFailed(
            f"'{Path(caller.filename).name}' calls serve_models in line {caller.lineno}, which never returns; "
            'expected that call behind `if __name__ == "__main__":`'
        )

    return serve_models


class _Uncached(SourceFileLoader):
    """Compiles the file anew: Python's cache takes one that was changed within a second for the same."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


def _executed(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_loader(name, _Uncached(name, str(path)))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
