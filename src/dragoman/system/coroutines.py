"""Run a coroutine up to its first suspension at once, without a task."""

import asyncio
from collections.abc import Coroutine, Generator
from contextvars import Context, copy_context
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Pending(Generator[Any, Any, T], Coroutine[Any, Any, T]):
    """A coroutine that has run up to its first suspension: await it once, or make a task of it."""

    __slots__ = ("_coroutine", "_is_resumed", "_waits_for")

    def __init__(self, coroutine: Coroutine[Any, Any, T], waits_for: Any) -> None:
        self._coroutine = coroutine
        self._waits_for = waits_for
        self._is_resumed = False

    def send(self, value: Any) -> Any:
        return self._coroutine.send(value) if self._is_resumed else next(self)

    def throw(self, *error: Any) -> Any:
        if not self._is_resumed:
            waits_for = next(self)
            # A task that is cancelled before its first step cancels what the coroutine waits for, as it does later.
            if hasattr(waits_for, "cancel") and waits_for.cancel():
                return waits_for
        return self._coroutine.throw(*error)

    def close(self) -> None:
        self._coroutine.close()

    def __next__(self) -> Any:  # each step of a task
        if self._is_resumed:
            return self._coroutine.send(None)
        waits_for, self._waits_for = self._waits_for, None  # whose result may be large
        self._is_resumed = True
        return waits_for

    def __await__(self) -> Generator[Any, Any, T]:
        return self


def begin(coroutine: Coroutine[Any, Any, T]) -> T | Pending[T]:
    """Return the result of a coroutine that does not have to wait, else the rest of it. Raises what it raises.

    The first step runs in the caller's context, perhaps without a task: code that needs one awaits `ensure_task()`.
    """
    try:
        return Pending(coroutine, coroutine.send(None))
    except StopIteration as end:
        result: T = end.value
        return result


async def complete(result: T | Coroutine[Any, Any, T]) -> T:
    """Return a result, or await the coroutine that computes it."""
    return await result if isinstance(result, Coroutine) else result


class Start(Generic[T]):
    """A coroutine begun in a context of its own: `task` is None if its `result` or `error` is known already.

    `context`: its context variables, by default a copy of the current ones.
    """

    __slots__ = ("error", "result", "task")

    def __init__(
        self, coroutine: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop, context: Context | None = None
    ) -> None:
        self.task: asyncio.Task[T] | None = None
        self.result: T | None = None
        self.error: BaseException | None = None
        context = context or copy_context()
        try:
            pending = Pending(coroutine, context.run(coroutine.send, None))
        except StopIteration as end:
            self.result = end.value
        except BaseException as error:
            # Drop the frame of this call from the traceback: it would keep the coroutine's arguments alive.
            self.error = error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)
        else:
            self.task = loop.create_task(pending, context=context)


async def ensure_task() -> None:
    """Return in a task: a coroutine that was begun without one suspends for one turn of the event loop."""
    if asyncio.current_task() is None:
        await asyncio.sleep(0)
