"""`--max-connection-age-s`: connections are replaced under load without a lost call, and cut after the grace."""

import http.client
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import httpx
import pytest

from e2e.server_process import MODELS, TIMEOUT_S, ServerProcess, running_server, wait_until

TROUBLE = MODELS / "trouble.py"
AGE_S = 0.2
SCRAPES: list[int] = []
LIVE = "/inference.GRPCInferenceService/ServerLive"


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with running_server(f"{TROUBLE}:Twice", "--max-connection-age-s", str(AGE_S)) as process:
        yield process


def send_for(seconds: float, send: Callable[[], object]) -> int:
    """Send one call after the other for some time; return how many."""
    count, end_s = 0, time.monotonic() + seconds
    while time.monotonic() < end_s:
        send()
        count += 1
    return count


@pytest.mark.parametrize("http2", [False, True])
def test_httpx_loses_no_call_and_opens_connections(server: ServerProcess, http2: bool) -> None:
    before = connections(server)
    body = {"inputs": [{"name": "x", "datatype": "FP64", "shape": [1], "data": [1.0]}]}
    with httpx.Client(base_url=f"http://{server.url}", http1=not http2, http2=http2, timeout=TIMEOUT_S) as client:

        def send() -> None:
            response = client.post("/v2/models/Twice/infer", json=body)
            assert response.json()["outputs"][0]["data"] == [2.0]

        wait_until(lambda: send_for(2 * AGE_S, send) and connections(server) - before > 3, "further connections")


def test_grpc_loses_no_call_of_many_at_a_time(server: ServerProcess) -> None:
    before = connections(server)
    with grpc.insecure_channel(server.grpc_url) as channel, ThreadPoolExecutor(8) as threads:
        live = channel.unary_unary(LIVE)

        def many() -> bool:
            """A call of gRPC raises an error if it fails."""
            assert all(threads.map(lambda _: send_for(AGE_S, lambda: live(b"", timeout=TIMEOUT_S)), range(8)))
            return connections(server) - before > 3

        wait_until(many, "further connections")


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_curl_loses_no_call(server: ServerProcess) -> None:
    """Over HTTP/1.1: curl 7.88 fails at the second request of HTTP/2 with prior knowledge, without an age and beside
    nginx too ("Error in the HTTP2 framing layer")."""
    shown = "%{http_code} %{num_connects}\n"
    flags = ("-sS", "--http1.1", "-o", "/dev/null", "--rate", "50/s", "-w", shown)
    done = subprocess.run(
        ["curl", *flags, f"http://{server.url}/v2/models/Twice?[1-40]"],
        check=True,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    lines = [line.split() for line in done.stdout.splitlines()]
    assert {code for code, _ in lines} == {"200"}
    assert 1 < sum(int(number) for _, number in lines) < 40


def connections(server: ServerProcess) -> int:
    """Return how many connections the server has accepted, those of this function left out."""
    SCRAPES.append(1)
    lines = httpx.get(f"http://{server.url}/metrics").text.splitlines()
    found = sum(int(float(line.split()[1])) for line in lines if line.startswith("dragoman_connections_total"))
    return found - len(SCRAPES)


def test_after_the_grace_requests_are_cancelled(tmp_path: Path) -> None:
    flags = ("--max-connection-age-s", "0.2", "--max-connection-age-grace-s", "0.3", "--placement", "thread")
    with running_server(f"{TROUBLE}:Gate", *flags) as process:
        idle = http.client.HTTPConnection("127.0.0.1", process.http_port, timeout=TIMEOUT_S)
        idle.request("GET", "/v2/health/live")
        idle.getresponse().read()
        status, _ = process.infer("Gate", [str(tmp_path)], "BYTES")
        assert status == 503
        assert idle.sock.recv(1) == b""  # an idle connection is closed then
        idle.close()
        (tmp_path / "go").touch()
