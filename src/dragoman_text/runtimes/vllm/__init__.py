"""The runtime of text generation with vLLM; chosen by `runtime`, never by a file."""

from dragoman.core.runtime import Runtime, lazy_function

RUNTIME = Runtime(
    load=lazy_function("dragoman_text.runtimes.vllm.model:VllmModel"),
    packages=("vllm", "transformers"),
    extra="vllm",
    placement="process",
)
