"""One process compared with several front ends that share an engine, on all cores, with small and large JSON.

usage: python -m benchmarks.front_ends [--quick] [--front-ends 2] [--only NAME] [--connections 16]
"""

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
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


@dataclass(frozen=True, slots=True)
class Row:
    """One interval: responses per second, and CPU time per response of the engine's process and of all others."""

    workload: str
    front_ends: int
    round: int
    rate: float
    p50_ms: float
    engine_us: float
    others_us: float
    errors: int


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    rounds, seconds = (1, 0.5) if options.quick else (options.rounds, options.seconds)
    counts = [1, options.front_ends]
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as running:
        servers = {count: _start_server(running, Path(folder), count) for count in counts}
        for workload in identity():
            if workload.name not in ("rest-json-small", "rest-json-large") or options.only not in workload.name:
                continue
            for number in range(rounds + 1):  # the first one is a warm-up
                for count in counts if number % 2 else counts[::-1]:
                    row = _row(workload, count, number, servers[count], options.connections, seconds, Path(folder))
                    rows += [row] * (number > 0 or options.quick)
    report = f"{machine.describe()}\n\n{table(rows, counts[1])}"
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "front_ends.json").write_text(json.dumps([asdict(row) for row in rows], indent=2))
    print(report)
    return 1 if any(row.errors for row in rows) else 0


def _start_server(running: contextlib.ExitStack, folder: Path, count: int) -> tuple[Process, int]:
    port = free_port()
    models = [f"{MODELS}:{name}" for name in ("Identity", "IdentityImage")]
    command = dragoman(models, port, -1, "--front-ends", str(count))
    process = running.enter_context(run_process(command, folder / f"{count}.log"))
    process.wait_until(partial(http_ready, port))
    return process, port


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
    before = _cpu_s(process)
    measured = c_generator(Load(checked, connections, seconds, None, folder))
    engine_s, others_s = (after_s - before_s for after_s, before_s in zip(_cpu_s(process), before, strict=True))
    each = 1e6 / max(1, measured.responses)
    return Row(
        workload.name, count, number, measured.rate, measured.p50_ms, engine_s * each, others_s * each, measured.errors
    )


def _cpu_s(process: Process) -> tuple[float, float]:
    """Return the CPU time of the engine's process and that of all others."""
    ticks = [int(s[11]) + int(s[12]) for s in filter(None, map(_stat, process.pids()))]
    return ticks[0] / _TICKS, sum(ticks[1:]) / _TICKS


def table(rows: Sequence[Row], many: int) -> str:
    """Return medians of the rounds, and of the ratios in each round to one process."""
    lines = [
        "| workload | front ends | responses/s | p50 ms | CPU us of the engine's process | of front ends | times one |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name in dict.fromkeys(row.workload for row in rows):
        for count in (1, many):
            group = [r for r in rows if (r.workload, r.front_ends) == (name, count)]
            one = {r.round: r.rate for r in rows if (r.workload, r.front_ends) == (name, 1)}
            medians = [
                statistics.median(getattr(r, k) for r in group) for k in ("rate", "p50_ms", "engine_us", "others_us")
            ]
            times = statistics.median(r.rate / one[r.round] for r in group)
            cells = [
                name,
                str(count),
                f"{medians[0]:,.0f}",
                f"{medians[1]:.2f}",
                f"{medians[2]:.0f}",
                f"{medians[3]:.0f}",
            ]
            lines.append(f"| {' | '.join([*cells, f'{times:.2f}'])} |")
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.front_ends", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one short run of each, to check that it works")
    parser.add_argument("--front-ends", type=int, default=2)
    parser.add_argument("--only", default="", help="workloads with this in their name: small or large")
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0)
    return parser


if __name__ == "__main__":
    sys.exit(main())
