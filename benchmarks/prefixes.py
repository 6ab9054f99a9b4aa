"""The prefix cache: 10,000 prompts that begin with one of 100 texts, with the cache and without it.

usage: python -m benchmarks.prefixes [--prompts 10000] [--uncached 200] [--clients 8] [--quick]

The model is the Llama with 100 million random parameters of `benchmarks.generation` in BF16, in this process. A prompt
is one of 100 prefixes of 480 tokens with 16 more, and gets 4 new tokens. Without the cache fewer prompts are measured.
"""

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks import machine
from benchmarks.generation import make_model
from benchmarks.generation_side import parameters
from benchmarks.processes import RESULTS

PREFIXES, PREFIX, QUESTION, NEW = 100, 480, 16, 4
Row = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.prefixes", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=10_000)
    parser.add_argument("--uncached", type=int, default=200, help="prompts without the cache")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--quick", action="store_true", help="few prompts of a tiny model, to check that it works")
    options = parser.parse_args(arguments)
    if options.quick:
        options.prompts, options.uncached = 300, 20
    path = str(make_model(RESULTS / "models", "tiny" if options.quick else "100M"))
    rows = [measure(path, 0, options.uncached, options.clients)]
    rows.append(measure(path, 2 * PREFIXES * (PREFIX + QUESTION), options.prompts, options.clients))
    print(machine.describe(), table(rows), sep="\n\n")


def measure(path: str, cached_tokens: int, count: int, clients: int) -> Row:
    """Return the times of `count` prompts with a prefix cache of so many tokens."""
    from dragoman.core.calls import Generate
    from dragoman.core.spec import ModelSpec
    from dragoman.core.text import Sampling
    from dragoman_text.runtimes.llm.model import LanguageModel

    limits = {"prefix_cache": cached_tokens, "max_batch": clients}
    model = LanguageModel(ModelSpec(name="m", uri=path, parameters=parameters("bfloat16") | limits))
    model.load()
    draw = random.Random(1)
    prefixes = [[draw.randrange(7, 600) for _ in range(PREFIX)] for _ in range(PREFIXES)]
    prompts = ((*draw.choice(prefixes), *(draw.randrange(7, 600) for _ in range(QUESTION))) for _ in range(count))
    first_ms: list[float] = []
    cached = 0

    async def client() -> None:
        nonlocal cached
        sampling = Sampling(max_new_tokens=NEW, ignore_eos=True)
        for prompt in prompts:
            began_s = time.perf_counter()
            async for chunk in model.generate(Generate(prompts=(prompt,), sampling=sampling, stream=True)):
                if chunk.prompts:  # the first one
                    first_ms.append(1000 * (time.perf_counter() - began_s))
                    cached += chunk.prompts[0].cached

    async def together() -> None:
        await asyncio.gather(*(client() for _ in range(clients)))

    began_s, busy_s = time.perf_counter(), time.process_time()
    asyncio.run(together())
    duration_s, busy_s = time.perf_counter() - began_s, time.process_time() - busy_s
    asyncio.run(model.close())
    tenth = max(1, count // 10)
    row = {"prompts": count, "cache": cached_tokens, "cached_share": cached / (count * (PREFIX + QUESTION))}
    row |= {"prompts_per_s": count / duration_s, "cpu_ms": 1000 * busy_s / count}
    row |= {"early_ms": median(first_ms[tenth : 2 * tenth]), "late_ms": median(first_ms[-tenth:])}
    print(row, file=sys.stderr)
    return row


def median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def table(rows: Sequence[Row]) -> str:
    """Return a table; the first token is the median of the second tenth of the prompts and of the last."""
    head = "| prompts | cache, tokens | tokens from it | prompts/s | CPU ms/prompt | first token ms, early | late |"
    lines = [head, "|---:|---:|---:|---:|---:|---:|---:|"]
    for row in rows:
        cells = f"{row['prompts']:,} | {row['cache']:,} | {row['cached_share']:.1%} | {row['prompts_per_s']:.1f}"
        cells += f" | {row['cpu_ms']:.1f} | {row['early_ms']:.0f} | {row['late_ms']:.0f}"
        lines.append(f"| {cells} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
