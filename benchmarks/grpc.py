"""gRPC, small and large unary calls: our server beside echo servers of grpcio, in the same run.

usage: python -m benchmarks.grpc [--quick] [--only NAME] [--connections 1,16] [--rounds 3] [--seconds 2]

The load comes from `grpc_load.c`, which is compiled at its first use and compares every response.
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
from benchmarks.grpc_load import write_load_files
from benchmarks.http import MODELS, Subject
from benchmarks.identity import Cores
from benchmarks.load import build_generator, parse_result
from benchmarks.processes import RESULTS, dragoman, free_port, http_ready, listens, pin, run_process
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
def subjects(core: int | None, is_selected: Callable[[str], bool]) -> Iterator[list[Subject]]:
    """Start the selected servers and wait until they listen."""
    logs = RESULTS / "logs"
    with ExitStack() as stack:
        servers = []
        for kind in ECHOES:
            if not is_selected(f"echo {kind}"):
                continue
            port = free_port()
            command = [sys.executable, "-m", "benchmarks.grpc_echo", kind, str(port)]
            process = stack.enter_context(run_process(command, logs / f"grpc-echo-{kind}.log", core))
            process.wait_until(lambda port=port: listens(port))  # type: ignore[misc]
            servers.append(Subject(f"echo {kind}", process, port, echo=True))
        if is_selected(SERVER):
            http_port, port = free_port(), free_port()
            process = stack.enter_context(run_process(dragoman(MODELS, http_port, port), logs / "grpc-own.log", core))
            process.wait_until(lambda: http_ready(http_port))
            servers.append(Subject(SERVER, process, port, echo=False))
        yield servers


def measure(subject: Subject, workload: Workload, plan: Plan, connections: int, core: int | None) -> dict[str, float]:
    """Run one interval. Return responses per second, latencies, and CPU time of the server per response."""
    with tempfile.TemporaryDirectory() as name:
        response = check_request(workload, subject.port, echo=subject.echo).body
        write_load_files(Path(name), subject.port, workload.body, response)
        command = [
            str(build_generator("grpc_load")),
            str(subject.port),
            str(connections),
            str(plan.streams),
            str(plan.seconds),
            name,
        ]
        began_s = subject.process.cpu_s()
        run = subprocess.run(command, preexec_fn=pin(core), capture_output=True, text=True, check=True, timeout=120)
        cpu_s = subject.process.cpu_s() - began_s
    result = parse_result(run.stdout, subject.name)
    return {**result, "rate": result["responses"] / result["seconds"], "cpu_us": 1e6 * cpu_s / result["responses"]}


def compare(
    servers: Sequence[Subject], workload: Workload, plan: Plan, connections: int, core: int | None
) -> list[Row]:
    """Measure the servers by turns. Return medians, and medians of the ratios in each round to the plain echo."""
    rounds = [{s.name: measure(s, workload, plan, connections, core) for s in servers} for _ in range(plan.rounds)]
    rows: list[Row] = []
    for subject in servers:
        own = [r[subject.name] for r in rounds]
        row: Row = {"workload": workload.name, "connections": connections, "server": subject.name}
        row |= {key: statistics.median(m[key] for m in own) for key in ("rate", "p50_ms", "p99_ms", "cpu_us")}
        row["times_the_echo"] = statistics.median(r[subject.name]["rate"] / r[BASE]["rate"] for r in rounds)
        row["cpu_share"] = statistics.median(r[BASE]["cpu_us"] / r[subject.name]["cpu_us"] for r in rounds)
        rows.append(row)
    return rows


def show(rows: Sequence[Row]) -> None:
    print(f"\n{rows[0]['workload']}, c = {rows[0]['connections']}; ratios to {BASE}")
    print(f"{'server':>16} {'responses/s':>10} {'p50 ms':>8} {'p99 ms':>8} {'CPU us':>8} {'rate':>7} {'1/CPU':>7}")
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
    parser.add_argument("--subjects", default="", help="comma-separated names; default: all")
    parser.add_argument("--connections", default="")
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=0.0)
    options = parser.parse_args()
    connections = [int(c) for c in (options.connections or ("16" if options.quick else "1,16,64")).split(",")]
    plan = Plan(
        connections,
        options.streams,
        options.rounds or (1 if options.quick else 3),
        options.seconds or (0.5 if options.quick else 2),
    )
    cores = Cores.of_this_machine()
    print(machine.describe())
    selected = [w for w in workloads.identity() if w.wire == "grpc" and options.only in w.name]
    names = options.subjects.split(",") if options.subjects else []
    rows: list[Row] = []
    with subjects(cores.server, lambda name: not names or name in (BASE, *names)) as servers:
        for workload in selected:
            for number in plan.connections:
                rows += (new := compare(servers, workload, plan, number, cores.load))
                show(new)
    result = {"machine": machine.machine(), "versions": machine.versions(), "rows": rows}
    (RESULTS / "grpc.json").write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
