"""One engine of the text generation benchmark, in its own process; it reads and writes lines of JSON.

usage: python -m benchmarks.generation_side SIDE FOLDER DTYPE
"""

import asyncio
import json
import os
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.processes import cpu_s, peak_mib, process_tree

PROMPT = 64

# The times, in seconds from the start of a round, at which each client got its tokens.
Times = list[list[float]]
Generate = Callable[[list[list[int]], int], Times]


def prompts(clients: int, seed: int) -> list[list[int]]:
    """Return random prompts of 64 tokens."""
    draw = random.Random(seed)
    return [[draw.randrange(7, 600) for _ in range(PROMPT)] for _ in range(clients)]


def ours(folder: str, dtype: str, quantization: str = "none") -> Generate:
    """Return a function that generates with our engine, through the model class of the server."""
    from dragoman.core.calls import Generate
    from dragoman.core.spec import ModelSpec
    from dragoman.core.text import Sampling
    from dragoman_text.runtimes.llm.model import LanguageModel

    parameters = {"dtype": dtype, "quantization": quantization, **json.loads(os.environ.get("LLM_PARAMETERS", "{}"))}
    model = LanguageModel(ModelSpec(name="m", uri=folder, parameters=parameters))
    model.load()

    async def client(prompt: list[int], new: int, began_s: float) -> list[float]:
        sampling = Sampling(max_new_tokens=new, ignore_eos=True)
        times: list[float] = []
        async for chunk in model.generate(Generate(prompts=(tuple(prompt),), sampling=sampling, stream=True)):
            times += [time.perf_counter() - began_s] * len(chunk.texts[0].tokens)
        return times

    async def together(prompts: list[list[int]], new: int) -> Times:
        began_s = time.perf_counter()
        return list(await asyncio.gather(*(client(prompt, new, began_s) for prompt in prompts)))

    return lambda prompts, new: asyncio.run(together(prompts, new))


def _transformers(folder: str, dtype: str) -> Any:
    import torch
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    return torch, model


def transformers_generate(folder: str, dtype: str) -> Generate:
    """Return a function that generates with `generate` of transformers, one prompt after another."""
    torch, model = _transformers(folder, dtype)

    class Clock:
        """Called by `generate` with the prompt, then with each token."""

        def __init__(self, began_s: float) -> None:
            self.times: list[float] = []
            self._began_s, self._prompt = began_s, True

        def put(self, _: Any) -> None:
            if not self._prompt:
                self.times.append(time.perf_counter() - self._began_s)
            self._prompt = False

        def end(self) -> None:
            pass

    def generate(prompts: list[list[int]], new: int) -> Times:
        began_s, found = time.perf_counter(), []
        for prompt in prompts:
            clock = Clock(began_s)
            length = {"max_new_tokens": new, "min_new_tokens": new}
            model.generate(torch.tensor([prompt]), do_sample=False, streamer=clock, pad_token_id=2, **length)
            found.append(clock.times)
        return found

    return generate


def transformers_static_batch(folder: str, dtype: str) -> Generate:
    """Return a function that generates with `generate` of transformers on one batch: all clients wait for the end."""
    torch, model = _transformers(folder, dtype)

    def generate(prompts: list[list[int]], new: int) -> Times:
        began_s = time.perf_counter()
        model.generate(torch.tensor(prompts), do_sample=False, max_new_tokens=new, min_new_tokens=new, pad_token_id=2)
        return [[time.perf_counter() - began_s] * new for _ in prompts]

    return generate


def transformers_continuous_batching(folder: str, dtype: str) -> Generate:
    """Return a function that generates with continuous batching of transformers."""
    _, model = _transformers(folder, dtype)
    from transformers import ContinuousBatchingConfig, GenerationConfig

    settings = ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=512)

    def generate(prompts: list[list[int]], new: int) -> Times:
        config = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=2)
        manager = model.init_continuous_batching(generation_config=config, continuous_batching_config=settings)
        manager.start()
        began_s = time.perf_counter()
        names = [manager.add_request(prompt, max_new_tokens=new, record_timestamps=True) for prompt in prompts]
        left, found = set(names), []
        while left:
            result = manager.get_result(timeout=1)
            if result is None or not result.is_finished():
                continue
            left.discard(result.request_id)
            found.append([moment - began_s for moment in result.timestamps])
        manager.stop(block=True)
        return found

    return generate


SIDES: dict[str, Callable[[str, str], Generate]] = {
    "dragoman": ours,
    "dragoman int8": partial(ours, quantization="int8"),
    "dragoman int4": partial(ours, quantization="int4"),
    "generate": transformers_generate,
    "static batch": transformers_static_batch,
    "continuous batching": transformers_continuous_batching,
}


def measure_round(generate: Generate, clients: int, new: int, seed: int) -> dict[str, float]:
    """Return tokens per second and per CPU second, medians of the first token and of the gaps, and peak memory.

    CPU time and memory include child processes, in which some engines compute.
    """
    busy_before_s = _cpu_s()
    times = generate(prompts(clients, seed), new)
    # Until the last token, because continuous batching of transformers takes half a second to stop.
    duration_s, cpu_time_s = max(each[-1] for each in times), _cpu_s() - busy_before_s
    assert [len(each) for each in times] == [new] * clients, [len(each) for each in times]
    gaps = [after - before for each in times for before, after in pairwise(each)]
    return {
        "tokens_per_s": clients * new / duration_s,
        "tokens_per_cpu_s": clients * new / cpu_time_s,
        "first_ms": 1e3 * statistics.median(each[0] for each in times),
        "gap_ms": 1e3 * statistics.median(gaps),
        "peak_mib": sum(map(peak_mib, process_tree(os.getpid()))),
    }


def _cpu_s() -> float:
    return sum(map(cpu_s, process_tree(os.getpid())))


def config(make: Callable[[str, str], Generate], folder: str, dtype: str) -> None:
    """Answer lines of JSON until the input ends. All other output goes to the log."""
    warnings.simplefilter("ignore")
    # Child processes of an engine inherit the log as standard output.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    generate = make(str(Path(folder)), dtype)
    print("ready", file=out, flush=True)
    for line in sys.stdin:
        options = json.loads(line)
        print(
            json.dumps(measure_round(generate, options["clients"], options["new"], options["seed"])),
            file=out,
            flush=True,
        )


if __name__ == "__main__":
    config(SIDES[sys.argv[1]], *sys.argv[2:])
