"""Batching: throughput and latency with a model that takes 1 ms per batch and 0.02 ms per row on its own device.

Closed loop: clients that send their next request after each response. Open loop: requests at random times.

usage: python -m benchmarks.batching [--quick]
"""

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import load, machine, workloads
from benchmarks.checked_request import CheckedRequest, check_request
from benchmarks.identity import Cores
from benchmarks.processes import RESULTS, ROOT, Process, dragoman, free_port, http_ready, pin, run_process

METHODS = {
    "no batching": ("--max-batch-size", "1"),
    "as soon as idle": ("--max-batch-size", "64", "--batch-linger", "0"),
    "adaptive delay 0.5": ("--max-batch-size", "64"),
    "timer 1 ms": ("--max-batch-size", "64", "--batch-linger", "0", "--max-batch-wait-s", "0.001"),
}


@dataclass(frozen=True, slots=True)
class Server:
    method: str
    process: Process
    checked: CheckedRequest


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.batching", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one short run of each, to check that it works")
    parser.add_argument("--only", default="", metavar="NAME", help="methods with this in their name")
    options = parser.parse_args(arguments)
    seconds, rounds = (0.3, 1) if options.quick else (2.0, 3)
    clients, rates = ((4,), (300,)) if options.quick else ((1, 16, 64), (300, 2000, 8000))
    cores = Cores.of_this_machine()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as running:
        servers = [
            _server(method, more, running, cores, Path(folder))
            for method, more in METHODS.items()
            if options.only in method
        ]
        rows = list(_rows(servers, seconds, rounds, clients, rates, cores, Path(folder)))
    results = {"machine": machine.machine(), "versions": machine.versions(), "rows": rows}
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "batching.json").write_text(json.dumps(results, indent=2))
    print(machine.describe() + "\n\n" + table(rows))


def _server(method: str, more: Sequence[str], running: contextlib.ExitStack, cores: Cores, folder: Path) -> Server:
    port = free_port()
    command = dragoman([f"{ROOT / 'benchmarks' / 'models.py'}:Batched"], port, -1, *more)
    process = running.enter_context(run_process(command, folder / f"{method.replace(' ', '-')}.log", cores.server))
    process.wait_until(lambda: http_ready(port))
    workload = workloads.small_json("batched", "Batched")
    return Server(method, process, check_request(workload, port, echo=False))


def _rows(
    servers: Sequence[Server],
    seconds: float,
    rounds: int,
    clients: Sequence[int],
    rates: Sequence[int],
    cores: Cores,
    folder: Path,
) -> Iterator[dict[str, Any]]:
    """Yield a row for each load, round and server. Servers take turns."""
    kinds = [*(("closed", c) for c in clients), *(("open", r) for r in rates)]
    for kind, amount in kinds:
        for turn in range(rounds):
            for server in servers:
                if kind == "open" and server.method == "no batching" and amount > 500:
                    continue  # more than it can serve
                before_s = server.process.cpu_s()
                if kind == "closed":
                    result = load.python_generator(load.Load(server.checked, amount, seconds, cores.load, folder))
                else:
                    result = _open(server.checked, amount, seconds, cores, folder)
                cpu_us = (server.process.cpu_s() - before_s) / max(1, result.responses) * 1e6
                yield {"kind": kind, "amount": amount, "round": turn, "method": server.method, "cpu_us": cpu_us} | {
                    "rate": result.rate,
                    "p50_ms": result.p50_ms,
                    "p99_ms": result.p99_ms,
                    "errors": result.errors,
                }


def _open(checked: CheckedRequest, rate: int, seconds: float, cores: Cores, folder: Path) -> load.Measurement:
    plan: dict[str, object] = {"port": checked.port, "rate": rate, "seconds": seconds}
    load.write_plan(folder, checked.workload.http_request(), checked.body, plan)
    command = [sys.executable, "-m", "benchmarks.open_loop", str(folder)]
    run = subprocess.run(
        command, cwd=ROOT, preexec_fn=pin(cores.load), capture_output=True, text=True, timeout=seconds + 60
    )
    if run.returncode:
        raise RuntimeError(f"the load generator failed: {run.stderr[-2000:]}")
    return load.Measurement(**json.loads(run.stdout))


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return a table of the medians of the rounds."""
    lines = [
        "| load | | responses/s | p50 ms | p99 ms | CPU us/response | errors |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for kind, amount, method in dict.fromkeys((r["kind"], r["amount"], r["method"]) for r in rows):
        group = [r for r in rows if (r["kind"], r["amount"], r["method"]) == (kind, amount, method)]
        middle = {key: statistics.median(r[key] for r in group) for key in ("rate", "p50_ms", "p99_ms", "cpu_us")}
        load_kind = f"closed, {amount} clients" if kind == "closed" else f"open, {amount:,}/s"
        cells = [load_kind, method, f"{middle['rate']:,.0f}", f"{middle['p50_ms']:.2f}", f"{middle['p99_ms']:.2f}"]
        cells += [f"{middle['cpu_us']:.0f}", str(sum(r["errors"] for r in group))]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
