"""Ten thousand idle connections beside light load: what they cost in memory, and whether others notice them.

usage: python -m benchmarks.idle [--quick] [--count 10000] [--rounds 3] [--seconds 2]
"""

import argparse
import json
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

_CONNECTIONS = 4  # the load is light


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a hundred connections, to see that it works")
    parser.add_argument("--count", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=0.0)
    given = parser.parse_args()
    count = given.count or (100 if given.quick else 10_000)
    rounds, seconds = given.rounds or (1 if given.quick else 3), given.seconds or (0.2 if given.quick else 2.0)
    print(machine.described())
    print(f"{'server':>8} {'p50 ms':>8} {'p50 beside':>11} {'ratio':>6} {'p99 beside':>11} {'KiB a connection':>17}")
    with http.subjects(Cores.of_this_machine().server, [http.SERVER]) as found:
        for subject in found:
            result = [compare(subject, count, seconds) for _ in range(rounds)]
            without, beside, p99 = (statistics.median(t[k] for t in result) for k in ("without", "beside", "p99"))
            ratio = statistics.median(t["beside"] / t["without"] for t in result)
            print(
                f"{subject.name:>8} {without:>8.3f} {beside:>11.3f} {ratio:>6.2f} {p99:>11.2f} "
                f"{result[0]['kib']:>17.1f}"
            )


def compare(subject: http.Subject, count: int, seconds: float) -> dict[str, float]:
    """Light load without the idle connections and beside them. Raises RuntimeError where an answer is wrong."""
    (workload,) = (w for w in workloads.identity() if w.name == "rest-json-small")
    core = Cores.of_this_machine().load
    with tempfile.TemporaryDirectory() as name:
        http.write_question(Path(name), subject, workload)
        command = [str(load.built("http_load")), str(subject.port), str(_CONNECTIONS), str(seconds), name]
        without = _run(command, core)
        before = subject.process.memory_mib()["pss_mib"]
        beside, held = _beside([*command, str(count)], core, subject)
    kib = (held - before) * 1024 / count
    return {"without": without["p50_ms"], "beside": beside["p50_ms"], "p99": beside["p99_ms"], "kib": kib}


def _run(command: Sequence[str], core: int | None) -> dict[str, Any]:
    done = subprocess.run(command, preexec_fn=pin(core), capture_output=True, text=True, check=True, timeout=120)
    return _checked(json.loads(done.stdout))


def _beside(command: Sequence[str], core: int | None, subject: http.Subject) -> tuple[dict[str, Any], float]:
    """What the load saw, and the server's memory with all connections open."""
    with subprocess.Popen(command, preexec_fn=pin(core), stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        running.stdout.readline()  # they are open
        held = subject.process.memory_mib()["pss_mib"]
        text = running.stdout.read()
    if running.returncode:
        raise RuntimeError(f"{subject.name}: the load generator failed")
    socket.create_connection(("127.0.0.1", subject.port)).close()  # it still takes others
    return _checked(json.loads(text)), held


def _checked(result: dict[str, Any]) -> dict[str, Any]:
    if result["faults"] or not result["answers"]:
        raise RuntimeError(f"{result['faults']} of {result['answers']} answers were wrong")
    return result


if __name__ == "__main__":
    main()
