"""HTTP/1.1: our server beside bare echoes of the same bytes, in the same run.

usage: python -m benchmarks.http [--quick] [--only NAME] [--connections 1,16,64] [--rounds 3] [--seconds 2]

`bare` is our HTTP server with an endpoint that returns the body: what HTTP itself costs. The load comes from
`http_load.c`, which is compiled at its first use and compares every response.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import load, machine, workloads
from benchmarks.checked_request import check_request
from benchmarks.identity import Cores
from benchmarks.processes import RESULTS, Process, dragoman, free_port, http_ready, listens, pin, started
from benchmarks.workloads import Workload

ECHOES = {"echo": "http", "buffered echo": "http-buffered"}
BARE = "bare"
SERVER = "own"
MODELS = ("benchmarks.models:Identity", "benchmarks.models:IdentityImage")


@dataclass(frozen=True, slots=True)
class Subject:
    """A server that is measured. An echo answers with the question."""

    name: str
    process: Process
    port: int
    echo: bool


@contextmanager
def subjects(core: int | None, wanted: Sequence[str]) -> Iterator[list[Subject]]:
    """The servers, each started and listening; all where none is named."""
    with ExitStack() as stack:
        found = []

        def start(name: str, command: Sequence[str], port: int) -> Process:
            return stack.enter_context(started(command, RESULTS / "logs" / f"http-{name}.log".replace(" ", "-"), core))

        for name, module in {**{n: ("ceilings", kind) for n, kind in ECHOES.items()}, BARE: ("http", "bare")}.items():
            if not wanted or name in wanted:
                port = free_port()
                process = start(name, [sys.executable, "-m", f"benchmarks.{module[0]}", module[1], str(port)], port)
                process.until(lambda port=port: listens(port))  # type: ignore[misc]
                found.append(Subject(name, process, port, echo=True))
        if not wanted or SERVER in wanted:
            port = free_port()
            process = start(SERVER, dragoman(MODELS, port, -1), port)
            process.until(lambda: http_ready(port))
            found.append(Subject(SERVER, process, port, echo=False))
        yield found


async def bare(port: int) -> None:
    """An HTTP server with nothing behind it."""
    from dragoman.protocols.wire import HttpProtocol, HttpRequest, HttpResponse, Route, json_response
    from dragoman.transports.http_server import HttpServer
    from dragoman.transports.limits import Limits

    def echo(request: HttpRequest) -> HttpResponse:
        return HttpResponse(200, (request.body,))

    def error(fault: Any) -> HttpResponse:
        return json_response({"error": str(fault)}, 500)

    table = HttpProtocol("echo", (Route("POST", "/v2/models/{model}/infer", echo),), error)
    engine: Any = None  # not used
    limits = Limits(compress_responses=False)
    await HttpServer(engine, (table,), limits=limits).start([("127.0.0.1", port)])
    await asyncio.Event().wait()


def write_question(folder: Path, subject: Subject, workload: Workload) -> None:
    """What the generator sends and expects; the answer has been checked."""
    (folder / "question").write_bytes(load.question(workload, subject.port))
    (folder / "answer").write_bytes(check_request(workload, subject.port, echo=subject.echo).body)


def measure(subject: Subject, workload: Workload, connections: int, seconds: float, core: int | None) -> dict[str, Any]:
    """One interval: answers a second, latencies, and CPU time of the server an answer."""
    with tempfile.TemporaryDirectory() as name:
        write_question(Path(name), subject, workload)
        command = [str(load.built("http_load")), str(subject.port), str(connections), str(seconds), name]
        began_s = subject.process.cpu_s()
        run = subprocess.run(command, preexec_fn=pin(core), capture_output=True, text=True, check=False, timeout=120)
        cpu_s = subject.process.cpu_s() - began_s
    if run.returncode:
        raise RuntimeError(f"{subject.name}: {run.stderr}")
    result: dict[str, Any] = json.loads(run.stdout)
    if result["faults"] or not result["answers"]:
        raise RuntimeError(f"{subject.name}: {result['faults']} of {result['answers']} answers were wrong")
    return {**result, "rate": result["answers"] / result["seconds"], "cpu_us": 1e6 * cpu_s / result["answers"]}


def compare(found: Sequence[Subject], workload: Workload, connections: int, given: argparse.Namespace) -> None:
    """All servers in turns, some rounds; prints medians, and the median of the rounds' ratios to each echo."""
    core = Cores.of_this_machine().load
    measure(found[0], workload, connections, 0.2, core)
    rounds = [
        {s.name: measure(s, workload, connections, given.seconds, core) for s in found} for _ in range(given.rounds)
    ]
    print(f"\n{workload.name}, c = {connections}")
    bases = [s.name for s in found if s.name in ECHOES]
    print(
        f"{'server':>14} {'answers/s':>10} {'p50 ms':>8} {'p99 ms':>8} {'CPU us':>8}",
        *(f"{f'of {b}':>16}" for b in bases),
    )
    for subject in found:
        mine = [r[subject.name] for r in rounds]
        rate, p50, p99, cpu = (statistics.median(m[k] for m in mine) for k in ("rate", "p50_ms", "p99_ms", "cpu_us"))
        ratios = [statistics.median(r[subject.name]["rate"] / r[b]["rate"] for r in rounds) for b in bases]
        result = [f"{ratio:>15.2f}x" for ratio in ratios]
        print(f"{subject.name:>14} {rate:>10,.0f} {p50:>8.3f} {p99:>8.2f} {cpu:>8.1f}", *result, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default="rest", help="workloads with this in their name")
    parser.add_argument("--subjects", default="", help="names to take, all by default")
    parser.add_argument("--connections", default="")
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=0.0)
    given = parser.parse_args()
    given.rounds = given.rounds or (1 if given.quick else 3)
    given.seconds = given.seconds or (0.3 if given.quick else 2.0)
    connections = [int(c) for c in (given.connections or ("16" if given.quick else "1,16,64")).split(",")]
    print(machine.described())
    wanted = [w for w in workloads.identity() if w.wire == "http" and given.only in w.name]
    with subjects(Cores.of_this_machine().server, [n for n in given.subjects.split(",") if n]) as found:
        for workload in wanted:
            for number in connections:
                compare(found, workload, number, given)


if __name__ == "__main__":
    if sys.argv[1:2] == ["bare"]:
        import uvloop

        from dragoman.system.process import keep_freed_memory

        keep_freed_memory()
        uvloop.run(bare(int(sys.argv[2])))
    else:
        main()
