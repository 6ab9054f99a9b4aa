"""systemd is told when models are loaded, of reloads, and of the stop, by datagrams to NOTIFY_SOCKET."""

import signal
import socket
import time
from pathlib import Path

from e2e.server_process import started_server

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


def test_the_states_of_a_service(tmp_path: Path) -> None:
    (tmp_path / "echo.py").write_text(MODEL.format(load="pass"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "notify"))
        sock.settimeout(60)
        environment = {"NOTIFY_SOCKET": str(tmp_path / "notify")}
        with started_server(f"{tmp_path}/echo.py:Echo", environment=environment) as process:
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
    (tmp_path / "echo.py").write_text(MODEL.format(load="raise ValueError('no weights')"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "notify"))
        sock.settimeout(60)
        environment = {"NOTIFY_SOCKET": str(tmp_path / "notify")}
        with started_server(f"{tmp_path}/echo.py:Echo", environment=environment) as process:
            assert sock.recv(1000) == b"STOPPING=1"
            assert process.popen.wait(60) == 1
