"""Time of a decoding step without the server: with and without CUDA graphs, and which kernels take it."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.device import seconds
from dragoman_text.generation import gpu, sampler
from dragoman_text.generation.cache import KeyValueCache
from dragoman_text.generation.job import BatchRow
from dragoman_text.generation.pretrained import load_pretrained
from dragoman_text.generation.runner import Runner


def measure(folder: Path, device: str, clients: Sequence[int], *, graphs: bool, length: int) -> dict[str, Any]:
    """Return milliseconds of steps by number of sequences, and the kernels of a step of one."""
    runner = Runner(load_pretrained(folder, "bfloat16", device), packed=False, cuda_graphs=graphs)
    greedy = _greedy()
    rows, profile = [], []
    for count in clients:
        cache = KeyValueCache(runner.shape, count * 1024, runner.dtype, runner.device)
        cache.reserve(count, min(512, length + 64))
        batch = [BatchRow(slot, length, [5 + slot]) for slot in range(count)]

        def step(cache: KeyValueCache = cache, batch: Sequence[BatchRow] = batch) -> torch.Tensor:
            return runner.run(cache, batch)

        device_s = seconds(step, device)
        sampler.choose(step(), [greedy] * count)
        began_s = time.perf_counter()
        for _ in range(20):
            sampler.choose(step(), [greedy] * count)
        whole_s = (time.perf_counter() - began_s) / 20
        rows.append(
            {"sequences": count, "step_ms": round(1e3 * device_s, 3), "with_choice_ms": round(1e3 * whole_s, 3)}
        )
        if count == clients[0] and device.startswith("cuda"):
            profile = _kernels(step)
        cache.release()
    sizes = [each.nbytes for each in _weights(runner)]
    own_kernels = gpu.kernels(runner.device, runner.dtype) is not None
    return {
        "graphs": runner.graphs,
        "triton": own_kernels,
        "rows": rows,
        "kernels": profile,
        "weight_bytes": sum(sizes),
    }


def _greedy() -> Any:
    from dragoman.core.text import Sampling
    from dragoman_text.generation.token_sampler import TokenSampler

    return TokenSampler(Sampling(max_new_tokens=1), 0, (), frozenset(), (), None)


def _weights(runner: Runner) -> list[torch.Tensor]:
    """Return the weights that a step reads, each once: an embedding that is also the output layer is one of them."""
    fused = runner.fused
    if fused is None:
        return list(runner.model.parameters())
    layers = [getattr(layer, name) for layer in fused.layers for name in ("qkv", "out", "gate_up", "down")]
    return [each._weight for each in (*layers, fused.head) if hasattr(each, "_weight")]


def _kernels(step: Any) -> list[dict[str, Any]]:
    """Return the kernels of 20 steps: calls and microseconds per step, the longest first."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(20):
            step()
        torch.cuda.synchronize()
    rows = [
        {"kernel": each.key[:90], "calls": each.count / 20, "us": round(each.self_device_time_total / 20, 1)}
        for each in profiler.key_averages()
        if each.self_device_time_total
    ]
    return sorted(rows, key=lambda row: -row["us"])[:30]
