"""The runtime of text generation with vLLM; chosen by `runtime`, never by a file."""

from dragoman.core.model import Model
from dragoman.core.runtime import Runtime
from dragoman.core.spec import ModelSpec


def _load(spec: ModelSpec) -> Model:
    from dragoman.runtimes.vllm.model import VllmModel

    return VllmModel(spec)


RUNTIME = Runtime(load=_load, packages=("vllm", "transformers"), extra="vllm", placement="thread")
