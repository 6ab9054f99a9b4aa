"""One process compared with several that have copies of the models (`--processes`), by CPU time per response.

usage: python -m benchmarks.server_processes [--quick] [--processes 2] [--connections 16]

The server runs on one core and the load generator on another one, so that throughput is that of one core in each case.
What several processes add is CPU time per response: if that is equal, they need nothing of each other.
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from benchmarks import machine
from benchmarks.checked_request import check_request
from benchmarks.load import Load, c_generator
from benchmarks.processes import _TICKS, RESULTS, ROOT, Process, _stat, dragoman, free_port, http_ready, run_process
from benchmarks.workloads import Workload, identity

MODELS = ROOT / "benchmarks" / "models.py"
WORKLOADS = ("rest-json-small", "rest-json-large")


@dataclass(frozen=True, slots=True)
class Row:
    """One interval: responses per second, and CPU time per response of all processes of the server."""

    workload: str
    processes: int
    round: int
    rate: float
    p50_ms: float
    cpu_us: float
    errors: int


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    rounds, seconds = (1, 0.3) if options.quick else (options.rounds, options.seconds)
    counts = [1, options.processes]
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as running:
        servers = {count: _start_server(running, Path(folder), count) for count in counts}
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # also of the load generator
        for workload in identity():
            if workload.name not in WORKLOADS or options.only not in workload.name:
                continue
            for number in range(rounds + 1):  # the first one is a warm-up
                for count in counts if number % 2 else counts[::-1]:
                    connections = options.connections * count
                    row = _row(workload, count, number, servers[count], connections, seconds, Path(folder))
                    rows += [row] * (number > 0)
    report = f"{machine.describe()}\n\n{table(rows, counts[1])}"
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "server_processes.json").write_text(json.dumps([asdict(row) for row in rows], indent=2))
    print(report)
    return 1 if any(row.errors for row in rows) else 0


def _start_server(running: contextlib.ExitStack, folder: Path, count: int) -> tuple[Process, int]:
    port = free_port()
    models = [f"{MODELS}:{name}" for name in ("Identity", "IdentityImage")]
    command = dragoman(models, port, -1, "--processes", str(count))
    process = running.enter_context(run_process(command, folder / f"{count}.log"))
    process.wait_until(partial(http_ready, port))
    while count > 1 and _copies(port) < len(models) * count:
        time.sleep(0.1)
    for pid in process.pids():
        os.sched_setaffinity(pid, {min(os.sched_getaffinity(0))})
    return process, port


def _copies(port: int) -> float:
    """Return the number of models in all processes."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as response:
        lines = response.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("dragoman_front_end_models{"))


def _row(
    workload: Workload,
    count: int,
    number: int,
    server: tuple[Process, int],
    connections: int,
    seconds: float,
    folder: Path,
) -> Row:
    process, port = server
    checked = check_request(workload, port, echo=False)
    before_s = _cpu_s(process)
    measured = c_generator(Load(checked, connections, seconds, None, folder))
    cpu_us = 1e6 * (_cpu_s(process) - before_s) / max(1, measured.responses)
    return Row(workload.name, count, number, measured.rate, measured.p50_ms, cpu_us, measured.errors)


def _cpu_s(process: Process) -> float:
    """Return the CPU time of all processes of the server."""
    return sum(int(s[11]) + int(s[12]) for s in filter(None, map(_stat, process.pids()))) / _TICKS


def table(rows: Sequence[Row], many: int) -> str:
    """Return medians of the rounds, the spread of CPU times, and medians of the ratios in each round to one process."""
    lines = [
        "| workload | processes | responses/s | p50 ms | CPU us per response | least to most | times one process |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name in dict.fromkeys(row.workload for row in rows):
        one = {r.round: r.cpu_us for r in rows if (r.workload, r.processes) == (name, 1)}
        for count in (1, many):
            group = [r for r in rows if (r.workload, r.processes) == (name, count)]
            rate, p50_ms, cpu_us = (
                statistics.median(getattr(r, k) for r in group) for k in ("rate", "p50_ms", "cpu_us")
            )
            least, most = (f(r.cpu_us for r in group) for f in (min, max))
            ratio = statistics.median(r.cpu_us / one[r.round] for r in group)
            cells = (f"{rate:,.0f}", f"{p50_ms:.2f}", f"{cpu_us:,.1f}", f"{least:,.1f} to {most:,.1f}", f"{ratio:.2f}")
            lines.append(f"| {' | '.join((name, str(count), *cells))} |")
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.server_processes", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one short run of each, to check that it works")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", default="", help="workloads with this in their name: small or large")
    parser.add_argument("--connections", type=int, default=16, help="for each process")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0)
    return parser


if __name__ == "__main__":
    sys.exit(main())
