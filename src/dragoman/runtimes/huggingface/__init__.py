"""The runtime of Hugging Face models by task."""

from dragoman.core.runtime import Runtime, lazy_function
from dragoman.runtimes.pretrained import pretrained_runtime

RUNTIME = Runtime(
    load=lazy_function("dragoman.runtimes.huggingface.model:HuggingFaceModel"),
    packages=("transformers", "torch"),
    extra="huggingface",
    is_model_folder=lambda folder: pretrained_runtime(folder) == "huggingface",
    uri_is_path=False,  # it may be a name on the hub
)
