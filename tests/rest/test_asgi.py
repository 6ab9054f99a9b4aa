"""`dragoman.asgi` with in-process clients, mounted into frameworks, and under a real ASGI server."""

import asyncio
import gc
import http.client
import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, MutableMapping
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path
from typing import Any, ClassVar

import httpx2
import numpy as np
import pytest
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

import dragoman
from dragoman import Infer, Tensor
from dragoman.core.errors import InvalidInput
from dragoman.transports.asgi import ResponseAborted
from rest.rest_server import Counter, Gate, Identity, inputs, tensor

INFER = "/v2/models/Identity/infer"
BODY = inputs(tensor())
TIMEOUT_S = 60
TOO_LARGE = 413, {"error": "the body is larger than the limit of 1000 bytes"}


class Loads(dragoman.Model):
    """Records when it is loaded and unloaded."""

    placement = "inline"
    events: ClassVar[list[str]] = []

    def load(self) -> None:
        self.events.append("load")

    def close(self) -> None:
        self.events.append("close")

    def infer(self, call: Infer) -> Any:
        return dict(call.inputs)


@pytest.fixture
def events() -> list[str]:
    """Return the events that the model `Loads` recorded."""
    Loads.events.clear()
    return Loads.events


def transport(app: Any) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://test")


# --- httpx -------------------------------------------------------------------------------------------------------


async def test_httpx_without_lifespan(events: list[str]) -> None:
    app = dragoman.asgi(Identity, Loads, Counter)
    async with app, transport(app) as client:
        assert events == ["load"]
        response = await client.post(INFER, json=BODY)
        assert (response.status_code, response.json()["outputs"][0]["data"]) == (200, [1])
        assert response.headers["content-type"] == "application/json"
        assert int(response.headers["content-length"]) == len(response.content)
        assert (await client.get("/v2/health/ready")).status_code == 200
        stream = await client.post("/v2/models/Counter/infer_stream", json={**BODY, "parameters": {"n": 3}})
        assert stream.headers["content-type"].startswith("text/event-stream")
        found = [json.loads(line[6:]) for line in stream.text.splitlines() if line.startswith("data: ")]
        assert [chunk["outputs"][0]["data"] for chunk in found] == [[0], [1], [2]]
    assert events == ["load", "close"]


async def test_the_first_request_loads_the_models(events: list[str]) -> None:
    app = dragoman.asgi(Loads, Identity)
    async with transport(app) as client:
        assert events == []
        responses = await asyncio.gather(*(client.post(INFER, json=BODY) for _ in range(5)))
        assert [a.status_code for a in responses] == [200] * 5
    assert events == ["load"]
    async with app:
        pass
    assert events == ["load", "close"]


async def test_a_stopped_application_starts_again(events: list[str]) -> None:
    app = dragoman.asgi(Loads)
    for _ in range(2):
        async with app, transport(app) as client:
            assert (await client.post("/v2/models/Loads/infer", json=BODY)).status_code == 200
    assert events == ["load", "close"] * 2


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404),
        ("DELETE", INFER, 405),
        ("GET", "/v2/models/none", 404),
        ("OPTIONS", INFER, 204),
        ("HEAD", "/v2", 200),
        ("GET", "/v2/models/Identity%2F", 404),
    ],
)
async def test_statuses(method: str, path: str, status: int) -> None:
    async with dragoman.asgi(Identity) as app, transport(app) as client:
        response = await client.request(method, path)
        assert response.status_code == status
        if status >= 400:
            assert set(response.json()) == {"error"}
        if method == "HEAD":
            assert response.content == b""
            assert int(response.headers["content-length"]) > 0


async def chunks(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


async def test_limits_of_bodies() -> None:
    app = dragoman.asgi(Identity, max_body_bytes=1000, max_bodies_bytes=500)
    async with app, transport(app) as client:
        for content in (b"x" * 1001, chunks(b"x" * 600, b"x" * 600)):
            response = await client.post(INFER, content=content)
            assert response.status_code in (413, 503)
        response = await client.post(INFER, content=b"x" * 1001)
        assert (response.status_code, response.json()) == (
            413,
            {"error": "the body is larger than the limit of 1000 bytes"},
        )
        response = await client.post(INFER, content=b"x" * 600)
        assert response.status_code == 503
        assert "500 bytes" in response.json()["error"]
        for _ in range(10):  # the bytes of a request are released with its response
            assert (await client.post(INFER, json=BODY)).status_code == 200
    app = dragoman.asgi(Identity, max_body_bytes=1000)
    async with app, transport(app) as client:
        response = await client.post(INFER, content=chunks(b"x" * 600, b"x" * 600))
        assert (response.status_code, response.json()) == (
            413,
            {"error": "the body is larger than the limit of 1000 bytes"},
        )


# --- Starlette and FastAPI ---------------------------------------------------------------------------------------


def test_test_client_runs_the_lifespan(events: list[str]) -> None:
    with TestClient(dragoman.asgi(Identity, Loads)) as client:
        assert events == ["load"]
        assert client.post(INFER, json=BODY).json()["outputs"][0]["data"] == [1]
        with pytest.raises(WebSocketDisconnect), client.websocket_connect("/v2"):
            pass
    assert events == ["load", "close"]


def test_test_client_without_lifespan_has_an_event_loop_for_each_request(events: list[str]) -> None:
    client = TestClient(dragoman.asgi(Loads))
    for _ in range(2):
        assert client.post("/v2/models/Loads/infer", json=BODY).status_code == 200
    assert events == ["load", "close"] * 2


def test_worker_processes_end_with_the_event_loop(tmp_path: Path) -> None:
    (tmp_path / "served.py").write_text(
        "import os\nimport dragoman\n\n\nclass Pid(dragoman.Model):\n    placement = 'process'\n\n"
        "    def infer(self, call):\n        import numpy as np\n        return {'pid': np.array([os.getpid()])}\n"
    )
    response = TestClient(dragoman.asgi(f"{tmp_path / 'served.py'}:Pid")).post("/v2/models/Pid/infer", json=BODY)
    (pid,) = response.json()["outputs"][0]["data"]
    assert pid != os.getpid()
    until(lambda: not Path(f"/proc/{pid}").exists())


def test_a_model_that_cannot_be_loaded_is_not_ready() -> None:
    class Broken(dragoman.Model):
        placement = "inline"

        def load(self) -> None:
            raise ValueError("no weights")

        def infer(self, call: Infer) -> Any:
            return {}

    with TestClient(dragoman.asgi(Broken)) as client:
        assert client.get("/v2/health/live").status_code == 200
        assert client.get("/v2/health/ready").status_code == 400
        assert client.post("/v2/models/Broken/infer", json=BODY).status_code == 503


@pytest.mark.parametrize("prefix", ["/models", "/a b/ö"])
def test_mounted_into_fastapi(prefix: str, events: list[str]) -> None:
    models = dragoman.asgi(Identity, Loads)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with models:
            yield

    app = FastAPI(lifespan=lifespan)
    app.mount(prefix, models)

    @app.get("/hello")
    def hello() -> str:
        return "hello"

    with TestClient(app) as client:
        assert events == ["load"]
        assert client.get("/hello").json() == "hello"
        assert client.post(prefix + INFER, json=BODY).json()["outputs"][0]["data"] == [1]
        assert client.get(prefix + "/nowhere").json() == {"error": "no such path: /nowhere"}
        assert client.get(INFER).json() == {"detail": "Not Found"}
    assert events == ["load", "close"]


def test_mounted_without_lifespan_and_behind_a_proxy(events: list[str]) -> None:
    app = Starlette(routes=[Mount("/one", Mount("/two", app=dragoman.asgi(Loads)))])
    with TestClient(app, root_path="/proxy") as client:
        assert events == []
        response = client.post("/proxy/one/two/v2/models/Loads/infer", json=BODY)
        assert response.json()["outputs"][0]["data"] == [1]
    assert events == ["load", "close"]  # the event loop has ended


def test_invalid_models_and_settings_are_reported_at_once() -> None:
    with pytest.raises(InvalidInput, match=r"setting 'http_port': not available in dragoman\.asgi"):
        dragoman.asgi(Identity, http_port=1)
    with pytest.raises(InvalidInput, match="unknown setting 'max_body'; did you mean 'max_body_bytes'"):
        dragoman.asgi(Identity, max_body=1)  # type: ignore[call-arg]
    with pytest.raises(InvalidInput, match="nothing to serve"):
        dragoman.asgi()


# --- the interface itself ----------------------------------------------------------------------------------------


class Wire:
    """One request of an ASGI server: the messages of the application, and a disconnect at a chosen time."""

    def __init__(self, path: str, body: Any, **scope: Any) -> None:
        raw = json.dumps(body).encode()
        self.scope = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b"", **scope}
        self.messages = [{"type": "http.request", "body": raw[:5], "more_body": True}]
        self.messages.append({"type": "http.request", "body": raw[5:], "more_body": False})
        self.disconnected = asyncio.Event()
        self.sent: list[dict[str, Any]] = []
        self.reads = True
        self.accepts: float = math.inf  # messages; then the client has disconnected

    async def receive(self) -> dict[str, Any]:
        if self.messages:
            return self.messages.pop(0)
        await self.disconnected.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        if not self.reads:
            await asyncio.Event().wait()
        if len(self.sent) == self.accepts:
            raise OSError("the client has disconnected")
        self.sent.append(message)

    def respond(self, app: Any) -> Any:
        return app(self.scope, self.receive, self.send)


class Spy:
    """Keep a reference to the model that was loaded last, which runs in this process."""

    loaded: ClassVar[Any]

    def load(self) -> None:
        super().load()  # type: ignore[misc]
        Spy.loaded = self


class SpyGate(Spy, Gate):
    pass


class SpyCounter(Spy, Counter):
    pass


async def test_a_client_that_disconnects_within_its_body_gets_no_response() -> None:
    async with dragoman.asgi(Identity) as app:
        wire = Wire(INFER, BODY)
        wire.messages[1:] = [{"type": "http.disconnect"}]
        await wire.respond(app)
        assert wire.sent == []


async def test_a_cancelled_request_gets_503() -> None:
    async with dragoman.asgi(SpyGate) as app:
        wire, model = Wire("/v2/models/SpyGate/infer", BODY), Spy.loaded
        responding = asyncio.ensure_future(wire.respond(app))
        await asyncio.wait_for(model.begun.wait(), TIMEOUT_S)
        responding.cancel()
        with pytest.raises(asyncio.CancelledError):
            await responding
        assert wire.sent[0]["status"] == 503
        assert model.cancelled.is_set()


async def test_requests_that_are_cancelled_at_any_turn_of_the_event_loop_leave_nothing_behind() -> None:
    """A coroutine that is never awaited, or a result that nobody takes, would be a warning, which is an error here."""
    gc.collect()
    gc.freeze()  # collections below look at no objects of libraries
    async with dragoman.asgi(SpyGate, drain_s=0.05) as app:
        for turns in range(12):
            wire = Wire("/v2/models/SpyGate/infer", BODY)
            responding = asyncio.ensure_future(wire.respond(app))
            for _ in range(turns):
                await asyncio.sleep(0)
            responding.cancel()
            with pytest.raises(asyncio.CancelledError):
                await responding
            del responding
            gc.collect()
        assert Spy.loaded.cancelled.is_set()


async def test_a_client_that_does_not_read_ends_its_stream() -> None:
    async with dragoman.asgi(SpyCounter, write_timeout_s=0.05) as app:
        wire, model = (
            Wire("/v2/models/SpyCounter/infer_stream", {**BODY, "parameters": {"n": -1}}),
            Spy.loaded,
        )
        wire.reads = False
        with pytest.raises(Exception, match="the response could not be completed"):
            await asyncio.wait_for(wire.respond(app), TIMEOUT_S)
        await asyncio.wait_for(model.closed.wait(), TIMEOUT_S)


async def test_a_body_that_comes_too_slowly_is_a_408() -> None:
    async with dragoman.asgi(Identity, body_timeout_s=0.05) as app:
        wire = Wire(INFER, BODY)
        del wire.messages[1]
        await asyncio.wait_for(wire.respond(app), TIMEOUT_S)
        assert wire.sent[0]["status"] == 408
        assert (b"connection", b"close") in wire.sent[0]["headers"]


async def test_http2_gets_no_connection_header() -> None:
    async with dragoman.asgi(Identity, max_body_bytes=1) as app:
        wire = Wire(INFER, BODY, http_version="2")
        await wire.respond(app)
        assert wire.sent[0]["status"] == 413
        assert b"connection" not in dict(wire.sent[0]["headers"])


async def test_large_responses_are_sent_in_chunks() -> None:
    data = np.arange(200_000, dtype=np.int32).tolist()
    async with dragoman.asgi(Identity) as app:
        wire = Wire(INFER, inputs(tensor(shape=[len(data)], data=data)))
        await wire.respond(app)
        assert len(wire.sent) > 3
        assert all(len(m["body"]) <= 1 << 18 for m in wire.sent[1:])
        assert [m["more_body"] for m in wire.sent[1:]] == [True] * (len(wire.sent) - 2) + [False]
        body = b"".join(m["body"] for m in wire.sent[1:])
        assert json.loads(body)["outputs"][0]["data"] == data


class SlowLoad(Identity):
    """Loads once `may_load` is set."""

    may_load: ClassVar[threading.Event]

    def load(self) -> None:
        assert self.may_load.wait(TIMEOUT_S)


@pytest.fixture
def slow_load() -> Iterator[threading.Event]:
    SlowLoad.may_load = threading.Event()
    yield SlowLoad.may_load
    SlowLoad.may_load.set()


async def test_health_checks_do_not_wait_for_models(slow_load: threading.Event) -> None:
    app = dragoman.asgi(SlowLoad)
    async with transport(app) as client:
        assert (await asyncio.wait_for(client.get("/v2/health/live"), TIMEOUT_S)).status_code == 200
        assert (await asyncio.wait_for(client.get("/v2/health/ready"), TIMEOUT_S)).status_code == 400
        unknown = asyncio.ensure_future(client.get("/nowhere"))
        wrong_method = asyncio.ensure_future(client.delete(INFER))
        cancelled = asyncio.ensure_future(client.post("/v2/models/SlowLoad/infer", json=BODY))
        waiting = asyncio.ensure_future(client.post("/v2/models/SlowLoad/infer", json=BODY))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        cancelled.cancel()  # does not stop the load that others wait for
        await asyncio.sleep(0)
        slow_load.set()
        assert (await asyncio.wait_for(waiting, TIMEOUT_S)).status_code == 200
        assert (await asyncio.wait_for(unknown, TIMEOUT_S)).status_code == 404
        assert (await asyncio.wait_for(wrong_method, TIMEOUT_S)).status_code == 405
    async with app:
        pass


async def test_calls_in_flight_are_completed_before_models_are_closed() -> None:
    async with dragoman.asgi(SpyGate) as app:
        wire, model = Wire("/v2/models/SpyGate/infer", BODY), Spy.loaded
        responding = asyncio.ensure_future(wire.respond(app))
        await asyncio.wait_for(model.begun.wait(), TIMEOUT_S)
        asyncio.get_running_loop().call_later(0.05, model.open.set)
    await asyncio.wait_for(responding, TIMEOUT_S)
    assert wire.sent[0]["status"] == 200


async def test_calls_that_outlast_the_drain_time_are_cancelled(caplog: pytest.LogCaptureFixture) -> None:
    async with dragoman.asgi(SpyGate, drain_s=0.05) as app:
        wire, model = Wire("/v2/models/SpyGate/infer", BODY), Spy.loaded
        responding = asyncio.ensure_future(wire.respond(app))
        await asyncio.wait_for(model.begun.wait(), TIMEOUT_S)
    await asyncio.wait_for(responding, TIMEOUT_S)
    assert model.cancelled.is_set()
    assert wire.sent[0]["status"] == 503
    assert "calls were still running after 0.05 s" in caplog.text


async def test_what_is_sent_for_head_options_and_query() -> None:
    async with dragoman.asgi(Identity) as app:
        head = Wire("/v2", BODY, method="HEAD")
        await head.respond(app)
        assert int(dict(head.sent[0]["headers"])[b"content-length"]) > 0
        assert [m["body"] for m in head.sent[1:]] == [b""]
        stream = Wire("/v2/models/Identity/generate_stream", BODY, method="HEAD")
        await stream.respond(app)
        assert b"".join(m["body"] for m in stream.sent[1:]) == b""
        options = Wire(INFER, BODY, method="OPTIONS")
        await options.respond(app)
        assert options.sent[0]["status"] == 204
        assert b"content-length" not in dict(options.sent[0]["headers"])
        query = Wire("/v2", BODY, method="GET", raw_path=b"/v2?x=1")  # some servers leave the query there
        await query.respond(app)
        assert query.sent[0]["status"] == 200


async def test_fields_of_one_name_are_joined() -> None:
    data = np.arange(2000, dtype=np.int32).tolist()
    async with dragoman.asgi(Identity, compress_responses=True) as app:
        fields = [(b"accept-encoding", b"gzip"), (b"accept-encoding", b"br")]
        wire = Wire(INFER, inputs(tensor(shape=[len(data)], data=data)), headers=fields)
        await wire.respond(app)
        assert dict(wire.sent[0]["headers"])[b"content-encoding"] == b"gzip"


async def test_a_client_that_disconnects_ends_its_stream_silently() -> None:
    async with dragoman.asgi(SpyCounter) as app:
        wire, model = (
            Wire("/v2/models/SpyCounter/infer_stream", {**BODY, "parameters": {"n": -1}}),
            Spy.loaded,
        )
        responding = asyncio.ensure_future(wire.respond(app))
        while len(wire.sent) < 3:
            await asyncio.sleep(0.001)
        wire.disconnected.set()
        await asyncio.wait_for(responding, TIMEOUT_S)
        await asyncio.wait_for(model.closed.wait(), TIMEOUT_S)


async def test_a_body_that_is_announced_too_large_is_not_received() -> None:
    async with dragoman.asgi(Identity, max_body_bytes=1000) as app:
        wire = Wire(INFER, BODY, headers=[(b"content-length", b"1001")])
        await wire.respond(app)
        assert wire.sent[0]["status"] == 413
        assert len(wire.messages) == 2
        for length in (b"-1", b"1e9", b"\xb2"):  # the last is a digit, but not a decimal one
            wire = Wire(INFER, BODY, headers=[(b"content-length", length)])
            await wire.respond(app)
            assert wire.sent[0]["status"] == 200


def test_stopping_in_another_event_loop_is_harmless(events: list[str]) -> None:
    app = dragoman.asgi(Loads)
    asyncio.run(Wire("/v2/models/Loads/infer", BODY).respond(app))
    assert events == ["load", "close"]
    asyncio.run(app.__aexit__())
    assert events == ["load", "close"]


async def test_models_are_loaded_again_after_a_failed_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "models" / "late" / "1"
    folder.mkdir(parents=True)
    (folder / "model.py").write_text(
        "import dragoman\n\n\nclass Late(dragoman.Model):\n    placement = 'inline'\n\n"
        "    def infer(self, call):\n        return dict(call.inputs)\n"
    )
    app = dragoman.asgi(str(tmp_path / "models"))
    moved = folder.rename(tmp_path / "moved")
    sent: list[dict[str, Any]] = []
    await app({"type": "lifespan"}, as_async(lambda: {"type": "lifespan.startup"}), as_async(sent.append))
    assert [message["type"] for message in sent] == ["lifespan.startup.failed"]
    assert f"file '{folder}' not found" in sent[0]["message"]
    assert "the models could not be loaded" in caplog.text
    moved.rename(folder)
    async with asyncio.timeout(TIMEOUT_S), transport(app) as client:
        while (response := await response_or_error(client, "/v2/models/late/infer")) is None:
            await asyncio.sleep(0.001)
    assert response.json()["outputs"][0]["data"] == [1]
    await app.__aexit__()


def as_async(function: Callable[..., Any]) -> Callable[..., Any]:
    async def call(*args: Any) -> Any:
        return function(*args)

    return call


async def response_or_error(client: httpx2.AsyncClient, path: str) -> httpx2.Response | None:
    try:
        return await client.post(path, json=BODY)
    except InvalidInput:
        return None


async def test_a_large_body_has_more_time() -> None:
    async with dragoman.asgi(Identity, body_timeout_s=0.05) as app:
        wire = Wire(INFER, BODY)
        wire.messages[0]["body"] = b" " * (1 << 20) + json.dumps(BODY).encode()[:5]
        receive = wire.receive

        async def receive_slowly() -> dict[str, Any]:
            await asyncio.sleep(0.1 * (len(wire.messages) < 2))
            return await receive()

        wire.receive = receive_slowly  # type: ignore[method-assign]
        await asyncio.wait_for(wire.respond(app), TIMEOUT_S)
        assert wire.sent[0]["status"] == 200


async def test_a_large_response_to_head_has_no_body() -> None:
    async with dragoman.asgi(Identity, server_name="x" * 300_000) as app:
        wire = Wire("/v2", BODY, method="HEAD")
        await wire.respond(app)
        assert int(dict(wire.sent[0]["headers"])[b"content-length"]) > 300_000
        assert [(m["body"], m["more_body"]) for m in wire.sent[1:]] == [(b"", False)]


class IgnoresCancellation(Spy, Gate):
    """Returns a result although its client has disconnected."""

    async def infer(self, call: Infer) -> Mapping[str, Tensor]:
        try:
            return await super().infer(call)
        except asyncio.CancelledError:
            return call.inputs


class RaisesWhenClosed(Spy, Counter):
    """A stream whose `finally` fails."""

    async def infer(self, call: Infer) -> AsyncIterator[dict[str, Any]]:
        try:
            async for chunk in super().infer(call):
                yield chunk
        finally:
            raise ValueError("closing failed")


@pytest.mark.parametrize("model_class", [SpyGate, IgnoresCancellation])
async def test_a_client_that_disconnects_cancels_its_call_and_gets_nothing(model_class: type[Spy]) -> None:
    async with dragoman.asgi(model_class) as app:
        wire, model = Wire(f"/v2/models/{model_class.__name__}/infer", BODY), Spy.loaded
        responding = asyncio.ensure_future(wire.respond(app))
        await asyncio.wait_for(model.begun.wait(), TIMEOUT_S)
        wire.disconnected.set()
        await asyncio.wait_for(responding, TIMEOUT_S)
        assert model.cancelled.is_set()
        assert wire.sent == []


async def test_a_stream_that_fails_after_its_client_disconnected_is_no_error_of_the_server() -> None:
    async with dragoman.asgi(RaisesWhenClosed) as app:
        wire = Wire("/v2/models/RaisesWhenClosed/infer_stream", {**BODY, "parameters": {"n": -1}})
        responding = asyncio.ensure_future(wire.respond(app))
        while len(wire.sent) < 3:
            await asyncio.sleep(0.001)
        wire.disconnected.set()
        await asyncio.wait_for(responding, TIMEOUT_S)


async def test_a_server_that_cannot_send_a_chunk_gets_the_response_aborted() -> None:
    async with dragoman.asgi(Counter) as app:
        wire = Wire("/v2/models/Counter/infer_stream", {**BODY, "parameters": {"n": 5}})
        sent = wire.send

        async def send(message: MutableMapping[str, Any]) -> None:
            if len(wire.sent) == 3:
                wire.sent.append({"failed": message})
                raise RuntimeError("cannot send")
            await sent(dict(message))

        with pytest.raises(ResponseAborted):
            await app(wire.scope, wire.receive, send)
        assert [*wire.sent[3]] == ["failed"]
        assert len(wire.sent) == 4


async def test_a_server_that_reports_disconnects_by_oserror(caplog: pytest.LogCaptureFixture) -> None:
    async with dragoman.asgi(SpyCounter, max_body_bytes=1000) as app:
        wire, model = (
            Wire("/v2/models/SpyCounter/infer_stream", {**BODY, "parameters": {"n": -1}}),
            Spy.loaded,
        )
        wire.accepts = 2
        await asyncio.wait_for(wire.respond(app), TIMEOUT_S)
        await asyncio.wait_for(model.closed.wait(), TIMEOUT_S)
        error = Wire(INFER, "x" * 1000)
        error.accepts = 0
        await asyncio.wait_for(error.respond(app), TIMEOUT_S)
    assert caplog.text == ""


async def test_a_client_that_does_not_read_an_error() -> None:
    async with dragoman.asgi(Identity, write_timeout_s=0.05, max_body_bytes=1000) as app:
        wire = Wire(INFER, "x" * 1000)
        wire.reads = False
        with pytest.raises(Exception, match="the response could not be completed"):
            await asyncio.wait_for(wire.respond(app), TIMEOUT_S)


async def test_two_concurrent_event_loops_are_rejected() -> None:
    async with dragoman.asgi(Identity) as app:
        with pytest.raises(RuntimeError, match="runs in another event loop"):
            await asyncio.to_thread(asyncio.run, Wire(INFER, BODY).respond(app))


# --- uvicorn -----------------------------------------------------------------------------------------------------


def until(condition: Any) -> None:
    end_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.01)


@pytest.fixture(scope="module")
def uvicorn() -> Iterator[int]:
    """Start `uvicorn asgi_server:app`; return its port. It must exit cleanly on SIGTERM."""
    with socket.create_server(("127.0.0.1", 0)) as bound:
        port: int = bound.getsockname()[1]
    command = [sys.executable, "-m", "uvicorn", "asgi_server:app", "--port", str(port), "--app-dir"]
    with subprocess.Popen([*command, str(Path(__file__).parent)], stderr=subprocess.PIPE, text=True) as process:
        try:
            until(lambda: is_ready(port) or process.poll() is not None)
            yield port
            _, text = send_request(port, "POST", "/v2/models/Twice/infer", inputs(tensor(datatype="FP32")))
            (worker,) = json.loads(text)["outputs"][1]["data"]
            assert worker != process.pid
            process.send_signal(signal.SIGINT)
            _, log = process.communicate(timeout=TIMEOUT_S)
            assert "Application shutdown complete" in log
            assert "Traceback" not in log
            until(lambda: not Path(f"/proc/{worker}").exists())
        finally:
            process.kill()


def is_ready(port: int) -> bool:
    try:
        return send_request(port, "GET", "/v2/health/ready")[0] == 200
    except OSError:
        return False


def send_request(port: int, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    connection.request(method, path, None if body is None else json.dumps(body))
    response = connection.getresponse()
    found = response.status, response.read()
    connection.close()
    return found


def test_under_uvicorn(uvicorn: int) -> None:
    x = tensor(shape=[2], datatype="FP32", data=[1, 1.5])
    status, text = send_request(uvicorn, "POST", "/v2/models/Twice/infer", inputs(x))
    assert (status, json.loads(text)["outputs"][0]["data"]) == (200, [2, 3])
    assert send_request(uvicorn, "POST", "/v2/models/Twice/infer", "x" * 20_000)[0] == 413
    assert send_request(uvicorn, "GET", "/nowhere") == (404, b'{"error":"no such path: /nowhere"}')


@contextmanager
def stream(port: int, folder: Path) -> Iterator[http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    with closing(connection):
        body = inputs(tensor(), parameters={"folder": str(folder)})
        connection.request("POST", "/v2/models/Steps/infer_stream", json.dumps(body))
        with connection.getresponse() as response:
            yield response


def test_chunks_are_sent_as_they_are_computed(uvicorn: int, tmp_path: Path) -> None:
    with stream(uvicorn, tmp_path) as response:
        assert response.status == 200
        assert json.loads(response.readline()[6:])["outputs"][0]["data"] == [0]
        (tmp_path / "go").touch()
        assert response.readline() == b"\n"
        assert json.loads(response.readline()[6:])["outputs"][0]["data"] == [1]


def test_a_stream_is_closed_when_its_client_disconnects(uvicorn: int, tmp_path: Path) -> None:
    with stream(uvicorn, tmp_path) as response:
        assert response.readline()
    until((tmp_path / "closed").exists)
    assert not (tmp_path / "go").exists()
