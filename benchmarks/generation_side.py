"""One engine of the text generation benchmark, in its own process; it reads and writes lines of JSON.

usage: python -m benchmarks.generation_side SIDE MODEL DTYPE
"""

import asyncio
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.processes import cpu_s, memory_mib, process_tree

# Tokens of a prompt.
PROMPT = 64
# In place of a dtype: the weights are those of a GGUF file.
GGUF = "gguf"


@dataclass(slots=True)
class Text:
    """The tokens that a client got, and when it got each: seconds from the start of the round."""

    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    def add(self, tokens: Iterable[int], began_s: float) -> None:
        """Add tokens that have just come."""
        found = list(tokens)
        self.tokens += found
        self.times += [time.perf_counter() - began_s] * len(found)


Generate = Callable[[list[list[int]], int], list[Text]]


@dataclass(frozen=True, slots=True)
class Engine:
    """A function that generates texts for prompts, the process that computes, and the seconds of its start.

    The start of an engine that computes in this process is timed by the parent process.
    """

    generate: Generate
    pid: int = field(default_factory=os.getpid)
    ready_s: float | None = None


def threads() -> int:
    """Return the number of threads of every engine: one per core."""
    return len(os.sched_getaffinity(0))


def parameters(dtype: str, quantization: str = "none") -> dict[str, Any]:
    """Return the parameters of our engine. A GGUF file has its own types."""
    found: dict[str, Any] = {"threads": threads()}
    if dtype != GGUF:
        found |= {"dtype": dtype, "quantization": quantization}
    found |= json.loads(os.environ.get("LLM_PARAMETERS", "{}"))
    return found


def ours(folder: str, dtype: str, quantization: str = "none") -> Engine:
    """Return our engine, through the model class of the server."""
    from dragoman.core.calls import Generate
    from dragoman.core.spec import ModelSpec
    from dragoman.core.text import Sampling
    from dragoman_text.runtimes.llm.model import LanguageModel

    model = LanguageModel(ModelSpec(name="m", uri=folder, parameters=parameters(dtype, quantization)))
    model.load()

    async def client(prompt: list[int], new: int, began_s: float) -> Text:
        sampling, text = Sampling(max_new_tokens=new, ignore_eos=True), Text()
        async for chunk in model.generate(Generate(prompts=(tuple(prompt),), sampling=sampling, stream=True)):
            text.add((token.id for token in chunk.texts[0].tokens), began_s)
        return text

    async def together(prompts: list[list[int]], new: int) -> list[Text]:
        began_s = time.perf_counter()
        return list(await asyncio.gather(*(client(prompt, new, began_s) for prompt in prompts)))

    return Engine(lambda prompts, new: asyncio.run(together(prompts, new)))


def ours_served(folder: str, dtype: str) -> Engine:
    """Return our server."""
    from benchmarks.generation_server import dragoman_serve

    return dragoman_serve(folder, parameters(dtype))


def llama_cpp(folder: str, dtype: str) -> Engine:
    """Return llama.cpp's server."""
    from benchmarks.generation_server import llama_server

    return llama_server(folder)


def _transformers(folder: str, dtype: str) -> Any:
    import torch
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    return torch, model


def transformers_generate(folder: str, dtype: str) -> Engine:
    """Return `generate` of transformers, one prompt after another."""
    torch, model = _transformers(folder, dtype)

    class Clock:
        """Called by `generate` with the prompt, then with each token."""

        def __init__(self, began_s: float) -> None:
            self.text = Text()
            self._began_s, self._prompt = began_s, True

        def put(self, tokens: Any) -> None:
            if not self._prompt:
                self.text.add(tokens.tolist(), self._began_s)
            self._prompt = False

        def end(self) -> None:
            pass

    def generate(prompts: list[list[int]], new: int) -> list[Text]:
        began_s, found = time.perf_counter(), []
        for prompt in prompts:
            clock = Clock(began_s)
            length = {"max_new_tokens": new, "min_new_tokens": new}
            model.generate(torch.tensor([prompt]), do_sample=False, streamer=clock, pad_token_id=2, **length)
            found.append(clock.text)
        return found

    return Engine(generate)


def transformers_static_batch(folder: str, dtype: str) -> Engine:
    """Return `generate` of transformers on one batch: all clients wait for the end."""
    torch, model = _transformers(folder, dtype)

    def generate(prompts: list[list[int]], new: int) -> list[Text]:
        began_s, found = time.perf_counter(), [Text() for _ in prompts]
        length = {"max_new_tokens": new, "min_new_tokens": new}
        rows = model.generate(torch.tensor(prompts), do_sample=False, pad_token_id=2, **length)
        for text, row in zip(found, rows.tolist(), strict=True):
            text.add(row[PROMPT:], began_s)
        return found

    return Engine(generate)


def transformers_continuous_batching(folder: str, dtype: str) -> Engine:
    """Return continuous batching of transformers."""
    _, model = _transformers(folder, dtype)
    from transformers import ContinuousBatchingConfig, GenerationConfig

    settings = ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=512)

    def generate(prompts: list[list[int]], new: int) -> list[Text]:
        config = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=2)
        manager = model.init_continuous_batching(generation_config=config, continuous_batching_config=settings)
        manager.start()
        began_s = time.perf_counter()
        names = [manager.add_request(prompt, max_new_tokens=new, record_timestamps=True) for prompt in prompts]
        found: dict[str, Text] = {}
        while len(found) < len(names):
            result = manager.get_result(timeout=1)
            if result is None or not result.is_finished():
                continue
            times = [moment - began_s for moment in result.timestamps]
            found[result.request_id] = Text(list(result.generated_tokens), times)
        manager.stop(block=True)
        return [found[name] for name in names]

    return Engine(generate)


SIDES: dict[str, Callable[[str, str], Engine]] = {
    "dragoman": ours,
    "dragoman serve": ours_served,
    "dragoman int8": partial(ours, quantization="int8"),
    "dragoman int4": partial(ours, quantization="int4"),
    "llama.cpp": llama_cpp,
    "generate": transformers_generate,
    "static batch": transformers_static_batch,
    "continuous batching": transformers_continuous_batching,
}


def measure_round(engine: Engine, prompts: list[list[int]], new: int) -> dict[str, Any]:
    """Let a client for each prompt request `new` tokens, all at once.

    Return tokens per second and CPU second, medians of the first token and of the gaps, memory, and the tokens.

    CPU time and memory include child processes, in which some engines compute.
    """
    busy_before_s, tokens = _cpu_s(engine), len(prompts) * new
    texts = engine.generate(prompts, new)
    # Until the last token, because continuous batching of transformers takes half a second to stop.
    duration_s, cpu_time_s = max(text.times[-1] for text in texts), _cpu_s(engine) - busy_before_s
    assert [len(text.tokens) for text in texts] == [new] * len(prompts), [len(text.tokens) for text in texts]
    gaps = [after - before for text in texts for before, after in pairwise(text.times)]
    return {
        "tokens_per_s": tokens / duration_s,
        "cpu_ms": 1e3 * cpu_time_s / tokens,
        "first_ms": 1e3 * statistics.median(text.times[0] for text in texts),
        "gap_ms": 1e3 * statistics.median(gaps),
        "pss_mib": _pss_mib(engine),
        "tokens": [text.tokens for text in texts],
    }


def _cpu_s(engine: Engine) -> float:
    return sum(map(cpu_s, process_tree(engine.pid)))


def _pss_mib(engine: Engine) -> float:
    return memory_mib(process_tree(engine.pid))["pss_mib"]


def config(make: Callable[[str, str], Engine], folder: str, dtype: str) -> None:
    """Answer lines of JSON until the input ends. All other output goes to the log."""
    warnings.simplefilter("ignore")
    # Child processes of an engine inherit the log as standard output.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    engine = make(str(Path(folder)), dtype)
    ready = {"ready_s": engine.ready_s, "ready_cpu_s": _cpu_s(engine), "ready_pss_mib": _pss_mib(engine)}
    print(json.dumps(ready), file=out, flush=True)
    for line in sys.stdin:
        options = json.loads(line)
        found = measure_round(engine, options["prompts"], options["new"])
        print(json.dumps(found), file=out, flush=True)


if __name__ == "__main__":
    config(SIDES[sys.argv[1]], *sys.argv[2:])
