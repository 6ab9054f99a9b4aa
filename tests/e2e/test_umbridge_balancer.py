"""Behind the load balancer of UM-Bridge: what its job script and its C++ client do, byte by byte.

The job script starts a server and asks `/Info` with curl until anything answers, once a second; then the balancer
connects, reads the list of models once, and sends one request per job over a new connection.
"""

import json
import shutil
import socket
import subprocess
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from e2e.server_process import ServerProcess

MODEL = """
import time
import dragoman

@dragoman.vector_function(inputs={"x": 2}, derivatives="complex step")
def banana(x, *, scale=1.0):
    return scale * ((1 - x[0]) ** 2 + 10 * (x[1] - x[0] ** 2) ** 2)

time.sleep(0.5)  # as a simulator that reads its data
"""
# Of cpp-httplib 0.9, with which the balancer is built.
HEADERS = "Accept: */*\r\nConnection: close\r\n%sHost: %s\r\nUser-Agent: cpp-httplib/0.9\r\n\r\n"
JOB_SCRIPT = """
while ! curl -s "http://$HOST_AND_PORT/Info" > /dev/null; do
    sleep 1
done
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Return a server of a job, as soon as curl has got a response."""
    folder = tmp_path_factory.mktemp("job")
    (folder / "banana.py").write_text(MODEL)
    process = ServerProcess.on_free_ports("banana.py:banana", folder=folder)
    try:
        if shutil.which("curl"):
            subprocess.run(["bash", "-c", JOB_SCRIPT], env={"HOST_AND_PORT": process.url}, check=True, timeout=60)
        else:
            process.wait_until_live()
        yield process
    finally:
        process.kill()


def send(process: ServerProcess, path: str, body: bytes | None = None) -> tuple[int, Any]:
    """Send the bytes of the C++ client on a new connection; return status and body."""
    content = "" if body is None else f"Content-Length: {len(body)}\r\nContent-Type: application/json\r\n"
    method = "GET" if body is None else "POST"
    request = f"{method} {path} HTTP/1.1\r\n" + HEADERS % (content, process.url)
    with socket.create_connection(("127.0.0.1", process.http_port), timeout=60) as connection:
        connection.sendall(request.encode())
        connection.sendall(body or b"")  # the client sends the body in a packet of its own
        response = b""
        while data := connection.recv(1 << 16):
            response += data
    head, _, content_bytes = response.partition(b"\r\n\r\n")
    assert b"connection: close" in head.lower()
    return int(head.split()[1]), json.loads(content_bytes)


def test_the_first_response_lists_the_models(job: ServerProcess) -> None:
    assert send(job, "/Info") == (200, {"protocolVersion": 1.0, "models": ["banana"]})


def test_every_request_of_the_balancer(job: ServerProcess) -> None:
    support = dict.fromkeys(("Evaluate", "Gradient", "ApplyJacobian", "ApplyHessian"), True)
    point = b'"config":{},"input":[[2.0,0.0]],"name":"banana"'
    derivative = b'"config":{},"inWrt":0,"input":[[2.0,0.0]],"name":"banana","outWrt":0,'
    hessian = derivative.replace(b'"inWrt":0', b'"inWrt1":0,"inWrt2":0')
    assert send(job, "/ModelInfo", b'{"name":"banana"}') == (200, {"support": support})
    for path, body, key, value in (
        ("/InputSizes", b'{"name":"banana"}', "inputSizes", [2]),
        ("/OutputSizes", b'{"name":"banana"}', "outputSizes", [1]),
        ("/InputSizes", b'{"config":{"scale":2.0},"name":"banana"}', "inputSizes", [2]),
        ("/Evaluate", b"{%s}" % point, "output", [[161.0]]),
        ("/Gradient", b'{%s"sens":[1.0]}' % derivative, "output", [322.0, -80.0]),
        ("/ApplyJacobian", b'{%s"vec":[1.0,0.0]}' % derivative, "output", [322.0]),
        ("/ApplyHessian", b'{%s"sens":[1.0],"vec":[0.0,1.0]}' % hessian, "output", [-80.0, 20.0]),
    ):
        status, found = send(job, path, body)
        assert (path, status) == (path, 200)
        assert list(found) == [key]
        np.testing.assert_allclose(found[key], value, rtol=1e-12)


def test_errors_have_the_type_and_message_that_the_balancer_prints(job: ServerProcess) -> None:
    status, body = send(job, "/Evaluate", b'{"config":{},"input":[[1.0]],"name":"banana"}')
    assert (status, body["error"]["type"]) == (400, "InvalidInput")
    assert "expected 2 numbers, got 1" in body["error"]["message"]


def test_the_signal_of_scancel_ends_the_server(job: ServerProcess) -> None:
    job.popen.terminate()
    assert job.popen.wait(60) == 0
