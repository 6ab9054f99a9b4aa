"""Start, measure and stop server processes, each on its own core. CPU time and memory are read from /proc."""

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
    """A running server with its child processes and its log file."""

    child: subprocess.Popen[bytes]
    log: Path

    def pids(self) -> list[int]:
        """Return the ids of the process and all its descendants."""
        return process_tree(self.child.pid)

    def wait_until(self, ready: Callable[[], bool], limit_s: float = 60.0) -> float:
        """Wait for `ready()`, polled every 2 ms. Return the seconds; raise RuntimeError with the end of the log."""
        began_s = time.monotonic()
        while time.monotonic() - began_s < limit_s and self.child.poll() is None:
            try:
                if ready():
                    return time.monotonic() - began_s
            except (OSError, http.client.HTTPException):
                pass
            time.sleep(0.002)
        raise RuntimeError(f"the server did not become ready; its log: {self.log.read_text(errors='replace')[-2000:]}")

    def cpu_s(self) -> float:
        """Return the CPU time used so far, also by child processes that have exited."""
        stats = filter(None, map(_stat, self.pids()))
        return sum(sum(map(int, f[11:15])) for f in stats) / _TICKS

    def open_files(self) -> int:
        """Return the number of open files of all processes."""
        count = 0
        for pid in self.pids():
            with suppress(OSError):  # it has just ended
                count += len(os.listdir(f"/proc/{pid}/fd"))
        return count

    def memory_mib(self) -> dict[str, float]:
        """Return `memory_mib` of the process and all its descendants."""
        return memory_mib(self.pids())


def memory_mib(pids: Sequence[int]) -> dict[str, float]:
    """Return PSS, RSS and `own_mib` of the processes.

    PSS divides a shared page among the processes that map it, so its sum is the memory of the server; RSS counts
    it in each. `own_mib` is PSS without pages of files such as libraries, whose share depends on other programs.
    """
    rolls = []
    for pid in pids:
        with suppress(OSError):  # it has just ended
            rolls.append(Path(f"/proc/{pid}/smaps_rollup").read_text())
    kinds = ("Pss", "Rss", "Pss_Anon", "Pss_Shmem")
    pss, rss, anonymous, shared = (sum(_kib(kind, roll) for roll in rolls) / 1024 for kind in kinds)
    sizes = {"pss_mib": pss, "rss_mib": rss, "own_mib": anonymous + shared}
    return {"processes": len(rolls), **{name: round(size, 1) for name, size in sizes.items()}}


@contextmanager
def peak_memory(process: Process, kind: str) -> Iterator[list[float]]:
    """Yield a list whose only element is the largest memory of that kind (see `memory_mib`) in the block.

    Memory is read every 50 ms.
    """
    peak, stopped = [0.0], threading.Event()

    def sample() -> None:
        while not stopped.wait(0.05):
            with suppress(OSError, AssertionError):  # a process has just ended
                peak[0] = max(peak[0], process.memory_mib()[kind])

    sampling = threading.Thread(target=sample)
    sampling.start()
    try:
        yield peak
    finally:
        stopped.set()
        sampling.join()


@contextmanager
def run_process(command: Sequence[str], log: Path, core: int | None = None, cwd: Path = ROOT) -> Iterator[Process]:
    """Run a server with its output in `log`, and stop it at the end of the block."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        pinned, env = pin(core), environment()
        child = subprocess.Popen(command, cwd=cwd, env=env, stdout=output, stderr=output, preexec_fn=pinned)
    try:
        yield Process(child, log)
    finally:
        child.terminate()
        try:
            child.wait(10)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def environment() -> dict[str, str]:
    """Return the environment of this process, with Python's cache of bytecode, which installed packages have too."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def pin(core: int | None) -> Callable[[], None] | None:
    """Return a function for `preexec_fn` that pins the child process to a core."""
    return None if core is None else partial(os.sched_setaffinity, 0, {core})


def dragoman(models: Sequence[str], http_port: int, grpc_port: int, *more: str) -> list[str]:
    """Return the command that serves the models."""
    ports = ["--http-port", str(http_port), "--grpc-port", str(grpc_port)]
    return [sys.executable, "-m", "dragoman", "serve", *models, *ports, "--log-level", "warning", *more]


def http_ready(port: int, path: str = "/v2/health/ready") -> bool:
    """Return whether a server is ready; the path is that of the Open Inference Protocol."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    finally:
        connection.close()


def listens(port: int) -> bool:
    socket.create_connection(("127.0.0.1", port), 1).close()
    return True


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def process_tree(pid: int) -> list[int]:
    """Return the ids of a process and all its descendants."""
    parents = {int(p): f[1] for p in os.listdir("/proc") if p.isdigit() and (f := _stat(int(p)))}
    tree = [pid]
    for parent in tree:
        tree += [child for child, parent_pid in parents.items() if int(parent_pid) == parent]
    return tree


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process, to the nanosecond; 0 if it has exited."""
    try:
        return time.clock_gettime(~pid << 3 | 2)  # CPU-time clock id of another process, see clock_getcpuclockid(3)
    except OSError:
        return 0.0


def peak_mib(pid: int) -> float:
    """Return the peak memory (VmHWM) of a process; 0 if it has exited."""
    try:
        return _kib("VmHWM", Path(f"/proc/{pid}/status").read_text()) / 1024
    except (OSError, AssertionError):  # a zombie process has none
        return 0.0


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the third on; empty if the process has exited."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _kib(kind: str, roll: str) -> int:
    match = re.search(rf"^{kind}:\s+(\d+)", roll, re.MULTILINE)
    assert match is not None
    return int(match[1])
