"""The device and the software of a measurement, and the limits of its speed: memory bandwidth, matrix products."""

import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import machine

_PACKAGES = (
    *("torch", "transformers", "tokenizers", "safetensors", "triton", "cuda-bindings", "numpy", "onnxruntime"),
    *("onnxruntime-gpu", "tritonclient", "grpcio", "protobuf", "uvloop", "httptools", "orjson", "msgspec"),
)


def describe(device: str) -> dict[str, Any]:
    """Return the names and versions of the machine, the device and packages."""
    found: dict[str, Any] = {"machine": machine.machine(), "packages": machine.versions(_PACKAGES), "device": device}
    if device.startswith("cuda"):
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "name": properties.name,
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
            "driver": _driver(),
        }
    return found


def limits(device: str, size: int) -> dict[str, float]:
    """Return the bandwidth of copies of `size` bytes, counting bytes read and written, and of products, in BF16."""
    source = torch.randn(size // 2, device=device, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    copy_s = seconds(lambda: target.copy_(source), device)
    side = 8192 if device.startswith("cuda") else 256
    left, right = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    product_s = seconds(lambda: left @ right, device)
    # Reading alone: a product with a vector reads a matrix once, as a decoding step does its weights.
    vector = torch.randn(side, 1, device=device, dtype=torch.bfloat16)
    matrices = [torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(4)]  # more than the cache
    read_s = seconds(lambda: [matrix @ vector for matrix in matrices], device)
    return {
        "copy_gb_per_s": round(2 * size / copy_s / 1e9, 1),
        "vector_product_gb_per_s": round(4 * side * side * 2 / read_s / 1e9, 1),
        "product_tflop_per_s": round(2 * side**3 / product_s / 1e12, 2),
    }


def seconds(run: Callable[[], object], device: str, rounds: int = 20) -> float:
    """Return the median time of a computation."""
    for _ in range(3):
        run()
    times = []
    for _ in range(rounds):
        if device.startswith("cuda"):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            run()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        else:
            began_s = time.perf_counter()
            run()
            times.append(time.perf_counter() - began_s)
    median: float = statistics.median(times)
    return median


def _driver() -> str:
    if shutil.which("nvidia-smi") is None:
        return "nvidia-smi is not installed"
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, timeout=20, check=False).stdout.strip()
