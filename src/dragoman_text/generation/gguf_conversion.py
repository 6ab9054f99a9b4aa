"""The packages that convert a GGUF file, where its weights or its tokenizer are not used as they are."""

from dragoman.core.model import Model
from dragoman.core.runtime import Runtime
from dragoman.system.transformers_loads import import_transformers

_GGUF = Runtime(load=Model, extra="gguf")


def require_conversion() -> None:
    """Import transformers and the packages that it needs for GGUF files. Raises ModelFailed if one is missing."""
    for package in ("gguf", "accelerate"):
        _GGUF.require(package)
    import_transformers(_GGUF.require)
