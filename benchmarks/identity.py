"""Overhead of the server: identity models over every protocol, compared with an echo of the same bytes.

usage: python -m benchmarks.identity [--quick] [--only NAME] [--generator python] [--peer mlserver]
"""

import argparse
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from benchmarks import load, machine, peer, tables, workloads
from benchmarks.checked_request import CheckedRequest, check_request
from benchmarks.processes import RESULTS, ROOT, Process, dragoman, free_port, http_ready, listens, run_process
from benchmarks.workloads import Wire, Workload

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Subject:
    """A server to measure: its process and port for each protocol that it serves."""

    name: str
    wires: dict[Wire, tuple[Process, int]]
    echo: bool = False


@dataclass(frozen=True, slots=True)
class Cores:
    """The cores of the servers and of the load generator; both None if there is only one core."""

    server: int | None
    load: int | None

    @classmethod
    def of_this_machine(cls) -> "Cores":
        cores = sorted(os.sched_getaffinity(0))
        return cls(cores[0], cores[1]) if len(cores) > 1 else cls(None, None)


@dataclass(frozen=True, slots=True)
class Plan:
    """Numbers of connections, number and duration of the rounds, and the load generator."""

    connections: Sequence[int]
    rounds: int
    seconds: float
    warm_up_s: float
    generator: str

    @classmethod
    def of(cls, options: argparse.Namespace) -> "Plan":
        defaults = cls([16], 1, 0.5, 0.0, "auto") if options.quick else cls([1, 16, 64], 3, 2.0, 1.0, "auto")
        overrides = {f.name: result for f in fields(cls) if (result := getattr(options, f.name, None)) is not None}
        return replace(defaults, **overrides)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    plan = Plan.of(options)
    selected = [w for w in workloads.identity() if options.only in w.name]
    if not selected:
        raise SystemExit(f"no workload has {options.only!r} in its name")
    result: dict[str, Any] = {"machine": machine.machine(), "versions": machine.versions()}
    result["generators"] = {wire: load.choose(wire, options.generator).__name__ for wire in ("http", "grpc")}
    cores = Cores.of_this_machine()
    result["pinned"] = cores.server is not None
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as running:
        subjects = [_dragoman(running, cores, folder), _echoes(running, cores, folder)]
        if options.peer:
            subjects.append(Subject(options.peer, peer.start_peer(options.peer, running, cores.server, Path(folder))))
        result["rows"] = [row for w in selected for row in _rows(plan, w, subjects, cores, Path(folder))]
    report = tables.report(result)
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "identity.json").write_text(json.dumps(result, indent=2))
    (RESULTS / "identity.md").write_text(report)
    print(report)
    return 1 if any(row["errors"] for row in result["rows"]) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.identity", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one short run of each, to check that it works")
    parser.add_argument("--only", default="", metavar="NAME", help="workloads with this in their name")
    parser.add_argument("--connections", type=_integers, default=None, help="default 1,16,64")
    parser.add_argument("--rounds", type=int, default=None, help="rounds, in which the servers take turns (default 3)")
    parser.add_argument("--seconds", type=float, default=None, help="duration of each run (default 2)")
    parser.add_argument(
        "--generator", choices=("auto", "python"), default="auto", help="python: our generator in Python"
    )
    parser.add_argument("--peer", choices=peer.NAMES, help="install this server and measure it in the same run")
    return parser


def _integers(text: str) -> list[int]:
    return [int(n) for n in text.split(",")]


# --- the servers -------------------------------------------------------------------------------------------


def _dragoman(running: contextlib.ExitStack, cores: Cores, folder: str) -> Subject:
    models = [f"{ROOT / 'benchmarks' / 'models.py'}:{name}" for name in ("Identity", "IdentityImage")]
    http, grpc, log = free_port(), free_port(), Path(folder) / "dragoman.log"
    process = running.enter_context(run_process(dragoman(models, http, grpc), log, cores.server))
    process.wait_until(lambda: http_ready(http))
    return Subject("dragoman", {"http": (process, http), "grpc": (process, grpc)})


def _echoes(running: contextlib.ExitStack, cores: Cores, folder: str) -> Subject:
    return Subject("echo", {wire: _echo(wire, running, cores, folder) for wire in ("http", "grpc")}, echo=True)


def _echo(wire: Wire, running: contextlib.ExitStack, cores: Cores, folder: str) -> tuple[Process, int]:
    port, log = free_port(), Path(folder) / f"echo-{wire}.log"
    command = [sys.executable, "-m", "benchmarks.echo", wire, str(port)]
    process = running.enter_context(run_process(command, log, cores.server))
    process.wait_until(lambda: listens(port))
    return process, port


# --- the measurements --------------------------------------------------------------------------------------


def _rows(plan: Plan, workload: Workload, subjects: Sequence[Subject], cores: Cores, folder: Path) -> Iterator[Row]:
    run = load.choose(workload.wire, plan.generator)
    participants = [(subject, checked) for subject in subjects if (checked := _check(subject, workload))]
    for count in plan.connections:
        loads = [(s, load.Load(checked, count, plan.seconds, cores.load, folder)) for s, checked in participants]
        if plan.warm_up_s:
            for _, interval in loads:
                run(replace(interval, seconds=plan.warm_up_s))
        for turn in range(plan.rounds):  # by turns, so that other load affects all servers
            for subject, interval in loads:
                yield _row(subject, run, interval, turn)


def _check(subject: Subject, workload: Workload) -> CheckedRequest | None:
    """Return the checked request; None if a peer does not support it. Raises ValueError for our server and the echo."""
    try:
        return check_request(workload, subject.wires[workload.wire][1], echo=subject.echo)
    except (ValueError, KeyError):
        if subject.name in ("dragoman", "echo"):
            raise
        return None


def _row(subject: Subject, run: Callable[[load.Load], load.Measurement], interval: load.Load, turn: int) -> Row:
    process = subject.wires[interval.checked.workload.wire][0]
    before_s = process.cpu_s()
    measured = run(interval)
    cpu_us = (process.cpu_s() - before_s) / max(1, measured.responses) * 1e6
    row: Row = {"workload": interval.checked.workload.name, "connections": interval.connections, "round": turn}
    row |= {"server": subject.name, "rate": measured.rate, "cpu_us": cpu_us, **asdict(measured)}
    print(
        f"{row['workload']:18} c={interval.connections:<3} {subject.name:10} {measured.rate:10.1f}/s  "
        f"p99 {measured.p99_ms:8.2f} ms  cpu {cpu_us:8.1f} us  {measured.errors or 'no'} errors",
        file=sys.stderr,
        flush=True,
    )
    return row


if __name__ == "__main__":
    sys.exit(main())
