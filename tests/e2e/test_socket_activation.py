"""Sockets that a service manager opens and hands over: a restart refuses no connection."""

import fcntl
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

import dragoman
from dragoman.system.service_manager import take_sockets

from .server_process import TIMEOUT_S, wait_until

MODEL = """
import time
import dragoman

class Echo(dragoman.Model):
    placement = "thread"
    inputs = outputs = (dragoman.TensorSpec("x", dragoman.FP64, (-1,)),)

    def infer(self, call):
        time.sleep(0.02)
        return {"x": call.inputs["x"].data}
"""
X = json.dumps({"inputs": [{"name": "x", "datatype": "FP64", "shape": [1], "data": [1.5]}]})
# Sets its own id before it becomes the server, as systemd does between fork and exec.
START = 'exec 3<&"$1" 4<&"$2"; shift 2; export LISTEN_PID=$$; exec "$@"'


class ServiceManager:
    """Keeps two listening sockets open, and starts servers with them as descriptors 3 and 4."""

    def __init__(self, folder: Path) -> None:
        (folder / "echo.py").write_text(MODEL)
        self._model = f"{folder}/echo.py:Echo"
        self._log = (folder / "log").open("wb")
        self.log = folder / "log"
        self._sockets = [socket.create_server(("127.0.0.1", 0), backlog=512) for _ in range(2)]
        self.http_port, self.grpc_port = (sock.getsockname()[1] for sock in self._sockets)
        self._high = [fcntl.fcntl(sock.fileno(), fcntl.F_DUPFD, 10) for sock in self._sockets]

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "LISTEN_FDS": "2", "LISTEN_FDNAMES": "http:grpc"}
        server = [sys.executable, "-m", "dragoman", "serve", self._model, *arguments]
        command = ["bash", "-c", START, "bash", *map(str, self._high), *server]
        return subprocess.Popen(command, pass_fds=self._high, stdout=self._log, stderr=self._log, env=environment)

    def close(self) -> None:
        for descriptor in self._high:
            os.close(descriptor)
        for sock in self._sockets:
            sock.close()
        self._log.close()


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[ServiceManager]:
    found = ServiceManager(tmp_path)
    yield found
    found.close()


class Clients(threading.Thread):
    """Sends one request after another, each on a new connection, and records the statuses, 0 without a response."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self.statuses: list[int] = []
        self.is_stopped = False
        self._port = port

    def run(self) -> None:
        while not self.is_stopped:
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=TIMEOUT_S)
            try:
                connection.request("POST", "/v2/models/Echo/infer", X)
                self.statuses.append(connection.getresponse().status)
            except OSError:
                self.statuses.append(0)
            finally:
                connection.close()


def end(server: subprocess.Popen[bytes]) -> int:
    server.send_signal(signal.SIGTERM)
    return server.wait(TIMEOUT_S)


def test_a_restart_refuses_no_connection(manager: ServiceManager) -> None:
    servers = [manager.start()]
    clients = [Clients(manager.http_port) for _ in range(4)]
    try:
        # The first requests wait until the server accepts; while its model loads they get 503.
        with dragoman.Client(f"grpc://127.0.0.1:{manager.grpc_port}", timeout_s=TIMEOUT_S) as client:
            wait_until(client.ready, "the first server")
        for each in clients:
            each.start()
        wait_until(lambda: all(len(each.statuses) > 5 for each in clients), "requests of all clients")
        assert end(servers[0]) == 0
        answered = [len(each.statuses) for each in clients]
        servers.append(manager.start())
        wait_until(
            lambda: all(len(each.statuses) > n + 5 for each, n in zip(clients, answered, strict=True)), "the second one"
        )
    finally:
        for each in clients:
            each.is_stopped = True
        for each in clients:
            each.join(TIMEOUT_S)
        assert [end(server) for server in servers[1:]] == [0] * len(servers[1:])
    assert {status for each in clients for status in each.statuses} == {200}, manager.log.read_text()


def test_several_processes_are_refused(manager: ServiceManager) -> None:
    assert manager.start("--processes", "2").wait(TIMEOUT_S) == 2
    assert "'processes': expected 1 with sockets of the service manager" in manager.log.read_text()


def test_variables_for_another_process_are_ignored() -> None:
    environment = {"LISTEN_PID": "1", "LISTEN_FDS": "1", "LISTEN_FDNAMES": "http", "HOME": "/"}
    assert take_sockets(environment) == {}
    assert environment == {"HOME": "/"}  # nor do workers see them


@pytest.mark.parametrize(
    ("names", "kind", "message"),
    [
        ("http", "tcp", ""),
        ("", "tcp", "expected each of http, grpc and admin at most once, got 'unknown'; set FileDescriptorName="),
        ("https", "tcp", "got 'https'"),
        ("http:grpc", "tcp", "expected 1 names"),
        ("http", "unix", "got AF_UNIX SOCK_STREAM"),
        ("http", "connected", "that does not listen"),
        ("http", "closed", "Bad file descriptor"),
    ],
)
def test_sockets_are_checked(names: str, kind: str, message: str, tmp_path: Path) -> None:
    family = socket.AF_UNIX if kind == "unix" else socket.AF_INET
    with socket.socket(family) as sock:
        sock.bind(str(tmp_path / "socket") if kind == "unix" else ("127.0.0.1", 0))
        if kind != "connected":
            sock.listen()
        descriptor = os.dup(sock.fileno())
        if kind == "closed":
            os.close(descriptor)
        environment = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1", "LISTEN_FDNAMES": names}
        if not message:
            with take_sockets(environment, descriptor)["http"] as found:
                assert found.getsockname() == sock.getsockname()
                assert not found.get_inheritable()
            return
        with pytest.raises(ValueError, match="LISTEN_FD") as raised:
            take_sockets(environment, descriptor)
        assert message in str(raised.value)
        with suppress(OSError):  # closed
            os.close(descriptor)
