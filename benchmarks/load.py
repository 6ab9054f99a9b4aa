"""Load generators, each on a core of its own: wrk and h2load where they are installed, else our own, in C or Python."""

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

from benchmarks.checked_request import CheckedRequest
from benchmarks.grpc_load import write_question
from benchmarks.processes import RESULTS, ROOT, pin
from benchmarks.workloads import Wire, Workload

_GRPC_FRAME_BYTES = 5
_H2LOAD_SUMMARY = r"(?s)(\d+) succeeded, (\d+) failed, (\d+) errored.*\((\d+)\) data"


@dataclass(frozen=True, slots=True)
class Load:
    """One interval of load from some connections, each of which asks again as soon as it is answered."""

    checked: CheckedRequest
    connections: int
    seconds: float
    core: int | None
    folder: Path
    never_sleeps: bool = False  # the generators in C use all of their core, so that no server has to wake them


@dataclass(frozen=True, slots=True)
class Measured:
    """What one interval gave. `faults` are answers that were missing, or not those that were checked."""

    answers: int
    seconds: float
    p50_ms: float
    p99_ms: float
    faults: int

    @property
    def rate(self) -> float:
        return self.answers / self.seconds


def own(load: Load) -> Measured:
    """Compares each answer with the one that was checked."""
    workload = load.checked.workload
    (load.folder / "question").write_bytes(workload.body)
    (load.folder / "answer").write_bytes(load.checked.body)
    plan = {
        "wire": workload.wire,
        "path": workload.path,
        "headers": dict(workload.headers),
        "port": load.checked.port,
        "connections": load.connections,
        "seconds": load.seconds,
    }
    (load.folder / "question.json").write_text(json.dumps(plan))
    output = _run([sys.executable, "-m", "benchmarks.closed_loop", str(load.folder)], load)
    return Measured(**json.loads(output))


def compiled(load: Load) -> Measured:
    """The same in C, which takes a fifth of the server's time and not several times as much."""
    workload, port = load.checked.workload, load.checked.port
    if workload.wire == "http":
        (load.folder / "question").write_bytes(question(workload, port))
        (load.folder / "answer").write_bytes(load.checked.sent)
        command = [str(built("http_load")), *map(str, (port, load.connections, load.seconds, load.folder))]
    else:
        write_question(load.folder, port, workload.body, load.checked.body)
        command = [str(built("grpc_load")), *map(str, (port, load.connections, 1, load.seconds, load.folder))]
    environment = {"LOAD_NEVER_SLEEPS": "1"} if load.never_sleeps else {}
    return Measured(**json.loads(_run(command, load, environment)))


def question(workload: Workload, port: int) -> bytes:
    """A whole request over HTTP."""
    lines = [f"POST {workload.path} HTTP/1.1", f"host: 127.0.0.1:{port}"]
    lines += [f"{name}: {value}" for name, value in workload.headers.items()]
    return "\r\n".join([*lines, f"content-length: {len(workload.body)}", "", ""]).encode() + workload.body


def built(name: str) -> Path:
    """A load generator in C, compiled where that has not been done yet."""
    source, binary = ROOT / "benchmarks" / f"{name}.c", RESULTS / name
    if not binary.exists() or binary.stat().st_mtime < source.stat().st_mtime:
        RESULTS.mkdir(parents=True, exist_ok=True)
        subprocess.run(["cc", "-O2", "-o", str(binary), str(source)], check=True)
    return binary


def wrk(load: Load) -> Measured:
    """Counts statuses; the bytes that came must be those of as many right answers."""
    workload = load.checked.workload
    body = load.folder / "question"
    body.write_bytes(workload.body)
    headers = "\n".join(f"{name}:{value}" for name, value in workload.headers.items())
    command = ["wrk", "-t1", f"-c{load.connections}", f"-d{_whole(load)}s", "--timeout", "20s"]
    command += ["-s", str(ROOT / "benchmarks" / "post.lua"), f"http://127.0.0.1:{load.checked.port}{workload.path}"]
    output = _run(command, load, {"BODY": str(body), "HEADERS": headers})
    (result,) = _found(r"RESULT (.*)", output)
    found = json.loads(result)
    came = found.pop("bytes")
    found["faults"] += misfit(came, found["answers"], load.checked.whole_bytes, load.connections)
    return Measured(**found)


def h2load(load: Load) -> Measured:
    """One stream a connection. A gRPC error hides in a good status, but brings no message: bytes tell it."""
    workload = load.checked.workload
    body, log = load.folder / "question", load.folder / "h2load.log"
    body.write_bytes(bytes(1) + len(workload.body).to_bytes(4) + workload.body)
    log.unlink(missing_ok=True)
    command = ["h2load", "-t1", f"-c{load.connections}", "-m1", f"-D{_whole(load)}", "-d", str(body)]
    command += ["-H", "content-type: application/grpc", "-H", "te: trailers", f"--log-file={log}"]
    output = _run([*command, f"http://127.0.0.1:{load.checked.port}{workload.path}"], load)
    done, failed, errored, came = map(int, _found(_H2LOAD_SUMMARY, output))
    took_ms = [int(line.split("\t")[2]) / 1000 for line in log.read_text().splitlines()]
    cuts = statistics.quantiles(took_ms, n=100) if len(took_ms) > 1 else took_ms * 99
    faults = failed + errored + misfit(came, done, len(load.checked.body) + _GRPC_FRAME_BYTES, load.connections)
    return Measured(done, _whole(load), cuts[49], cuts[98], faults)


def choose(wire: Wire, wanted: str) -> Callable[[Load], Measured]:
    """The generator for a wire: our own where that is wanted or nothing else is installed."""
    native = {"http": wrk, "grpc": h2load}[wire]
    if wanted != "auto":
        return own
    if shutil.which(native.__name__):
        return native
    return best_of_ours()


def best_of_ours() -> Callable[[Load], Measured]:
    """Return our generator in C if it can be compiled, else the one in Python."""
    return compiled if shutil.which("cc") else own


def _whole(load: Load) -> int:
    return max(1, round(load.seconds))


def misfit(came: int, answers: int, answer_bytes: int, connections: int) -> int:
    """0 where so many bytes are so many answers, and at most one more begun on each connection."""
    fits = answers * answer_bytes <= came <= (answers + connections) * answer_bytes
    return 0 if fits else max(1, abs(came // answer_bytes - answers))


def _found(pattern: str, text: str) -> tuple[str, ...]:
    found = re.search(pattern, text)
    if found is None:
        raise RuntimeError(f"the load generator said something unexpected: {text[-2000:]}")
    return tuple(str(group) for group in found.groups())


def _run(command: Sequence[str], load: Load, more: dict[str, str] | None = None) -> str:
    run = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | (more or {}),
        preexec_fn=pin(load.core),
        capture_output=True,
        text=True,
        timeout=load.seconds + 60,
    )
    if run.returncode:
        raise RuntimeError(f"{command[0]} failed: {run.stderr[-2000:]}")
    return run.stdout
