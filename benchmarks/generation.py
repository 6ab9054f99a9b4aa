"""Texts written at the same time, by our engine and by transformers: tokens a second, first token, gaps, memory.

usage: python -m benchmarks.generation [--quick] [--dtype float32] [--model 100M] [--new 128] [--rounds 3] [--seconds 9]
       python -m benchmarks.generation --page    (writes what was found into docs/text-engine.md)
"""

import argparse
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.processes import RESULTS, ROOT
from dragoman.plugins import import_file

SIDES = ("dragoman", "continuous batching", "static batch", "generate")
CLIENTS = (1, 8, 32)
PAGE = ROOT / "docs" / "text-engine.md"
_MARKED = re.compile(r"(<!-- from results: generation -->\n).*?(<!-- end -->)", re.S)
_TOLD = ("tokens_per_s", "tokens_per_cpu_s", "first_ms", "gap_ms", "peak_mib")
_TRAIN = ROOT / "examples" / "text" / "train_models.py"


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured: so many new tokens for each client, in at most so many rounds of the numbers of clients.

    After `seconds` of them no further round of a model and number begins, though there is always one.
    """

    new: int = 128
    rounds: int = 3
    seconds: float = 9.0
    clients: tuple[int, ...] = CLIENTS
    models: tuple[str, ...] = ("tiny", "100M")
    sides: tuple[str, ...] = SIDES


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.generation", description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="one short round with the tiny model, to see that it works"
    )
    parser.add_argument("--dtype", action="append", choices=["float32", "bfloat16"])
    parser.add_argument("--model", action="append", choices=["tiny", "100M"])
    parser.add_argument("--new", type=int, default=128, help="how many tokens each client asks for")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=9.0, help="after which no further round begins")
    parser.add_argument("--page", action="store_true", help="measure nothing; write the page from the results")
    given = parser.parse_args(arguments)
    if given.page:
        PAGE.write_text(filled(PAGE.read_text(), json.loads((RESULTS / "generation.json").read_text())))
        return
    plan = Plan(given.new, given.rounds, given.seconds, models=tuple(given.model or ("tiny", "100M")))
    if given.quick:
        plan = Plan(8, 1, 0.0, (1, 4), ("tiny",), ("dragoman", "generate"))
    busy = machine.busy_cores()
    with tempfile.TemporaryDirectory() as folder:
        rows = [
            row
            for model in plan.models
            for dtype in given.dtype or ["float32", "bfloat16"]
            for row in measured(made(Path(folder), model), model, dtype, plan)
        ]
    told = {
        "machine": machine.machine(),
        "versions": machine.versions(),
        "new": plan.new,
        "others_busy_cores": busy,
        "rows": rows,
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "generation.json").write_text(json.dumps(told, indent=2))
    print(machine.described() + "\n\n" + table(rows))


def made(folder: Path, name: str) -> Path:
    """A Llama with random weights, tiny or of about 100 million parameters, and a tokenizer."""
    train: Any = import_file(_TRAIN)
    if (folder / name).exists():
        return folder / name
    import transformers

    train.train(folder / name, "llama", train.TINY, steps=1)
    if name != "tiny":
        weights = ("config.json", "generation_config.json", "model.safetensors")
        for each in weights:
            (folder / name / each).unlink()
        config = transformers.LlamaConfig(
            vocab_size=32000,
            hidden_size=768,
            intermediate_size=2048,
            num_hidden_layers=12,
            num_attention_heads=12,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
        )
        transformers.LlamaForCausalLM(config).save_pretrained(folder / name)
    return folder / name


def measured(folder: Path, model: str, dtype: str, plan: Plan) -> Iterator[dict[str, Any]]:
    """A row for each side, number of clients and round. One side runs at a time, and they take turns."""
    with contextlib.ExitStack() as running:
        sides = {name: running.enter_context(asked(name, folder, dtype)) for name in plan.sides}
        for clients in plan.clients:
            # Many clients of `generate`, one after another, would only take longer.
            asking = {name: ask for name, ask in sides.items() if name != "generate" or clients == plan.clients[0]}
            for ask in asking.values():
                ask(clients, min(plan.new, 8), 1000)  # what is done once is done here
            began_s = time.monotonic()
            for turn in range(plan.rounds):
                if turn and time.monotonic() - began_s > plan.seconds:
                    break
                for side, ask in asking.items():
                    found = ask(clients, plan.new, turn)
                    yield {"model": model, "dtype": dtype, "side": side, "clients": clients, "round": turn, **found}


@contextlib.contextmanager
def asked(side: str, folder: Path, dtype: str) -> Iterator[Callable[[int, int, int], dict[str, float]]]:
    """A process that is this side, and how to ask it."""
    command = [sys.executable, "-m", "benchmarks.generation_side", side, str(folder), dtype]
    log = (RESULTS / "logs").resolve()
    log.mkdir(parents=True, exist_ok=True)
    # Spinning threads would make whoever spins longest slow on a busy machine; all sides have the same.
    environment = {"GOMP_SPINCOUNT": "2000", **os.environ, "HF_HUB_OFFLINE": "1"}
    with (log / "generation.log").open("ab") as said:
        child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, text=True, env=environment, cwd=ROOT
        )
        assert child.stdin is not None
        assert child.stdout is not None
        source, target = child.stdout, child.stdin
        if source.readline() != "ready\n":
            raise RuntimeError(f"'{side}' does not start; see {said.name}")

        def ask(clients: int, new: int, seed: int) -> dict[str, float]:
            print(json.dumps({"clients": clients, "new": new, "seed": seed}), file=target, flush=True)
            line = source.readline()
            if not line:
                raise RuntimeError(f"'{side}' ended; see {said.name}")
            found: dict[str, float] = json.loads(line)
            return found

        try:
            yield ask
        finally:
            child.kill()
            child.wait()
            target.close()
            source.close()


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Medians of the rounds, and how many times the tokens of each other side ours are, by time and by CPU time."""
    lines = [
        "| model | clients | side | tokens/s | by CPU s | first token ms | gap ms | peak MiB | ours / it (by CPU) |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    keys = dict.fromkeys((row["model"], row["dtype"], row["clients"]) for row in rows)
    for model, dtype, clients in keys:
        asked = (model, dtype, clients)
        sides = dict.fromkeys(row["side"] for row in rows if (row["model"], row["dtype"], row["clients"]) == asked)
        found = {side: [_median(rows, (*asked, side), key) for key in _TOLD] for side in sides}
        ours = found["dragoman"]
        for side, (speed, by_cpu, first, gap, peak) in sorted(found.items(), key=lambda pair: -pair[1][0]):
            ratio = "" if side == "dragoman" else f"{ours[0] / speed:.2f} ({ours[1] / by_cpu:.2f})"
            cells = (f"{model} {dtype}", clients, side, f"{speed:,.0f}", f"{by_cpu:,.0f}", f"{first:.0f}", f"{gap:.1f}")
            lines.append("| " + " | ".join(map(str, (*cells, f"{peak:,.0f}", ratio))) + " |")
    return "\n".join(lines)


def filled(text: str, found: dict[str, Any]) -> str:
    """The page with its marked part written anew from the results."""
    m = found["machine"]
    line = f"{m['processor']}, {m['cores']} cores, {m['when'][:16].replace('T', ' ')} UTC; prompts of 64 tokens, "
    line += f"{found['new']} new ones; cores busy with something else before: {found['others_busy_cores']:.1f}."
    return _MARKED.sub(lambda part: f"{part[1]}\n{line}\n\n{table(found['rows'])}\n\n{part[2]}", text)


def _median(rows: Sequence[dict[str, Any]], key: tuple[Any, ...], what: str) -> float:
    found: float = statistics.median(
        row[what] for row in rows if (row["model"], row["dtype"], row["clients"], row["side"]) == key
    )
    return found


if __name__ == "__main__":
    main()
