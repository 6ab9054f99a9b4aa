"""Strangers at the port that workers join."""

import json
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from http.client import HTTPConnection
from pathlib import Path

import msgspec

from benchmarks.attack.attack import AimMissedError, Attack, Target
from benchmarks.attack.http2 import OTHER_ADDRESS
from benchmarks.processes import ROOT, free_port
from dragoman_cluster.handshake import Hello

_SECRET = "the secret of the server and its workers"
_STRANGERS = 300
_JOINED_S = 60.0  # by when a worker has joined, of which most is its start
_CONFIG = """
[model]
runtime = "python"
uri = "{models}:doubled"
[model.placement]
launcher = "join"
replicas = 1
"""


def _prepare(folder: Path) -> Sequence[str]:
    """Write a model that waits for a worker, and the secret; return the model and the flags."""
    model = folder / "joined"
    model.mkdir(parents=True, exist_ok=True)
    (model / "dragoman.toml").write_text(_CONFIG.format(models=ROOT / "benchmarks" / "attack" / "models.py"))
    (folder / "worker-secret").write_text(_SECRET)
    port = ("--worker-port", str(free_port()))
    return str(model), *port, "--worker-secret-file", str(folder / "worker-secret")


def _messages() -> Sequence[bytes]:
    """Return what strangers send: nothing, other protocols, and handshakes that are broken or never go on."""
    hello = msgspec.msgpack.encode(Hello(bytes(32), host="h" * 2000))
    sized = len(hello).to_bytes(4) + hello
    deep = b"\x91" * 4000
    return (
        b"",
        b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
        (1 << 31).to_bytes(4) + bytes(1000),
        (4096).to_bytes(4) + bytes(10),
        sized,
        sized + (64).to_bytes(4) + msgspec.msgpack.encode({"proof": bytes(32)}),
        len(deep).to_bytes(4) + deep,
    )


def _strangers(target: Target) -> str:
    """Occupy the port, and start a worker meanwhile: the model that waits for it is served."""
    port, messages = int(target.argument("--worker-port")), _messages()
    command = [sys.executable, "-m", "dragoman", "worker", "--join", f"127.0.0.1:{port}"]
    command += ["--secret-file", target.argument("--worker-secret-file")]
    began_s = time.monotonic()
    with ExitStack() as stack:
        for number in range(_STRANGERS):
            stranger = stack.enter_context(socket.create_connection((target.host, port), 10, (OTHER_ADDRESS, 0)))
            with suppress(OSError):  # it may be closed already
                stranger.sendall(messages[number % len(messages)])
        worker = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
        try:
            while not _is_served(target):
                if worker.poll() is not None or time.monotonic() - began_s > _JOINED_S:
                    raise AimMissedError(f"the worker had not joined after {time.monotonic() - began_s:.0f} s")
                time.sleep(0.1)
            took_s = time.monotonic() - began_s
        finally:
            worker.kill()
    warnings = target.process.log.read_text().count("worker not accepted")
    if warnings > 10:
        raise AimMissedError(f"{warnings} warnings about strangers in {took_s:.0f} s")
    return f"{_STRANGERS} connections; a worker joined after {took_s:.1f} s; {warnings} warnings"


def _is_served(target: Target) -> bool:
    connection = HTTPConnection(target.host, target.http_port, timeout=60)
    try:
        tensor = {"name": "x", "datatype": "FP64", "shape": [1], "data": [4]}
        connection.request("POST", "/v2/models/joined/infer", json.dumps({"inputs": [tensor]}))
        response = connection.getresponse()
        answer = json.loads(response.read())
        return response.status == 200 and answer["outputs"][0]["data"] == [8]
    finally:
        connection.close()


ATTACKS = (
    Attack(
        name="worker-port",
        about=f"{_STRANGERS} strangers at the worker port, silent or with broken handshakes, while a worker joins",
        run=_strangers,
        prepare=_prepare,
    ),
)
