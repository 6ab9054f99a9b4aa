"""A queue of calls with priorities, a limit and a timeout, for models that have a schedule policy."""

import asyncio
import time
from collections import deque
from collections.abc import Coroutine, Sequence
from itertools import chain
from typing import Any

from msgspec import structs

from dragoman.core.calls import Infer, Request
from dragoman.core.schedule import PRIORITY, TIMEOUT, Order, QueuePolicy, ScheduleOptions
from dragoman.core.tensor import NONE
from dragoman.engine.batching import Batcher, Key, Member
from dragoman.system.request_context import get_context
from dragoman.workers.pool import Pool

# Parameters that order the queue. The model does not see them: they must not keep calls from being merged.
_PARAMETERS = (PRIORITY, TIMEOUT)


class _ScheduledMember(Member, eq=False):
    order: Order = (1, False, 0)


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
        self._policy = QueuePolicy(options)
        self._waiting: Any  # queues of `_ScheduledMember`, each in the order of the policy

    def begin(self, request: Request[Any]) -> Coroutine[Any, Any, Any]:
        """Return a coroutine that answers any call; it raises Overloaded if the queue is full or the wait too long."""
        return self._call_in_order(request)

    async def _call_in_order(self, request: Request[Any]) -> Any:
        loop = asyncio.get_running_loop()
        call: Any = request.call
        parameters = call.parameters if isinstance(call, Infer) else NONE
        if not parameters.keys().isdisjoint(_PARAMETERS):
            rest = {name: value for name, value in parameters.items() if name not in _PARAMETERS}
            call = structs.replace(call, parameters=rest)
            request = structs.replace(request, call=call)
        key, count = self._key(request)
        member = _ScheduledMember(request, call, count, loop.create_future(), time.monotonic(), get_context())
        queue: deque[Any] = self._waiting.get(key) or deque()
        wait_s = self._policy.put(queue, member, parameters, chain.from_iterable(self._waiting.values()))
        self._waiting[key] = queue
        self._dispatch_soon()
        timer = loop.call_later(wait_s, self._expire, key, member) if wait_s else None
        try:
            return await self._wait_for_answer(key, member)
        finally:
            if timer is not None:
                timer.cancel()

    def _key(self, request: Request[Any]) -> tuple[Key, int]:
        """Return the key and the number of rows of a call; one that cannot be merged has a key of its own."""
        if self.max_rows <= 1:
            return (), 1
        count = self._rows(request)
        return (self._group_key(request), count) if count is not None else ((object(),), 1)

    def _expire(self, key: Key, member: _ScheduledMember) -> None:
        """Reject or delay a call that still waits."""
        if member.batch is not None or member.answer.done():
            return
        queue = self._waiting[key]
        error = self._policy.expire(queue, member)
        if error is not None:
            member.fail(error)
        if not queue:
            del self._waiting[key]

    def _next(self, ready: Sequence[Key]) -> Key:
        """Return the key whose first call is the next one."""
        return min(ready, key=lambda key: self._waiting[key][0].order)

    def _rank(self, member: _ScheduledMember) -> tuple[Any, ...]:
        """Return the level of a call, and whether it has waited too long: owners share what a level gets."""
        return member.order[:2]
