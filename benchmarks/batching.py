"""What merging of calls gives, and what it costs: a model of 1 ms a batch and 0.02 ms a row, on a device of its own.

Closed loop: some clients that send their next request after each response. Open loop: very many who ask when they like.

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
from benchmarks.processes import RESULTS, ROOT, Process, dragoman, free_port, http_ready, pin, started

WAYS = {
    "no batching": (),
    "as soon as idle": ("--max-batch-size", "64", "--batch-linger", "0"),
    "linger 0.5": ("--max-batch-size", "64"),
    "timer 1 ms": ("--max-batch-size", "64", "--batch-linger", "0", "--max-batch-wait-s", "0.001"),
}


@dataclass(frozen=True, slots=True)
class Server:
    way: str
    process: Process
    checked: CheckedRequest


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.batching", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one short run of each, to see that it works")
    parser.add_argument("--only", default="", metavar="NAME", help="ways with this in their name")
    given = parser.parse_args(arguments)
    seconds, rounds = (0.3, 1) if given.quick else (2.0, 3)
    clients, rates = ((4,), (300,)) if given.quick else ((1, 16, 64), (300, 2000, 8000))
    cores = Cores.of_this_machine()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as running:
        servers = [_server(way, more, running, cores, Path(folder)) for way, more in WAYS.items() if given.only in way]
        rows = list(_rows(servers, seconds, rounds, clients, rates, cores, Path(folder)))
    results = {"machine": machine.machine(), "versions": machine.versions(), "rows": rows}
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "batching.json").write_text(json.dumps(results, indent=2))
    print(machine.described() + "\n\n" + table(rows))


def _server(way: str, more: Sequence[str], running: contextlib.ExitStack, cores: Cores, folder: Path) -> Server:
    port = free_port()
    command = dragoman([f"{ROOT / 'benchmarks' / 'models.py'}:Batched"], port, -1, *more)
    process = running.enter_context(started(command, folder / f"{way.replace(' ', '-')}.log", cores.server))
    process.until(lambda: http_ready(port))
    workload = workloads.small_json("batched", "Batched")
    return Server(way, process, check_request(workload, port, echo=False))


def _rows(
    servers: Sequence[Server],
    seconds: float,
    rounds: int,
    clients: Sequence[int],
    rates: Sequence[int],
    cores: Cores,
    folder: Path,
) -> Iterator[dict[str, Any]]:
    """A row for each load, round and server, which take turns."""
    kinds = [*(("closed", c) for c in clients), *(("open", r) for r in rates)]
    for kind, amount in kinds:
        for turn in range(rounds):
            for server in servers:
                if kind == "open" and server.way == "no batching" and amount > 500:
                    continue  # it would only fall behind
                before_s = server.process.cpu_s()
                if kind == "closed":
                    found = load.own(load.Load(server.checked, amount, seconds, cores.load, folder))
                else:
                    found = _open(server.checked, amount, seconds, cores, folder)
                cpu_us = (server.process.cpu_s() - before_s) / max(1, found.answers) * 1e6
                yield {"kind": kind, "amount": amount, "round": turn, "way": server.way, "cpu_us": cpu_us} | {
                    "rate": found.rate,
                    "p50_ms": found.p50_ms,
                    "p99_ms": found.p99_ms,
                    "faults": found.faults,
                }


def _open(checked: CheckedRequest, rate: int, seconds: float, cores: Cores, folder: Path) -> load.Measured:
    workload = checked.workload
    (folder / "question").write_bytes(workload.body)
    (folder / "answer").write_bytes(checked.body)
    results = {"path": workload.path, "headers": dict(workload.headers), "port": checked.port}
    (folder / "question.json").write_text(json.dumps(results | {"rate": rate, "seconds": seconds}))
    command = [sys.executable, "-m", "benchmarks.open_loop", str(folder)]
    run = subprocess.run(
        command, cwd=ROOT, preexec_fn=pin(cores.load), capture_output=True, text=True, timeout=seconds + 60
    )
    if run.returncode:
        raise RuntimeError(f"the load failed: {run.stderr[-2000:]}")
    return load.Measured(**json.loads(run.stdout))


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Medians of the rounds."""
    lines = ["| load | | answers/s | p50 ms | p99 ms | CPU us each | faults |", "|---|---|---:|---:|---:|---:|---:|"]
    for kind, amount, way in dict.fromkeys((r["kind"], r["amount"], r["way"]) for r in rows):
        group = [r for r in rows if (r["kind"], r["amount"], r["way"]) == (kind, amount, way)]
        middle = {key: statistics.median(r[key] for r in group) for key in ("rate", "p50_ms", "p99_ms", "cpu_us")}
        what = f"closed, {amount} clients" if kind == "closed" else f"open, {amount:,}/s"
        cells = [what, way, f"{middle['rate']:,.0f}", f"{middle['p50_ms']:.2f}", f"{middle['p99_ms']:.2f}"]
        cells += [f"{middle['cpu_us']:.0f}", str(sum(r["faults"] for r in group))]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
