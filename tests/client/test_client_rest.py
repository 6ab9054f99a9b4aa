"""The REST client against a scripted server: statuses, invalid responses, connections."""

import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import pytest

import dragoman
from client.client_servers import ClientKind, Echo, LoopThread
from dragoman import Tensor, errors
from dragoman.client.errors import error_of_status

X = {"x": Tensor.of([1.0])}  # needs no metadata
JSON = b'{"model_name":"m","outputs":[{"name":"y","datatype":"INT64","shape":[1],"data":[7]}]}'


def response(status: int, body: bytes = b"", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status} X", f"content-length: {len(body)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


OK = response(200, JSON)
BUSY = response(503, b'{"error":"too busy"}', "retry-after: 0")


class ScriptedServer:
    """A server that sends scripted responses in order; None closes the connection."""

    def __init__(self, responses: Sequence[bytes | None]) -> None:
        self._answers = list(responses)
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self.heard: list[bytes] = []
        self.connections = 0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while self._answers:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            self.connections += 1
            with connection, suppress(ConnectionError):  # the client may disconnect
                connection.settimeout(10)
                self._speak(connection)

    def _speak(self, connection: socket.socket) -> None:
        while self._answers and (received := self._request(connection)):
            self.heard.append(received)
            raw = self._answers.pop(0)
            if raw is None:
                return
            connection.sendall(raw)
            if b"close" in raw.partition(b"\r\n\r\n")[0]:
                return

    def _request(self, connection: socket.socket) -> bytes:
        received = b""
        while b"\r\n\r\n" not in received:
            data = connection.recv(1 << 16)
            if not data:
                return b""
            received += data
        headers, _, body = received.partition(b"\r\n\r\n")
        fields = dict(line.partition(b": ")[::2] for line in headers.split(b"\r\n"))
        length = int(fields.get(b"content-length", 0))
        while len(body) < length:
            body += connection.recv(1 << 16)
        return headers + b"\r\n\r\n" + body

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(10)


StartScriptedServer = Callable[..., Any]


@pytest.fixture(params=["blocking", "asyncio"])
def scripted_server(request: Any, loop_thread: LoopThread) -> StartScriptedServer:
    @contextmanager
    def raw(*responses: bytes | None, **options: Any) -> Iterator[tuple[Any, ScriptedServer]]:
        server = ScriptedServer(responses)
        try:
            with loop_thread.client(request.param, server.url, **options) as client:
                yield client, server
        finally:
            server.close()

    return raw


# --- retries ---------------------------------------------------------------------------------------------------


def test_busy_twice(scripted_server: StartScriptedServer) -> None:
    with scripted_server(BUSY, BUSY, OK) as (client, server):
        assert client.infer("m", X)["y"].tolist() == [7]
        assert len(set(server.heard)) == 1
        assert len(server.heard) == 3
        assert server.connections == 1


def test_busy_until_retries_are_used_up(scripted_server: StartScriptedServer) -> None:
    with scripted_server(*[BUSY] * 3, retries=2) as (client, server):
        with pytest.raises(errors.Overloaded, match=r"^too busy$") as caught:
            client.infer("m", X)
        assert isinstance(caught.value, errors.NotReady)
        assert len(server.heard) == 3


def test_retry_after_is_honoured(scripted_server: StartScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    waits_s: list[float] = []

    async def sleep(delay_s: float) -> None:
        waits_s.append(delay_s)

    for kind in (dragoman.Client, dragoman.AsyncClient):
        monkeypatch.setattr(kind, "_sleep", staticmethod(sleep))
    with scripted_server(response(503, b"", "retry-after: 1"), OK) as (client, _):
        client.infer("m", X)
    (wait_s,) = waits_s
    assert 1 < wait_s < 1.2  # and the first back-off


@pytest.mark.parametrize("status", [400, 429, 500, 502, 503, 504])
def test_errors_without_retry_after_are_not_retried(scripted_server: StartScriptedServer, status: int) -> None:
    with scripted_server(response(status, b'{"error":"no"}'), OK) as (client, server):
        with pytest.raises(errors.DragomanError, match=r"^no$"):
            client.infer("m", X)
        assert len(server.heard) == 1


def test_a_call_that_may_have_run_is_not_retried(scripted_server: StartScriptedServer) -> None:
    with scripted_server(None, OK) as (client, server):
        with pytest.raises(ConnectionError, match="closed before the response"):
            client.infer("m", X)
        assert len(server.heard) == 1


def test_a_stream_is_retried_before_it_begins(scripted_server: StartScriptedServer) -> None:
    folded = JSON.replace(b",", b",\ndata:", 1)
    events = b"data: %b\r\n\r\n: a comment\n\ndata: %b\n\ndata: [DONE]\n\n" % (JSON, folded)
    with scripted_server(BUSY, response(200, events)) as (client, _):
        assert [r["y"].tolist() for r in client.stream("m", X)] == [[7], [7]]


# --- errors ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (302, errors.CallerError),
        (400, errors.InvalidInput),
        (401, errors.Unauthorized),
        (403, errors.Forbidden),
        (404, errors.ModelNotFound),
        (405, errors.NotSupported),
        (413, errors.InvalidInput),
        (418, errors.CallerError),
        (429, errors.Overloaded),
        (500, errors.ServerError),
        (503, errors.NotReady),
        (504, errors.DeadlineExceeded),
    ],
)
def test_statuses(status: int, kind: type[errors.DragomanError]) -> None:
    assert isinstance(error_of_status(status, {}, b""), kind)


@pytest.mark.parametrize(
    ("body", "raw"),
    [
        (b'{"error":"one"}', "one"),
        (b'{"detail":"two"}', "two"),
        (b'{"error":{"code":1}}', '{"error":{"code":1}}'),
        (b"<html>three</html>", "<html>three</html>"),
        (b"[" * 100_000, "[" * 300),
        (b"", "the server answered 400 without a message"),
    ],
)
def test_error_messages_of_the_server(body: bytes, raw: str) -> None:
    assert error_of_status(400, {}, body).message == raw


@pytest.mark.parametrize(("text", "wait_s"), [("2", 2), ("1.5", 1.5), ("-1", 0), ("soon", None), ("", None)])
def test_retry_after(text: str, wait_s: float | None) -> None:
    assert error_of_status(503, {"retry-after": text}, b"").retry_after_s == wait_s


def test_retry_after_a_date() -> None:
    assert error_of_status(503, {"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}, b"").retry_after_s == 0


@pytest.mark.parametrize(
    ("raw", "kind"),
    [
        (b"SSH-2.0\r\n\r\n", errors.ServerError),
        (response(200, b"not json"), errors.InvalidOutput),
        (response(200, b'{"outputs":[{"name":"y","datatype":"INT9","shape":[1],"data":[7]}]}'), errors.InvalidOutput),
        (response(200, JSON, "inference-header-content-length: 5"), errors.InvalidOutput),
        (response(200, JSON, "content-encoding: br"), errors.ServerError),
        (response(200, JSON, "content-encoding: gzip"), errors.ServerError),
        (response(200, JSON)[:-5] + b"close", errors.InvalidOutput),
        (response(200, JSON)[:-5].replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n", 1), ConnectionError),
    ],
)
def test_invalid_responses(scripted_server: StartScriptedServer, raw: bytes, kind: type[Exception]) -> None:
    with scripted_server(raw) as (client, _), pytest.raises(kind):
        client.infer("m", X)


def test_invalid_metadata(scripted_server: StartScriptedServer) -> None:
    with (
        scripted_server(response(200, b'{"name":7}')) as (client, _),
        pytest.raises(errors.InvalidOutput, match="cannot be read"),
    ):
        client.metadata("m")


# --- forms of a response ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "raw",
    [
        response(200, zlib.compress(JSON), "Content-Encoding: deflate"),
        b"HTTP/1.1 100 Continue\r\nx: y\r\n\r\n" + OK,
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\n"
        + JSON[:2]
        + b"\r\n%x\r\n" % (len(JSON) - 2)
        + JSON[2:]
        + b"\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n" + JSON,
        b"HTTP/1.1 200 OK\r\nx: close\r\n\r\n" + JSON,
    ],
    ids=["deflate", "continue", "chunked", "close", "until the end"],
)
def test_valid_responses(scripted_server: StartScriptedServer, raw: bytes) -> None:
    with scripted_server(raw) as (client, _):
        assert client.infer("m", X)["y"].tolist() == [7]


def test_a_stream_with_a_slow_reader(scripted_server: StartScriptedServer) -> None:
    events = b"data: %b\n\n" % JSON.replace(b"[7]", b"[7%b]" % (b" " * 20_000)) * 300
    with scripted_server(response(200, events), response(200, events[:90], "connection: close"), OK) as (
        client,
        server,
    ):
        results = client.stream("m", X)
        next(results)
        time.sleep(0.2)
        assert sum(1 for _ in results) == 299
        assert len(list(client.stream("m", X))) == 0
        client.infer("m", X)
        assert server.connections == 2


LARGE = b'{"outputs":[{"name":"y","datatype":"UINT8","shape":[300000],"data":[%b1]}]}' % (b"1," * 299_999)


def test_a_large_response(scripted_server: StartScriptedServer) -> None:
    large = response(200, LARGE)
    with scripted_server(large, large, OK) as (client, server):
        for _ in range(2):
            assert client.infer("m", X)["y"].sum() == 300_000
        client.infer("m", X)
        assert server.connections == 1


def test_a_large_response_that_is_truncated(scripted_server: StartScriptedServer) -> None:
    broken = response(200, LARGE, "x: close")[:-100]
    with scripted_server(broken) as (client, _), pytest.raises(ConnectionError, match="closed before the response"):
        client.infer("m", X)


def test_data_after_a_response(scripted_server: StartScriptedServer) -> None:
    for raw in (OK, response(200, LARGE)):
        with scripted_server(raw + OK, OK) as (client, server):
            for _ in range(2):
                client.infer("m", X)
            assert server.connections == 2


def test_connections_are_kept(scripted_server: StartScriptedServer) -> None:
    chunked = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(JSON), JSON)
    with scripted_server(OK, chunked, OK, response(400), OK) as (client, server):
        for _ in range(3):
            client.infer("m", X)
        with pytest.raises(errors.InvalidInput):
            client.infer("m", X)
        client.infer("m", X)
        assert server.connections == 1


def test_a_connection_that_the_server_closed_is_not_used(scripted_server: StartScriptedServer) -> None:
    with scripted_server(response(200, JSON, "x: close"), OK) as (client, server):  # without announcing it
        client.infer("m", X)
        time.sleep(0.1)
        client.infer("m", X)
        assert server.connections == 2


def test_a_silent_server(scripted_server: StartScriptedServer) -> None:
    raw = r"^no response within 0\.2 s$"
    with (
        scripted_server(b"HTTP/1.1 200 OK\r\n", OK, timeout_s=0.2) as (client, _),
        pytest.raises(errors.DeadlineExceeded, match=raw),
    ):
        client.infer("m", X)


def test_an_error_response_before_the_body_is_sent(loop_thread: LoopThread) -> None:
    with loop_thread.serving(Echo, max_body_bytes=1000) as server:
        twins: tuple[ClientKind, ...] = ("blocking", "asyncio")
        for client_kind in twins:
            for url in (server.http_url, f"grpc://{server.grpc_url}"):
                with (
                    loop_thread.client(client_kind, url) as client,
                    pytest.raises(errors.InvalidInput, match="1000 bytes"),
                ):
                    client.infer("Echo", {"x": Tensor.of(np.ones(1 << 20))})


# --- sent requests ---------------------------------------------------------------------------------------------


def test_requests_on_the_wire(scripted_server: StartScriptedServer) -> None:
    headers = {"X-Trace": "seven"}
    with scripted_server(OK, OK, OK, token="t", headers=headers) as (client, server):
        client.infer("a/b c", {"x": Tensor.of(np.arange(2, dtype=np.int16))}, version="1", id="i")
        client.ready("m")
        client.load("m")
    head, _, body = server.heard[0].partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v2/models/a%2Fb%20c/versions/1/infer HTTP/1.1\r\nhost: 127.0.0.1:")
    lines = dict(line.split(": ") for line in head.decode().split("\r\n")[1:])
    assert lines["authorization"] == "Bearer t"
    assert lines["x-trace"] == "seven"
    assert body[int(lines["inference-header-content-length"]) :] == b"\0\0\1\0"
    assert server.heard[1].startswith(b"GET /v2/models/m/ready HTTP/1.1\r\n")
    assert server.heard[2].startswith(b"POST /v2/repository/models/m/load HTTP/1.1\r\n")


def test_a_path_prefix(loop_thread: LoopThread) -> None:
    server = ScriptedServer([OK])
    with loop_thread.client("blocking", f"{server.url}/models/one/") as client:
        client.infer("m", X)
    server.close()
    assert server.heard[0].startswith(b"POST /models/one/v2/models/m/infer ")
