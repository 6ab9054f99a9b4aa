"""A queue of calls with priorities, a limit and a timeout, for models that have a schedule policy."""

import asyncio
import bisect
import time
from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from msgspec import structs

from dragoman.core.calls import Infer, Request
from dragoman.core.errors import Overloaded
from dragoman.core.schedule import PRIORITY, TIMEOUT, ScheduleOptions
from dragoman.core.tensor import NONE
from dragoman.engine.batching import Batcher, Key, Member
from dragoman.system.request_context import get_context
from dragoman.workers.pool import Pool

# Parameters that order the queue. The model does not see them: they must not keep calls from being merged.
_PARAMETERS = (PRIORITY, TIMEOUT)
# Offset between the levels of the order, larger than any clock: all calls of a level come before the next level, and
# within a level those that have waited too long come last.
_LEVEL_S = 1e9


@dataclass(slots=True, eq=False)
class _ScheduledMember(Member):
    level: int = 1
    order: tuple[int, bool, float] = field(default=(0, False, 0.0))


class ScheduledBatcher(Batcher):
    """A batcher whose queue has the order and the limits of `options`. Calls that cannot be merged wait in it too."""

    def __init__(
        self,
        pool: Pool,
        max_rows: int,
        max_wait_s: float,
        delay_fraction: float,
        model: str,
        options: ScheduleOptions,
        *,
        accepts_larger: bool,
        by_owner: bool,
    ) -> None:
        super().__init__(
            pool, max_rows, max_wait_s, delay_fraction, model, accepts_larger=accepts_larger, by_owner=by_owner
        )
        self._options = options

    def begin(self, request: Request[Any]) -> Coroutine[Any, Any, Any]:
        """Return a coroutine that answers any call; it raises Overloaded if the queue is full or the wait too long."""
        return self._call_in_order(request)

    async def _call_in_order(self, request: Request[Any]) -> Any:
        options, loop, now_s = self._options, asyncio.get_running_loop(), time.monotonic()
        call: Any = request.call
        parameters = call.parameters if isinstance(call, Infer) else NONE
        level = options.level(parameters.get(PRIORITY))
        if not parameters.keys().isdisjoint(_PARAMETERS):
            rest = {name: value for name, value in parameters.items() if name not in _PARAMETERS}
            call = structs.replace(call, parameters=rest)
            request = structs.replace(request, call=call)
        key, count = self._key(request)
        waiting = sum(m.level == level for queue in self._waiting.values() for m in queue)  # type: ignore[attr-defined]
        policy = options.policy(level)
        if 0 < policy.max_queue_size <= waiting:
            raise Overloaded("Exceeds maximum queue size")
        member = _ScheduledMember(
            request, call, count, loop.create_future(), now_s, get_context(),
            level=level, order=(level, False, now_s),
        )  # fmt: skip
        self._insert(key, member)
        self._dispatch_soon()
        wait_s = policy.wait_s(parameters)
        timer = loop.call_later(wait_s, self._expire, key, member) if wait_s else None
        try:
            return await member.answer
        except asyncio.CancelledError:
            self._cancel(key, member)
            raise
        finally:
            if timer is not None:
                timer.cancel()

    def _key(self, request: Request[Any]) -> tuple[Key, int]:
        """Return the key and the number of rows of a call; one that cannot be merged has a key of its own."""
        if self.max_rows <= 1:
            return (), 1
        count = self._rows(request)
        return (self._group_key(request), count) if count is not None else ((object(),), 1)

    def _insert(self, key: Key, member: _ScheduledMember) -> None:
        queue: deque[Any] = self._waiting.setdefault(key, deque())
        queue.insert(bisect.bisect(queue, member.order, key=lambda other: other.order), member)

    def _expire(self, key: Key, member: _ScheduledMember) -> None:
        """Reject or delay a call that still waits."""
        if member.batch is not None or member.answer.done():
            return
        self._forget(key, member)
        if self._options.policy(member.level).timeout_action == "reject":
            member.fail(Overloaded("Request timeout expired"))
            return
        member.order = member.level, True, member.arrived_s
        self._insert(key, member)

    def _wait_s(self, queue: deque[Any], delay_s: float, now_s: float) -> float:
        """Return how long a batch still waits. Ready batches get negative values, which sort by their order."""
        wait_s = super()._wait_s(queue, delay_s, now_s)
        if wait_s > 0:
            return wait_s
        first: _ScheduledMember = queue[0]
        level, is_delayed, arrived_s = first.order
        return (2 * level + is_delayed) * _LEVEL_S + arrived_s - 1e12
