"""A coroutine's first step, taken at once: what need not wait is done without a task and without a turn of the loop."""

import asyncio
import types
from collections.abc import Coroutine, Generator
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Waiting:
    """What a coroutine waits for after its first step; `resumed` goes on from there."""

    on: Any


def begun(coroutine: Coroutine[Any, Any, T]) -> T | Waiting:
    """The coroutine's result where it does not have to wait, else what it waits for. Raises what it raises."""
    try:
        return Waiting(coroutine.send(None))
    except StopIteration as end:
        result: T = end.value
        return result


@types.coroutine
def resumed(coroutine: Coroutine[Any, Any, T], waiting: Waiting) -> Generator[Any, Any, T]:
    """Await the rest of a coroutine that has begun."""
    awaited = waiting.on
    try:
        while True:
            try:
                sent = yield awaited
            except GeneratorExit:
                coroutine.close()
                raise
            except BaseException as fault:
                awaited = coroutine.throw(fault)
            else:
                awaited = coroutine.send(sent)
    except StopIteration as end:
        result: T = end.value
        return result


class _Rest(Coroutine[Any, Any, T]):
    """A coroutine that has begun, for a task: one that is cancelled before its first turn must still reach it."""

    __slots__ = ("_coroutine", "_waiting")

    def __init__(self, coroutine: Coroutine[Any, Any, T], waiting: Waiting) -> None:
        self._coroutine = coroutine
        self._waiting: Waiting | None = waiting

    def send(self, value: Any) -> Any:
        waiting, self._waiting = self._waiting, None
        return self._coroutine.send(value) if waiting is None else waiting.on

    def throw(self, *fault: Any) -> Any:
        waiting, self._waiting = self._waiting, None
        # A task that is cancelled cancels what it waits for, and goes on when that has ended.
        if waiting is not None and hasattr(waiting.on, "cancel") and waiting.on.cancel():
            return waiting.on
        return self._coroutine.throw(*fault)

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, T]:
        raise NotImplementedError("it is for a task")


class Start(Generic[T]):
    """A coroutine started in a context of its own: `task` is None where its `result` or `fault` is there already.

    Code that runs in the first step finds no current task; that which needs one awaits `in_task()` before.
    """

    __slots__ = ("fault", "result", "task")

    def __init__(self, coroutine: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop) -> None:
        self.task: asyncio.Task[T] | None = None
        self.result: T | None = None
        self.fault: BaseException | None = None
        context = copy_context()
        try:
            waiting = Waiting(context.run(coroutine.send, None))
        except StopIteration as end:
            self.result = end.value
        except (Exception, asyncio.CancelledError) as fault:
            # Without the frame of this call, which would keep itself and all that the coroutine had in its hands.
            self.fault = fault.with_traceback(fault.__traceback__ and fault.__traceback__.tb_next)
        else:
            self.task = loop.create_task(_Rest(coroutine, waiting), context=context)


async def in_task() -> None:
    """Returns in a task; a coroutine that was begun without one gets it by waiting for a turn of the loop."""
    if asyncio.current_task() is None:
        await asyncio.sleep(0)
