"""A server process for tests, started and stopped as users do, and functions that wait for it."""

import http.client
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self, TypeVar

from e2e.forked_process import ForkedProcess, can_fork

T = TypeVar("T")

MODELS = Path(__file__).parent / "models"
# Limit for anything that takes a moment on an idle machine; with many other processes a server starts in a minute.
TIMEOUT_S = 120.0


def wait_until(condition: Callable[[], T], description: str, within_s: float = TIMEOUT_S) -> T:
    """Return the first true value of `condition()`. Raises AssertionError after `within_s` seconds."""
    end_s = time.monotonic() + within_s
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < end_s, f"{description} did not happen within {within_s} s"
        time.sleep(0.01)


def _candidate_ports() -> Iterator[int]:
    """Return ports below the ephemeral range, a range for each test process, so that no other socket takes them."""
    first = 12_000 + 4_000 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    start = os.getpid() % 4_000
    return (first + (start + n) % 4_000 for n in itertools.count())


_PORTS = _candidate_ports()


def free_ports(count: int) -> list[int]:
    """Return ports on which nothing listens."""
    ports: list[int] = []
    while len(ports) < count:
        port = next(_PORTS)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            ports.append(port)
    return ports


class ServerProcess:
    """`python -m dragoman serve ARGUMENTS`; its output goes to a file.

    imports: modules that a forked process has imported before, see `forked_process`.
    """

    def __init__(
        self,
        *arguments: str,
        command: Sequence[str] = ("-m", "dragoman", "serve"),
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
        imports: tuple[str, ...] = (),
    ) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed in `kill`
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("DRAGOMAN_", "PYTEST_"))}
        env = {**clean, **(environment or {})}
        self.popen = (
            ForkedProcess([*command[2:], *arguments], *2 * (self._log.fileno(),), env, folder, imports)
            if can_fork(command, environment or {})
            else subprocess.Popen(
                [sys.executable, *command, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                env=env,
                cwd=folder,
            )
        )
        self.http_port = self.grpc_port = 0
        self.headers: Mapping[str, str] = {}  # of requests without others

    @classmethod
    def on_free_ports(cls, *arguments: str, **options: Any) -> Self:
        """Start a server on free ports, without waiting for it."""
        http_port, grpc_port = free_ports(2)
        process = cls("--http-port", str(http_port), "--grpc-port", str(grpc_port), *arguments, **options)
        process.http_port, process.grpc_port = http_port, grpc_port
        return process

    @property
    def url(self) -> str:
        return f"127.0.0.1:{self.http_port}"

    @property
    def grpc_url(self) -> str:
        return f"127.0.0.1:{self.grpc_port}"

    def log(self) -> str:
        """Return the output so far."""
        return os.pread(self._log.fileno(), 1 << 24, 0).decode(errors="replace")

    # --- requests --------------------------------------------------------------------------------------------

    def request(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, Any, dict[str, str]]:
        """Send a request on a new connection; return status, body (parsed if it is JSON) and headers."""
        connection = http.client.HTTPConnection("127.0.0.1", self.http_port, timeout=TIMEOUT_S)
        try:
            data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
            connection.request(method, path, data, dict(self.headers if headers is None else headers))
            response = connection.getresponse()
            content = response.read()
            response_headers = {k.lower(): v for k, v in response.getheaders()}
            if response_headers.get("content-type", "").partition(";")[0] == "application/json" and content:
                return response.status, json.loads(content), response_headers
            return response.status, content, response_headers
        finally:
            connection.close()

    def status(self, path: str) -> int:
        """Return the status of GET `path`; 0 if nothing listens."""
        try:
            return self.request("GET", path)[0]
        except OSError:
            return 0

    def infer(self, model: str, values: Any, datatype: str = "FP64", **parameters: Any) -> tuple[int, Any]:
        """Send an inference request with one input `x`; return status and body."""
        tensor = {"name": "x", "datatype": datatype, "shape": [len(values)], "data": values}
        status, body, _ = self.request(
            "POST",
            f"/v2/models/{model}/infer",
            {"inputs": [tensor], **({"parameters": parameters} if parameters else {})},
        )
        return status, body

    # --- waiting ---------------------------------------------------------------------------------------------

    def wait_for_status(self, path: str, status: int) -> Self:
        """Wait until GET `path` has this status. Raises AssertionError with the log if the server exits first."""
        return self._wait(lambda: self.status(path) == status, f"status {status} of {path}")

    def wait_until_ready(self) -> Self:
        return self.wait_for_status("/v2/health/ready", 200)

    def wait_until_live(self) -> Self:
        return self.wait_for_status("/v2/health/live", 200)

    def wait_for_log(self, text: str) -> Self:
        return self._wait(lambda: text in self.log(), f"the line {text!r}")

    def _wait(self, condition: Callable[[], bool], description: str) -> Self:
        try:
            wait_until(lambda: condition() or self.popen.poll() is not None, description)
            assert condition(), f"{description} did not happen before it ended with {self.popen.returncode}"
        except AssertionError as error:
            raise AssertionError(f"{error}; its log:\n{self.log()}") from error
        return self

    def terminate(self) -> None:
        self.popen.send_signal(signal.SIGTERM)

    def wait_for_exit(self, within_s: float = TIMEOUT_S) -> int:
        """Wait for the exit of the process and return its exit code."""
        return self.popen.wait(within_s)

    # --- its processes ---------------------------------------------------------------------------------------

    def workers(self) -> list[int]:
        """Return the ids of the processes that the server has started."""
        children: list[int] = []
        for task in Path(f"/proc/{self.popen.pid}/task").iterdir():
            with suppress(OSError):  # the thread has ended
                children += map(int, (task / "children").read_text().split())
        return children

    def kill(self) -> None:
        """Make sure that the process has ended."""
        if self.popen.poll() is None:
            self.terminate()
            try:
                self.popen.wait(60)
            except subprocess.TimeoutExpired:
                self.popen.kill()
                self.popen.wait()
        self._log.close()


@contextmanager
def running_server(*arguments: str, **options: Any) -> Iterator[ServerProcess]:
    """Start a server on free ports, wait until it is ready, and stop it at the end."""
    process = ServerProcess.on_free_ports(*arguments, **options)
    try:
        yield process.wait_until_ready()
    finally:
        process.kill()


@contextmanager
def started_server(*arguments: str, **options: Any) -> Iterator[ServerProcess]:
    """Start a server on free ports without waiting for it, and stop it at the end."""
    process = ServerProcess.on_free_ports(*arguments, **options)
    try:
        yield process
    finally:
        process.kill()
