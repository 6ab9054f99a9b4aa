"""Load generators, each on a CPU core of its own: wrk and h2load if they are installed, else our own in C or Python."""

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.checked_request import CheckedRequest
from benchmarks.grpc_load import write_load_files
from benchmarks.processes import RESULTS, ROOT, pin
from benchmarks.workloads import Wire

_GRPC_FRAME_BYTES = 5
_H2LOAD_SUMMARY = r"(?s)(\d+) succeeded, (\d+) failed, (\d+) errored.*\((\d+)\) data"


@dataclass(frozen=True, slots=True)
class Load:
    """One interval of closed-loop load: each connection sends its next request when it has received a response."""

    checked: CheckedRequest
    connections: int
    seconds: float
    core: int | None
    folder: Path
    never_sleeps: bool = False  # the generators in C use all of their core, so that no server has to wake them


@dataclass(frozen=True, slots=True)
class Measurement:
    """Result of one interval. `errors` counts missing responses and those that differ from the checked one."""

    responses: int
    seconds: float
    p50_ms: float
    p99_ms: float
    errors: int

    @property
    def rate(self) -> float:
        return self.responses / self.seconds


def python_generator(load: Load) -> Measurement:
    """Run our generator in Python, which compares each response with the checked one."""
    workload = load.checked.workload
    request = workload.http_request() if workload.wire == "http" else workload.body
    plan = {"wire": workload.wire, "path": workload.path, "port": load.checked.port}
    plan |= {"connections": load.connections, "seconds": load.seconds}
    write_plan(load.folder, request, load.checked.body, plan)
    output = _run([sys.executable, "-m", "benchmarks.closed_loop", str(load.folder)], load)
    return Measurement(**json.loads(output))


def write_plan(folder: Path, request: bytes, response: bytes, plan: dict[str, object]) -> None:
    """Write what the generators in Python read: the request, the expected response body, and the plan."""
    (folder / "request").write_bytes(request)
    (folder / "response").write_bytes(response)
    (folder / "plan.json").write_text(json.dumps(plan))


def c_generator(load: Load) -> Measurement:
    """Run our generator in C. It uses a fifth of the server's CPU time, the one in Python several times as much."""
    workload, port = load.checked.workload, load.checked.port
    if workload.wire == "http":
        (load.folder / "request").write_bytes(workload.http_request())
        (load.folder / "response").write_bytes(load.checked.sent)
        command = [str(build_generator("http_load")), *map(str, (port, load.connections, load.seconds, load.folder))]
    else:
        write_load_files(load.folder, port, workload.body, load.checked.body, workload.headers)
        command = [str(build_generator("grpc_load")), *map(str, (port, load.connections, 1, load.seconds, load.folder))]
    environment = {"LOAD_NEVER_SLEEPS": "1"} if load.never_sleeps else {}
    return Measurement(**json.loads(_run(command, load, environment)))


def build_generator(name: str) -> Path:
    """Return the path of a load generator in C, compiled if it is older than its source or the shared header."""
    source, binary = ROOT / "benchmarks" / f"{name}.c", RESULTS / name
    changed_s = max(file.stat().st_mtime for file in (source, source.with_name("load_generator.h")))
    if not binary.exists() or binary.stat().st_mtime < changed_s:
        RESULTS.mkdir(parents=True, exist_ok=True)
        subprocess.run(["cc", "-O2", "-o", str(binary), str(source), "-lm"], check=True)
    return binary


def parse_result(output: str, server: str) -> dict[str, Any]:
    """Return the result that a generator in C printed. Raises RuntimeError if a response was wrong or none came."""
    result: dict[str, Any] = json.loads(output)
    if result["errors"] or not result["responses"]:
        raise RuntimeError(f"{server}: {result['errors']} of {result['responses']} responses were wrong")
    return result


def wrk(load: Load) -> Measurement:
    """Run wrk, which counts statuses; the bytes received must be those of as many correct responses."""
    workload = load.checked.workload
    body = load.folder / "request"
    body.write_bytes(workload.body)
    headers = "\n".join(f"{name}:{value}" for name, value in workload.headers.items())
    command = ["wrk", "-t1", f"-c{load.connections}", f"-d{_whole_seconds(load)}s", "--timeout", "20s"]
    command += ["-s", str(ROOT / "benchmarks" / "post.lua"), f"http://127.0.0.1:{load.checked.port}{workload.path}"]
    output = _run(command, load, {"BODY": str(body), "HEADERS": headers})
    (line,) = _search(r"RESULT (.*)", output)
    result = json.loads(line)
    received_bytes = result.pop("bytes")
    result["errors"] += unexpected_responses(
        received_bytes, result["responses"], load.checked.whole_bytes, load.connections
    )
    return Measurement(**result)


def h2load(load: Load) -> Measurement:
    """Run h2load with one stream per connection. A gRPC error has HTTP status 200 but no message: bytes show it."""
    workload = load.checked.workload
    body, log = load.folder / "request", load.folder / "h2load.log"
    body.write_bytes(bytes(1) + len(workload.body).to_bytes(4) + workload.body)
    log.unlink(missing_ok=True)
    command = ["h2load", "-t1", f"-c{load.connections}", "-m1", f"-D{_whole_seconds(load)}", "-d", str(body)]
    command += ["-H", "content-type: application/grpc", "-H", "te: trailers", f"--log-file={log}"]
    output = _run([*command, f"http://127.0.0.1:{load.checked.port}{workload.path}"], load)
    succeeded, failed, errored, received_bytes = map(int, _search(_H2LOAD_SUMMARY, output))
    durations_ms = [int(line.split("\t")[2]) / 1000 for line in log.read_text().splitlines()]
    cuts = statistics.quantiles(durations_ms, n=100) if len(durations_ms) > 1 else durations_ms * 99
    response_bytes = len(load.checked.body) + _GRPC_FRAME_BYTES
    errors = failed + errored + unexpected_responses(received_bytes, succeeded, response_bytes, load.connections)
    return Measurement(succeeded, _whole_seconds(load), cuts[49], cuts[98], errors)


def choose(wire: Wire, generator: str) -> Callable[[Load], Measurement]:
    """Return the generator for a protocol: with "auto" the best that is installed, else ours in Python."""
    native = {"http": wrk, "grpc": h2load}[wire]
    if generator != "auto":
        return python_generator
    if shutil.which(native.__name__):
        return native
    return best_of_ours()


def best_of_ours() -> Callable[[Load], Measurement]:
    """Return our generator in C if it can be compiled, else the one in Python."""
    return c_generator if shutil.which("cc") else python_generator


def _whole_seconds(load: Load) -> int:
    return max(1, round(load.seconds))


def unexpected_responses(received_bytes: int, responses: int, response_bytes: int, connections: int) -> int:
    """Return 0 if the bytes are those of the responses and at most one more per connection, else how many differ."""
    fits = responses * response_bytes <= received_bytes <= (responses + connections) * response_bytes
    return 0 if fits else max(1, abs(received_bytes // response_bytes - responses))


def _search(pattern: str, text: str) -> tuple[str, ...]:
    match = re.search(pattern, text)
    if match is None:
        raise RuntimeError(f"unexpected output of the load generator: {text[-2000:]}")
    return tuple(str(group) for group in match.groups())


def _run(command: Sequence[str], load: Load, environment: dict[str, str] | None = None) -> str:
    run = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | (environment or {}),
        preexec_fn=pin(load.core),
        capture_output=True,
        text=True,
        timeout=load.seconds + 60,
    )
    if run.returncode:
        raise RuntimeError(f"{command[0]} failed: {run.stderr[-2000:]}")
    return run.stdout
