"""Coroutines that start without a task and continue in one."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest

from dragoman.system.coroutines import Pending, Start, begin, ensure_task

T = TypeVar("T")


async def call_without_task(function: Callable[[], T]) -> T:
    """Call `function` from the event loop, outside of any task, and return its result."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    loop.call_soon(lambda: future.set_result(function()))
    return await future


def start(coroutine: Coroutine[Any, Any, Any]) -> Start[Any]:
    return Start(coroutine, asyncio.get_running_loop())


async def returns_immediately() -> int:
    assert asyncio.current_task() is None
    return 7


async def continues_in_task(value: int) -> int:
    await ensure_task()
    async with asyncio.timeout(60):
        await asyncio.sleep(0)
        return value


async def test_a_coroutine_that_does_not_wait_needs_no_task() -> None:
    started = await call_without_task(lambda: start(returns_immediately()))
    assert (started.task, started.result, started.error) == (None, 7, None)


async def fails() -> None:
    raise ValueError("no")


async def test_start_keeps_the_error() -> None:
    started = await call_without_task(lambda: start(fails()))
    assert started.task is None
    assert isinstance(started.error, ValueError)


async def test_a_coroutine_that_waits_continues_in_a_task() -> None:
    started = await call_without_task(lambda: start(continues_in_task(3)))
    assert started.task is not None
    assert await started.task == 3


async def test_cancelling_a_task_before_its_first_step_cancels_the_coroutine() -> None:
    events: list[str] = []

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            events.append("cancelled")
            raise

    started = await call_without_task(lambda: start(waits()))
    assert started.task is not None
    started.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await started.task
    assert events == ["cancelled"]


async def test_cancelling_a_task_before_its_first_step_cancels_the_awaited_future() -> None:
    work = asyncio.ensure_future(asyncio.Event().wait())
    await asyncio.sleep(0)

    async def waits() -> None:
        await asyncio.gather(work)

    started = await call_without_task(lambda: start(waits()))
    assert started.task is not None
    started.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await started.task
    assert work.cancelled()


async def test_a_pending_coroutine_continues_when_awaited() -> None:
    pending = begin(continues_in_task(4))
    assert isinstance(pending, Pending)
    assert await pending == 4
    assert begin(asyncio.sleep(0)) is not None
    with pytest.raises(ValueError, match="no"):
        begin(fails())


async def test_errors_are_thrown_into_a_pending_coroutine() -> None:
    events: list[str] = []

    async def waits() -> str:
        for _ in range(2):
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                events.append("cancelled")
        return "done"

    async def awaits() -> str:
        pending = begin(waits())
        assert isinstance(pending, Pending)
        return await pending

    task = asyncio.ensure_future(awaits())
    for _ in range(2):
        await asyncio.sleep(0)
        task.cancel()
    assert await task == "done"
    assert events == ["cancelled", "cancelled"]


async def test_closing_a_pending_coroutine_runs_its_cleanup() -> None:
    events: list[str] = []

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            events.append("closed")

    pending = begin(waits())
    assert isinstance(pending, Pending)
    pending.close()
    assert events == ["closed"]


async def test_context_variables_do_not_leak_from_a_first_step() -> None:
    from contextvars import ContextVar

    name: ContextVar[str] = ContextVar("name", default="")

    async def sets() -> None:
        name.set("mine")

    def start_and_get() -> str:
        start(sets())
        return name.get()

    assert await call_without_task(start_and_get) == ""
