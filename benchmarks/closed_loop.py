"""Our own load generator: connections that each send one question, wait for its answer, compare it and go on.

usage: python -m benchmarks.closed_loop FOLDER, where `question.json`, `question` and `answer` lie
"""

import asyncio
import json
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import uvloop

from benchmarks.messages import Answers, question

_OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),  # else all channels share one connection
]
_PATIENCE_S = 20.0


@dataclass(slots=True)
class Tally:
    """What all connections have seen; none asks again after `end_s` of the performance counter."""

    answer: bytes
    end_s: float
    took_s: list[float] = field(default_factory=list)
    faults: int = 0

    def note(self, body: bytes, began_s: float) -> bool:
        """Count one answer; whether to go on."""
        now_s = time.perf_counter()
        self.took_s.append(now_s - began_s)
        self.faults += body != self.answer
        return now_s < self.end_s


class Asker(Answers):
    """One connection over HTTP."""

    def __init__(self, asking: bytes, tally: Tally) -> None:
        super().__init__()
        self.asking = asking
        self.tally = tally
        self.over = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._ask()

    def _ask(self) -> None:
        self.began_s = time.perf_counter()
        self.transport.write(self.asking)

    def answered(self, body: bytes) -> None:
        if self.tally.note(body, self.began_s):
            self._ask()
        else:
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.over.done():
            self.tally.faults += time.perf_counter() < self.tally.end_s
            self.over.set_result(None)


async def over_http(plan: Mapping[str, Any], body: bytes, tally: Tally) -> None:
    asking = question(plan, body)
    loop = asyncio.get_running_loop()
    connections = [
        await loop.create_connection(lambda: Asker(asking, tally), "127.0.0.1", plan["port"])
        for _ in range(plan["connections"])
    ]
    await asyncio.gather(*(asker.over for _, asker in connections))


async def over_grpc(plan: Mapping[str, Any], body: bytes, tally: Tally) -> None:
    async def ask() -> None:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{plan['port']}", options=_OPTIONS) as channel:
            call = channel.unary_unary(plan["path"])
            again = True
            while again:
                began_s = time.perf_counter()
                again = tally.note(await call(body), began_s)

    await asyncio.gather(*(ask() for _ in range(plan["connections"])))


async def run(folder: Path) -> dict[str, float]:
    plan = json.loads((folder / "question.json").read_text())
    began_s = time.perf_counter()
    tally = Tally((folder / "answer").read_bytes(), began_s + plan["seconds"])
    wire = {"http": over_http, "grpc": over_grpc}[plan["wire"]]
    async with asyncio.timeout(plan["seconds"] + _PATIENCE_S):
        await wire(plan, (folder / "question").read_bytes(), tally)
    cuts = statistics.quantiles(tally.took_s or [0.0], n=100) if len(tally.took_s) > 1 else tally.took_s * 99
    return {
        "answers": len(tally.took_s),
        "seconds": time.perf_counter() - began_s,
        "p50_ms": cuts[49] * 1000,
        "p99_ms": cuts[98] * 1000,
        "faults": tally.faults,
    }


if __name__ == "__main__":
    print(json.dumps(uvloop.run(run(Path(sys.argv[1])))))
