"""Batching: merging and splitting are inverse, and no response depends on the batch."""

import asyncio
import gc
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.core.bytes_tensor import BytesTensor, came_as_text
from dragoman.core.calls import Infer, Inference, Request
from dragoman.core.chunks import ChunkStream
from dragoman.core.datatypes import BYTES, DATATYPES, Datatype
from dragoman.core.errors import InvalidInput, InvalidOutput, ModelFailed, NotReady
from dragoman.core.metrics import Family
from dragoman.core.signature import Signature
from dragoman.core.tensor import Tensor, object_array
from dragoman.core.worker_status import WorkerStatus
from dragoman.engine.batching import Batcher, group_key, merge, rows, split_rows
from dragoman.workers.pool import Loaded

datatypes = st.sampled_from(list(DATATYPES.values()))
trailing = st.lists(st.integers(0, 3), max_size=3).map(tuple)


def tensor(kind: Datatype, shape: tuple[int, ...], seed: int) -> Tensor:
    count = int(np.prod(shape))
    raw = np.random.default_rng(seed).bytes(count * max(kind.size, 1))
    if kind.kind == "bytes":
        return Tensor(object_array([raw[i : i + 1] * 3 for i in range(count)], shape), kind)
    if kind.kind == "bool":
        return Tensor((np.frombuffer(raw, np.uint8) % 2).astype(bool).reshape(shape), kind)
    return Tensor(np.frombuffer(raw, kind.dtype).reshape(shape), kind)


def equal_tensors(a: Tensor, b: Tensor) -> bool:
    return a.datatype is b.datatype and a.shape == b.shape and a.data.tobytes() == b.data.tobytes()


@given(
    st.lists(st.tuples(datatypes, trailing), min_size=1, max_size=3),
    st.lists(st.integers(0, 4), min_size=1, max_size=5),
)
def test_split_is_the_inverse_of_merge(specs: list[tuple[Datatype, tuple[int, ...]]], counts: list[int]) -> None:
    calls = [
        Infer({f"x{i}": tensor(kind, (n, *tail), 7 * i + n) for i, (kind, tail) in enumerate(specs)}) for n in counts
    ]
    assert len({group_key(c) for c in calls}) == 1
    merged = merge(calls)
    assert rows(merged) == sum(counts)
    parts = split_rows(Inference(merged.inputs), counts)
    for call, part in zip(calls, parts, strict=True):
        assert all(
            part.outputs[n].data.tolist() == t.data.tolist()
            if t.datatype.kind == "bytes"
            else equal_tensors(part.outputs[n], t)
            for n, t in call.inputs.items()
        )


def test_text_and_bytes_are_not_merged() -> None:
    texts = [BytesTensor.of_texts([text], (1, 1)) for text in ("a", "b")]
    plain = Tensor(object_array([b"c"], (1, 1)), BYTES)
    calls = [Infer({"x": tensor}) for tensor in (*texts, plain)]
    first, second, third = map(group_key, calls)
    assert first == second != third
    merged = merge(calls[:2]).inputs["x"]
    assert (came_as_text(merged), merged.shape, merged.data.tolist()) == (True, (2, 1), [[b"a"], [b"b"]])
    assert not came_as_text(merge([calls[2], calls[2]]).inputs["x"])


def test_parameters_of_a_merged_response_go_to_every_call() -> None:
    inference = Inference({"y": Tensor(np.arange(3.0), DATATYPES["FP64"], {"unit": "m"})}, {"version": 2})
    parts = split_rows(inference, [1, 2])
    assert [dict(part.parameters) for part in parts] == [{"version": 2}] * 2
    assert [dict(part.outputs["y"].parameters) for part in parts] == [{"unit": "m"}] * 2
    assert [part.outputs["y"].data.tolist() for part in parts] == [[0.0], [1.0, 2.0]]
    x = Tensor(np.arange(2.0), DATATYPES["FP64"], {"unit": "m"})
    merged = merge([Infer({"x": x}, ("y",), {"a": 1}), Infer({"x": x}, ("y",), {"a": 1})])
    assert (merged.outputs, merged.parameters, merged.inputs["x"].parameters) == (("y",), {"a": 1}, {"unit": "m"})


def test_only_calls_that_can_be_merged_have_the_same_key() -> None:
    x = Tensor.of(np.zeros((2, 3), np.float32))
    base = Infer({"x": x})
    others = [
        Infer({"y": x}),
        Infer({"x": Tensor.of(np.zeros((2, 4), np.float32))}),
        Infer({"x": Tensor.of(np.zeros((2, 3), np.float64))}),
        Infer({"x": x}, ("out",)),
        Infer({"x": x}, (), {"a": 1}),
        Infer({"x": x}, (), {"a": True}),
        Infer({"x": x}, (), {"a": 1.0}),
        Infer({"x": x}, (), {"a": "1"}),
        Infer({"x": Tensor(x.data, x.datatype, {"content_type": "np"})}),
        Infer({"x": x}, config={"level": 1}),
        Infer({"x": x}, config={"level": 2}),
    ]
    assert len({group_key(c) for c in [base, *others]}) == 1 + len(others)
    assert group_key(base) == group_key(Infer({"x": Tensor.of(np.ones((5, 3), np.float32))}))


def test_calls_are_mergeable_if_all_inputs_have_the_same_rows() -> None:
    two, wide, three, scalar = (Tensor.of(np.zeros(shape)) for shape in ((2, 3), (2, 5, 1), (3, 3), ()))
    assert rows(Infer({"x": two, "y": wide})) == 2
    assert rows(Infer({"x": two}), {}) == 2
    assert rows(Infer({"x": two, "y": three})) is None
    assert rows(Infer({"x": scalar})) is None
    assert rows(Infer({"x": two}), {"user": "alice"}) is None
    assert rows(Infer({"x": two}, content_types={"y": "str"})) is None


@pytest.mark.parametrize("shape", [(3,), (), (5, 1)])
def test_outputs_must_have_the_rows_of_the_batch(shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidOutput, match="output 'y': expected 4 rows"):
        split_rows(Inference({"y": Tensor.of(np.zeros(shape))}), [1, 3])


FATAL = 666.0


class RecordingPool:
    """A pool with one worker that doubles `x`, fails on negative numbers, and can be paused."""

    now: Mapping[Any, Any] = {}

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.cancelled = 0
        self.ready = True
        self.unavailable = self.waiting = ""
        self.capacity = 1
        self.on_capacity: Callable[[], None] = lambda: None
        self.is_replicated = False

    async def start(self) -> Loaded:
        return Loaded(Signature(batched=True), "test", frozenset({Infer}))

    def measurements(self) -> Sequence[Family]:
        return ()

    def workers(self) -> tuple[WorkerStatus, ...]:
        return ()

    def states(self) -> Mapping[str, int]:
        return {}

    def process_ids(self) -> Mapping[int, int]:
        return {}

    async def call(self, request: Request[Any]) -> Any:
        call = request.call
        assert isinstance(call, Infer)
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        x = call.inputs["x"].data
        self.batches.append(len(x))
        if (x == FATAL).any():
            raise ZeroDivisionError("an unexpected error")
        if (x < 0).any():
            raise ModelFailed("model 'm' failed: ValueError: negative")
        return Inference({"y": Tensor.of(x * 2)}, call.parameters)

    def stream(self, request: Request[Any]) -> ChunkStream[Any]:
        raise NotImplementedError

    async def close(self) -> None:
        self.ready = False


def make_request(*numbers: float, **parameters: Any) -> Request[Inference]:
    return Request(Infer({"x": Tensor.of(np.array(numbers, np.float64).reshape(-1, 1))}, (), parameters), "m")


@pytest.fixture
async def pool() -> RecordingPool:
    return RecordingPool()


@pytest.fixture
def batcher(pool: RecordingPool) -> Callable[..., Batcher]:
    return lambda max_rows=8, wait_s=0.0: Batcher(pool, max_rows, wait_s)


def begin(batcher: Batcher, request: Request[Inference]) -> Coroutine[Any, Any, Inference]:
    coroutine = batcher.begin(request)
    assert coroutine is not None
    return coroutine


async def gather(batcher: Batcher, requests: list[Request[Inference]]) -> list[Any]:
    responses: list[Any] = await asyncio.gather(*(begin(batcher, r) for r in requests), return_exceptions=True)
    return responses


async def gather_while_busy(pool: RecordingPool, batcher: Batcher, requests: list[Request[Inference]]) -> list[Any]:
    """Queue requests behind a call without rows, which the worker does first."""
    pool.gate.clear()
    first = asyncio.ensure_future(begin(batcher, make_request()))
    await asyncio.sleep(0)
    results = asyncio.ensure_future(gather(batcher, requests))
    await asyncio.sleep(0.001)
    pool.gate.set()
    await first
    return await results


def numbers(inference: Inference) -> list[float]:
    return [float(v) for v in inference.outputs["y"].data[:, 0]]


async def test_an_idle_worker_gets_a_call_immediately(pool: RecordingPool, batcher: Any) -> None:
    assert numbers(await begin(batcher(8), make_request(1.0))) == [2.0]
    assert pool.batches == [1]


async def test_queued_calls_are_merged_and_get_their_own_rows(pool: RecordingPool, batcher: Any) -> None:
    results = await gather_while_busy(pool, batcher(8), [make_request(float(i), float(i) + 0.5) for i in range(20)])
    assert [numbers(a) for a in results] == [[2.0 * i, 2.0 * i + 1] for i in range(20)]
    assert max(pool.batches) == 8
    assert sum(pool.batches) == 40


async def test_a_failing_call_does_not_fail_the_others_of_its_batch(pool: RecordingPool, batcher: Any) -> None:
    requests = [make_request(1.0), make_request(-1.0), make_request(3.0)]
    results = await gather_while_busy(pool, batcher(8), requests)
    assert numbers(results[0]) == [2.0]
    assert isinstance(results[1], ModelFailed)
    assert numbers(results[2]) == [6.0]
    assert pool.batches == [0, 3, 1, 1, 1]


async def test_calls_with_different_parameters_are_not_merged(pool: RecordingPool, batcher: Any) -> None:
    names = ["alice", "bob", "carol", "dave"]
    results = await gather_while_busy(pool, batcher(8), [make_request(1.0, user=n) for n in names])
    assert [a.parameters["user"] for a in results] == names


async def test_calls_with_too_many_rows_are_rejected(batcher: Any) -> None:
    assert numbers(await begin(batcher(8), make_request(*range(8)))) == [2.0 * i for i in range(8)]
    with pytest.raises(InvalidInput, match=r"^inference request batch-size must be <= 8 for '', got 9$"):
        await begin(batcher(8), make_request(*range(9)))


async def test_batches_grow_during_the_wait(pool: RecordingPool, batcher: Any) -> None:
    waiting_batcher = batcher(4, 10.0)
    first = asyncio.ensure_future(begin(waiting_batcher, make_request(1.0)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not pool.batches
    rest = await gather(waiting_batcher, [make_request(2.0), make_request(3.0), make_request(4.0)])
    assert numbers(await first) == [2.0]
    assert [numbers(a) for a in rest] == [[4.0], [6.0], [8.0]]
    assert pool.batches == [4]


async def test_cancelled_calls_are_dropped_and_the_last_one_cancels_the_batch(
    pool: RecordingPool, batcher: Any
) -> None:
    pool.gate.clear()
    queue = batcher(8)
    running = asyncio.ensure_future(begin(queue, make_request(1.0)))
    await asyncio.sleep(0.01)
    waiting = [asyncio.ensure_future(begin(queue, make_request(float(i)))) for i in (2, 3)]
    await asyncio.sleep(0.01)
    waiting[0].cancel()
    running.cancel()
    await asyncio.sleep(0.01)
    assert pool.cancelled == 1
    pool.gate.set()
    assert numbers(await waiting[1]) == [6.0]
    assert pool.batches == [1]


async def test_a_full_batch_does_not_wait_behind_a_single_call_with_another_key(
    pool: RecordingPool, batcher: Any
) -> None:
    waiting_batcher = batcher(2, 10.0)
    lone = asyncio.ensure_future(begin(waiting_batcher, make_request(1.0, user="alice")))
    await asyncio.sleep(0)
    results = await asyncio.wait_for(gather(waiting_batcher, [make_request(2.0), make_request(3.0)]), 60)
    assert [numbers(a) for a in results] == [[4.0], [6.0]]
    assert pool.batches == [2]
    assert not lone.done()
    assert numbers((await gather(waiting_batcher, [make_request(4.0, user="alice")]))[0]) == [8.0]
    assert numbers(await lone) == [2.0]


async def test_a_single_call_waits_at_most_max_wait(pool: RecordingPool, batcher: Any) -> None:
    calls = [make_request(1.0, user="alice"), make_request(2.0, user="bob")]
    assert [numbers(a) for a in await asyncio.wait_for(gather(batcher(4, 0.02), calls), 60)] == [[2.0], [4.0]]


async def test_tensors_of_cancelled_calls_are_freed_while_the_worker_is_busy(pool: RecordingPool, batcher: Any) -> None:
    pool.gate.clear()
    queue = batcher(8)
    running = asyncio.ensure_future(begin(queue, make_request(1.0)))
    await asyncio.sleep(0.01)
    request: Any = make_request(2.0)
    reference = weakref.ref(request.call.inputs["x"].data)
    waiting = asyncio.ensure_future(begin(queue, request))
    await asyncio.sleep(0.01)
    waiting.cancel()
    await asyncio.wait({waiting})
    del request, waiting
    gc.collect()
    assert reference() is None
    pool.gate.set()
    assert numbers(await running) == [2.0]


async def test_closing_fails_queued_calls(pool: RecordingPool, batcher: Any) -> None:
    pool.capacity = 2
    queue = batcher(2)
    pool.gate.clear()
    alone = [asyncio.ensure_future(begin(queue, make_request(float(i)))) for i in range(2)]  # the pool's
    await asyncio.sleep(0)
    calls = [asyncio.ensure_future(begin(queue, make_request(float(i)))) for i in range(4)]
    alone[0].cancel()  # so that the first batch begins
    await asyncio.sleep(0.01)
    await queue.close()
    assert pool.cancelled == 2
    results = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 60)
    assert [type(r) for r in results] == [NotReady] * 4
    assert [str(r) for r in results[2:]] == ["the model is unloading"] * 2
    pool.gate.set()
    assert numbers(await alone[1]) == [2.0]


@pytest.mark.parametrize("turns", range(5))
async def test_closing_fails_a_call_at_every_stage(pool: RecordingPool, batcher: Any, turns: int) -> None:
    pool.gate.clear()
    queue = batcher(2)
    first = asyncio.ensure_future(begin(queue, make_request()))
    await asyncio.sleep(0)
    call = asyncio.ensure_future(begin(queue, make_request(1.0)))
    first.cancel()
    await asyncio.sleep(0)
    for _ in range(turns):
        await asyncio.sleep(0)
    await queue.close()
    with pytest.raises(NotReady, match=r"the (model is unloading|server is stopping)"):
        await asyncio.wait_for(call, 60)


@pytest.mark.parametrize("turns", range(6))
async def test_a_call_can_be_cancelled_at_every_stage(pool: RecordingPool, batcher: Any, turns: int) -> None:
    pool.gate.clear()
    queue = batcher(8)
    calls = [asyncio.ensure_future(begin(queue, make_request(float(i)))) for i in range(2)]
    for _ in range(turns):
        await asyncio.sleep(0)
    for call in calls:
        call.cancel()
    results = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 60)
    assert [type(r) for r in results] == [asyncio.CancelledError] * 2
    pool.gate.set()
    assert numbers(await asyncio.wait_for(begin(queue, make_request(3.0)), 60)) == [6.0]
    assert pool.batches[-1] == 1


async def test_closing_cancels_the_timer_of_a_waiting_batch(pool: RecordingPool, batcher: Any) -> None:
    queue = batcher(8, 0.3)
    call = asyncio.ensure_future(begin(queue, make_request(1.0)))
    await asyncio.sleep(0)
    await queue.close()
    with pytest.raises(NotReady):
        await call
    await asyncio.sleep(0.4)
    assert not pool.batches


@pytest.mark.parametrize("others", [[], [2.0, 3.0]])
async def test_an_unexpected_error_fails_every_call_of_the_batch(
    pool: RecordingPool, batcher: Any, others: list[float]
) -> None:
    requests = [make_request(FATAL), *map(make_request, others)]
    results = await asyncio.wait_for(gather_while_busy(pool, batcher(8), requests), 60)
    assert [type(a) for a in results] == [ZeroDivisionError] * (1 + len(others))


async def test_a_cancelled_batch_fails_its_calls(pool: RecordingPool, batcher: Any) -> None:
    pool.gate.clear()
    before = asyncio.all_tasks()
    queue = batcher(8)
    first = asyncio.ensure_future(begin(queue, make_request()))
    await asyncio.sleep(0)
    call = asyncio.ensure_future(begin(queue, make_request(1.0)))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.sleep(0.01)
    (work,) = asyncio.all_tasks() - before - {call}
    work.cancel()
    with pytest.raises(NotReady, match="the server is stopping"):
        await asyncio.wait_for(call, 60)


async def test_batches_are_filled_up_to_max_rows(pool: RecordingPool, batcher: Any) -> None:
    await gather(batcher(4, 10.0), [make_request(1.0, 2.0, 3.0), make_request(4.0)])
    requests = [make_request(1.0, 2.0, 3.0), make_request(4.0, 5.0), make_request(6.0)]
    await gather_while_busy(pool, batcher(4), requests)
    assert pool.batches == [4, 0, 3, 3]


class CountingPool(RecordingPool):
    """A pool that counts how often its capacity is read."""

    capacity_reads = 0

    def __getattribute__(self, name: str) -> Any:
        if name == "capacity":
            self.capacity_reads += 1
        return super().__getattribute__(name)


async def test_calls_of_one_loop_iteration_are_dispatched_together() -> None:
    pool = CountingPool()
    pool.gate.clear()
    queue: Any = Batcher(pool, 8, 0.0)
    calls = [asyncio.ensure_future(begin(queue, make_request(float(i)))) for i in range(50)]
    await asyncio.sleep(0.01)
    assert pool.capacity_reads < 5
    pool.gate.set()
    assert [numbers(await call) for call in calls] == [[2.0 * i] for i in range(50)]


async def test_a_waiting_batch_does_not_keep_the_event_loop_busy() -> None:
    pool = CountingPool()
    queue: Any = Batcher(pool, 8, 0.05, delay_fraction=20.0)
    await gather_while_busy(pool, queue, [make_request(1.0), make_request(2.0)])
    first = asyncio.ensure_future(begin(queue, make_request(3.0)))
    assert numbers(await first) == [6.0]
    assert pool.capacity_reads < 20


async def test_the_rest_of_a_key_goes_to_the_end_of_the_queue(pool: RecordingPool, batcher: Any) -> None:
    pool.gate.clear()
    queue = batcher(2)
    running = asyncio.ensure_future(begin(queue, make_request(0.0)))
    await asyncio.sleep(0.01)
    calls = [make_request(float(i), user="alice") for i in range(5)] + [make_request(9.0, user="bob")]
    waiting = asyncio.ensure_future(gather(queue, calls))
    await asyncio.sleep(0.01)
    pool.gate.set()
    await running
    assert [numbers(result) for result in await waiting] == [[0.0], [2.0], [4.0], [6.0], [8.0], [18.0]]
    assert pool.batches == [1, 2, 1, 2, 1]  # the first, alice's, bob's, alice's
