"""The runtime of text generation with our own engine."""

from dragoman.core.runtime import Runtime, lazy_function
from dragoman.runtimes.pretrained import pretrained_runtime

RUNTIME = Runtime(
    load=lazy_function("dragoman_text.runtimes.llm.model:LanguageModel"),
    packages=("transformers", "torch", "safetensors"),
    extra="text",
    suffixes=(".gguf",),
    is_model_folder=lambda folder: pretrained_runtime(folder) == "llm",
    placement="thread",
    unsupported={
        "Embed": ': serve the folder with runtime = "huggingface" and parameters.task = "feature-extraction"; '
        'parameters.pooling is "last", "mean", "cls" or "max"'
    },
)
