"""The runtime of text generation with OpenVINO GenAI."""

from pathlib import Path

from dragoman.core.model import Model
from dragoman.core.runtime import Runtime
from dragoman.core.spec import ModelSpec
from dragoman.runtimes.recognise import pretrained_runtime


def _load(spec: ModelSpec) -> Model:
    from dragoman.runtimes.openvino_genai.model import OpenVinoModel

    return OpenVinoModel(spec)


def _is_model_folder(folder: Path) -> bool:
    return pretrained_runtime(folder) == "openvino_genai"


RUNTIME = Runtime(
    load=_load,
    packages=("openvino_genai", "transformers"),
    extra="openvino",
    is_model_folder=_is_model_folder,
    placement="thread",
)
