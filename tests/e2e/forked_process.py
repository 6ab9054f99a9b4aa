"""Processes of `python -m dragoman`, forked from one that has imported it: a start takes a third of the CPU time.

Commands with other programs, or with variables that Python itself reads, start an interpreter of their own.
"""

import atexit
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

# Imported by `dragoman serve` when it runs. So are protocols and runtimes.
_MODULES = (
    "dragoman.cli.serving",
    "dragoman.cli.startup",
    "dragoman.cli.first_requests",
    "dragoman.processes.server_processes",
    "dragoman_simulators.derivatives.decorator",
    "dragoman.runtimes.python.model",
    "dragoman.runtimes.tables",
    "dragoman_simulators.simulator_model",
    "dragoman.transports.grpc.calls",
    "dragoman.transports.http2.protocol",
    "dragoman.transports.http_server",
    "dragoman.workers.local",
    "dragoman.workers.process",
    "google.protobuf.text_format",
    "uvloop",
)
# What a server of a language model imports besides: with it a start takes a fifth of the CPU time.
TEXT = ("dragoman_text.generation.loading", "transformers.models.llama.modeling_llama")
_NUMBER_BYTES = 4
_MAX_REQUEST_BYTES = 1 << 17


def can_fork(command: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Return whether this is a command of dragoman, with an environment that only it reads."""
    return tuple(command[:2]) == ("-m", "dragoman") and not any(name.startswith("PYTHON") for name in environment)


class ForkedProcess:
    """A process with the methods of `subprocess.Popen` that tests use. Its standard input is the null device.

    `output` and `errors` are descriptors of files; `imports` are modules that it has imported besides the usual ones.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        output: int,
        errors: int,
        environment: Mapping[str, str],
        folder: Path | None,
        imports: tuple[str, ...] = (),
    ) -> None:
        request = json.dumps([arguments, dict(environment), os.path.abspath(folder or ".")]).encode()
        assert len(request) < _MAX_REQUEST_BYTES
        self.returncode: int | None = None
        self._numbers, numbers = os.pipe()  # the process id, then the exit code
        socket.send_fds(_template(imports), [request], [output, errors, numbers])
        os.close(numbers)
        self.pid = self._number()

    def _number(self) -> int:
        data = os.read(self._numbers, _NUMBER_BYTES)
        assert data, "the process that forks has ended"
        return int.from_bytes(data, "big", signed=True)

    def poll(self) -> int | None:
        """Return the exit code; None while the process runs."""
        return self._poll(0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit code. Raises subprocess.TimeoutExpired after `timeout` seconds."""
        code = self._poll(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return code

    def _poll(self, timeout_s: float | None) -> int | None:
        if self.returncode is None and select.select([self._numbers], [], [], timeout_s)[0]:
            self.returncode = self._number()
            os.close(self._numbers)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run_command(
    *arguments: str, environment: Mapping[str, str] | None = None, folder: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `python -m dragoman ARGUMENTS` to its end, with these and the inherited variables."""
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        variables = {**os.environ, **(environment or {})}
        process = ForkedProcess(arguments, output.fileno(), errors.fileno(), variables, folder)
        try:
            code = process.wait(180)
        finally:
            process.kill()
        for file in (output, errors):
            file.seek(0)
        return subprocess.CompletedProcess(arguments, code, output.read(), errors.read())


@cache
def _template(imports: tuple[str, ...]) -> socket.socket:
    """Start the process that forks and return the socket for its requests. It exits once that is closed."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno()), *imports],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
        )

    def close() -> None:
        ours.close()
        process.wait()

    atexit.register(close)
    return ours


def _next_process(requests: socket.socket) -> list[str] | None:
    """Fork for each request: return its arguments in the new process. Return None once there are no more requests."""
    running: dict[int, tuple[int, int]] = {}  # by the descriptor of a process: its id, and where its exit code goes
    while True:
        watched: list[Any] = [requests, *running]
        readable = select.select(watched, [], [])[0]
        for descriptor in readable:
            if descriptor is not requests:
                pid, numbers = running.pop(descriptor)
                os.close(descriptor)
                _write_number(numbers, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                os.close(numbers)
        if requests not in readable:
            continue
        data, descriptors, _, _ = socket.recv_fds(requests, _MAX_REQUEST_BYTES, 3)
        if not data:
            return None
        arguments, environment, folder = json.loads(data)
        output, errors, numbers = descriptors
        pid = os.fork()
        if pid == 0:
            os.dup2(output, 1)
            os.dup2(errors, 2)
            os.closerange(3, 1 + max(requests.fileno(), *descriptors, *running, *(n for _, n in running.values())))
            os.environ.clear()
            os.environ.update(environment)
            os.chdir(folder)
            return [str(argument) for argument in arguments]
        os.close(output)
        os.close(errors)
        running[os.pidfd_open(pid)] = pid, numbers
        _write_number(numbers, pid)


def _write_number(descriptor: int, number: int) -> None:
    with suppress(BrokenPipeError):  # the process that asked has ended
        os.write(descriptor, number.to_bytes(_NUMBER_BYTES, "big", signed=True))


def main() -> None:
    gc.disable()  # all that is imported stays
    for group in ("protocols", "runtimes"):
        for entry in entry_points(group=f"dragoman.{group}"):
            entry.load()
    for name in (*_MODULES, *sys.argv[2:]):
        importlib.import_module(name)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also where the tests run under `nohup`
    gc.freeze()
    gc.enable()
    requests = socket.socket(fileno=int(sys.argv[1]))
    arguments = _next_process(requests)
    if arguments is not None:
        requests.detach()
        sys.path[0] = os.getcwd()  # as with `-m`
        sys.argv = ["dragoman", *arguments]
        runpy.run_module("dragoman", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
