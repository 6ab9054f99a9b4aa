"""Run one attack against one server, and measure latency of the well-behaved client and memory of the server."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.attack.attack import SLACK_FILES, AimMissedError, Attack, Target
from benchmarks.attack.server import run_server
from benchmarks.processes import ROOT, peak_memory

_TRACEBACK = "Traceback (most recent call last):"


@dataclass(slots=True, kw_only=True)
class Result:
    """Times in ms; memory (`own_mib`) in MiB, and open files, of all processes of the server.

    `missed` lists the aims not met.
    """

    name: str
    about: str
    note: str = ""
    took_s: float = 0.0
    before_ms: float = 0.0  # the longest health check without an attack
    health_http_ms: float = 0.0
    health_grpc_ms: float = 0.0
    infer_ms: float = 0.0
    memory_before: float = 0.0
    memory_peak: float = 0.0
    memory_after: float = 0.0
    memory_limit: float | None = None
    files_before: int = 0
    files_after: int = 0
    missed: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure(attack: Attack, idle_s: float = 1.0) -> Result:
    """Run an attack on a new server, with `idle_s` before the attack and between its end and the reading of memory."""
    result = Result(name=attack.name, about=attack.about, memory_limit=attack.memory_limit_mib)
    with run_server(attack) as target, _client(target, attack.token) as client:
        time.sleep(idle_s)
        before = _report(client)
        result.before_ms = max(before["health_http"]["longest_ms"], before["health_grpc"]["longest_ms"])
        result.memory_before = target.process.memory_mib()["own_mib"]
        result.files_before = target.process.open_files()
        with peak_memory(target.process, "own_mib") as peak:
            _run(attack, target, result)
            time.sleep(idle_s)
        if target.process.child.poll() is not None:
            result.missed.append(f"the server exited with status {target.process.child.returncode}")
            return result
        waits = _report(client)
        result.memory_peak = peak[0]
        result.memory_after = target.process.memory_mib()["own_mib"]
        result.files_after = target.process.open_files()
        log = target.process.log.read_text(errors="replace")
    result.health_http_ms = waits["health_http"]["longest_ms"]
    result.health_grpc_ms = waits["health_grpc"]["longest_ms"]
    result.infer_ms = waits["infer"]["longest_ms"]
    result.missed += find_missed_aims(attack, result, waits, log)
    return result


def _run(attack: Attack, target: Target, result: Result) -> None:
    began_s = time.monotonic()
    try:
        result.note = attack.run(target)
    except AimMissedError as missed:
        result.missed.append(str(missed))
    result.took_s = time.monotonic() - began_s


def find_missed_aims(
    attack: Attack, result: Result, waits: Mapping[str, Mapping[str, Any]], log: str = ""
) -> list[str]:
    """Return the aims that are missed, as messages; `waits` as in `benchmarks.attack.client.Waits`."""
    missed = []
    for name, longest_ms in (("HTTP", result.health_http_ms), ("gRPC", result.health_grpc_ms)):
        if longest_ms > attack.health_ms:
            missed.append(f"health over {name} took {longest_ms:.0f} ms")
    probes = ("health_http", "health_grpc", *(() if attack.infer_may_fail else ("infer",)))
    failed = ((name, waits[name]) for name in probes)
    missed += [f"{found['errors']} errors of {name}: {found['error']}" for name, found in failed if found["errors"]]
    grown = result.memory_peak - result.memory_before
    if result.memory_limit is not None and grown > result.memory_limit:
        missed.append(f"memory grew by {grown:.0f} MiB, limit {result.memory_limit:.0f}")
    if (kept := result.files_after - result.files_before) > SLACK_FILES:
        missed.append(f"{kept} more open files after the attack, limit {SLACK_FILES}")
    if _TRACEBACK in log and not attack.logs_tracebacks:
        missed.append(f"a traceback in the log: {log.partition(_TRACEBACK)[2].strip()[-200:]!r}")
    return missed


@contextmanager
def _client(target: Target, token: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "benchmarks.attack.client", str(target.http_port), str(target.grpc_port)]
    command += [token] if token else []
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
        try:
            while not _report(client)["infer"]["probes"]:  # warm-up
                time.sleep(0.1)
            yield client
        finally:
            client.kill()


def _report(client: subprocess.Popen[str]) -> Any:
    assert client.stdin is not None
    assert client.stdout is not None
    client.stdin.write("\n")
    client.stdin.flush()
    return json.loads(client.stdout.readline())
