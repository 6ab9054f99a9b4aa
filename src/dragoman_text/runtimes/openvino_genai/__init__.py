"""The runtime of text generation with OpenVINO GenAI."""

from dragoman.core.runtime import Runtime, lazy_function
from dragoman.runtimes.pretrained import pretrained_runtime

RUNTIME = Runtime(
    load=lazy_function("dragoman_text.runtimes.openvino_genai.model:OpenVinoTextModel"),
    packages=("openvino_genai", "transformers"),
    extra="openvino",
    is_model_folder=lambda folder: pretrained_runtime(folder) == "openvino_genai",
    placement="thread",
)
