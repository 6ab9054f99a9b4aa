"""Closed-loop load generator in Python: each connection sends a request, compares the response, and sends the next.

usage: python -m benchmarks.closed_loop FOLDER, which contains `plan.json`, `request` and `response`
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

from benchmarks.messages import ResponseReader

_OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),  # else all channels share one connection
]
_TIMEOUT_S = 20.0


@dataclass(slots=True)
class Results:
    """Durations and errors of all connections. `end_s`, of the performance counter, ends the load."""

    expected_body: bytes
    end_s: float
    durations_s: list[float] = field(default_factory=list)
    errors: int = 0

    def add(self, body: bytes, began_s: float) -> bool:
        """Count a response. Return whether to send another request."""
        now_s = time.perf_counter()
        self.durations_s.append(now_s - began_s)
        self.errors += body != self.expected_body
        return now_s < self.end_s


class HttpClient(ResponseReader):
    """One connection over HTTP."""

    def __init__(self, request: bytes, results: Results) -> None:
        super().__init__()
        self.request = request
        self.results = results
        self.closed = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._send()

    def _send(self) -> None:
        self.began_s = time.perf_counter()
        self.transport.write(self.request)

    def on_response(self, body: bytes) -> None:
        if self.results.add(body, self.began_s):
            self._send()
        else:
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.closed.done():
            self.results.errors += time.perf_counter() < self.results.end_s
            self.closed.set_result(None)


async def load_http(plan: Mapping[str, Any], request: bytes, results: Results) -> None:
    loop = asyncio.get_running_loop()
    connections = [
        await loop.create_connection(lambda: HttpClient(request, results), "127.0.0.1", plan["port"])
        for _ in range(plan["connections"])
    ]
    await asyncio.gather(*(client.closed for _, client in connections))


async def load_grpc(plan: Mapping[str, Any], request: bytes, results: Results) -> None:
    async def run_client() -> None:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{plan['port']}", options=_OPTIONS) as channel:
            call = channel.unary_unary(plan["path"])
            again = True
            while again:
                began_s = time.perf_counter()
                again = results.add(await call(request), began_s)

    await asyncio.gather(*(run_client() for _ in range(plan["connections"])))


async def run(folder: Path) -> dict[str, float]:
    plan = json.loads((folder / "plan.json").read_text())
    began_s = time.perf_counter()
    results = Results((folder / "response").read_bytes(), began_s + plan["seconds"])
    load = {"http": load_http, "grpc": load_grpc}[plan["wire"]]
    async with asyncio.timeout(plan["seconds"] + _TIMEOUT_S):
        await load(plan, (folder / "request").read_bytes(), results)
    durations_s = results.durations_s
    cuts = statistics.quantiles(durations_s, n=100) if len(durations_s) > 1 else durations_s * 99
    return {
        "responses": len(durations_s),
        "seconds": time.perf_counter() - began_s,
        "p50_ms": cuts[49] * 1000,
        "p99_ms": cuts[98] * 1000,
        "errors": results.errors,
    }


if __name__ == "__main__":
    print(json.dumps(uvloop.run(run(Path(sys.argv[1])))))
