"""gRPC, small and large unary calls: our server beside bare echoes of grpcio, in the same run.

usage: python -m benchmarks.grpc [--quick] [--only NAME] [--connections 1,16] [--rounds 3] [--seconds 2]

The load comes from `grpc_load.c`, which is compiled at its first use and compares every answer.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import machine, workloads
from benchmarks.checked_request import check_request
from benchmarks.grpc_load import write_question
from benchmarks.http import MODELS, Subject
from benchmarks.identity import Cores
from benchmarks.load import built
from benchmarks.processes import RESULTS, dragoman, free_port, http_ready, listens, pin, started
from benchmarks.workloads import Workload

Row = dict[str, Any]
ECHOES = ("aio", "aio-uvloop", "sync", "own")
SERVER = "dragoman own"
BASE = "echo aio"


@dataclass(frozen=True, slots=True)
class Plan:
    connections: Sequence[int]
    streams: int
    rounds: int
    seconds: float


@contextmanager
def subjects(core: int | None, wanted: Callable[[str], bool]) -> Iterator[list[Subject]]:
    """The wanted servers, each started and listening."""
    logs = RESULTS / "logs"
    with ExitStack() as stack:
        found = []
        for kind in ECHOES:
            if not wanted(f"echo {kind}"):
                continue
            port = free_port()
            command = [sys.executable, "-m", "benchmarks.grpc_echo", kind, str(port)]
            process = stack.enter_context(started(command, logs / f"grpc-echo-{kind}.log", core))
            process.until(lambda port=port: listens(port))  # type: ignore[misc]
            found.append(Subject(f"echo {kind}", process, port, echo=True))
        if wanted(SERVER):
            http_port, port = free_port(), free_port()
            process = stack.enter_context(started(dragoman(MODELS, http_port, port), logs / "grpc-own.log", core))
            process.until(lambda: http_ready(http_port))
            found.append(Subject(SERVER, process, port, echo=False))
        yield found


def measure(subject: Subject, workload: Workload, plan: Plan, connections: int, core: int | None) -> dict[str, float]:
    """One interval: answers a second, latencies, and CPU time of the server an answer."""
    with tempfile.TemporaryDirectory() as name:
        answer = check_request(workload, subject.port, echo=subject.echo).body
        write_question(Path(name), subject.port, workload.body, answer)
        command = [
            str(built("grpc_load")),
            str(subject.port),
            str(connections),
            str(plan.streams),
            str(plan.seconds),
            name,
        ]
        began_s = subject.process.cpu_s()
        run = subprocess.run(command, preexec_fn=pin(core), capture_output=True, text=True, check=True, timeout=120)
        cpu_s = subject.process.cpu_s() - began_s
    result: dict[str, float] = json.loads(run.stdout)
    if result["faults"] or not result["answers"]:
        raise RuntimeError(
            f"{subject.name}: {result['faults']} of {result['answers']} answers were wrong: {run.stderr}"
        )
    return {**result, "rate": result["answers"] / result["seconds"], "cpu_us": 1e6 * cpu_s / result["answers"]}


def compare(found: Sequence[Subject], workload: Workload, plan: Plan, connections: int, core: int | None) -> list[Row]:
    """All servers in turns, some rounds: medians, and the medians of the rounds' ratios to the plain echo."""
    rounds = [{s.name: measure(s, workload, plan, connections, core) for s in found} for _ in range(plan.rounds)]
    rows: list[Row] = []
    for subject in found:
        mine = [r[subject.name] for r in rounds]
        row: Row = {"workload": workload.name, "connections": connections, "server": subject.name}
        row |= {key: statistics.median(m[key] for m in mine) for key in ("rate", "p50_ms", "p99_ms", "cpu_us")}
        row["times_the_echo"] = statistics.median(r[subject.name]["rate"] / r[BASE]["rate"] for r in rounds)
        row["cpu_share"] = statistics.median(r[BASE]["cpu_us"] / r[subject.name]["cpu_us"] for r in rounds)
        rows.append(row)
    return rows


def show(rows: Sequence[Row]) -> None:
    print(f"\n{rows[0]['workload']}, c = {rows[0]['connections']}; ratios are those to {BASE}")
    print(f"{'server':>16} {'answers/s':>10} {'p50 ms':>8} {'p99 ms':>8} {'CPU us':>8} {'rate':>7} {'1/CPU':>7}")
    for r in rows:
        print(
            f"{r['server']:>16} {r['rate']:>10,.0f} {r['p50_ms']:>8.2f} {r['p99_ms']:>8.2f} {r['cpu_us']:>8.1f}",
            end=" ",
        )
        print(f"{r['times_the_echo']:>6.2f}x {r['cpu_share']:>6.2f}x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default="grpc-raw")
    parser.add_argument("--subjects", default="", help="names to take, all by default")
    parser.add_argument("--connections", default="")
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=0.0)
    given = parser.parse_args()
    connections = [int(c) for c in (given.connections or ("16" if given.quick else "1,16,64")).split(",")]
    plan = Plan(
        connections,
        given.streams,
        given.rounds or (1 if given.quick else 3),
        given.seconds or (0.5 if given.quick else 2),
    )
    cores = Cores.of_this_machine()
    print(machine.described())
    wanted = [w for w in workloads.identity() if w.wire == "grpc" and given.only in w.name]
    names = given.subjects.split(",") if given.subjects else []
    rows: list[Row] = []
    with subjects(cores.server, lambda name: not names or name in (BASE, *names)) as found:
        for workload in wanted:
            for number in plan.connections:
                rows += (new := compare(found, workload, plan, number, cores.load))
                show(new)
    result = {"machine": machine.machine(), "versions": machine.versions(), "rows": rows}
    (RESULTS / "grpc.json").write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
