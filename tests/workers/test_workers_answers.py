"""Every pool gives the same answers, streams and errors."""

import asyncio
import gc
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from workers_harness import PLACES, ask, first, pool_of, until

from dragoman.core.errors import (
    DeadlineExceeded,
    DragomanError,
    InvalidInput,
    InvalidOutput,
    ModelFailed,
    NotReady,
)
from dragoman.system.coroutines import complete

everywhere = pytest.mark.parametrize("place", PLACES)


@everywhere
@pytest.mark.parametrize("model", ["Acts", "AsyncActs"])
@pytest.mark.parametrize(
    ("do", "kind", "message"),
    [
        ("value", ModelFailed, "model 'm' failed: ValueError: seven is not allowed"),
        ("input", InvalidInput, "input 'x' is bad"),
        ("own", InvalidInput, "mine"),
        ("exit", ModelFailed, "model 'm' failed: SystemExit: 3"),
        ("none", InvalidOutput, "model 'm' failed: expected outputs, got None"),
    ],
)
async def test_errors_reach_the_caller(
    place: str, model: str, do: str, kind: type[DragomanError], message: str
) -> None:
    async with pool_of(place, model) as pool:
        for _ in range(2):
            with pytest.raises(kind) as caught:
                await complete(pool.call(ask(do=do)))
            assert caught.value.message == message
            with pytest.raises(kind):
                await anext(pool.stream(ask(do=do)))
        assert first(await complete(pool.call(ask(do="pid")))) > 0


@everywhere
@pytest.mark.parametrize("model", ["Acts", "AsyncActs"])
async def test_a_cancellation_of_the_models_own_is_a_fault(place: str, model: str) -> None:
    async with pool_of(place, model) as pool:
        with pytest.raises(ModelFailed, match="CancelledError"):
            await complete(pool.call(ask(do="cancelled")))
        assert first(await complete(pool.call(ask(do="pid")))) > 0


@everywhere
async def test_outputs_are_checked(place: str) -> None:
    async with pool_of(place, "Strict") as pool:
        with pytest.raises(InvalidOutput, match="model 'm' failed: output 'y' is missing"):
            await complete(pool.call(ask(do="pid")))


@everywhere
@pytest.mark.parametrize("model", ["Echo", "AsyncEcho", "Count", "AsyncCount"])
async def test_a_call_that_is_too_late_does_not_run(place: str, model: str) -> None:
    async with pool_of(place, model) as pool:
        late = ask(1, deadline_s=time.monotonic() - 1)
        with pytest.raises(DeadlineExceeded, match="Request timeout expired"):
            await complete(pool.call(late))
        with pytest.raises(DeadlineExceeded):
            await anext(pool.stream(late))
        assert first(await complete(pool.call(ask(1, deadline_s=time.monotonic() + 60)))) >= 0


@everywhere
async def test_many_at_once(place: str) -> None:
    for model in ("Echo", "AsyncEcho"):
        async with pool_of(place, model) as pool:
            answers = await asyncio.gather(*(complete(pool.call(ask(n))) for n in range(300)))
            assert [first(a) for a in answers] == list(range(300))


@everywhere
async def test_a_model_that_does_not_load(place: str) -> None:
    with pytest.raises(ModelFailed, match="failed to load 'm', RuntimeError: no weights here"):
        async with pool_of(place, "Unloadable"):
            pass


@everywhere
async def test_a_closed_pool_is_not_ready_and_refuses(place: str, tmp_path: Path) -> None:
    async with pool_of(place, "TellsClose", parameters={"closed": str(tmp_path / "closed")}) as pool:
        ready = pool.ready
        assert ready
        assert pool.capacity == 1
        await pool.close()
        ready = pool.ready
        assert not ready
        assert (tmp_path / "closed").exists()
        with pytest.raises(NotReady, match="unloading"):
            await complete(pool.call(ask()))
        with pytest.raises(NotReady, match="unloading"):
            await anext(pool.stream(ask()))


@pytest.mark.parametrize("place", ["thread", "process"])
async def test_a_cancelled_call_keeps_no_tensors_while_the_worker_is_busy(place: str, tmp_path: Path) -> None:
    async with pool_of(place, "Acts") as pool:
        running = asyncio.create_task(complete(pool.call(ask(do="hold", begun=tmp_path / "begun", go=tmp_path / "go"))))
        await until((tmp_path / "begun").exists)
        held = []
        waiting = []
        for n in range(3):
            request: Any = ask(n, do="pid")
            held.append(weakref.ref(request.call.inputs["n"].data))
            waiting.append(asyncio.create_task(complete(pool.call(request))))
        del request
        await asyncio.sleep(0.05)
        for call in waiting:
            call.cancel()
        await asyncio.wait(waiting)
        waiting.clear()
        del call
        gc.collect()
        assert [ref() for ref in held] == [None] * 3
        (tmp_path / "go").touch()
        assert first(await running) > 0


async def test_an_idle_thread_keeps_no_tensors() -> None:
    async with pool_of("thread", "Acts") as pool:
        request: Any = ask(do="pid")
        held = weakref.ref(request.call.inputs["n"].data)
        answer = await complete(pool.call(request))
        given = weakref.ref(answer.outputs["pid"].data)
        del request, answer
        gc.collect()
        await until(lambda: held() is None and given() is None, 2)


@everywhere
async def test_an_async_model_takes_many_calls_at_a_time(place: str) -> None:
    async with pool_of(place, "AsyncEcho", replicas=2) as pool:
        assert pool.capacity == 128


@pytest.mark.parametrize("place", ["inline", "thread"])
async def test_an_id_of_several_lines_is_one_line_of_the_log(place: str, caplog: pytest.LogCaptureFixture) -> None:
    async with pool_of(place, "Acts") as pool:
        with pytest.raises(ModelFailed):
            await complete(pool.call(structs.replace(ask(do="value"), id="a\nERROR forged")))
    assert r"failed on request 'a\nERROR forged'" in caplog.messages[-1]


@pytest.mark.parametrize(
    ("place", "model"), [("thread", "Acts"), ("process", "Acts"), *((p, "AsyncActs") for p in PLACES)]
)
async def test_calls_that_run_and_wait_fail_on_close(place: str, model: str, tmp_path: Path) -> None:
    asked = ask(do="hold", begun=tmp_path / "begun", go=tmp_path / "go", cancelled=tmp_path / "cancelled")
    async with pool_of(place, model) as pool:
        calls = [asyncio.create_task(complete(pool.call(asked))) for _ in range(4)]
        await until((tmp_path / "begun").exists)
        began_s = time.monotonic()
        closing = asyncio.create_task(pool.close())
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(r) for r in results] == [NotReady] * 4
        (tmp_path / "go").touch()
        await closing
        assert time.monotonic() - began_s < 3
    gc.collect()


@pytest.mark.parametrize("place", PLACES)
async def test_a_running_async_call_is_cancelled(place: str, tmp_path: Path) -> None:
    asked = ask(do="hold", begun=tmp_path / "begun", go=tmp_path / "go", cancelled=tmp_path / "cancelled")
    async with pool_of(place, "AsyncActs") as pool:
        call = asyncio.create_task(complete(pool.call(asked)))
        await until((tmp_path / "begun").exists)
        call.cancel()
        await asyncio.wait({call})
        assert call.cancelled()
        await until((tmp_path / "cancelled").exists)
        assert first(await complete(pool.call(ask(do="pid")))) > 0


@pytest.mark.parametrize("place", ["thread", "process"])
async def test_cancelled_calls_that_wait_do_not_run(place: str, tmp_path: Path) -> None:
    async with pool_of(place, "Acts") as pool:
        running = asyncio.create_task(complete(pool.call(ask(do="hold", begun=tmp_path / "begun", go=tmp_path / "go"))))
        await until((tmp_path / "begun").exists)
        # The first of them already lies in the worker's socket.
        waiting = [
            asyncio.create_task(complete(pool.call(ask(do="hold", begun=tmp_path / f"b{n}", go=tmp_path / "go"))))
            for n in range(3)
        ]
        last = asyncio.create_task(complete(pool.call(ask(do="pid"))))
        await asyncio.sleep(0)
        for call in waiting:
            call.cancel()
        await asyncio.wait(waiting)
        (tmp_path / "go").touch()
        assert first(await running) == first(await last)
        assert not list(tmp_path.glob("b[0-9]"))
