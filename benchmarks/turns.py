"""Measure servers by turns under the same load: medians, and ratios within each round."""

import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import load
from benchmarks.identity import Cores
from benchmarks.peers import PEERS
from benchmarks.subjects import Subject
from benchmarks.workloads import Workload

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Plan:
    """Numbers of connections, and number and duration of the rounds."""

    connections: Sequence[int] = (1, 16, 64)
    rounds: int = 3
    seconds: float = 2.0
    warm_up_s: float = 0.5
    quick: bool = False


QUICK = Plan(connections=(16,), rounds=1, seconds=0.3, warm_up_s=0.0, quick=True)


def rounds(plan: Plan, workload: Workload, subjects: Sequence[Subject], cores: Cores, folder: Path) -> Iterator[Row]:
    """Yield a row for each server, number of connections and round. Servers that cannot answer are left out."""
    requests = {subject: checked for subject in subjects if (checked := subject.check(workload))}
    for count in plan.connections:
        for turn in range(plan.rounds):  # by turns, so that other load affects all servers
            for subject, checked in list(requests.items()):
                interval = load.Load(checked, count, plan.seconds, cores.load, folder)
                try:
                    if turn == 0 and plan.warm_up_s:
                        run(subject, replace(interval, seconds=plan.warm_up_s), 0)
                    yield run(subject, interval, turn)
                except (RuntimeError, subprocess.TimeoutExpired) as error:
                    if subject.name not in PEERS:
                        raise
                    print(f"{subject.name} is left out of further rounds: {error}", file=sys.stderr)
                    del requests[subject]


def run(subject: Subject, interval: load.Load, turn: int) -> Row:
    """Run one interval of load. Raises RuntimeError if a response was wrong."""
    checked = interval.checked
    generate = load.choose(checked.workload.wire, "auto")
    began_s = subject.process.cpu_s()
    measured = generate(interval)
    cpu_us = (subject.process.cpu_s() - began_s) / max(1, measured.responses) * 1e6
    if measured.errors or not measured.responses:
        raise RuntimeError(f"{subject.name}: {measured.errors} of {measured.responses} responses were wrong")
    row: Row = {"workload": checked.workload.name, "connections": interval.connections, "server": subject.name}
    row |= {"round": turn, "rate": measured.rate, "cpu_us": cpu_us, **asdict(measured)}
    line = f"{row['workload']:18} c={row['connections']:<3} {subject.name:18} {row['rate']:10.1f}/s"
    print(f"{line}  p99 {row['p99_ms']:8.2f} ms  cpu {cpu_us:8.1f} us", file=sys.stderr, flush=True)
    return row


def summary(rows: Sequence[Row]) -> list[Row]:
    """Return a row for each server: medians of its rounds, and of the ratios in each round to every other server.

    `ratios` compare throughput, `cpu_ratios` responses per CPU time of the server.
    """
    result = []
    for key in dict.fromkeys((r["workload"], r["connections"], r["server"]) for r in rows):
        mine = _of(rows, *key)
        row: Row = dict(zip(("workload", "connections", "server"), key, strict=True))
        row |= {k: _round(statistics.median(r[k] for r in mine)) for k in ("rate", "p50_ms", "p99_ms", "cpu_us")}
        row["rate_spread"] = [_round(end(r["rate"] for r in mine)) for end in (min, max)]
        others = {r["server"] for r in rows if (r["workload"], r["connections"]) == key[:2]} - {key[2]}
        row["ratios"], row["cpu_ratios"] = {}, {}
        for other in sorted(others):
            theirs = {r["round"]: r for r in _of(rows, *key[:2], other)}
            pairs = [(r, theirs[r["round"]]) for r in mine if r["round"] in theirs]
            if not pairs:
                continue
            row["ratios"][other] = _round(statistics.median(a["rate"] / b["rate"] for a, b in pairs))
            if all(a["cpu_us"] for a, _ in pairs):
                row["cpu_ratios"][other] = _round(statistics.median(b["cpu_us"] / a["cpu_us"] for a, b in pairs))
        result.append(row)
    return result


def _of(rows: Sequence[Row], *key: object) -> list[Row]:
    return [r for r in rows if (r["workload"], r["connections"], r["server"]) == key]


def _round(number: float) -> float:
    return float(f"{number:.4g}")
