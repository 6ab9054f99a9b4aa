"""Adaptive batch delay: batches wait only for clients that resend immediately."""

import asyncio
from typing import Any

import numpy as np

from dragoman.core.calls import Infer, Inference, Request
from dragoman.core.tensor import Tensor
from dragoman.engine.batch_delay import BatchDelay
from dragoman.engine.batching import Batcher


def test_delay_is_a_fraction_of_the_latency_until_all_clients_return() -> None:
    delay = BatchDelay(0.5)
    delay.batch_finished(size=3, queued=2, duration_s=0.010, now_s=1.0)
    assert abs(delay.remaining_s(2, 1.001) - 0.004) < 1e-9
    assert delay.remaining_s(4, 1.002) > 0
    assert delay.remaining_s(5, 1.003) == 0
    assert delay.remaining_s(2, 1.003) == 0  # a delay that has ended does not start again


def test_delay_ends_after_its_duration() -> None:
    delay = BatchDelay(0.5)
    delay.batch_finished(size=4, queued=0, duration_s=0.010, now_s=1.0)
    assert delay.remaining_s(3, 1.0051) == 0
    assert delay.remaining_s(1, 1.0) == 0


def test_calls_do_not_wait_long_after_a_slow_first_call() -> None:
    delay = BatchDelay(0.5)
    delay.batch_finished(size=1, queued=3, duration_s=60.0, now_s=1.0)
    assert abs(delay.remaining_s(3, 1.0) - 0.1) < 1e-9
    assert delay.remaining_s(3, 1.11) == 0


def test_no_delay_for_one_client_or_fraction_zero() -> None:
    for fraction, calls in ((0.5, 1), (0.0, 9)):
        delay = BatchDelay(fraction)
        delay.batch_finished(size=calls, queued=0, duration_s=1.0, now_s=1.0)
        assert delay.remaining_s(1, 1.0) == 0


def test_latency_is_a_moving_average() -> None:
    delay = BatchDelay(1.0)
    delay.batch_finished(2, 0, 0.010, 1.0)
    delay.batch_finished(2, 0, 0.020, 2.0)
    assert abs(delay.remaining_s(0, 2.0) - 0.012) < 1e-9


def delayed_batches(delay: BatchDelay, times: int, returning: int, calls: int = 4) -> list[bool]:
    """Return for each batch of `calls` whether it was delayed, if `returning` clients returned in time."""
    delayed = []
    for batch in range(times):
        delay.batch_finished(size=calls, queued=0, duration_s=0.010, now_s=float(batch))
        delayed.append(delay.remaining_s(0, float(batch)) > 0)
        delay.remaining_s(returning, batch + 0.9)
    return delayed


def test_delay_stops_if_clients_do_not_return() -> None:
    delay = BatchDelay(0.5)
    assert all(delayed_batches(delay, 20, returning=4))
    assert delayed_batches(delay, 4, returning=1)[-1] is False
    assert sum(delayed_batches(delay, 160, returning=1)) == 10  # the delay is retried every 16 batches
    delayed_batches(delay, 160, returning=4)
    assert all(delayed_batches(delay, 20, returning=4))


def test_delay_continues_only_if_most_clients_return() -> None:
    assert all(delayed_batches(BatchDelay(0.5), 60, returning=2, calls=2))
    assert all(delayed_batches(BatchDelay(0.5), 60, returning=3))
    assert not all(delayed_batches(BatchDelay(0.5), 60, returning=1, calls=2))
    assert delayed_batches(BatchDelay(0.5), 8, returning=0, calls=2) == [True, True, *[False] * 6]


def test_more_queued_calls_than_clients_count_as_all() -> None:
    delay = BatchDelay(0.5)
    assert all(delayed_batches(delay, 20, returning=9))
    delay.batch_finished(size=4, queued=3, duration_s=0.010, now_s=1.0)
    assert delay.remaining_s(6, 1.001) > 0
    assert delay.remaining_s(7, 1.001) == 0


def test_delay_is_retried_every_16_batches() -> None:
    delay = BatchDelay(0.5)
    delayed = delayed_batches(delay, 80, returning=0)
    first = delayed.index(False)
    assert [i - first for i, is_delayed in enumerate(delayed) if is_delayed and i > first] == [15, 31, 47, 63]


def test_no_delay_before_the_first_batch() -> None:
    delay = BatchDelay(0.5)
    assert delay.remaining_s(0, 5.0) == 0
    delay.batch_finished(size=2, queued=0, duration_s=0.0, now_s=1.0)
    assert delay.remaining_s(0, 1.0) == 0
    delay.batch_finished(size=2, queued=0, duration_s=0.010, now_s=2.0)
    assert abs(delay.remaining_s(0, 2.0) - 0.005) < 1e-12
    delay.batch_finished(size=1, queued=0, duration_s=0.010, now_s=3.0)
    assert delay.remaining_s(0, 3.0) == 0
    delay.batch_finished(size=1, queued=1, duration_s=0.010, now_s=4.0)
    assert delay.remaining_s(1, 4.0) > 0


class SlowPool:
    """A pool with one worker that takes 10 ms for each call."""

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.capacity = 1

    async def call(self, request: Request[Any]) -> Inference:
        call = request.call
        assert isinstance(call, Infer)
        self.batches.append(len(call.inputs["x"].data))
        await asyncio.sleep(0.01)
        return Inference({"y": call.inputs["x"]})


async def client(batcher: Batcher, times: int) -> None:
    for _ in range(times):
        for _ in range(5):  # round trip to the client
            await asyncio.sleep(0)
        coroutine = batcher.begin(Request(Infer({"x": Tensor.of(np.zeros((1, 2)))}), "m"))
        assert coroutine is not None
        await coroutine


async def test_delay_merges_two_groups_of_clients() -> None:
    pool: Any = SlowPool()
    batcher = Batcher(pool, 64, 0.0, delay_fraction=10.0)
    first = asyncio.ensure_future(client(batcher, 4))
    while not pool.batches:
        await asyncio.sleep(0)
    await asyncio.gather(first, client(batcher, 3))
    assert pool.batches == [1, 2, 2, 2]


async def test_without_delay_two_groups_alternate() -> None:
    pool: Any = SlowPool()
    batcher = Batcher(pool, 64, 0.0)
    first = asyncio.ensure_future(client(batcher, 3))
    while not pool.batches:
        await asyncio.sleep(0)
    await asyncio.gather(first, client(batcher, 3))
    assert pool.batches == [1] * 6


async def test_a_delayed_call_runs_if_the_other_client_does_not_return() -> None:
    pool: Any = SlowPool()
    batcher = Batcher(pool, 64, 0.0, delay_fraction=1.0)
    first = asyncio.ensure_future(client(batcher, 1))
    while not pool.batches:
        await asyncio.sleep(0)
    await asyncio.wait_for(asyncio.gather(first, client(batcher, 1)), 60)
    assert pool.batches == [1, 1]
