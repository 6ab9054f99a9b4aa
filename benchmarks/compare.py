"""This checkout compared with another one: CPU time per request of both, measured by turns in one run.

usage: python -m benchmarks.compare OTHER_CHECKOUT [--only NAME] [--connections 16] [--starts 5] [--rounds 6]
       [--seconds 0.5]

The other checkout runs with the same interpreter and the same versions of its dependencies. Turns are short and ratios
are taken within a round, so the result is usable on a machine with other load; the quartiles show how reliable it is.
Both servers are started several times, because one start may be 5 % faster than the next by where its memory lies.
"""

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from benchmarks import load, umbridge, workloads
from benchmarks.checked_request import check_request
from benchmarks.identity import Cores
from benchmarks.processes import ROOT, Process, dragoman, free_port, http_ready, process_tree, run_process
from benchmarks.workloads import Workload

MODELS = ROOT / "benchmarks" / "models.py"
Ports = dict[str, int]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__)
    parser.add_argument("checkout", type=Path, help="folder of the other checkout, the `before` of the table")
    parser.add_argument("--only", default="", metavar="NAME", help="workloads with this in their name")
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--starts", type=int, default=5, help="how often both servers are started")
    parser.add_argument("--rounds", type=int, default=6, help="turns of each server after a start, for each workload")
    parser.add_argument("--seconds", type=float, default=0.5, help="duration of one turn")
    options = parser.parse_args(arguments)
    cores = Cores.of_this_machine()
    selected = [w for w in (*workloads.identity(), *umbridge.workloads("Double")) if options.only in w.name]
    measured: dict[str, list[tuple[float, float]]] = {workload.name: [] for workload in selected}
    for _ in range(options.starts):
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as running:
            servers = [
                _start(running, source, Path(folder) / name, cores)
                for name, source in (("before", options.checkout.resolve()), ("now", ROOT))
            ]
            for workload in selected:
                measured[workload.name] += _rounds(workload, servers, cores, Path(folder), options)
    print("| workload | CPU us before | CPU us now | now / before | quartiles |\n|---|---:|---:|---:|---:|")
    for name, rounds in measured.items():
        print(_row(name, rounds))
    return 0


def _start(running: contextlib.ExitStack, source: Path, folder: Path, cores: Cores) -> tuple[Process, Ports]:
    """Serve the models of the identity and UM-Bridge benchmarks from the source of one checkout."""
    double = folder / "models" / "Double"
    double.mkdir(parents=True)
    (double / "dragoman.toml").write_text(
        f'[model]\nruntime = "python"\nuri = "{umbridge.MODELS}:Double"\nplacement = "inline"\n'
    )
    ports = {"http": free_port(), "grpc": free_port()}
    models = [str(double.parent), f"{MODELS}:Identity", f"{MODELS}:IdentityImage"]
    with python_path(source / "src"):
        command = dragoman(models, ports["http"], ports["grpc"])
        process = running.enter_context(run_process(command, folder / "log", cores.server, source))
    process.wait_until(partial(http_ready, ports["http"]))
    return process, ports


@contextlib.contextmanager
def python_path(source: Path) -> Iterator[None]:
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(source)
    try:
        yield
    finally:
        del os.environ["PYTHONPATH"]
        if before is not None:
            os.environ["PYTHONPATH"] = before


def _rounds(
    workload: Workload,
    servers: Sequence[tuple[Process, Ports]],
    cores: Cores,
    folder: Path,
    options: argparse.Namespace,
) -> list[tuple[float, float]]:
    """Return the CPU time per request of both servers in each round, in us."""
    run = load.best_of_ours()
    intervals = [
        load.Load(
            check_request(workload, ports[workload.wire], echo=False),
            options.connections,
            options.seconds,
            cores.load,
            folder,
            never_sleeps=True,
        )
        for _, ports in servers
    ]
    for interval in intervals:  # warm up
        run(interval)
    (before, first), (now, second) = zip((process for process, _ in servers), intervals, strict=True)
    return [(cpu_us(before, run, first), cpu_us(now, run, second)) for _ in range(options.rounds)]


def _row(name: str, rounds: Sequence[tuple[float, float]]) -> str:
    before, now = (statistics.median(side) for side in zip(*rounds, strict=True))
    low, middle, high = statistics.quantiles([after / first for first, after in rounds], n=4)
    return f"| {name} | {before:.1f} | {now:.1f} | {middle:.2f} | {low:.2f} to {high:.2f} |"


def cpu_us(process: Process, run: Callable[[load.Load], load.Measurement], interval: load.Load) -> float:
    """Return the CPU time that one request takes, in us. Raises RuntimeError if a response is not the checked one."""
    before_ns = _cpu_ns(process)
    measured = run(interval)
    if measured.errors or not measured.responses:
        raise RuntimeError(f"{measured.errors} of {measured.responses} responses were wrong")
    return (_cpu_ns(process) - before_ns) / measured.responses / 1e3


def _cpu_ns(process: Process) -> int:
    """Return the CPU time of a server and its children: the scheduler's own count, which is exact to the nanosecond."""
    tasks = (task for pid in process_tree(process.child.pid) for task in Path(f"/proc/{pid}/task").iterdir())
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks)


if __name__ == "__main__":
    sys.exit(main())
