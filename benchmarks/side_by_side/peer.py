"""A server that is compared with Dragoman, and the processes of both."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.processes import RESULTS, Process, http_ready, run_process
from benchmarks.side_by_side.cases import Case
from benchmarks.side_by_side.exchange import Ports


@dataclass(frozen=True, slots=True)
class Peer:
    """A server: its packages, requests and models, how it is started, and the table of differences.

    `command` gets the interpreter, the folder of models and the ports, and returns a command; `flags` are those of
    Dragoman; `deadline_s` is that of a request. `ready` returns
    whether a server at this port has loaded its models.
    """

    name: str
    release: str
    packages: Sequence[str]
    pip_flags: Sequence[str]
    cases: Callable[[], Iterator[Case]]
    write_models: Callable[[Path], None]
    command: Callable[[Path, Path, Ports], list[str]]
    flags: Sequence[str]
    differences: Path
    deadline_s: float
    ready: Callable[[int], bool] = http_ready

    def install(self) -> Path:
        """Create the environment of the server, unless it exists. Return its interpreter."""
        home = RESULTS / "venvs" / f"side-by-side-{self.name.lower()}"
        python, stamp = home / "bin" / "python", home / "installed"
        if not stamp.exists() or stamp.read_text() != "\n".join(self.packages):
            subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
            subprocess.run([str(python), "-m", "pip", "install", "-q", *self.pip_flags, *self.packages], check=True)
            stamp.write_text("\n".join(self.packages))
        return python


class Server:
    """A server process that can be started again. Use as a context manager."""

    def __init__(self, command: Callable[[Ports], list[str]], folder: Path, ready: Callable[[int], bool]) -> None:
        self._command = command
        self._ready = ready
        self._folder = folder
        self._running = ExitStack()
        self._process: Process | None = None
        self._starts = 0
        self.ports = Ports.free()

    def start(self) -> None:
        """Start the process, or end it and start another one on other ports."""
        if self._process is not None:
            for pid in reversed(self._process.pids()):  # a server that hangs does not end by itself
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._running.close()
        self._starts += 1
        self.ports = Ports.free()
        home = self._folder / str(self._starts)
        home.mkdir(parents=True)
        command = self._command(self.ports)
        self._process = self._running.enter_context(run_process(command, home / "log", cwd=home))
        self._process.wait_until(partial(self._ready, self.ports.http), 120)

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.child.poll() is None

    def __enter__(self) -> "Server":
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._running.close()
