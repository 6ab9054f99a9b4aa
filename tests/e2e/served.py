"""A server process, started and stopped as a user does it, and how tests wait for what it does."""

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

T = TypeVar("T")

MODELS = Path(__file__).parent / "models"
# How long anything may take that should take a moment, on a busy machine.
PATIENCE_S = 60.0


def until(happened: Callable[[], T], what: str, within_s: float = PATIENCE_S) -> T:
    """The first true thing that `happened` gives; AssertionError where the time is over."""
    end_s = time.monotonic() + within_s
    while True:
        found = happened()
        if found:
            return found
        assert time.monotonic() < end_s, f"{what} did not happen within {within_s} s"
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


class Served:
    """`python -m dragoman serve ARGUMENTS` in a process of its own; its standard error goes to a file."""

    def __init__(
        self,
        *arguments: str,
        command: Sequence[str] = ("-m", "dragoman", "serve"),
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
    ) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed in `reap`
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("DRAGOMAN_", "PYTEST_"))}
        self.process = subprocess.Popen(
            [sys.executable, *command, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env={**clean, **(environment or {})},
            cwd=folder,
        )
        self.http_port = self.grpc_port = 0

    @classmethod
    def listening(cls, *arguments: str, **options: Any) -> Self:
        """One on free ports, of which nothing is awaited yet."""
        http_port, grpc_port = free_ports(2)
        served = cls("--http-port", str(http_port), "--grpc-port", str(grpc_port), *arguments, **options)
        served.http_port, served.grpc_port = http_port, grpc_port
        return served

    @property
    def url(self) -> str:
        return f"127.0.0.1:{self.http_port}"

    @property
    def grpc_url(self) -> str:
        return f"127.0.0.1:{self.grpc_port}"

    def log(self) -> str:
        """All that it has printed so far."""
        return os.pread(self._log.fileno(), 1 << 24, 0).decode(errors="replace")

    # --- asking ----------------------------------------------------------------------------------------------

    def ask(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, Any, dict[str, str]]:
        """Status, body (as JSON where it is) and headers of one request on a connection of its own."""
        connection = http.client.HTTPConnection("127.0.0.1", self.http_port, timeout=PATIENCE_S)
        try:
            data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
            connection.request(method, path, data, dict(headers or {}))
            response = connection.getresponse()
            content = response.read()
            found = {k.lower(): v for k, v in response.getheaders()}
            if found.get("content-type", "").partition(";")[0] == "application/json" and content:
                return response.status, json.loads(content), found
            return response.status, content, found
        finally:
            connection.close()

    def status(self, path: str) -> int:
        """The status of GET `path`; 0 while nobody listens."""
        try:
            return self.ask("GET", path)[0]
        except OSError:
            return 0

    def infer(self, model: str, values: Any, datatype: str = "FP64", **parameters: Any) -> tuple[int, Any]:
        """Status and body of the plain JSON question with the one input `x`, in one row a value."""
        tensor = {"name": "x", "datatype": datatype, "shape": [len(values)], "data": values}
        status, body, _ = self.ask(
            "POST",
            f"/v2/models/{model}/infer",
            {"inputs": [tensor], **({"parameters": parameters} if parameters else {})},
        )
        return status, body

    # --- waiting ---------------------------------------------------------------------------------------------

    def until_status(self, path: str, wanted: int) -> Self:
        """Wait until GET `path` answers so; AssertionError with the log where the server ends before."""
        return self._until(lambda: self.status(path) == wanted, f"status {wanted} of {path}")

    def until_ready(self) -> Self:
        return self.until_status("/v2/health/ready", 200)

    def until_live(self) -> Self:
        return self.until_status("/v2/health/live", 200)

    def until_logged(self, text: str) -> Self:
        return self._until(lambda: text in self.log(), f"the line {text!r}")

    def _until(self, happened: Callable[[], bool], what: str) -> Self:
        try:
            until(lambda: happened() or self.process.poll() is not None, what)
            assert happened(), f"{what} did not happen before it ended with {self.process.returncode}"
        except AssertionError as fault:
            raise AssertionError(f"{fault}; its log:\n{self.log()}") from fault
        return self

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def ended(self, within_s: float = PATIENCE_S) -> int:
        """Its exit code, once it has ended."""
        return self.process.wait(within_s)

    # --- its processes ---------------------------------------------------------------------------------------

    def workers(self) -> list[int]:
        """The processes that the server has started."""
        found: list[int] = []
        for task in Path(f"/proc/{self.process.pid}/task").iterdir():
            with suppress(OSError):  # a thread that has ended meanwhile
                found += map(int, (task / "children").read_text().split())
        return found

    def reap(self) -> None:
        """Be sure that it is gone, whatever happened."""
        if self.process.poll() is None:
            self.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._log.close()


@contextmanager
def serving(*arguments: str, **options: Any) -> Iterator[Served]:
    """A server on free ports that is ready, and gone afterwards."""
    served = Served.listening(*arguments, **options)
    try:
        yield served.until_ready()
    finally:
        served.reap()


@contextmanager
def started(*arguments: str, **options: Any) -> Iterator[Served]:
    """A server on free ports of which nothing is awaited, and gone afterwards."""
    served = Served.listening(*arguments, **options)
    try:
        yield served
    finally:
        served.reap()
