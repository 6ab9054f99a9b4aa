"""Concurrent text generation with our engine and others: tokens per second, first token, CPU time, memory.

usage: python -m benchmarks.generation [--only 100M-bfloat16] [--peers vllm,openvino-genai] [--clients 1,8] [--quick]
       python -m benchmarks.generation --page    (writes the results into benchmarks/results/text-engine.md)
"""

import argparse
import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.peers import home_of, installed_engines, python, version
from benchmarks.peers.engines import ENGINES
from benchmarks.processes import RESULTS, ROOT
from dragoman.plugins import import_file

OURS = "dragoman"
TRANSFORMERS = ("continuous batching", "static batch", "generate")
CASES = ("100M-float32", "100M-bfloat16", "tiny-float32", "tiny-bfloat16")
# Our engine with quantized weights, whose rows are beside those of the others. Peers have none of these formats.
QUANTIZED = ("int8", "int4")
PAGE = ROOT / "benchmarks" / "results" / "text-engine.md"
_MARKED = re.compile(r"(<!-- from results: generation -->\n).*?(<!-- end -->)", re.S)
_COLUMNS = ("tokens_per_s", "tokens_per_cpu_s", "first_ms", "gap_ms", "peak_mib")
Measure = Callable[[int, int, int], dict[str, float]]
_TRAIN = ROOT / "examples" / "text" / "train_models.py"


@dataclass(frozen=True, slots=True)
class Plan:
    """New tokens per client, the maximum number of rounds, and the numbers of clients.

    After `seconds` no further round of a case and number of clients begins; there is always one.
    """

    new: int
    rounds: int
    seconds: float
    clients: tuple[int, ...]
    cases: tuple[str, ...]
    peers: tuple[str, ...]
    quantized: tuple[str, ...] = ()


def main(arguments: Sequence[str] | None = None) -> None:
    options = argument_parser().parse_args(arguments)
    if options.page:
        PAGE.write_text(fill_page(PAGE.read_text(), json.loads((RESULTS / "generation.json").read_text())))
        return
    plan, busy = plan_runs(options), machine.busy_cores()
    with tempfile.TemporaryDirectory() as folder:
        rows = [row for case in plan.cases for row in measure_case(Path(folder), case, plan)]
    results = {
        "machine": machine.machine(),
        "versions": machine.versions() | {name: version(name) for name in plan.peers if name in ENGINES},
        "new": plan.new,
        "others_busy_cores": busy,
        "rows": rows,
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "generation.json").write_text(json.dumps(results, indent=2))
    print(machine.describe() + "\n\n" + table(rows))


def argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.generation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="one short round of a tiny model, to check that it works")
    parser.add_argument("--only", default=",".join(CASES[:3]), metavar="CASES", help=f"of {', '.join(CASES)}")
    parser.add_argument(
        "--peers", metavar="NAMES", help=f"of {', '.join((*TRANSFORMERS, *ENGINES))}; default: all installed ones"
    )
    parser.add_argument(
        "--quantized", default=",".join(QUANTIZED), metavar="NAMES", help=f"of {', '.join(QUANTIZED)}, our weights"
    )
    parser.add_argument("--clients", default="1,8,32", metavar="NUMBERS")
    parser.add_argument("--new", type=int, default=32, help="tokens that each client requests")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=9.0, help="no further round begins after this time")
    parser.add_argument("--page", action="store_true", help="measure nothing; write the page from the results")
    return parser


def plan_runs(options: argparse.Namespace) -> Plan:
    """Return the plan of the arguments. Peers that are not installed are left out, with a message."""
    known = (*TRANSFORMERS, *ENGINES)
    peers = _parse_names("--peers", options.peers, known) if options.peers is not None else known
    for name in [name for name in peers if name in ENGINES and name not in installed_engines()]:
        print(f"{name} is not installed, and left out: python -m benchmarks.peers install {name}")
    available = tuple(name for name in peers if name in TRANSFORMERS or name in installed_engines())
    if options.quick:
        return Plan(8, 1, 0.0, (1, 4), ("tiny-float32",), available if options.peers is not None else ("generate",))
    clients = tuple(map(int, options.clients.split(",")))
    return Plan(
        options.new,
        options.rounds,
        options.seconds,
        clients,
        _parse_names("--only", options.only, CASES),
        available,
        _parse_names("--quantized", options.quantized, QUANTIZED),
    )


def _parse_names(option: str, options: str, known: Sequence[str]) -> tuple[str, ...]:
    names = tuple(filter(None, options.split(",")))
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"{option}: expected some of {', '.join(known)}, got {unknown[0]!r}")
    return names


def make_model(folder: Path, name: str) -> Path:
    """Save a Llama with random weights, tiny or of about 100 million parameters, and a tokenizer.

    The tiny one has heads of size 32, the minimum for the kernels of vLLM.
    """
    train: Any = import_file(_TRAIN)
    if (folder / name).exists():
        return folder / name
    import transformers

    train.train(folder / name, "llama", replace(train.TINY, heads=2), steps=1)
    if name != "tiny":
        for file in ("config.json", "generation_config.json", "model.safetensors"):
            (folder / name / file).unlink()
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


def measure_case(folder: Path, case: str, plan: Plan) -> Iterator[dict[str, Any]]:
    """Yield a row for each engine, number of clients and round. Engines take turns.

    A peer that does not start, or fails, is left out from then on, with a message.
    """
    model, dtype = case.split("-")
    # The sizes of the tiny model are no multiples of the groups of quantized weights.
    quantized = () if model == "tiny" else tuple(f"{OURS} {each}" for each in plan.quantized)
    with contextlib.ExitStack() as running:
        sides: dict[str, Measure] = {}
        for name in (OURS, *quantized, *plan.peers):
            with _left_out(case, name, sides):
                sides[name] = running.enter_context(running_engine(name, make_model(folder, model), dtype))
        for clients in plan.clients:
            # `generate` serves clients one after another, so more of them only take longer.
            active = [name for name in sides if name != "generate" or clients == plan.clients[0]]
            for name in active:
                with _left_out(case, name, sides):
                    sides[name](clients, min(plan.new, 4), 100 * clients + 99)  # warm-up
            began_s = time.monotonic()
            for turn in range(plan.rounds):
                if turn and time.monotonic() - began_s > plan.seconds:
                    break
                for side in [name for name in active if name in sides]:
                    with _left_out(case, side, sides):
                        # Prompts differ in each round, because engines cache prefixes.
                        found = sides[side](clients, plan.new, 100 * clients + turn)
                        yield {"model": model, "dtype": dtype, "side": side, "clients": clients, "round": turn, **found}


@contextlib.contextmanager
def _left_out(case: str, name: str, sides: dict[str, Measure]) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if name.startswith(OURS):
            raise
        sides.pop(name, None)
        print(f"{case}: {name} is left out: {error}", flush=True)


def side_command(side: str, folder: Path, dtype: str) -> list[str]:
    """Return the command of an engine; a peer runs in its own environment."""
    if side in ENGINES:
        return [str(python(home_of(side))), "-m", ENGINES[side].side, str(folder), dtype]
    return [sys.executable, "-m", "benchmarks.generation_side", side, str(folder), dtype]


@contextlib.contextmanager
def running_engine(side: str, folder: Path, dtype: str) -> Iterator[Measure]:
    """Run an engine in a process that is stopped between measurements. Raises RuntimeError if it exits."""
    log = (RESULTS / "logs").resolve()
    log.mkdir(parents=True, exist_ok=True)
    # On a busy machine spinning threads slow down the engine that spins longest; all engines have the same limit.
    environment = {"GOMP_SPINCOUNT": "8000", **os.environ, "HF_HUB_OFFLINE": "1"}
    with (log / "generation.log").open("ab") as log_file:
        child = subprocess.Popen(
            side_command(side, folder, dtype),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log_file,
            text=True,
            env=environment,
            cwd=ROOT,
            start_new_session=True,
        )
        assert child.stdin is not None
        assert child.stdout is not None
        source, target = child.stdout, child.stdin

        def measure_resumed(clients: int, new: int, seed: int) -> dict[str, float]:
            _signal(child, signal.SIGCONT)
            try:
                return measure(clients, new, seed)
            finally:
                _signal(child, signal.SIGSTOP)

        def measure(clients: int, new: int, seed: int) -> dict[str, float]:
            try:
                print(json.dumps({"clients": clients, "new": new, "seed": seed}), file=target, flush=True)
            except BrokenPipeError:
                raise RuntimeError(f"'{side}' ended; see {log_file.name}") from None
            line = source.readline()
            if not line:
                raise RuntimeError(f"'{side}' ended; see {log_file.name}")
            found: dict[str, float] = json.loads(line)
            return found

        try:
            if source.readline() != "ready\n":
                raise RuntimeError(f"'{side}' does not start; see {log_file.name}")
            _signal(child, signal.SIGSTOP)
            yield measure_resumed
        finally:
            _signal(child, signal.SIGCONT)
            # It exits when its input ends, which frees shared memory; otherwise its session is killed.
            with contextlib.suppress(BrokenPipeError):
                target.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(15)
            _signal(child, signal.SIGKILL)
            child.wait()
            source.close()


def _signal(child: subprocess.Popen[str], what: signal.Signals) -> None:
    """Send a signal to all processes of an engine. Idle engines are stopped, because their threads use CPU time."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, what)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return medians of the rounds, and the ratio of our tokens to those of each engine, by time and by CPU time."""
    lines = [
        "| model | clients | engine | tokens/s | tokens/CPU s | first token ms | ms between tokens | peak MiB "
        "| dragoman / engine (by CPU) |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    keys = dict.fromkeys((row["model"], row["dtype"], row["clients"]) for row in rows)
    for model, dtype, clients in keys:
        key = (model, dtype, clients)
        sides = dict.fromkeys(row["side"] for row in rows if (row["model"], row["dtype"], row["clients"]) == key)
        found = {side: [_median(rows, (*key, side), column) for column in _COLUMNS] for side in sides}
        ours = found[OURS]
        for side, (speed, by_cpu, first, gap, peak) in sorted(found.items(), key=lambda pair: -pair[1][0]):
            ratio = "" if side == OURS else f"{ours[0] / speed:.2f} ({ours[1] / by_cpu:.2f})"
            cells = (f"{model} {dtype}", clients, side, f"{speed:,.0f}", f"{by_cpu:,.0f}", f"{first:.0f}", f"{gap:.1f}")
            lines.append("| " + " | ".join(map(str, (*cells, f"{peak:,.0f}", ratio))) + " |")
    return "\n".join(lines)


def fill_page(text: str, found: dict[str, Any]) -> str:
    """Return the page with its marked section replaced."""
    m = found["machine"]
    line = f"{m['processor']}, {m['cores']} cores, {m['when'][:16].replace('T', ' ')} UTC; prompts of 64 tokens, "
    engines = "".join(f"{name} {found['versions'][name]}; " for name in ENGINES if name in found["versions"])
    line += f"{found['new']} new tokens; {engines}other load before: {found['others_busy_cores']:.1f} cores."
    return _MARKED.sub(lambda part: f"{part[1]}\n{line}\n\n{table(found['rows'])}\n\n{part[2]}", text)


def _median(rows: Sequence[dict[str, Any]], key: tuple[Any, ...], what: str) -> float:
    found: float = statistics.median(
        row[what] for row in rows if (row["model"], row["dtype"], row["clients"], row["side"]) == key
    )
    return found


if __name__ == "__main__":
    main()
