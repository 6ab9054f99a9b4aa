"""WebSocket connections on a transport in memory: handshake, frames, limits, timeouts and the end of the server."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from wsproto.connection import Connection, ConnectionType
from wsproto.events import CloseConnection, Event, Ping, Pong, TextMessage

from dragoman.access.control import AccessControl, AccessRules
from dragoman.access.sites import SiteRules
from dragoman.core.errors import InvalidInput
from dragoman.protocols.wire import (
    EndpointResult,
    HttpError,
    HttpProtocol,
    HttpRequest,
    HttpResponse,
    Route,
    json_response,
)
from dragoman.transports.application import Application
from dragoman.transports.bodies import BodyMemory
from dragoman.transports.executor import MessageExecutor
from dragoman.transports.http1.connection import http1
from dragoman.transports.http1.request_reader import Http1Context
from dragoman.transports.limits import Limits
from dragoman.transports.listener import Listener

LIMITS = Limits(
    header_timeout_s=10, body_timeout_s=30, write_timeout_s=60, keep_alive_timeout_s=75, max_body_bytes=1000
)
KEY = "dGhlIHNhbXBsZSBub25jZQ=="  # of RFC 6455, 1.3
HANDSHAKE = {
    "host": "localhost",
    "upgrade": "websocket",
    "connection": "keep-alive, Upgrade",
    "sec-websocket-key": KEY,
    "sec-websocket-version": "13",
}
ADDRESS = "127.0.0.1"


class Session:
    """Answers with the message and the number of messages so far; `fail` fails and `two` has two lines."""

    count = 0

    def answer(self, http: HttpRequest) -> EndpointResult:
        self.count += 1
        text = bytes(http.body).decode()
        if text == "fail":
            raise InvalidInput("it fails")
        if text == "worst":
            raise RuntimeError("worst")
        if text == "two":
            return HttpResponse(200, (b"one\ntwo\n",))
        return HttpResponse(200, (f"{text} {self.count}\n".encode(),))

    def format_response(self, response: HttpResponse) -> bytes:
        return b"".join(map(bytes, response.body))


def _error(error: Any, _request_id: str = "") -> HttpResponse:
    return json_response({"error": str(error), "status": error.status}, error.status, getattr(error, "headers", ()))


def _no_upgrade(http: HttpRequest) -> HttpResponse:
    raise HttpError(426, "expected a WebSocket")


class Transport(asyncio.Transport):
    """Keeps what is written; `unread` bytes of it wait for the client."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.unread = 0
        self.is_closed = self.is_aborted = False
        self.protocol: Any = None

    def set_protocol(self, protocol: Any) -> None:
        self.protocol = protocol

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return (ADDRESS, 1) if name == "peername" else default

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def writelines(self, parts: Any) -> None:
        for part in parts:
            self.write(part)

    def get_write_buffer_size(self) -> int:
        return self.unread

    def can_write_eof(self) -> bool:
        return False

    def is_closing(self) -> bool:
        return self.is_closed or self.is_aborted

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_aborted = True

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def take(self) -> bytes:
        written, self.written = self.written, b""
        return written


class Client:
    """A connection of a listener that asks for a WebSocket."""

    def __init__(self, access: AccessControl | None = None, max_bodies: int = 0, session: Any = Session) -> None:
        self.now_s = asyncio.get_running_loop().time()
        self.bodies = BodyMemory(max_bodies)
        route = Route("GET", "/ws", _no_upgrade, role="infer", session=lambda _: session())
        self.protocol = HttpProtocol("test", (route,), _error)
        engine: Any = SimpleNamespace(is_remote=False, ready=None, wait_for_change=None)  # not called
        executor = MessageExecutor(self.bodies)
        self.application = Application(engine, (self.protocol,), LIMITS, executor=executor, access=access)
        wire = http1(Http1Context(self.application))
        self.listener = Listener(wire, limits=LIMITS)
        self.transport = Transport()
        self.transport.protocol = self.listener.open(wire)
        self.transport.protocol.connection_made(self.transport)
        self.frames = Connection(ConnectionType.CLIENT)
        self.cancelled = 0  # answers that `waiting` made wait

    @property
    def connection(self) -> Any:
        return self.transport.protocol

    def send_bytes(self, data: bytes) -> bytes:
        self.connection.get_buffer(-1)[: len(data)] = data
        self.connection.buffer_updated(len(data))
        return self.transport.take()

    def upgrade(self, after: bytes = b"", method: str = "GET", **changes: str | None) -> tuple[int, str]:
        """Send a handshake; return status and headers of the response."""
        fields = {**HANDSHAKE, **{name.replace("_", "-"): value for name, value in changes.items()}}
        lines = [f"{method} /ws HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items() if value), "", ""]
        head, _, rest = self.send_bytes("\r\n".join(lines).encode() + after).partition(b"\r\n\r\n")
        status = int(head[9:12])
        if status == 101:
            self.transport.written = rest
        return status, head.decode()

    def send(self, *events: Event) -> list[Any]:
        return self.send_raw(b"".join(map(self.frames.send, events)))

    def send_raw(self, data: bytes) -> list[Any]:
        return self.read(self.send_bytes(data))

    def read(self, data: bytes | None = None) -> list[Any]:
        """Return texts, codes of Close frames as numbers, and payloads of other frames."""
        self.frames.receive_data(self.transport.take() if data is None else data)
        found: list[Any] = []
        for event in self.frames.events():
            match event:
                case TextMessage() | Pong():
                    found.append(event.data if isinstance(event, TextMessage) else event.payload)
                case CloseConnection():
                    found.append(int(event.code))
                case Ping():
                    found.append("ping")
        return found

    def check_after(self, seconds: float) -> float:
        """Check timeouts as if so many seconds had passed; return after how many to check again, 0 for never."""
        again_s: float = self.connection.check_timeouts(self.now_s + seconds)
        return again_s and again_s - self.now_s


def text(data: str) -> TextMessage:
    return TextMessage(data)


async def connected(**options: Any) -> Client:
    client = Client(**options)
    assert client.upgrade()[0] == 101
    return client


async def test_the_handshake_of_the_rfc() -> None:
    client = Client()
    status, headers = client.upgrade()
    assert status == 101
    lines = headers.lower().split("\r\n")
    assert {"upgrade: websocket", "connection: upgrade"} <= {*lines}
    assert "sec-websocket-accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=" in headers
    assert "sec-websocket-extensions" not in headers.lower()
    assert not any(line.startswith(("content-length", "transfer-encoding")) for line in lines)
    assert client.send(text("hello"), text("you")) == ["hello 1", "you 2"]
    assert client.send(text("two")) == ["one", "two"]
    statuses = client.application.counters.statuses("test")
    assert (statuses[101], statuses[200]) == (1, 3)


async def test_a_message_may_come_with_the_handshake() -> None:
    client = Client()
    assert client.upgrade(after=client.frames.send(text("early")))[0] == 101
    assert client.read() == ["early 1"]


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"sec_websocket_version": "8"}, 426),
        ({"sec_websocket_version": None}, 426),
        ({"sec_websocket_key": None}, 400),
        ({"sec_websocket_key": "c2hvcnQ="}, 400),
        ({"sec_websocket_key": "no base64"}, 400),
        ({"content_length": "3"}, 400),
        ({"upgrade": "h2c"}, 426),  # no WebSocket is asked for: the endpoint answers
        ({"connection": "close"}, 426),
        ({"method": "POST"}, 405),
    ],
)
async def test_handshakes_that_are_rejected(changes: Any, status: int) -> None:
    client = Client()
    found, headers = client.upgrade(b"abc" if "content_length" in changes else b"", **changes)
    assert found == status
    if changes.get("sec_websocket_version", "13") != "13":
        assert "sec-websocket-version: 13" in headers.lower()


async def test_fragments_are_one_message_and_control_frames_may_come_between() -> None:
    client = await connected()
    assert client.send(TextMessage("a\u00e9", message_finished=False)) == []
    assert client.send(Ping(b"x")) == [b"x"]
    assert client.send(TextMessage("b", message_finished=False), TextMessage("c")) == ["a\u00e9bc 1"]
    data = client.frames.send(text("slow"))
    assert [client.send_raw(data[i : i + 1]) for i in range(len(data))][-1] == ["slow 2"]
    assert client.bodies.size == 0


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        (b"\x81\x05hello", 1002),  # not masked
        (b"\xc1\x80\0\0\0\0", 1002),  # a reserved bit: no extension was negotiated
        (b"\x83\x80\0\0\0\0", 1002),  # a reserved opcode
        (b"\x89\xfe\x00\xff\0\0\0\0", 1002),  # a control frame of more than 125 bytes
        (b"\x09\x80\0\0\0\0", 1002),  # a control frame in fragments
        (b"\x80\x81\0\0\0\0a", 1002),  # a continuation of nothing
        (b"\x01\x81\0\0\0\0a\x81\x81\0\0\0\0a", 1002),  # a message within another one
        (b"\x81\xff" + b"\xff" * 8 + b"\0\0\0\0", 1002),  # a length beyond 63 bits
        (b"\x88\x81\0\0\0\0\x01", 1002),  # half a close code
        (b"\x88\x82\0\0\0\0\x03\xed", 1002),  # a close code that must not be sent
        (b"\x81\x81\0\0\0\0\xff", 1007),  # not UTF-8
        (b"\x82\x81\0\0\0\0a", 1003),  # binary
    ],
)
async def test_invalid_frames_get_their_close_code(frame: bytes, code: int) -> None:
    client = await connected()
    assert client.send_raw(frame) == [code]
    assert client.send(text("a")) == [] if client.frames.state.name == "OPEN" else True
    assert client.check_after(5) == 0
    assert client.transport.is_closing()
    assert client.bodies.size == 0


async def test_a_message_is_at_most_as_long_as_a_body() -> None:
    client = await connected()
    assert client.send(text("x" * 1000)) == ["x" * 1000 + " 1"]
    assert client.send(TextMessage("x" * 999, message_finished=False)) == []
    assert client.bodies.size == 999
    assert client.send(TextMessage("\u00e9")) == [1009]
    assert client.bodies.size == 0


async def test_messages_count_as_bodies() -> None:
    client = await connected(max_bodies=500)
    assert client.send(TextMessage("x" * 400, message_finished=False)) == []
    assert client.send(TextMessage("x" * 400)) == [1013]
    assert client.bodies.size == 0


async def test_errors_are_messages_and_the_connection_stays_open() -> None:
    client = await connected()
    (failed,) = client.send(text("fail"))
    assert json.loads(failed) == {"error": "it fails", "status": 400}
    (failed,) = client.send(text("worst"))
    assert json.loads(failed)["status"] == 500
    assert client.send(text("a")) == ["a 3"]


def waiting(client: Client) -> Callable[[], Awaitable[None]]:
    """Make the application of a client wait for the returned gate before it answers each message."""
    gate = asyncio.Event()
    answer = client.application.answer

    async def wait(*arguments: Any) -> None:
        try:
            await gate.wait()
        except asyncio.CancelledError:
            client.cancelled += 1
            raise
        await answer(*arguments)

    client.application.answer = wait  # type: ignore[method-assign,assignment]

    async def open_gate() -> None:
        gate.set()
        for _ in range(40):
            await asyncio.sleep(0)

    return open_gate


async def test_messages_that_come_during_a_response_wait_in_their_order() -> None:
    client = await connected()
    open_gate = waiting(client)
    assert client.send(*(text(str(i)) for i in range(3))) == []
    assert client.send(Ping(b"p")) == [b"p"]
    assert client.bodies.size == 3
    await open_gate()
    assert client.read() == ["0 1", "1 2", "2 3"]
    assert client.bodies.size == 0


async def test_too_many_messages_that_wait_close_the_connection() -> None:
    client = await connected()
    waiting(client)
    assert client.send(*(text("a") for _ in range(10))) == [1008]
    for _ in range(5):
        await asyncio.sleep(0)
    assert client.bodies.size == 0


@pytest.mark.parametrize("how", ["close", "lost"])
async def test_a_client_that_closes_cancels_the_response(how: str) -> None:
    client = await connected()
    open_gate = waiting(client)
    client.send(text("a"), text("b"))
    if how == "close":
        assert client.send(CloseConnection(1000)) == [1000]
        assert client.transport.is_closed
    client.connection.connection_lost(None)
    for _ in range(5):
        await asyncio.sleep(0)
    assert client.cancelled == 1
    await open_gate()
    assert client.transport.take() == b""
    assert (client.bodies.size, len(client.listener._open)) == (0, 0)


async def test_a_drained_connection_closes_after_the_response() -> None:
    client = await connected()
    open_gate = waiting(client)
    client.send(text("a"), text("b"))
    client.connection.drain()
    assert client.read() == []
    await open_gate()
    assert client.read() == ["a 1", 1001]
    assert client.bodies.size == 0
    idle = await connected()
    idle.connection.retire()
    assert idle.read() == [1001]
    assert idle.send_bytes(idle.frames.send(CloseConnection(1001))) == b""
    assert idle.transport.is_closed
    cancelled = await connected()
    waiting(cancelled)
    cancelled.send(text("a"))
    cancelled.connection.cancel()
    for _ in range(5):
        await asyncio.sleep(0)
    assert cancelled.read()[-1] == 1001


async def test_a_draining_server_opens_no_websocket() -> None:
    client = Client()
    client.listener.draining = True
    wire = http1(Http1Context(client.application))
    client.transport.protocol = client.listener.open(wire)
    client.connection.connection_made(client.transport)
    assert client.upgrade()[0] == 503


async def test_an_idle_client_is_pinged_and_a_silent_one_disconnected() -> None:
    client = await connected()
    assert 74 < client.check_after(60) < 80
    assert client.read() == []
    assert 149 < client.check_after(76) < 155
    assert client.read() == ["ping"]
    client.send(Pong(b""))
    assert 74 < client.check_after(76) - 76 + 76 < 155
    silent = await connected()
    silent.check_after(76)
    assert not silent.transport.is_aborted
    assert silent.check_after(152) == 0
    assert silent.transport.is_aborted


async def test_a_message_has_the_time_of_a_body() -> None:
    client = await connected()
    client.send(TextMessage("a", message_finished=False))
    assert 29 < client.check_after(10) < 35
    client.check_after(31)
    assert client.read() == [1008]
    assert client.check_after(40) == 0


async def test_a_client_that_does_not_read_is_waited_for_and_disconnected() -> None:
    client = await connected()
    client.transport.unread = 500
    client.connection.pause_writing()
    assert client.send(text("a"), text("b")) == ["a 1"]  # the next response waits for the client
    assert client.bodies.size > 0
    client.transport.unread = 0
    client.connection.resume_writing()
    for _ in range(5):
        await asyncio.sleep(0)
    assert client.read() == ["b 2"]
    assert client.bodies.size == 0
    client.transport.unread = 500
    client.connection.pause_writing()
    assert client.check_after(30) > 30
    assert client.check_after(70) == 0
    assert client.transport.is_aborted
    client.connection.connection_lost(None)
    assert client.bodies.size == 0


# --- access ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({}, 101),
        ({"origin": "http://localhost"}, 101),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "https://evil.example", "sec_fetch_site": "cross-site"}, 403),
        ({"origin": "https://friend.example"}, 101),
        ({"host": "evil.example"}, 403),
    ],
)
async def test_pages_of_other_sites_may_open_none(fields: Any, status: int) -> None:
    """Browsers send the handshake for any page, and let it read the messages: CORS does not apply."""
    sites = SiteRules(allowed_hosts=(), allows_origin=lambda origin: origin == "https://friend.example")
    client = Client(AccessControl(AccessRules(sites=sites)))
    assert client.upgrade(**fields)[0] == status


async def test_a_key_is_needed_and_checked_for_each_message(tmp_path: Any) -> None:
    control = AccessControl(AccessRules(api_key="k" * 32))
    assert Client(control).upgrade()[0] == 401
    client = Client(control)
    assert client.upgrade(authorization=f"Bearer {'k' * 32}")[0] == 101
    assert client.send(text("a")) == ["a 1"]
    control._grants.clear()  # the key was removed from the file
    control._increment_version()
    error, code = client.send(text("b"))
    assert (json.loads(error)["status"], code) == (401, 1008)
