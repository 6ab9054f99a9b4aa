"""Texts written at the same time, by our engine and by transformers: tokens a second, first token, gaps, memory.

usage: python -m benchmarks.generation [--quick] [--dtype float32] [--model 100M] [--new 128] [--rounds 3]
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.processes import RESULTS, ROOT
from dragoman.plugins import import_file

SIDES = ("dragoman", "continuous batching", "static batch", "generate")
CLIENTS = (1, 8, 32)
_TRAIN = ROOT / "examples" / "text" / "train_models.py"


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured: so many new tokens for each client, in so many rounds of the numbers of clients."""

    new: int = 128
    rounds: int = 3
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
    given = parser.parse_args(arguments)
    plan = Plan(given.new, given.rounds, models=tuple(given.model or ("tiny", "100M")))
    if given.quick:
        plan = Plan(8, 1, (1, 4), ("tiny",), ("dragoman", "generate"))
    with tempfile.TemporaryDirectory() as folder:
        rows = [
            row
            for model in plan.models
            for dtype in given.dtype or ["float32", "bfloat16"]
            for row in measured(made(Path(folder), model), model, dtype, plan)
        ]
    told = {"machine": machine.machine(), "versions": machine.versions(), "rows": rows}
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
    for clients in plan.clients:
        with contextlib.ExitStack() as running:
            sides = {name: running.enter_context(asked(name, folder, dtype)) for name in plan.sides}
            for turn in range(plan.rounds):
                for side, ask in sides.items():
                    few = side == "generate" and clients > 8  # one after another: more clients would only take longer
                    asking = 8 if few else clients
                    ask(asking, min(plan.new, 8), 1000 + turn)  # what is done once is done here
                    found = ask(asking, plan.new, turn)
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
    """Medians of the rounds, and how many times the tokens of the best other side ours are."""
    lines = [
        "| model | clients | side | tokens/s | first token ms | gap ms | peak MiB | ours / it |",
        "|---|---|---|---|---|---|---|---|",
    ]
    keys = dict.fromkeys((row["model"], row["dtype"], row["clients"]) for row in rows)
    for model, dtype, clients in keys:
        sides = dict.fromkeys(row["side"] for row in rows)
        speeds = {side: _median(rows, (model, dtype, clients, side), "tokens_per_s") for side in sides}
        for side, speed in sorted(speeds.items(), key=lambda pair: -pair[1]):
            rest = [_median(rows, (model, dtype, clients, side), key) for key in ("first_ms", "gap_ms", "peak_mib")]
            ratio = "" if side == "dragoman" else f"{speeds['dragoman'] / speed:.2f}"
            cells = (f"{model} {dtype}", clients, side, f"{speed:,.0f}", f"{rest[0]:.0f}", f"{rest[1]:.1f}")
            lines.append("| " + " | ".join(map(str, (*cells, f"{rest[2]:,.0f}", ratio))) + " |")
    return "\n".join(lines)


def _median(rows: Sequence[dict[str, Any]], key: tuple[Any, ...], what: str) -> float:
    found: float = statistics.median(
        row[what] for row in rows if (row["model"], row["dtype"], row["clients"], row["side"]) == key
    )
    return found


if __name__ == "__main__":
    main()
