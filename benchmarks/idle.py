"""Memory of 10,000 idle connections, and latency of a light load with and without them.

usage: python -m benchmarks.idle [--quick] [--count 10000] [--rounds 3] [--seconds 2]
"""

import argparse
import socket
import statistics
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import http, load, machine, workloads
from benchmarks.identity import Cores
from benchmarks.processes import pin

_ACTIVE_CONNECTIONS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a hundred connections, to check that it works")
    parser.add_argument("--count", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=0.0)
    options = parser.parse_args()
    count = options.count or (100 if options.quick else 10_000)
    rounds, seconds = options.rounds or (1 if options.quick else 3), options.seconds or (0.2 if options.quick else 2.0)
    print(machine.describe())
    print(f"{'server':>8} {'p50 ms':>8} {'p50 idle':>11} {'ratio':>6} {'p99 idle':>11} {'KiB/connection':>17}")
    with http.subjects(Cores.of_this_machine().server, [http.SERVER]) as servers:
        for subject in servers:
            result = [compare(subject, count, seconds) for _ in range(rounds)]
            without, with_idle, p99 = (statistics.median(t[k] for t in result) for k in ("without", "with_idle", "p99"))
            ratio = statistics.median(t["with_idle"] / t["without"] for t in result)
            print(
                f"{subject.name:>8} {without:>8.3f} {with_idle:>11.3f} {ratio:>6.2f} {p99:>11.2f} "
                f"{result[0]['kib']:>17.1f}"
            )


def compare(subject: http.Subject, count: int, seconds: float) -> dict[str, float]:
    """Measure the load without and with the idle connections. Raises RuntimeError if a response is wrong."""
    (workload,) = (w for w in workloads.identity() if w.name == "rest-json-small")
    core = Cores.of_this_machine().load
    with tempfile.TemporaryDirectory() as name:
        http.write_load_files(Path(name), subject, workload)
        command = [
            str(load.build_generator("http_load")),
            str(subject.port),
            str(_ACTIVE_CONNECTIONS),
            str(seconds),
            name,
        ]
        without = _run(command, core, subject)
        before = subject.process.memory_mib()["pss_mib"]
        with_idle, memory_mib = _run_with_idle([*command, str(count)], core, subject)
    kib = (memory_mib - before) * 1024 / count
    return {"without": without["p50_ms"], "with_idle": with_idle["p50_ms"], "p99": with_idle["p99_ms"], "kib": kib}


def _run(command: Sequence[str], core: int | None, subject: http.Subject) -> dict[str, Any]:
    run = subprocess.run(command, preexec_fn=pin(core), capture_output=True, text=True, check=True, timeout=120)
    return load.parse_result(run.stdout, subject.name)


def _run_with_idle(command: Sequence[str], core: int | None, subject: http.Subject) -> tuple[dict[str, Any], float]:
    """Return the result of the load, and the memory of the server with all connections open."""
    with subprocess.Popen(command, preexec_fn=pin(core), stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        running.stdout.readline()  # the idle connections are open
        memory_mib = subject.process.memory_mib()["pss_mib"]
        text = running.stdout.read()
    if running.returncode:
        raise RuntimeError(f"{subject.name}: the load generator failed")
    socket.create_connection(("127.0.0.1", subject.port)).close()  # it still accepts connections
    return load.parse_result(text, subject.name), memory_mib


if __name__ == "__main__":
    main()
