"""Calls, errors and cancellation, the same in every worker pool."""

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from dragoman.core.errors import (
    DeadlineExceeded,
    DragomanError,
    InvalidInput,
    InvalidOutput,
    ModelFailed,
    NotReady,
    WorkerLost,
)
from dragoman.system.coroutines import complete
from dragoman.system.threads import limit_library_threads
from dragoman.workers import local
from workers.workers_harness import PLACEMENTS, call, first_value, make_request, pool_of, wait_until

every_placement = pytest.mark.parametrize("placement", PLACEMENTS)


ERRORS: dict[str, tuple[type[DragomanError], str]] = {
    "value": (ModelFailed, "model 'm' failed: ValueError: seven is not allowed"),
    "input": (InvalidInput, "input 'x' is bad"),
    "own": (InvalidInput, "mine"),
    "exit": (ModelFailed, "model 'm' failed: SystemExit: 3"),
    "panic": (ModelFailed, "model 'm' failed: PanicException: index out of bounds"),
    "none": (InvalidOutput, "model 'm' failed: expected outputs, got None"),
    "cancelled": (ModelFailed, "model 'm' failed: CancelledError: "),
}


@every_placement
@pytest.mark.parametrize("model", ["Actions", "AsyncActions"])
async def test_errors_reach_the_caller(placement: str, model: str) -> None:
    async with pool_of(placement, model) as pool:
        for do, (error, message) in ERRORS.items():
            for _ in range(2):
                with pytest.raises(error) as caught:
                    await call(pool, do=do)
                assert caught.value.message == message
                with pytest.raises(error):
                    await anext(pool.stream(make_request(do=do)))
            assert first_value(await call(pool, do="pid")) > 0


@every_placement
async def test_outputs_are_checked(placement: str) -> None:
    async with pool_of(placement, "Strict") as pool:
        with pytest.raises(InvalidOutput, match="model 'm' failed: output 'y' is missing"):
            await call(pool, do="pid")


@every_placement
@pytest.mark.parametrize("model", ["Echo", "AsyncEcho", "Count", "AsyncCount"])
async def test_calls_after_their_deadline_do_not_run(placement: str, model: str) -> None:
    async with pool_of(placement, model) as pool:
        late = make_request(1, deadline_s=time.monotonic() - 1)
        with pytest.raises(DeadlineExceeded, match="Request timeout expired"):
            await complete(pool.call(late))
        with pytest.raises(DeadlineExceeded):
            await anext(pool.stream(late))
        assert first_value(await call(pool, 1, deadline_s=time.monotonic() + 60)) >= 0


@every_placement
async def test_concurrent_calls_get_their_own_responses(placement: str) -> None:
    for model in ("Echo", "AsyncEcho"):
        async with pool_of(placement, model) as pool:
            responses = await asyncio.gather(*(call(pool, n) for n in range(300)))
            assert [first_value(a) for a in responses] == list(range(300))


@every_placement
async def test_error_of_a_model_that_cannot_be_loaded(placement: str) -> None:
    with pytest.raises(ModelFailed, match="failed to load 'm', RuntimeError: no weights here"):
        async with pool_of(placement, "Unloadable"):
            pass


@pytest.mark.parametrize("placement", ["thread", "process"])
async def test_a_load_over_its_limit_fails(placement: str) -> None:
    with pytest.raises(
        ModelFailed, match=r"failed to load 'm', it took more than 0.05 s \(load_timeout_s, and a second"
    ):
        async with pool_of(placement, "LoopsInLoad", load_timeout_s=0.05):
            pass


@every_placement
async def test_a_closed_pool_is_not_ready_and_rejects_calls(placement: str, tmp_path: Path) -> None:
    async with pool_of(placement, "RecordsClose", parameters={"closed": str(tmp_path / "closed")}) as pool:
        ready = pool.ready
        assert ready
        assert pool.capacity == 1
        await pool.close()
        ready = pool.ready
        assert not ready
        assert (tmp_path / "closed").exists()
        with pytest.raises(NotReady, match="unloading"):
            await call(pool)
        with pytest.raises(NotReady, match="unloading"):
            await anext(pool.stream(make_request()))


@pytest.mark.parametrize("placement", ["thread", "process"])
async def test_cancelled_calls_release_their_tensors_while_the_worker_is_busy(placement: str, tmp_path: Path) -> None:
    async with pool_of(placement, "Actions") as pool:
        running = asyncio.create_task(call(pool, do="hold", begun=tmp_path / "begun", go=tmp_path / "go"))
        await wait_until((tmp_path / "begun").exists)
        references = []
        waiting = []
        for n in range(3):
            request: Any = make_request(n, do="pid")
            references.append(weakref.ref(request.call.inputs["n"].data))
            waiting.append(asyncio.create_task(complete(pool.call(request))))
        del request
        await asyncio.sleep(0.05)
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)
        waiting.clear()
        del task
        gc.collect()
        assert [ref() for ref in references] == [None] * 3
        (tmp_path / "go").touch()
        assert first_value(await running) > 0


async def test_an_idle_thread_releases_tensors() -> None:
    async with pool_of("thread", "Actions") as pool:
        request: Any = make_request(do="pid")
        input_reference = weakref.ref(request.call.inputs["n"].data)
        response = await complete(pool.call(request))
        output_reference = weakref.ref(response.outputs["pid"].data)
        del request, response
        gc.collect()
        await wait_until(lambda: input_reference() is None and output_reference() is None)


async def check_release_of_failed_call(placement: str, collect: Callable[[], object], **parameters: Any) -> None:
    """Check that the input of a failed call is freed by `collect`, which runs after the call, and by nothing else."""
    async with pool_of(placement, "Actions") as pool:
        request: Any = make_request(do="own", **parameters)  # an error that is not logged: pytest keeps the log
        reference = weakref.ref(request.call.inputs["n"].data)
        gc.disable()
        try:
            with suppress(DragomanError):
                await complete(pool.call(request))
            del request
            collect()
            await wait_until(lambda: reference() is None)
        finally:
            gc.enable()


async def test_failed_calls_release_their_tensors_without_the_garbage_collector() -> None:
    await check_release_of_failed_call("process", lambda: None)


async def test_failed_calls_of_a_thread_release_their_tensors_without_a_full_collection() -> None:
    """What existed during the call is old when it fails: a cycle with it would stay until a full collection."""
    await check_release_of_failed_call("thread", lambda: gc.collect(1), full_collection=True)


@every_placement
async def test_capacity_of_an_async_model(placement: str) -> None:
    async with pool_of(placement, "AsyncEcho", replicas=2) as pool:
        assert pool.capacity == 128


@pytest.mark.parametrize("placement", ["inline", "thread"])
async def test_line_breaks_in_request_ids_are_escaped_in_the_log(
    placement: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with pool_of(placement, "Actions") as pool:
        with pytest.raises(ModelFailed):
            await complete(pool.call(structs.replace(make_request(do="value"), id="a\nERROR forged")))
    assert r"failed on request 'a\nERROR forged'" in caplog.messages[-1]


@pytest.mark.parametrize(
    ("placement", "model"), [("thread", "Actions"), ("process", "Actions"), *((p, "AsyncActions") for p in PLACEMENTS)]
)
async def test_running_and_queued_calls_fail_on_close(placement: str, model: str, tmp_path: Path) -> None:
    request = make_request(do="hold", begun=tmp_path / "begun", go=tmp_path / "go", cancelled=tmp_path / "cancelled")
    async with pool_of(placement, model) as pool:
        calls = [asyncio.create_task(complete(pool.call(request))) for _ in range(4)]
        await wait_until((tmp_path / "begun").exists)
        closing = asyncio.create_task(pool.close())
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(r) for r in results] == [NotReady] * 4
        (tmp_path / "go").touch()
        await closing
    gc.collect()


@pytest.mark.parametrize("placement", PLACEMENTS)
async def test_a_running_async_call_is_cancelled(placement: str, tmp_path: Path) -> None:
    request = make_request(do="hold", begun=tmp_path / "begun", go=tmp_path / "go", cancelled=tmp_path / "cancelled")
    async with pool_of(placement, "AsyncActions") as pool:
        task = asyncio.create_task(complete(pool.call(request)))
        await wait_until((tmp_path / "begun").exists)
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()
        await wait_until((tmp_path / "cancelled").exists)
        assert first_value(await call(pool, do="pid")) > 0


@pytest.mark.parametrize("placement", ["thread", "process"])
async def test_cancelled_queued_calls_do_not_run(placement: str, tmp_path: Path) -> None:
    async with pool_of(placement, "Actions") as pool:
        running = asyncio.create_task(call(pool, do="hold", begun=tmp_path / "begun", go=tmp_path / "go"))
        await wait_until((tmp_path / "begun").exists)
        # The first of them is already in the worker's socket.
        waiting = [
            asyncio.create_task(call(pool, do="hold", begun=tmp_path / f"b{n}", go=tmp_path / "go")) for n in range(3)
        ]
        last = asyncio.create_task(call(pool, do="pid"))
        await asyncio.sleep(0)
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)
        (tmp_path / "go").touch()
        assert first_value(await running) == first_value(await last)
        assert not list(tmp_path.glob("b[0-9]"))


async def test_a_pool_whose_threads_have_ended_is_not_ready_and_its_calls_fail(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ends = threading.Event()

    def limit(_replicas: int, *, of_thread: bool = False) -> None:
        if of_thread:
            ends.wait(60)
            raise SystemExit(3)

    monkeypatch.setattr(local, "limit_library_threads", limit)
    async with pool_of("thread", "Actions") as pool:
        waiting = asyncio.create_task(call(pool, do="pid"))
        await asyncio.sleep(0)
        states = [pool.ready]
        ends.set()
        async with asyncio.timeout(60):
            for attempt in (waiting, call(pool, do="pid")):
                with pytest.raises(WorkerLost, match="the thread that runs it has ended: SystemExit: 3"):
                    await attempt
        assert [*states, pool.ready] == [True, False]
        assert "has ended" in pool.unavailable


def test_threads_of_libraries_that_cannot_be_limited_are_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    threadpoolctl = pytest.importorskip("threadpoolctl")

    def fail(**_: object) -> None:
        raise AttributeError("'NoneType' object has no attribute 'split'")

    monkeypatch.setattr(threadpoolctl, "threadpool_limits", fail)
    limit_library_threads(2, of_thread=True)
    assert "cannot be limited" in caplog.text
