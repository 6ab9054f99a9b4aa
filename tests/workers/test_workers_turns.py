"""Calls that wait in a worker process, and what else it does between two of them."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from dragoman.core.calls import Infer, Inference, Request
from dragoman.core.chunks import Take
from dragoman.core.tensor import Tensor
from dragoman.workers.channel import socket_pair
from dragoman.workers.frames import FrameKind, encode
from dragoman.workers.jobs import Job
from dragoman.workers.worker import Worker
from workers.workers_harness import make_request, wait_until


class Recorder:
    """An executor that records its calls, and the turns of the event loop after them."""

    name = "m"
    is_lost = False

    def __init__(self) -> None:
        self.ours, self.theirs = socket_pair()
        self.duration_s = 0.0
        self.cancels = 0  # the job that is cancelled during a call
        self.events: list[str] = []

    def send_calls(self, *numbers: int) -> None:
        jobs = [Job(number, FrameKind.CALL, make_request(number), lambda *_: None) for number in numbers]
        frames = [encode(FrameKind.CALL, job.number, job.fields()) for job in jobs]
        self.ours.sendall(b"".join(buffer for frame in frames for buffer in frame))

    def unavailable(self) -> str:
        return ""

    def call(self, request: Request[Any]) -> Any:
        assert isinstance(request.call, Infer)
        (first,) = request.call.inputs.values()
        time.sleep(self.duration_s)
        self.events.append(f"call {int(first.data[0])}")
        asyncio.get_running_loop().call_soon(self.events.append, "turn")
        if self.cancels == int(first.data[0]) + 1:
            self.ours.sendall(b"".join(encode(FrameKind.CANCEL, self.cancels)))
        return Inference({"y": Tensor.of(np.zeros(1))})

    async def call_async(self, request: Request[Any]) -> Any:
        raise NotImplementedError

    async def stream_async(self, request: Request[Any], take: Take[Any]) -> None:
        raise NotImplementedError


@asynccontextmanager
async def recorder() -> AsyncIterator[Recorder]:
    found = Recorder()
    worker = Worker(found, found.theirs, concurrent=False)
    serving = asyncio.create_task(worker.serve())
    yield found
    found.ours.close()
    await serving


async def test_each_long_call_has_a_turn_of_the_event_loop() -> None:
    """Other tasks of the worker, such as the one that sends metrics, run however many calls wait."""
    async with recorder() as found:
        found.duration_s = 0.002
        found.send_calls(1, 2, 3)
        await wait_until(lambda: len(found.events) == 6)
        assert found.events == ["call 1", "turn", "call 2", "turn", "call 3", "turn"]


async def test_a_call_that_is_cancelled_while_it_waits_is_not_computed() -> None:
    async with recorder() as found:
        found.send_calls(*range(1, 9))  # the first calls are not short
        await wait_until(lambda: "call 8" in found.events)
        found.cancels = 22
        found.send_calls(21, 22, 23)
        await wait_until(lambda: "call 23" in found.events)
        assert "call 22" not in found.events
