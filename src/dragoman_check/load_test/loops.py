"""Closed and open loops of requests."""

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, count, takewhile
from typing import Literal

from dragoman_check.load_test.connections import LoadConnection, open_connection, text_times
from dragoman_check.load_test.jobs import RequestJob
from dragoman_check.load_test.measurements import Measurement, Recorder

Arrival = Literal["poisson", "constant"]
# Pause of a connection after an error, so that a server that is away is not flooded.
_PAUSE_S = 0.05
# Timers of event loops are this coarse; the rest of a wait is spent in the loop.
_TIMER_S = 0.0015


@dataclass(frozen=True, slots=True)
class LoadLevel:
    """A closed loop of `concurrency` clients, or an open loop of `rate` requests per second.

    connections: in an open loop, the most that are open; requests beyond wait, and their wait is part of the latency.
    """

    concurrency: int = 1
    rate: float = 0.0
    arrival: Arrival = "poisson"
    seconds: float = 10.0
    warmup_s: float = 2.0
    connections: int = 256
    timeout_s: float = 60.0
    seed: int = 0

    @property
    def label(self) -> str:
        return f"{self.rate:g} requests/s, {self.arrival}" if self.rate else f"concurrency {self.concurrency}"


def arrival_times(load: LoadLevel) -> Iterator[float]:
    """Yield the times, in seconds from the start, at which requests of an open loop are due."""
    end_s = load.warmup_s + load.seconds
    if load.arrival == "constant":
        yield from takewhile(lambda time_s: time_s < end_s, (i / load.rate for i in count()))
        return
    gaps = random.Random(load.seed)  # noqa: S311
    yield from takewhile(lambda time_s: time_s < end_s, accumulate(gaps.expovariate(load.rate) for _ in count()))


async def run_load(job: RequestJob, load: LoadLevel, show: Callable[[Recorder], None] | None = None) -> Measurement:
    """Send requests for the warm-up and the measured time, wait for all responses, and return the measurement."""
    recorder = Recorder(time.perf_counter() + load.warmup_s, load.seconds, load.warmup_s)
    call_later = asyncio.get_running_loop().call_later
    timers = [call_later(after_s, recorder.sample_cpu) for after_s in (load.warmup_s, load.warmup_s + load.seconds)]
    display = asyncio.create_task(_show(recorder, show)) if show else None
    try:
        await (_open_loop(job, load, recorder) if load.rate else _closed_loop(job, load, recorder))
    finally:
        for timer in timers:
            timer.cancel()
        if display is not None:
            display.cancel()
    return recorder.measurement(job.protocol, load)


async def _show(recorder: Recorder, show: Callable[[Recorder], None]) -> None:
    while True:
        await asyncio.sleep(0.5)
        show(recorder)


async def _closed_loop(job: RequestJob, load: LoadLevel, recorder: Recorder) -> None:
    async def run_client() -> None:
        connection = open_connection(job, load.timeout_s)
        try:
            while time.perf_counter() < recorder.end_s:
                await _exchange(job, connection, recorder, None)
        finally:
            await connection.close()

    await asyncio.gather(*(run_client() for _ in range(load.concurrency)))


async def _open_loop(job: RequestJob, load: LoadLevel, recorder: Recorder) -> None:
    due: asyncio.Queue[float | None] = asyncio.Queue()
    clients: list[asyncio.Task[None]] = []
    idle = 0

    async def run_client() -> None:
        nonlocal idle
        connection = open_connection(job, load.timeout_s)
        try:
            while (due_s := await due.get()) is not None:
                idle -= 1
                await _exchange(job, connection, recorder, due_s)
                idle += 1
        finally:
            await connection.close()

    start_s = recorder.start_s - load.warmup_s
    for offset_s in arrival_times(load):
        await _wait_until(start_s + offset_s)
        if due.qsize() >= idle and len(clients) < load.connections:
            clients.append(asyncio.create_task(run_client()))
            idle += 1
        due.put_nowait(start_s + offset_s)
    for _ in clients:
        due.put_nowait(None)
    await asyncio.gather(*clients)


async def _wait_until(time_s: float) -> None:
    """Return at a time of the performance counter, at once if it is past."""
    while (left_s := time_s - time.perf_counter()) > 0:  # noqa: ASYNC110
        await asyncio.sleep(left_s - _TIMER_S if left_s > _TIMER_S else 0)


async def _exchange(job: RequestJob, connection: LoadConnection, recorder: Recorder, due_s: float | None) -> None:
    """Send one request and record it. Its latency counts from when it was due."""
    outcome = await connection.exchange()
    times = text_times(job, outcome) if job.has_text is not None else []
    recorder.add(outcome, outcome.sent_s if due_s is None else due_s, times)
    if outcome.error:
        await asyncio.sleep(_PAUSE_S)
