"""Python model server: loads each model once and serves it over several inference protocols.

The public names are listed here, but for the datatypes, and for type checkers in `__init__.pyi`. Anything else may
change without notice.
"""

import importlib
from typing import Any

from dragoman._version import __version__ as __version__

# Names are imported when first used, so that `import dragoman` is quick and a worker stays small.
_HOME = {
    "Model": "core.model",
    "Infer": "core.calls",
    "Inference": "core.calls",
    "Gradient": "core.calls",
    "ApplyJacobian": "core.calls",
    "ApplyHessian": "core.calls",
    "Generate": "core.calls",
    "Generation": "core.text",
    "Text": "core.text",
    "Token": "core.text",
    "Sampling": "core.text",
    "Tensor": "core.tensor",
    "TensorSpec": "core.signature",
    "Signature": "core.signature",
    "ModelSpec": "core.spec",
    "SequenceOptions": "core.sequences",
    "Runtime": "core.runtime",
    "Datatype": "core.datatypes",
    "Shape": "codecs.typed",
    "InferenceRequest": "formats.message",
    "InferenceResponse": "formats.message",
    "RequestInput": "formats.message",
    "RequestOutput": "formats.message",
    "ResponseOutput": "formats.message",
    "model": "runtimes.python.model",
    "VectorFunction": "core.vectors",
    "Server": "server",
    "serve": "server",
    "open_engine": "engine_setup",
    "asgi": "asgi_application",
    "Settings": "settings",
    "trace_headers": "system.trace_context",
    "Client": "client.client",
    "AsyncClient": "client.async_client",
}

_OWN = ("__version__", "client", "codecs", "errors", *_HOME)


def __getattr__(name: str) -> Any:
    if name == "codecs":
        return importlib.import_module("dragoman.codecs")
    if name == "client":
        return importlib.import_module(f"dragoman.{name}")
    if name == "errors":
        return importlib.import_module("dragoman.core.errors")
    if name in _HOME:
        return getattr(importlib.import_module(f"dragoman.{_HOME[name]}"), name)
    if name == "__all__" or name.isupper():
        from dragoman.core.datatypes import DATATYPES

        if name in DATATYPES:
            return DATATYPES[name]
    if name == "__all__" or not name.startswith("_"):
        from dragoman.hooks import own_entries

        of_features = own_entries("names")
        if name == "__all__":
            return [*_OWN, *DATATYPES, *of_features]
        if name in of_features:
            return of_features[name].load()
    raise AttributeError(f"module 'dragoman' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})
