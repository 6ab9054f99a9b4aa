"""The runtime of Hugging Face models by task."""

from pathlib import Path

from dragoman.core.model import Model
from dragoman.core.runtime import Runtime
from dragoman.core.spec import ModelSpec
from dragoman.runtimes.recognise import pretrained_runtime


def _load(spec: ModelSpec) -> Model:
    from dragoman.runtimes.huggingface.model import HuggingFaceModel

    return HuggingFaceModel(spec)


def _is_model_folder(folder: Path) -> bool:
    return pretrained_runtime(folder) == "huggingface"


RUNTIME = Runtime(
    load=_load,
    packages=("transformers", "torch"),
    extra="huggingface",
    is_model_folder=_is_model_folder,
    uri_is_path=False,  # it may be a name on the hub
)
