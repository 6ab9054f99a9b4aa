"""HTTP/1.1: our server compared with echo servers of the same bytes, in the same run.

usage: python -m benchmarks.http [--quick] [--only NAME] [--connections 1,16,64] [--rounds 3] [--seconds 2]

`bare` is our HTTP server with an endpoint that returns the body, to measure HTTP alone. The load comes from
`http_load.c`, which is compiled at its first use and compares every response.
"""

import argparse
import asyncio
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
from benchmarks.processes import RESULTS, Process, dragoman, free_port, http_ready, listens, pin, run_process
from benchmarks.workloads import Workload

ECHOES = {"echo": "http", "buffered echo": "http-buffered"}
BARE = "bare"
SERVER = "own"
MODELS = ("benchmarks.models:Identity", "benchmarks.models:IdentityImage")


@dataclass(frozen=True, slots=True)
class Subject:
    """A server to measure. An echo returns the request."""

    name: str
    process: Process
    port: int
    echo: bool


@contextmanager
def subjects(core: int | None, names: Sequence[str]) -> Iterator[list[Subject]]:
    """Start the named servers, or all if `names` is empty, and wait until they listen."""
    with ExitStack() as stack:
        servers = []

        def start(name: str, command: Sequence[str], port: int) -> Process:
            return stack.enter_context(
                run_process(command, RESULTS / "logs" / f"http-{name}.log".replace(" ", "-"), core)
            )

        for name, module in {**{n: ("echo", kind) for n, kind in ECHOES.items()}, BARE: ("http", "bare")}.items():
            if not names or name in names:
                port = free_port()
                process = start(name, [sys.executable, "-m", f"benchmarks.{module[0]}", module[1], str(port)], port)
                process.wait_until(lambda port=port: listens(port))  # type: ignore[misc]
                servers.append(Subject(name, process, port, echo=True))
        if not names or SERVER in names:
            port = free_port()
            process = start(SERVER, dragoman(MODELS, port, -1), port)
            process.wait_until(lambda: http_ready(port))
            servers.append(Subject(SERVER, process, port, echo=False))
        yield servers


async def bare(port: int) -> None:
    """Serve HTTP without an engine: the endpoint returns the body."""
    from dragoman.protocols.wire import HttpProtocol, HttpRequest, HttpResponse, Route, json_response
    from dragoman.transports.application import Application
    from dragoman.transports.http_server import HttpServer
    from dragoman.transports.limits import Limits

    def echo(request: HttpRequest) -> HttpResponse:
        return HttpResponse(200, (request.body,))

    def error_response(error: Any, _: str) -> HttpResponse:
        return json_response({"error": str(error)}, 500)

    table = HttpProtocol("echo", (Route("POST", "/v2/models/{model}/infer", echo),), error_response)
    engine: Any = None  # not used
    limits = Limits(compress_responses=False)
    await HttpServer(Application(engine, (table,), limits)).start([("127.0.0.1", port)])
    await asyncio.Event().wait()


def write_load_files(folder: Path, subject: Subject, workload: Workload) -> None:
    """Write the request and its checked response for `http_load`."""
    (folder / "request").write_bytes(workload.http_request())
    (folder / "response").write_bytes(check_request(workload, subject.port, echo=subject.echo).body)


def measure(subject: Subject, workload: Workload, connections: int, seconds: float, core: int | None) -> dict[str, Any]:
    """Run one interval. Return responses per second, latencies, and CPU time of the server per response."""
    with tempfile.TemporaryDirectory() as name:
        write_load_files(Path(name), subject, workload)
        command = [str(load.build_generator("http_load")), str(subject.port), str(connections), str(seconds), name]
        began_s = subject.process.cpu_s()
        run = subprocess.run(command, preexec_fn=pin(core), capture_output=True, text=True, check=False, timeout=120)
        cpu_s = subject.process.cpu_s() - began_s
    if run.returncode:
        raise RuntimeError(f"{subject.name}: {run.stderr}")
    result = load.parse_result(run.stdout, subject.name)
    return {**result, "rate": result["responses"] / result["seconds"], "cpu_us": 1e6 * cpu_s / result["responses"]}


def compare(servers: Sequence[Subject], workload: Workload, connections: int, options: argparse.Namespace) -> None:
    """Measure the servers by turns. Print medians, and medians of the ratios in each round to each echo."""
    core = Cores.of_this_machine().load
    measure(servers[0], workload, connections, 0.2, core)
    rounds = [
        {s.name: measure(s, workload, connections, options.seconds, core) for s in servers}
        for _ in range(options.rounds)
    ]
    print(f"\n{workload.name}, c = {connections}")
    bases = [s.name for s in servers if s.name in ECHOES]
    print(
        f"{'server':>14} {'responses/s':>10} {'p50 ms':>8} {'p99 ms':>8} {'CPU us':>8}",
        *(f"{f'of {b}':>16}" for b in bases),
    )
    for subject in servers:
        own = [r[subject.name] for r in rounds]
        rate, p50, p99, cpu = (statistics.median(m[k] for m in own) for k in ("rate", "p50_ms", "p99_ms", "cpu_us"))
        ratios = [statistics.median(r[subject.name]["rate"] / r[b]["rate"] for r in rounds) for b in bases]
        result = [f"{ratio:>15.2f}x" for ratio in ratios]
        print(f"{subject.name:>14} {rate:>10,.0f} {p50:>8.3f} {p99:>8.2f} {cpu:>8.1f}", *result, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default="rest", help="workloads with this in their name")
    parser.add_argument("--subjects", default="", help="comma-separated names; default: all")
    parser.add_argument("--connections", default="")
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=0.0)
    options = parser.parse_args()
    options.rounds = options.rounds or (1 if options.quick else 3)
    options.seconds = options.seconds or (0.3 if options.quick else 2.0)
    connections = [int(c) for c in (options.connections or ("16" if options.quick else "1,16,64")).split(",")]
    print(machine.describe())
    selected = [w for w in workloads.identity() if w.wire == "http" and options.only in w.name]
    with subjects(Cores.of_this_machine().server, [n for n in options.subjects.split(",") if n]) as servers:
        for workload in selected:
            for number in connections:
                compare(servers, workload, number, options)


if __name__ == "__main__":
    if sys.argv[1:2] == ["bare"]:
        import uvloop

        from dragoman.system.process import keep_freed_memory

        keep_freed_memory()
        uvloop.run(bare(int(sys.argv[2])))
    else:
        main()
