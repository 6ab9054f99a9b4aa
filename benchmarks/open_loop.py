"""Open-loop load: requests arrive at random times at a given rate, independent of responses.

Each is sent on an idle connection, or waits for one. The latency of a request is measured from the time it was due.

usage: python -m benchmarks.open_loop FOLDER, which contains `plan.json`, `request` and `response`
"""

import asyncio
import json
import random
import statistics
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.messages import ResponseReader

_CONNECTIONS = 256
_TIMEOUT_S = 20.0


class Clients:
    """All connections, the idle ones, the times of requests that wait for one, durations and errors."""

    def __init__(self, request: bytes, expected_body: bytes) -> None:
        self.request = request
        self.expected_body = expected_body
        self.idle: list[Connection] = []
        self.waiting_s: deque[float] = deque()
        self.durations_s: list[float] = []
        self.errors = 0

    def send(self, due_s: float) -> None:
        self.waiting_s.append(due_s)
        if self.idle:
            self.idle.pop().send(self.waiting_s.popleft())

    def on_response(self, connection: "Connection", body: bytes) -> None:
        self.durations_s.append(time.perf_counter() - connection.due_s)
        self.errors += body != self.expected_body
        if self.waiting_s:
            connection.send(self.waiting_s.popleft())
        else:
            self.idle.append(connection)


class Connection(ResponseReader):
    def __init__(self, clients: Clients) -> None:
        super().__init__()
        self.clients = clients
        self.due_s = 0.0

    def send(self, due_s: float) -> None:
        self.due_s = due_s
        self.transport.write(self.clients.request)

    def on_response(self, body: bytes) -> None:
        self.clients.on_response(self, body)


async def run(folder: Path) -> dict[str, float]:
    plan: dict[str, Any] = json.loads((folder / "plan.json").read_text())
    clients = Clients((folder / "request").read_bytes(), (folder / "response").read_bytes())
    loop = asyncio.get_running_loop()
    for _ in range(_CONNECTIONS):
        _, connection = await loop.create_connection(lambda: Connection(clients), "127.0.0.1", plan["port"])
        clients.idle.append(connection)
    sent = await _send_requests(clients, plan["rate"], plan["seconds"])
    end_s = time.perf_counter() + _TIMEOUT_S
    while len(clients.durations_s) < sent and time.perf_counter() < end_s:
        await asyncio.sleep(0.01)
    cuts = statistics.quantiles(clients.durations_s, n=100)
    return {
        "responses": len(clients.durations_s),
        "seconds": plan["seconds"],
        "p50_ms": cuts[49] * 1000,
        "p99_ms": cuts[98] * 1000,
        "errors": clients.errors + sent - len(clients.durations_s),
    }


async def _send_requests(clients: Clients, rate: float, seconds: float) -> int:
    """Send requests with exponentially distributed gaps. Return the number of requests."""
    gaps = random.Random(7)
    sent, began_s = 0, time.perf_counter()
    due_s = began_s
    while due_s < began_s + seconds:
        while due_s <= time.perf_counter():
            clients.send(due_s)
            sent += 1
            due_s += gaps.expovariate(rate)
        await asyncio.sleep(0)  # a timer would be too coarse
    return sent


if __name__ == "__main__":
    print(json.dumps(uvloop.run(run(Path(sys.argv[1])))))
