"""Open-loop load: requests arrive at random times at a given rate, independent of responses.

Each is sent on a connection that is free, or waits for one; how long an answer took counts from when it was due.

usage: python -m benchmarks.open_loop FOLDER, where `question.json`, `question` and `answer` lie
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

from benchmarks.messages import Answers, question

_CONNECTIONS = 256
_PATIENCE_S = 20.0


class Clients:
    """All connections, those that are free, and what they have seen."""

    def __init__(self, question: bytes, answer: bytes) -> None:
        self.question = question
        self.answer = answer
        self.free: list[Connection] = []
        self.due: deque[float] = deque()
        self.took_s: list[float] = []
        self.faults = 0

    def send(self, due_s: float) -> None:
        self.due.append(due_s)
        if self.free:
            self.free.pop().send(self.due.popleft())

    def answered(self, connection: "Connection", body: bytes) -> None:
        self.took_s.append(time.perf_counter() - connection.due_s)
        self.faults += body != self.answer
        if self.due:
            connection.send(self.due.popleft())
        else:
            self.free.append(connection)


class Connection(Answers):
    def __init__(self, clients: Clients) -> None:
        super().__init__()
        self.clients = clients
        self.due_s = 0.0

    def send(self, due_s: float) -> None:
        self.due_s = due_s
        self.transport.write(self.clients.question)

    def answered(self, body: bytes) -> None:
        self.clients.answered(self, body)


async def run(folder: Path) -> dict[str, float]:
    checked: dict[str, Any] = json.loads((folder / "question.json").read_text())
    body = (folder / "question").read_bytes()
    clients = Clients(question(checked, body), (folder / "answer").read_bytes())
    loop = asyncio.get_running_loop()
    for _ in range(_CONNECTIONS):
        _, connection = await loop.create_connection(lambda: Connection(clients), "127.0.0.1", checked["port"])
        clients.free.append(connection)
    sent = await _generate(clients, checked["rate"], checked["seconds"])
    end_s = time.perf_counter() + _PATIENCE_S
    while len(clients.took_s) < sent and time.perf_counter() < end_s:
        await asyncio.sleep(0.01)
    cuts = statistics.quantiles(clients.took_s, n=100)
    return {
        "answers": len(clients.took_s),
        "seconds": checked["seconds"],
        "p50_ms": cuts[49] * 1000,
        "p99_ms": cuts[98] * 1000,
        "faults": clients.faults + sent - len(clients.took_s),
    }


async def _generate(clients: Clients, rate: float, seconds: float) -> int:
    """Ask at random times, whose gaps are distributed exponentially; how often."""
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
