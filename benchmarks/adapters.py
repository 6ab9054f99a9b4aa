"""LoRA adapters: tokens per second of clients that each use one of 64, beside those that use the model alone.

usage: python -m benchmarks.adapters [--dtype bfloat16] [--rank 8] [--clients 1,8,64] [--rounds 3] [--quick]

The model is the Llama with 100 million random parameters of `benchmarks.generation`, in this process; every adapter
changes all linear layers. `none`, `same` (all clients use one adapter) and `own` (client i uses adapter i) take turns.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.generation import make_model, prompt_maker
from benchmarks.generation_side import parameters
from benchmarks.processes import RESULTS

ADAPTERS = 64
SIDES = ("none", "same", "own")
Row = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.adapters", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", default="bfloat16", help="float32 or bfloat16")
    parser.add_argument("--rank", type=int, default=8, help="of each adapter")
    parser.add_argument("--clients", default="1,8,64", metavar="NUMBERS")
    parser.add_argument("--new", type=int, default=48, help="tokens that each client requests")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one short round of a tiny model, to check that it works")
    options = parser.parse_args(arguments)
    clients = [4] if options.quick else [int(number) for number in options.clients.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        path = make_model(RESULTS / "models", "tiny" if options.quick else "100M")
        names = save_adapters(path, Path(folder), options.rank, max(clients))
        rows = measure(path, names, options, clients)
    print(machine.describe(), f"rank {options.rank}, {options.dtype}", table(rows), sep="\n\n")


def save_adapters(model: Path, folder: Path, rank: int, count: int) -> dict[str, str]:
    """Write adapters as PEFT does; return their folders by name."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model)
    hidden, mlp = config.hidden_size, config.intermediate_size
    keys = config.num_key_value_heads * (hidden // config.num_attention_heads)
    sizes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (hidden, keys),
        "self_attn.v_proj": (hidden, keys),
    }
    sizes |= {"self_attn.o_proj": (hidden, hidden), "mlp.down_proj": (mlp, hidden)}
    sizes |= {"mlp.gate_proj": (hidden, mlp), "mlp.up_proj": (hidden, mlp)}
    for number in range(min(count, ADAPTERS)):
        torch.manual_seed(number)
        weights = {}
        for layer in range(config.num_hidden_layers):
            for name, (inputs, outputs) in sizes.items():
                path = f"base_model.model.model.layers.{layer}.{name}"
                weights[f"{path}.lora_A.weight"] = torch.randn(rank, inputs) * 0.02
                weights[f"{path}.lora_B.weight"] = torch.randn(outputs, rank) * 0.02
        (folder / str(number)).mkdir()
        save_file(weights, folder / str(number) / "adapter_model.safetensors")
        settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
        (folder / str(number) / "adapter_config.json").write_text(json.dumps(settings))
    return {str(number): str(folder / str(number)) for number in range(min(count, ADAPTERS))}


def measure(path: Path, names: dict[str, str], options: argparse.Namespace, clients: Sequence[int]) -> list[Row]:
    """Return a row for each side, number of clients and round. Raises ValueError for an adapter that was not loaded."""
    from dragoman.core.calls import Generate
    from dragoman.core.spec import ModelSpec
    from dragoman.core.text import Sampling
    from dragoman_text.runtimes.llm.model import LanguageModel

    limits = {"adapters": names, "max_adapters": ADAPTERS, "adapter_memory": 8192, "max_batch": max(clients)}
    found = parameters(options.dtype) | limits | {"prefix_cache": 0}
    model = LanguageModel(ModelSpec(name="m", uri=str(path), parameters=found))
    model.load()
    if skipped := model.details()["skipped_adapters"]:
        raise ValueError(f"adapters that were not loaded: {skipped}")
    make, new = prompt_maker(path), 8 if options.quick else options.new

    async def client(prompt: list[int], adapter: str) -> int:
        sampling = Sampling(max_new_tokens=new, ignore_eos=True, adapter=adapter)
        call = Generate(prompts=(tuple(prompt),), sampling=sampling, stream=True)
        return sum([len(chunk.texts[0].tokens) async for chunk in model.generate(call)])

    async def together(prompts: list[list[int]], adapters: Sequence[str]) -> int:
        return sum(await asyncio.gather(*map(client, prompts, adapters)))

    rows = []
    for count in clients:
        adapters = {"none": [""] * count, "same": ["0"] * count, "own": [str(i % ADAPTERS) for i in range(count)]}
        for turn in range(1 if options.quick else options.rounds):
            for side in SIDES[turn % 3 :] + SIDES[: turn % 3]:
                began_s, busy_s = time.perf_counter(), time.process_time()
                tokens = asyncio.run(together(make(count, turn), adapters[side]))
                duration_s, busy_s = time.perf_counter() - began_s, time.process_time() - busy_s
                row = {"clients": count, "side": side, "round": turn}
                rows.append(row | {"tokens_per_s": tokens / duration_s, "cpu_ms": 1000 * busy_s / tokens})
                print(rows[-1], file=sys.stderr)
    asyncio.run(model.close())
    return rows


def table(rows: Sequence[Row]) -> str:
    """Return a table; ratios to `none` are the medians of those within a round, in brackets by CPU time."""
    lines = ["| clients | adapters | tokens/s | CPU ms/token | share of none (by CPU) |", "|---:|---|---:|---:|---|"]
    for count in dict.fromkeys(row["clients"] for row in rows):
        none = [row for row in rows if (row["clients"], row["side"]) == (count, "none")]
        for side in SIDES:
            mine = [row for row in rows if (row["clients"], row["side"]) == (count, side)]
            pairs = [(row, next(each for each in none if each["round"] == row["round"])) for row in mine]
            rate, cpu = (statistics.median(row[key] for row in mine) for key in ("tokens_per_s", "cpu_ms"))
            share = statistics.median(row["tokens_per_s"] / base["tokens_per_s"] for row, base in pairs)
            by_cpu = statistics.median(base["cpu_ms"] / row["cpu_ms"] for row, base in pairs)
            shown = "" if side == "none" else f"{share:.2f} ({by_cpu:.2f})"
            lines.append(f"| {count} | {side} | {rate:.0f} | {cpu:.2f} | {shown} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
