"""Many concurrent requests, valid and invalid, while workers are killed: each gets its own response."""

import asyncio
import json
import os
import re
import signal
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import aiohttp
import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from e2e.server_process import MODELS, ServerProcess, running_server, wait_until

TROUBLE = MODELS / "trouble.py"


@dataclass(frozen=True)
class Outcome:
    """Outcome of request `number`: the numbers of the response, or the error."""

    number: int
    kind: str
    values: tuple[float, ...] = ()
    error: str = ""


class Clients:
    """Clients over REST with JSON, REST with binary data, and gRPC; each sends its own numbers."""

    def __init__(self, process: ServerProcess, session: aiohttp.ClientSession, channel: Any) -> None:
        self._url = f"http://{process.url}/v2/models"
        self._session = session
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        self.done = 0

    async def request(self, number: int) -> Outcome:
        wire: Callable[..., Awaitable[tuple[tuple[float, ...], str]]]
        wire = (self._json, self._binary, self._grpc)[number % 3]
        kind = ("good", "good", "shape", "good", "good", "unknown", "good", "malformed", "good", "raises")[
            number // 3 % 10
        ]
        model = {"unknown": "missing", "raises": "Raises"}.get(kind, "Twice")
        try:
            values, error = await wire(model, np.array([number, number + 0.25]), kind)
        finally:
            self.done += 1
        return Outcome(number, kind, values, error)

    async def _json(self, model: str, values: Any, kind: str) -> tuple[tuple[float, ...], str]:
        shape = [3] if kind == "shape" else [2]
        body = json.dumps({"inputs": [{"name": "x", "datatype": "FP64", "shape": shape, "data": values.tolist()}]})
        return await self._posted(model, body[:-9].encode() if kind == "malformed" else body.encode(), {})

    async def _binary(self, model: str, values: Any, kind: str) -> tuple[tuple[float, ...], str]:
        tensor = {"name": "x", "datatype": "FP64", "shape": [2], "parameters": {"binary_data_size": 16}}
        if kind == "shape":
            tensor["shape"] = [3]
        head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
        length = len(head) + (8 if kind == "malformed" else 0)
        headers = {"inference-header-content-length": str(length)}
        return await self._posted(model, head + values.tobytes(), headers)

    async def _posted(self, model: str, body: bytes, headers: dict[str, str]) -> tuple[tuple[float, ...], str]:
        async with self._session.post(f"{self._url}/{model}/infer", data=body, headers=headers) as response:
            content = await response.read()
        if response.status != 200:
            return (), f"{response.status} {json.loads(content)['error']}"
        head = response.headers.get("inference-header-content-length")
        if head is None:
            return tuple(json.loads(content)["outputs"][0]["data"]), ""
        return tuple(np.frombuffer(content[int(head) :], "<f8").tolist()), ""

    async def _grpc(self, model: str, values: Any, kind: str) -> tuple[tuple[float, ...], str]:
        request = service_pb2.ModelInferRequest(model_name=model)
        request.inputs.add(name="x", datatype="FP64", shape=[3 if kind == "shape" else 2])
        request.raw_input_contents.extend([values.tobytes()] * (2 if kind == "malformed" else 1))
        try:
            response = await self._stub.ModelInfer(request)
        except grpc.aio.AioRpcError as fault:
            return (), f"{fault.code().name} {fault.details()}"
        return tuple(np.frombuffer(response.raw_output_contents[0], "<f8").tolist()), ""


EXPECTED_ERRORS = {
    "shape": r"(400|INVALID_ARGUMENT) input 'x': shape \[3\].*needs",
    "unknown": r"(404|NOT_FOUND) Request for unknown model: 'missing' is not found",
    "malformed": r"(400|INVALID_ARGUMENT) \S",
    "raises": r"(500|INTERNAL) model 'Raises' failed: ValueError: cannot do ",
}
LOST = r"(500|UNAVAILABLE) model '\w+': the worker process died \(signal SIGKILL\) while it computed this call"


def check(outcome: Outcome) -> str:
    """Assert that an outcome is as expected; return its kind, or `lost`."""
    if outcome.kind == "good":
        if re.fullmatch(LOST, outcome.error):
            return "lost"
        assert not outcome.error
        assert outcome.values == (2 * outcome.number, 2 * outcome.number + 0.5)
    else:
        if re.fullmatch(LOST, outcome.error) and outcome.kind == "raises":
            return "lost"
        assert re.match(EXPECTED_ERRORS[outcome.kind], outcome.error), outcome
        if outcome.kind == "raises":
            assert outcome.error.endswith(f"cannot do {outcome.number}")
    return outcome.kind


async def clients(
    process: ServerProcess, numbers: range, interrupt: Callable[[Clients], Coroutine[Any, Any, None]]
) -> list[Outcome]:
    """Send all requests concurrently while something else happens; nothing may take longer than a minute."""
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        asyncio.timeout(60),
        aiohttp.ClientSession(connector=connector) as session,
        grpc.aio.insecure_channel(process.grpc_url) as channel,
    ):
        callers = Clients(process, session, channel)
        happening = asyncio.create_task(interrupt(callers))
        outcomes = await asyncio.gather(*(callers.request(number) for number in numbers))
        await happening
        return outcomes


async def nothing(_: Clients) -> None:
    pass


def workers_of(process: ServerProcess, model: str, count: int) -> set[int]:
    """Return the worker processes of a model."""
    found: set[int] = set()

    def send_requests() -> bool:
        with ThreadPoolExecutor(4) as threads:
            for status, body in threads.map(lambda _: process.infer(model, [1.0]), range(8)):
                assert status == 200, body
                found.add(body["parameters"]["pid"])
        return len(found) >= count

    wait_until(send_requests, "an answer of each worker")
    return found


@pytest.fixture
def process() -> Iterator[ServerProcess]:
    with running_server(
        f"{TROUBLE}:Twice", f"{TROUBLE}:Raises", "--placement", "process", "--replicas", "2"
    ) as process:
        yield process


async def test_a_thousand_requests_and_a_worker_that_is_killed(process: ServerProcess) -> None:
    victim = min(workers_of(process, "Twice", 2))

    async def kill(callers: Clients) -> None:
        while callers.done < 500:
            await asyncio.sleep(0.001)
        os.kill(victim, signal.SIGKILL)

    kinds = Counter(map(check, await clients(process, range(1000), kill)))
    assert kinds["lost"] <= 1, "only what the killed worker computed"
    assert sum(kinds.values()) == 1000
    assert kinds["good"] + kinds["lost"] > 590
    assert f"worker process {victim} died (signal SIGKILL)" in process.log()
    process.wait_until_ready()
    wait_until(lambda: len(process.workers()) == 4, "the new worker")
    wait_until(lambda: "runs in place of one that ended" in process.log(), "the log of the new worker")
    assert victim not in workers_of(process, "Twice", 2)
    assert Counter(map(check, await clients(process, range(1000, 1300), nothing)))["lost"] == 0


async def test_all_workers_of_a_model_killed_at_once(process: ServerProcess) -> None:
    victims = workers_of(process, "Twice", 2)

    async def kill(callers: Clients) -> None:
        while callers.done < 60:
            await asyncio.sleep(0.001)
        for victim in victims:
            os.kill(victim, signal.SIGKILL)

    kinds = Counter(map(check, await clients(process, range(300), kill)))
    assert kinds["lost"] <= 2
    process.wait_until_ready()
    assert not victims & workers_of(process, "Twice", 1)


@pytest.mark.parametrize(("model", "end"), [("Exits", "exit code 1"), ("Segfaults", "signal SIGSEGV")])
def test_a_model_that_ends_its_process(model: str, end: str) -> None:
    with running_server(f"{TROUBLE}:{model}", f"{TROUBLE}:Twice") as process, ThreadPoolExecutor(16) as threads:
        numbers = [*range(1, 20), -1, *range(20, 40)]
        responses = dict(zip(numbers, threads.map(lambda n: process.infer(model, [float(n)]), numbers), strict=True))
        status, body = responses.pop(-1)
        assert status == 500
        assert body["error"] == f"model '{model}': the worker process died ({end}) while it computed this call"
        for number, (status, body) in responses.items():
            assert (status, body["outputs"][0]["data"]) == (200, [2.0 * number])
        assert process.infer("Twice", [1.0])[0] == 200
        for _ in range(5):  # as often as it likes
            status, body = process.infer(model, [-1.0])
            assert status in (500, 503)
            assert "died" in body["error"] or "is not ready: UNAVAILABLE" in body["error"]
        wait_until(lambda: process.infer(model, [3.0])[0] == 200, "the model's return")
        process.wait_until_ready()


def test_calls_of_disconnected_clients_are_not_computed() -> None:
    with running_server(f"{MODELS / 'shapes.py'}:Sleep", "--placement", "thread") as process:
        body = json.dumps({"inputs": [{"name": "x", "datatype": "FP64", "shape": [1], "data": [0.5]}]}).encode()
        headers = b"POST /v2/models/Sleep/infer HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
        sockets = [socket.create_connection(("127.0.0.1", process.http_port)) for _ in range(100)]
        for caller in sockets:
            caller.sendall(headers + body)
        for caller in sockets:
            caller.close()
        began_s = time.monotonic()
        assert process.infer("Sleep", [0.0])[0] == 200
        assert time.monotonic() - began_s < 40, "a hundred calls of half a second were waited for"


def test_more_clients_than_the_queue_holds() -> None:
    with running_server(f"{TROUBLE}:Twice", "--max-queue", "4") as process, ThreadPoolExecutor(32) as threads:
        responses = list(threads.map(lambda n: (n, process.infer("Twice", [float(n)])), range(200)))
        rejected = [body["error"] for _, (status, body) in responses if status == 503]
        assert rejected
        assert set(rejected) == {"Exceeds maximum queue size of 4 for model 'Twice'"}
        good = [(n, body["outputs"][0]["data"]) for n, (status, body) in responses if status == 200]
        assert len(good) + len(rejected) == 200
        assert all(data == [2.0 * n] for n, data in good)
        assert process.infer("Twice", [1.0])[0] == 200
