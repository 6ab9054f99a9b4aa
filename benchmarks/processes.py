"""Server processes that are measured: started on a core of their own, watched through /proc, stopped."""

import http.client
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Process:
    """A running server with the processes that it started, and what it says."""

    child: subprocess.Popen[bytes]
    log: Path

    def pids(self) -> list[int]:
        """Itself and all below it."""
        return family(self.child.pid)

    def until(self, ready: Callable[[], bool], limit_s: float = 60.0) -> float:
        """Seconds until it is ready, looked at every 2 ms. RuntimeError with what it said where it never is."""
        began_s = time.monotonic()
        while time.monotonic() - began_s < limit_s and self.child.poll() is None:
            try:
                if ready():
                    return time.monotonic() - began_s
            except (OSError, http.client.HTTPException):
                pass
            time.sleep(0.002)
        raise RuntimeError(f"the server never was ready; it said: {self.log.read_text(errors='replace')[-2000:]}")

    def cpu_s(self) -> float:
        """Seconds of a core that it has taken so far."""
        stats = filter(None, map(_stat, self.pids()))
        return sum(int(f[11]) + int(f[12]) for f in stats) / _TICKS

    def memory_mib(self) -> dict[str, float]:
        """PSS shares a page among those that map it, so its sum is what the server takes; RSS counts it each time.
        `own_mib` is PSS without the pages of files, such as libraries, whose share depends on other programs."""
        rolls = [Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in self.pids()]
        kinds = ("Pss", "Rss", "Pss_Anon", "Pss_Shmem")
        pss, rss, anonymous, shared = (sum(_kib(kind, roll) for roll in rolls) / 1024 for kind in kinds)
        sizes = {"pss_mib": pss, "rss_mib": rss, "own_mib": anonymous + shared}
        return {"processes": len(rolls), **{name: round(size, 1) for name, size in sizes.items()}}


@contextmanager
def peak_memory(process: Process, kind: str) -> Iterator[list[float]]:
    """The largest memory of that kind (see `Process.memory_mib`) meanwhile, in a list of one; read every 50 ms."""
    peak, over = [0.0], threading.Event()

    def sample() -> None:
        while not over.wait(0.05):
            with suppress(OSError, AssertionError):  # a process has just ended
                peak[0] = max(peak[0], process.memory_mib()[kind])

    sampling = threading.Thread(target=sample)
    sampling.start()
    try:
        yield peak
    finally:
        over.set()
        sampling.join()


@contextmanager
def started(command: Sequence[str], log: Path, core: int | None = None, cwd: Path = ROOT) -> Iterator[Process]:
    """Run a server, with what it says in `log`; it is gone afterwards."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        pinned = pin(core)
        child = subprocess.Popen(command, cwd=cwd, stdout=output, stderr=output, preexec_fn=pinned)
    try:
        yield Process(child, log)
    finally:
        child.terminate()
        try:
            child.wait(10)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def pin(core: int | None) -> Callable[[], None] | None:
    """What a child does first to stay on one core."""
    return None if core is None else partial(os.sched_setaffinity, 0, {core})


def dragoman(models: Sequence[str], http_port: int, grpc_port: int, *more: str) -> list[str]:
    """The command that serves some models."""
    ports = ["--http-port", str(http_port), "--grpc-port", str(grpc_port)]
    return [sys.executable, "-m", "dragoman", "serve", *models, *ports, "--log-level", "warning", *more]


def http_ready(port: int) -> bool:
    """Whether a server of the Open Inference Protocol is ready."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/v2/health/ready")
        return connection.getresponse().status == 200
    finally:
        connection.close()


def listens(port: int) -> bool:
    socket.create_connection(("127.0.0.1", port), 1).close()
    return True


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port: int = found.getsockname()[1]
        return port


def family(pid: int) -> list[int]:
    """A process and all below it."""
    parents = {int(p): f[1] for p in os.listdir("/proc") if p.isdigit() and (f := _stat(int(p)))}
    found = [pid]
    for each in found:
        found += [child for child, parent in parents.items() if int(parent) == each]
    return found


def cpu_s(pid: int) -> float:
    """Seconds of a core that a process has taken, to the nanosecond; 0 if it is gone."""
    try:
        return time.clock_gettime(~pid << 3 | 2)  # the kernel's number for the clock of another process
    except OSError:
        return 0.0


def peak_mib(pid: int) -> float:
    """The most memory that a process ever had at a time; 0 if it is gone."""
    try:
        return _kib("VmHWM", Path(f"/proc/{pid}/status").read_text()) / 1024
    except (OSError, AssertionError):  # a process that has ended but is not waited for has none
        return 0.0


def _stat(pid: int) -> list[str]:
    """The fields of its state, from the third on; none where it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _kib(kind: str, roll: str) -> int:
    found = re.search(rf"^{kind}:\s+(\d+)", roll, re.MULTILINE)
    assert found is not None
    return int(found[1])
