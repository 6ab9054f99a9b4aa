"""Graceful shutdown: requests in flight complete, within the configured time."""

import http.client
import json
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from e2e.server_process import MODELS, TIMEOUT_S, ServerProcess, free_ports, running_server, started_server, wait_until

TROUBLE = MODELS / "trouble.py"
Start = Callable[..., ServerProcess]


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    """Threads for requests that wait while the test continues."""
    with ThreadPoolExecutor(4) as threads:
        yield threads


@pytest.mark.parametrize("placement", ["process", "thread"])
@pytest.mark.parametrize("whole_group", [False, True])
def test_sigterm_completes_requests_in_flight(
    tmp_path: Path, threads: ThreadPoolExecutor, placement: str, whole_group: bool
) -> None:
    flags = ("--drain-s", "30", "--placement", placement)
    with running_server(f"{TROUBLE}:Gate", f"{TROUBLE}:Twice", *flags) as process:
        response = threads.submit(process.infer, "Gate", [str(tmp_path)], "BYTES")
        wait_until((tmp_path / "begun").exists, "the request")
        process.terminate()
        if whole_group:  # like a service manager that signals every process
            for worker in process.workers():
                os.kill(worker, signal.SIGTERM)
        process.wait_for_status("/v2/health/ready", 400)
        assert process.status("/v2/health/live") == 200
        status, body = process.infer("Twice", [1.0])
        assert (status, body) == (503, {"error": "the server is shutting down"})
        assert process.popen.poll() is None
        (tmp_path / "go").touch()
        assert response.result(TIMEOUT_S)[0] == 200
        assert process.wait_for_exit() == 0
        assert "Traceback" not in process.log()


@pytest.mark.parametrize(
    ("placement", "more"),
    [("process", ()), ("thread", ()), ("process", ("--processes", "2"))],
)
def test_sigterm_does_not_wait_for_a_hung_model(
    tmp_path: Path, threads: ThreadPoolExecutor, placement: str, more: tuple[str, ...]
) -> None:
    with running_server(f"{TROUBLE}:Stuck", "--drain-s", "0.1", "--placement", placement, *more) as process:
        response = threads.submit(process.infer, "Stuck", [1.0], begun=str(tmp_path / "begun"))
        wait_until((tmp_path / "begun").exists, "the request")
        workers = process.workers()
        process.terminate()
        assert process.wait_for_exit() == 0
        status, body = response.result(TIMEOUT_S)
        assert status == 503
        assert "is unloading" in body["error"] or "shutting down" in body["error"]
        assert bool(workers) == (placement == "process")
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers), "the end of the worker")


@pytest.mark.parametrize("placement", ["process", "thread"])
def test_sigterm_while_a_model_loads(tmp_path: Path, placement: str) -> None:
    environment = {"TEST_GATE": str(tmp_path / "never")}
    flags = ("--drain-s", "0.1", "--placement", placement)
    with started_server(f"{TROUBLE}:SlowToLoad", *flags, environment=environment) as process:
        wait_until((tmp_path / "never.begun").exists, "the load")
        process.terminate()
        assert process.wait_for_exit() == 0
        assert "Traceback" not in process.log()


def test_sigterm_while_a_load_runs_native_code(tmp_path: Path) -> None:
    """C++ aborts the process if its thread returns to Python while that is torn down."""
    pytest.importorskip("torch")
    environment = {"TEST_GATE": str(tmp_path / "never")}
    with started_server(f"{TROUBLE}:ComputesInLoad", "--drain-s", "0", environment=environment) as process:
        wait_until((tmp_path / "never.begun").exists, "the load")
        process.terminate()
        assert process.wait_for_exit() == 0
        assert "terminate called" not in process.log()


def test_a_second_signal_exits_at_once(tmp_path: Path, threads: ThreadPoolExecutor) -> None:
    with running_server(f"{TROUBLE}:Stuck", "--drain-s", "600") as process:
        response = threads.submit(process.infer, "Stuck", [1.0], begun=str(tmp_path / "begun"))
        wait_until((tmp_path / "begun").exists, "the request")
        workers = process.workers()
        process.terminate()
        process.wait_for_status("/v2/health/ready", 400)
        process.terminate()
        assert process.wait_for_exit() == -signal.SIGTERM
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers), "the end of the worker")
        with pytest.raises(OSError):
            response.result(TIMEOUT_S)


def test_ctrl_c_stops_as_sigterm_does() -> None:
    with running_server(f"{TROUBLE}:Twice") as process:
        process.popen.send_signal(signal.SIGINT)
        assert process.wait_for_exit() == 0
        assert "Traceback" not in process.log()
        assert "stopping: requests in flight have 30 s to finish" in process.log()


# --- the drain delay, and idle connections -----------------------------------------------------------------


SERVERS = [(), ("--processes", "2")]


def idle_connection(process: ServerProcess) -> http.client.HTTPConnection:
    """Return a keep-alive connection that has been used once."""
    connection = http.client.HTTPConnection("127.0.0.1", process.http_port, timeout=TIMEOUT_S)
    connection.request("GET", "/v2/health/live")
    assert connection.getresponse().read() == b""
    return connection


def is_closed(connection: http.client.HTTPConnection) -> bool:
    """Wait until the server has closed the connection; return whether it did."""
    return connection.sock.recv(1) == b""


@pytest.mark.parametrize("more", SERVERS)
def test_a_server_answers_and_is_not_ready_for_the_drain_delay(more: tuple[str, ...]) -> None:
    with running_server(f"{TROUBLE}:Twice", "--drain-delay-s", "60", *more) as process:
        idle, used = idle_connection(process), idle_connection(process)
        with grpc.insecure_channel(process.grpc_url) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            request = health_pb2.HealthCheckRequest()
            assert stub.Check(request, timeout=TIMEOUT_S).status == health_pb2.HealthCheckResponse.SERVING
            watch = stub.Watch(request)
            assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
            process.terminate()
            assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
            assert stub.Check(request, timeout=TIMEOUT_S).status == health_pb2.HealthCheckResponse.NOT_SERVING
            watch.cancel()
        assert process.status("/v2/health/ready") == process.status("/v2/models/Twice/ready") == 400
        assert process.status("/v2/health/live") == 200
        assert process.infer("Twice", [2.0])[1]["outputs"][0]["data"] == [4.0]
        used.request("GET", "/v2/health/ready")  # an open connection is answered, and replaced without a loss
        response = used.getresponse()
        assert (response.status, response.getheader("connection"), response.read()) == (400, "close", b"")
        with httpx.Client() as new:
            assert new.get(f"http://{process.url}/v2/health/live").headers["connection"] == "close"
        assert select.select([idle.sock], [], [], 0)[0] == []  # one without requests stays open
        assert process.popen.poll() is None
        process.terminate()  # a second signal ends the delay, not the process
        assert is_closed(idle)
        assert process.wait_for_exit() == 0
        idle.close()
        used.close()


def test_the_drain_delay_ends_by_itself() -> None:
    with running_server(f"{TROUBLE}:Twice", "--drain-delay-s", "0.5") as process:
        process.terminate()
        process.wait_for_status("/v2/health/ready", 400)
        assert process.wait_for_exit() == 0


@pytest.mark.parametrize("more", SERVERS)
def test_idle_connections_are_closed_when_the_drain_begins(
    tmp_path: Path, threads: ThreadPoolExecutor, more: tuple[str, ...]
) -> None:
    with running_server(f"{TROUBLE}:Gate", f"{TROUBLE}:Twice", "--drain-s", "60", *more) as process:
        idle = idle_connection(process)
        response = threads.submit(process.infer, "Gate", [str(tmp_path)], "BYTES")
        wait_until((tmp_path / "begun").exists, "the request")
        process.terminate()
        assert is_closed(idle)
        try:
            status, body, headers = process.request("POST", "/v2/models/Twice/infer", {"inputs": []})
        except ConnectionError:  # another process began its drain, and closed the connection before the request
            status, body, headers = process.request("POST", "/v2/models/Twice/infer", {"inputs": []})
        assert (status, body) == (503, {"error": "the server is shutting down"})
        assert (headers["connection"], headers["retry-after"]) == ("close", "1")
        assert not response.done()
        (tmp_path / "go").touch()
        assert response.result(TIMEOUT_S)[0] == 200
        assert process.wait_for_exit() == 0
        idle.close()


def test_sighup_ends_nothing(tmp_path: Path, threads: ThreadPoolExecutor) -> None:
    with running_server(f"{TROUBLE}:Gate", f"{TROUBLE}:Twice", "--processes", "2") as process:
        response = threads.submit(process.infer, "Gate", [str(tmp_path)], "BYTES")
        wait_until((tmp_path / "begun").exists, "the request")
        for pid in (process.popen.pid, *process.workers()):
            os.kill(pid, signal.SIGHUP)
        process.wait_for_log("SIGHUP: keys, certificates, log level and models are reloaded")
        process.terminate()
        process.wait_for_status("/v2/health/ready", 400)
        process.popen.send_signal(signal.SIGHUP)  # nor does it cut the drain short
        (tmp_path / "go").touch()
        assert response.result(TIMEOUT_S)[0] == 200
        assert process.wait_for_exit() == 0


def test_a_server_whose_terminal_is_closed_drains() -> None:
    ours, theirs = pty.openpty()
    script = (
        "import fcntl, os, signal, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
        "signal.signal(signal.SIGHUP, signal.SIG_DFL); "  # also where the tests run under `nohup`
        "os.execv(sys.argv[1], sys.argv[1:])"
    )
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
        wait_until(lambda: "Ctrl-C stops" in os.pread(log.fileno(), 1 << 20, 0).decode(), "its start")
        server.send_signal(signal.SIGHUP)  # the terminal still exists
        wait_until(
            lambda: (
                "SIGHUP: keys, certificates, log level and models are reloaded"
                in os.pread(log.fileno(), 1 << 20, 0).decode()
            ),
            "the line",
        )
        os.close(ours)
        assert server.wait(TIMEOUT_S) == 0
        assert "stopping: requests in flight" in os.pread(log.fileno(), 1 << 20, 0).decode()


def test_killing_the_server_ends_its_workers() -> None:
    with running_server(f"{TROUBLE}:Twice", "--replicas", "2") as process:
        workers = process.workers()
        assert len(workers) == 2
        process.popen.kill()
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers), "the end of the workers")


def test_idle_connections_do_not_delay_the_exit() -> None:
    with running_server(f"{TROUBLE}:Twice", "--drain-s", "600") as process:
        idle = http.client.HTTPConnection("127.0.0.1", process.http_port, timeout=60)
        idle.request("GET", "/v2/health/live")
        idle.getresponse().read()
        half = http.client.HTTPConnection("127.0.0.1", process.http_port, timeout=60)
        half.connect()
        half.sock.sendall(b"POST /v2/models/Twice/infer HTTP/1.1\r\nhost: x\r\ncontent-")
        with grpc.insecure_channel(process.grpc_url) as channel:
            grpc.channel_ready_future(channel).result(60)
            process.terminate()
            assert process.wait_for_exit() == 0
        idle.close()
        half.close()


def test_a_client_that_does_not_read_does_not_delay_the_exit() -> None:
    count = 4_000_000
    with running_server(
        f"{MODELS / 'shapes.py'}:Echo", "--placement", "thread", "--drain-s", "0.1", "--no-compress-responses"
    ) as process:
        tensor = {"name": "x", "datatype": "INT8", "shape": [count], "parameters": {"binary_data_size": count}}
        head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
        slow = http.client.HTTPConnection("127.0.0.1", process.http_port, timeout=60)
        headers = {"inference-header-content-length": str(len(head))}
        slow.request("POST", "/v2/models/Echo/infer", head + bytes(count), headers)
        wait_until(lambda: slow.sock.recv(1), "the beginning of the answer")
        process.terminate()
        assert process.wait_for_exit() == 0
        slow.close()


def test_the_temporary_folder_of_a_killed_server_is_removed_by_a_later_one(tmp_path: Path) -> None:
    def folders() -> set[Path]:
        return {*tmp_path.glob("dragoman-*")}

    environment = {"TMPDIR": str(tmp_path)}
    arguments = (f"{TROUBLE}:Twice", "--placement", "process", "--working-directory", "own")
    with running_server(*arguments, environment=environment) as killed:
        left = folders()
        killed.popen.kill()
        killed.wait_for_exit()
    with running_server(*arguments, environment=environment):
        own = folders() - left
        assert len(left) == len(own) == 3  # of metrics, of files, and of the worker process
        assert left < folders()  # young ones may not be locked yet
        for each in folders():
            os.utime(each, (1, 1))
        with running_server(*arguments, environment=environment):
            assert (left & folders(), own < folders(), len(folders())) == (set(), True, 6)
    assert folders() == set()


def test_connections_that_wait_to_be_accepted_are_answered() -> None:
    """Those that were made before the server stops are not reset when it closes its listening socket."""
    with running_server(f"{TROUBLE}:Twice") as process:
        process.popen.send_signal(signal.SIGSTOP)
        clients = []
        for _ in range(300):  # more than are accepted in an iteration of the event loop
            client = socket.create_connection(("127.0.0.1", process.http_port), timeout=TIMEOUT_S)
            client.sendall(b"GET /v2/health/live HTTP/1.1\r\nhost: a\r\n\r\n")
            clients.append(client)
        process.terminate()
        process.popen.send_signal(signal.SIGCONT)
        for client in clients:
            with client, client.makefile("rb") as response:
                text = response.read()  # to the end: the server closes the connection
            assert text.startswith(b"HTTP/1.1 200"), text
        assert process.wait_for_exit() == 0
