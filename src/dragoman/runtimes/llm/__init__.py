"""The runtime of text generation with our own engine."""

from pathlib import Path

from dragoman.core.model import Model
from dragoman.core.runtime import Runtime
from dragoman.core.spec import ModelSpec
from dragoman.runtimes.recognise import pretrained_runtime


def _load(spec: ModelSpec) -> Model:
    from dragoman.runtimes.llm.model import LanguageModel

    return LanguageModel(spec)


def _is_model_folder(folder: Path) -> bool:
    return pretrained_runtime(folder) == "llm"


RUNTIME = Runtime(
    load=_load,
    packages=("transformers", "torch", "safetensors"),
    extra="text",
    is_model_folder=_is_model_folder,
    placement="thread",
)
