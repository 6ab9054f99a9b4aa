"""One process beside several front ends around one engine, on all cores, over JSON small and large.

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
from benchmarks.load import Load, compiled
from benchmarks.processes import _TICKS, RESULTS, ROOT, Process, _stat, dragoman, free_port, http_ready, started
from benchmarks.workloads import Workload, identity

MODELS = ROOT / "benchmarks" / "models.py"


@dataclass(frozen=True, slots=True)
class Row:
    """One interval: answers a second, and microseconds of a core each, in the engine's process and in all others."""

    workload: str
    front_ends: int
    round: int
    rate: float
    p50_ms: float
    engine_us: float
    others_us: float
    faults: int


def main(arguments: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    rounds, seconds = (1, 0.5) if given.quick else (given.rounds, given.seconds)
    counts = [1, given.front_ends]
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as running:
        served = {count: _served(running, Path(folder), count) for count in counts}
        for workload in identity():
            if workload.name not in ("rest-json-small", "rest-json-large") or given.only not in workload.name:
                continue
            for number in range(rounds + 1):  # the first one warms up
                for count in counts if number % 2 else counts[::-1]:
                    row = _row(workload, count, number, served[count], given.connections, seconds, Path(folder))
                    rows += [row] * (number > 0 or given.quick)
    report = f"{machine.described()}\n\n{table(rows, counts[1])}"
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "front_ends.json").write_text(json.dumps([asdict(row) for row in rows], indent=2))
    print(report)
    return 1 if any(row.faults for row in rows) else 0


def _served(running: contextlib.ExitStack, folder: Path, count: int) -> tuple[Process, int]:
    port = free_port()
    models = [f"{MODELS}:{name}" for name in ("Identity", "IdentityImage")]
    command = dragoman(models, port, -1, "--front-ends", str(count))
    process = running.enter_context(started(command, folder / f"{count}.log"))
    process.until(partial(http_ready, port))
    return process, port


def _row(
    workload: Workload,
    count: int,
    number: int,
    served: tuple[Process, int],
    connections: int,
    seconds: float,
    folder: Path,
) -> Row:
    process, port = served
    checked = check_request(workload, port, echo=False)
    before = _cpu_s(process)
    measured = compiled(Load(checked, connections, seconds, None, folder))
    engine_s, others_s = (after - then for after, then in zip(_cpu_s(process), before, strict=True))
    each = 1e6 / max(1, measured.answers)
    return Row(
        workload.name, count, number, measured.rate, measured.p50_ms, engine_s * each, others_s * each, measured.faults
    )


def _cpu_s(process: Process) -> tuple[float, float]:
    """Seconds of a core that the engine's process has taken, and all others."""
    taken = [int(s[11]) + int(s[12]) for s in filter(None, map(_stat, process.pids()))]
    return taken[0] / _TICKS, sum(taken[1:]) / _TICKS


def table(rows: Sequence[Row], many: int) -> str:
    """Medians of the rounds, and of the rounds' own ratios to one process."""
    lines = [
        "| workload | front ends | answers/s | p50 ms | CPU us in the engine's process | in front ends | times one |",
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
    parser.add_argument("--quick", action="store_true", help="one short run of each, to see that it works")
    parser.add_argument("--front-ends", type=int, default=2)
    parser.add_argument("--only", default="", help="small or large")
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0)
    return parser


if __name__ == "__main__":
    sys.exit(main())
