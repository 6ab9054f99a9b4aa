"""Servers of known delay, and one of Dragoman."""

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from features.check.conformance.conftest import server as server

METADATA = {
    "name": "slow",
    "platform": "test",
    "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 2]}],
    "outputs": [],
}
TOKENS = 4


@dataclass
class SlowServer:
    """A server that takes at least `delay_s` for a response, one request after the other.

    waiting, most_waiting: requests that have arrived and have no response.
    usage: completion tokens of OpenAI streams, reported on request; None for a server that rejects `stream_options`.
    """

    delay_s: float = 0.01
    failing: bool = False
    closing: bool = False
    missing: set[str] = field(default_factory=set)
    bodies: list[bytes] = field(default_factory=list)
    turn: threading.Lock = field(default_factory=threading.Lock)
    waiting: int = 0
    most_waiting: int = 0
    counting: threading.Lock = field(default_factory=threading.Lock)
    url: str = ""
    usage: int | None = 2 * TOKENS
    metadata: dict[str, Any] = field(default_factory=METADATA.copy)
    paths: list[str] = field(default_factory=list)
    authorization: str | None = None

    def count(self, change: int) -> None:
        with self.counting:
            self.waiting += change
            self.most_waiting = max(self.most_waiting, self.waiting)


def _handler(state: SlowServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            state.paths.append(self.path)
            state.authorization = self.headers["Authorization"]
            self._send(state.metadata, 503 if "error" in state.metadata else 200)

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            state.count(1)
            with state.turn:
                state.bodies.append(body)
                fails = state.failing and len(state.bodies) % 2
                time.sleep(state.delay_s)
                state.count(-1)
            if self.path in state.missing:
                self._send({"error": "not found"}, 404)
            elif state.closing:
                self.close_connection = True
            elif "completions" in self.path:
                self._stream_openai(json.loads(body).get("stream_options") is not None)
            elif "stream" in self.path:
                self._stream([{"token": {"id": i, "text": "a"}} for i in range(TOKENS)])
            else:
                self._send({"outputs": []}, 503 if fails else 200)

        def _send(self, value: Any, status: int = 200) -> None:
            body = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def _stream_openai(self, includes_usage: bool) -> None:
            events: list[Any] = [{"choices": [{"text": "a b"}]} for _ in range(TOKENS)]
            if includes_usage and state.usage is None:
                self._send({"error": {"message": "unknown field stream_options"}}, 400)
                return
            self._stream([*events, *[{"choices": [], "usage": {"completion_tokens": state.usage}}] * includes_usage])

        def _stream(self, events: list[Any]) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for i, each in enumerate(events):
                if i:
                    time.sleep(state.delay_s)
                event = {"error": "failed"} if state.failing else each
                self._chunk(b"data:" + json.dumps(event).encode() + b"\n\n")
            self._chunk(b"")

        def _chunk(self, data: bytes) -> None:
            self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            self.wfile.flush()

        def log_message(self, *arguments: Any) -> None:
            pass

    return Handler


@pytest.fixture
def slow() -> Iterator[SlowServer]:
    state = SlowServer()
    with ThreadingHTTPServer(("127.0.0.1", 0), _handler(state)) as http:
        state.url = f"http://127.0.0.1:{http.server_port}"
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield state
        finally:
            http.shutdown()
            thread.join()
