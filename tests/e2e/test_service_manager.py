"""systemd is told when models are loaded, of reloads, and of the stop, by datagrams to NOTIFY_SOCKET."""

import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from e2e.server_process import ServerProcess, started_server

MODEL = """
import dragoman

class Echo(dragoman.Model):
    placement = "inline"
    inputs = outputs = (dragoman.TensorSpec("x", dragoman.FP64, (-1,)),)

    def load(self):
        {load}

    def infer(self, call):
        return {{"x": call.inputs["x"].data}}
"""


@contextmanager
def service(folder: Path, load: str) -> Iterator[tuple[ServerProcess, socket.socket]]:
    """Start a server whose model runs `load` when it is loaded; return it with the socket of its service manager."""
    (folder / "echo.py").write_text(MODEL.format(load=load))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(folder / "notify"))
        sock.settimeout(60)
        environment = {"NOTIFY_SOCKET": str(folder / "notify")}
        with started_server(f"{folder}/echo.py:Echo", environment=environment) as process:
            yield process, sock


def test_the_states_of_a_service(tmp_path: Path) -> None:
    with service(tmp_path, "pass") as (process, sock):
        assert sock.recv(1000) == b"READY=1"
        before_us = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        process.popen.send_signal(signal.SIGHUP)
        reloading, time_us = sock.recv(1000).decode().split("\nMONOTONIC_USEC=")
        assert (reloading, int(time_us) >= before_us) == ("RELOADING=1", True)
        assert sock.recv(1000) == b"READY=1"
        process.popen.send_signal(signal.SIGTERM)
        assert sock.recv(1000) == b"STOPPING=1"
        assert process.popen.wait(60) == 0


def test_a_service_without_models_is_never_ready(tmp_path: Path) -> None:
    with service(tmp_path, "raise ValueError('no weights')") as (process, sock):
        assert sock.recv(1000) == b"STOPPING=1"
        assert process.popen.wait(60) == 1
