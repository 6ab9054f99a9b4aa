"""How a server stops: what is under way is finished, and nothing holds it up for longer than it was told."""

import http.client
import json
import os
import pty
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from e2e.served import MODELS, PATIENCE_S, Served, free_ports, serving, started, until

TROUBLE = MODELS / "trouble.py"
Start = Callable[..., Served]


@pytest.fixture
def beside() -> Iterator[ThreadPoolExecutor]:
    """Where requests wait for their answers while the test goes on."""
    with ThreadPoolExecutor(4) as threads:
        yield threads


@pytest.mark.parametrize("placement", ["process", "thread"])
@pytest.mark.parametrize("whole_group", [False, True])
def test_sigterm_finishes_what_is_under_way(
    tmp_path: Path, beside: ThreadPoolExecutor, placement: str, whole_group: bool
) -> None:
    flags = ("--drain-s", "30", "--placement", placement)
    with serving(f"{TROUBLE}:Gate", f"{TROUBLE}:Twice", *flags) as served:
        answer = beside.submit(served.infer, "Gate", [str(tmp_path)], "BYTES")
        until((tmp_path / "begun").exists, "the request")
        served.terminate()
        if whole_group:  # as a service manager does that signals every process of a service
            for worker in served.workers():
                os.kill(worker, signal.SIGTERM)
        served.until_status("/v2/health/ready", 400)
        assert served.status("/v2/health/live") == 200
        status, body = served.infer("Twice", [1.0])
        assert (status, body) == (503, {"error": "the server is shutting down"})
        assert served.process.poll() is None
        (tmp_path / "go").touch()
        assert answer.result(PATIENCE_S)[0] == 200
        assert served.ended() == 0
        assert "Traceback" not in served.log()


@pytest.mark.parametrize(
    ("placement", "more"),
    [("process", ()), ("thread", ()), ("process", ("--front-ends", "2"))],
)
def test_sigterm_does_not_wait_for_a_model_that_is_stuck(
    tmp_path: Path, beside: ThreadPoolExecutor, placement: str, more: tuple[str, ...]
) -> None:
    with serving(f"{TROUBLE}:Stuck", "--drain-s", "1", "--placement", placement, *more) as served:
        answer = beside.submit(served.infer, "Stuck", [1.0], begun=str(tmp_path / "begun"))
        until((tmp_path / "begun").exists, "the request")
        workers = served.workers()
        served.terminate()
        assert served.ended(within_s=30) == 0
        status, body = answer.result(PATIENCE_S)
        assert status == 503
        assert "is unloading" in body["error"] or "shutting down" in body["error"]
        assert bool(workers) == (placement == "process")
        until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers), "the end of the worker")


@pytest.mark.parametrize("placement", ["process", "thread"])
def test_sigterm_while_a_model_loads(tmp_path: Path, placement: str) -> None:
    environment = {"TEST_GATE": str(tmp_path / "never")}
    flags = ("--drain-s", "1", "--placement", placement)
    with started(f"{TROUBLE}:SlowToLoad", *flags, environment=environment) as served:
        until((tmp_path / "never.begun").exists, "the load")
        served.terminate()
        assert served.ended(within_s=30) == 0
        assert "Traceback" not in served.log()


def test_a_second_signal_ends_it_at_once(tmp_path: Path, beside: ThreadPoolExecutor) -> None:
    with serving(f"{TROUBLE}:Stuck", "--drain-s", "60") as served:
        answer = beside.submit(served.infer, "Stuck", [1.0], begun=str(tmp_path / "begun"))
        until((tmp_path / "begun").exists, "the request")
        workers = served.workers()
        served.terminate()
        served.until_status("/v2/health/ready", 400)
        served.terminate()
        assert served.ended(within_s=30) == -signal.SIGTERM
        until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers), "the end of the worker")
        with pytest.raises(OSError):
            answer.result(PATIENCE_S)


def test_ctrl_c_stops_as_sigterm_does() -> None:
    with serving(f"{TROUBLE}:Twice") as served:
        served.process.send_signal(signal.SIGINT)
        assert served.ended() == 0
        assert "Traceback" not in served.log()
        assert "stopping: requests in flight have 30 s to finish" in served.log()


# --- the drain delay, and idle connections -----------------------------------------------------------------


SERVERS = [(), ("--front-ends", "2")]


def kept(served: Served) -> http.client.HTTPConnection:
    """A connection that has been used once and is kept."""
    connection = http.client.HTTPConnection("127.0.0.1", served.http_port, timeout=PATIENCE_S)
    connection.request("GET", "/v2/health/live")
    assert connection.getresponse().read() == b""
    return connection


def is_closed(connection: http.client.HTTPConnection) -> bool:
    """Whether the server has closed a connection; waits for that."""
    return connection.sock.recv(1) == b""


@pytest.mark.parametrize("more", SERVERS)
def test_a_server_answers_and_is_not_ready_for_the_drain_delay(more: tuple[str, ...]) -> None:
    with serving(f"{TROUBLE}:Twice", "--drain-delay-s", "60", *more) as served:
        idle = kept(served)
        with grpc.insecure_channel(served.grpc_url) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            asked = health_pb2.HealthCheckRequest()
            assert stub.Check(asked, timeout=PATIENCE_S).status == health_pb2.HealthCheckResponse.SERVING
            watch = stub.Watch(asked)
            assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
            served.terminate()
            assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
            assert stub.Check(asked, timeout=PATIENCE_S).status == health_pb2.HealthCheckResponse.NOT_SERVING
            watch.cancel()
        assert served.status("/v2/health/ready") == served.status("/v2/models/Twice/ready") == 400
        assert served.status("/v2/health/live") == 200
        assert served.infer("Twice", [2.0])[1]["outputs"][0]["data"] == [4.0]
        idle.request("GET", "/v2/health/ready")  # kept, and kept on
        answer = idle.getresponse()
        assert (answer.status, answer.getheader("connection")) == (400, None)
        answer.read()
        assert served.process.poll() is None
        served.terminate()  # a second signal ends the delay, not the process
        assert is_closed(idle)
        assert served.ended() == 0
        idle.close()


def test_the_drain_delay_ends_by_itself() -> None:
    with serving(f"{TROUBLE}:Twice", "--drain-delay-s", "0.5") as served:
        served.terminate()
        served.until_status("/v2/health/ready", 400)
        assert served.ended() == 0


@pytest.mark.parametrize("more", SERVERS)
def test_idle_connections_are_closed_when_the_drain_begins(
    tmp_path: Path, beside: ThreadPoolExecutor, more: tuple[str, ...]
) -> None:
    with serving(f"{TROUBLE}:Gate", f"{TROUBLE}:Twice", "--drain-s", "60", *more) as served:
        idle = kept(served)
        answer = beside.submit(served.infer, "Gate", [str(tmp_path)], "BYTES")
        until((tmp_path / "begun").exists, "the request")
        served.terminate()
        assert is_closed(idle)
        status, body, headers = served.ask("POST", "/v2/models/Twice/infer", {"inputs": []})
        assert (status, body) == (503, {"error": "the server is shutting down"})
        assert (headers["connection"], headers["retry-after"]) == ("close", "1")
        assert not answer.done()
        (tmp_path / "go").touch()
        assert answer.result(PATIENCE_S)[0] == 200
        assert served.ended() == 0
        idle.close()


def test_sighup_is_ignored(tmp_path: Path, beside: ThreadPoolExecutor) -> None:
    with serving(f"{TROUBLE}:Gate", f"{TROUBLE}:Twice", "--front-ends", "2") as served:
        answer = beside.submit(served.infer, "Gate", [str(tmp_path)], "BYTES")
        until((tmp_path / "begun").exists, "the request")
        for pid in (served.process.pid, *served.workers()):
            os.kill(pid, signal.SIGHUP)
        served.until_logged("SIGHUP is ignored")
        served.terminate()
        served.until_status("/v2/health/ready", 400)
        served.process.send_signal(signal.SIGHUP)  # nor does it cut the drain short
        (tmp_path / "go").touch()
        assert answer.result(PATIENCE_S)[0] == 200
        assert served.ended() == 0


def test_a_server_whose_terminal_is_closed_drains() -> None:
    ours, theirs = pty.openpty()
    script = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
    port = free_ports(1)[0]
    command = [sys.executable, "-m", "dragoman", "serve", f"{TROUBLE}:Twice", "--http-port", str(port)]
    with tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen(
            [sys.executable, "-c", script, *command, "--grpc-port", "-1"],
            stdin=theirs,
            stderr=log,
            start_new_session=True,
        )
        os.close(theirs)
        until(lambda: "Ctrl-C stops" in os.pread(log.fileno(), 1 << 20, 0).decode(), "its start")
        server.send_signal(signal.SIGHUP)  # the terminal is there still
        until(lambda: "SIGHUP is ignored" in os.pread(log.fileno(), 1 << 20, 0).decode(), "the line")
        os.close(ours)
        assert server.wait(PATIENCE_S) == 0
        assert "stopping: requests in flight" in os.pread(log.fileno(), 1 << 20, 0).decode()


def test_killing_the_server_ends_its_workers() -> None:
    with serving(f"{TROUBLE}:Twice", "--replicas", "2") as served:
        workers = served.workers()
        assert len(workers) == 2
        served.process.kill()
        until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers), "the end of the workers")


def test_idle_connections_do_not_hold_it_up() -> None:
    with serving(f"{TROUBLE}:Twice", "--drain-s", "30") as served:
        idle = http.client.HTTPConnection("127.0.0.1", served.http_port, timeout=10)
        idle.request("GET", "/v2/health/live")
        idle.getresponse().read()
        half = http.client.HTTPConnection("127.0.0.1", served.http_port, timeout=10)
        half.connect()
        half.sock.sendall(b"POST /v2/models/Twice/infer HTTP/1.1\r\nhost: x\r\ncontent-")
        with grpc.insecure_channel(served.grpc_url) as channel:
            grpc.channel_ready_future(channel).result(10)
            served.terminate()
            assert served.ended(within_s=20) == 0
        idle.close()
        half.close()


def test_a_client_that_does_not_read_does_not_hold_it_up() -> None:
    count = 4_000_000
    with serving(f"{MODELS / 'shapes.py'}:Echo", "--drain-s", "1", "--no-compress-responses") as served:
        tensor = {"name": "x", "datatype": "INT8", "shape": [count], "parameters": {"binary_data_size": count}}
        head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
        slow = http.client.HTTPConnection("127.0.0.1", served.http_port, timeout=10)
        headers = {"inference-header-content-length": str(len(head))}
        slow.request("POST", "/v2/models/Echo/infer", head + bytes(count), headers)
        until(lambda: slow.sock.recv(1), "the beginning of the answer")
        served.terminate()
        assert served.ended(within_s=30) == 0
        slow.close()
