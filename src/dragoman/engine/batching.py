"""Merge calls that are queued for a busy model into batches, and split the responses.

Without settings there is no timer: while a worker is idle a call is computed at once, and while all are busy calls
wait in a queue for each group, whose members are alike but for their rows (`group_key`). A worker that becomes idle
takes as many calls of the oldest group as a batch may have rows, so batches grow with the load. Two settings make an
idle worker wait for more calls: `max_batch_wait_s`, and `batch_linger`, which adapts (`BatchDelay`). A batch that
fails is computed again, each call alone, so that one call cannot fail others. Other rules for the order are in
`scheduled_batching`, and batches of sequences in `sequence_pool`. Calls of several owners share the workers by the time
that these compute (`FairShares`): the owner that was served least has the next call of each batch, and of the groups.

    a call is   where                             when it is cancelled
    at once     in its caller's task              the worker's computation is
    queued      `Batcher._waiting`                it leaves the queue
    in a batch  `Batcher._running`, `_Batch`      the computation is, if all calls of the batch are
    answered    its future has an answer          nothing happens
"""

import asyncio
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import structs

from dragoman.core import error_texts
from dragoman.core.bytes_tensor import came_as_text, concatenate
from dragoman.core.callers import ANYONE
from dragoman.core.calls import Infer, Inference, Request
from dragoman.core.errors import DeadlineExceeded, DragomanError, InvalidInput, InvalidOutput, NotReady
from dragoman.core.fair_share import FairShares
from dragoman.core.tensor import Parameters, Tensor
from dragoman.core.vector_binding import config_key
from dragoman.engine.batch_counters import BatchCounters, Reason
from dragoman.engine.batch_delay import BatchDelay
from dragoman.system.call_times import CallTimes
from dragoman.system.coroutines import complete
from dragoman.system.request_context import Context, get_context, request_id, set_context
from dragoman.workers.pool import Pool

log = logging.getLogger("dragoman.batching")
Key = tuple[Any, ...]

# Event loops count timers in milliseconds: for a shorter delay the clock is read once per turn.
_SHORT_S = 0.002

# Seconds that a row is expected to take before any was computed, and the number of batches of the moving average.
_FIRST_ROW_S = 0.001
_ROW_AVERAGE = 8.0

# --- pure functions -------------------------------------------------------------------------


def group_key(call: Infer) -> Key:
    """Return a key of names, datatypes, trailing shapes, outputs, parameters and config. Equal keys may be merged."""
    tensors = tuple(
        [
            (name, t.datatype.name, came_as_text(t), t.shape[1:], _parameters_key(t.parameters))
            for name, t in call.inputs.items()
        ]
    )
    config = config_key(call.config) if call.config else ""
    return tensors, call.outputs, _parameters_key(call.parameters), config


def _parameters_key(parameters: Parameters) -> Key:
    # The type belongs to the key: True, 1 and 1.0 are equal in Python and not to a model.
    return tuple(sorted((k, type(v).__name__, v) for k, v in parameters.items())) if parameters else ()


def rows(call: Infer, metadata: Mapping[str, str] | None = None) -> int | None:
    """Return the rows of a call that may be merged: all its inputs have the same number of them; else None.

    Calls with metadata or content types of outputs are not merged: they must not affect the responses of others.
    """
    if metadata or call.content_types:
        return None
    counts = {tensor.data.shape[:1] for tensor in call.inputs.values()}
    return sum(counts.pop()) if len(counts) == 1 and () not in counts else None


def merge(calls: Sequence[Infer]) -> Infer:
    """Return one call with the rows of all, in order. Their keys are equal."""
    first = calls[0]
    inputs = {name: concatenate([c.inputs[name] for c in calls]) for name in first.inputs}
    return structs.replace(first, inputs=inputs)


def split_rows(answer: Inference, counts: Sequence[int]) -> list[Inference]:
    """Return one response per call, as views. Raises InvalidOutput unless each output has as many rows as the batch."""
    total = sum(counts)
    for name, tensor in answer.outputs.items():
        if not tensor.data.shape or tensor.data.shape[0] != total:
            raise InvalidOutput(f"output '{name}': expected {total} rows for {total} rows in, got {tensor.data.shape}")
    responses, start = [], 0
    for count in counts:
        end = start + count
        outputs = {n: Tensor(t.data[start:end], t.datatype, t.parameters) for n, t in answer.outputs.items()}
        responses.append(Inference(outputs, answer.parameters))
        start = end
    return responses


# --- queue and dispatch ------------------------------------------------------------------


class Member(msgspec.Struct, eq=False):
    """A call in the queue or in a batch."""

    request: Request[Inference]
    call: Infer
    rows: int
    answer: asyncio.Future[Inference]
    arrived_s: float
    context: Context
    batch: "_Batch | None" = None
    charged_s: float = 0.0  # service of its owner that was charged when it was taken

    def succeed(self, answer: Inference) -> None:
        if not self.answer.done():
            self.answer.set_result(answer)

    def fail(self, error: Exception) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)


class _Batch:
    """Calls that are computed together. When the last of them is cancelled, the computation is cancelled."""

    __slots__ = ("active", "dispatched_s", "members", "work")

    def __init__(self, members: list[Member], dispatched_s: float) -> None:
        self.members = members
        self.dispatched_s = dispatched_s
        self.active = len(members)
        self.work: asyncio.Task[Any] | None = None
        for member in members:
            member.batch = self

    def cancel_one(self) -> None:
        self.active -= 1
        if not self.active and self.work is not None:
            self.work.cancel()


class Batcher:
    """Batches the calls of one model. An idle worker takes all queued calls at once; batches grow while all are busy.

    Parameters
    ----------
    max_rows : largest batch.
    max_wait_s : how long an incomplete batch waits for more calls even if a worker is idle.
    delay_fraction : see `BatchDelay`.
    model : name in log lines, which explain each batch at the level `debug`.
    accepts_larger : calls with more rows are computed without the batcher instead of being rejected.
    always_queues : a call waits for others of this turn of the event loop even if a worker is idle: a model that runs
        on the event loop always is.
    by_owner : only requests of one owner are merged, for a model that calls others in its name.
    """

    def __init__(
        self,
        pool: Pool,
        max_rows: int,
        max_wait_s: float,
        delay_fraction: float = 0.0,
        model: str = "",
        *,
        accepts_larger: bool = False,
        always_queues: bool = False,
        by_owner: bool = False,
    ) -> None:
        self._pool = pool
        self.max_rows = max_rows
        self._max_wait_s = max_wait_s
        self._delay = BatchDelay(delay_fraction)
        self._model = model
        self._accepts_larger = accepts_larger
        self._always_queues = always_queues or max_wait_s > 0
        self._by_owner = by_owner
        self.counters = BatchCounters(lambda: sum(map(len, self._waiting.values())))
        self._shares = FairShares()  # of the owners of queued calls
        self._row_s = _FIRST_ROW_S  # that a row takes, lately
        self._was_delayed = False  # the next batch waits for the adaptive delay
        self._was_busy = False  # calls wait because all workers are busy
        self._waiting: OrderedDict[Key, deque[Member]] = OrderedDict()
        self._running: dict[asyncio.Task[None], _Batch] = {}
        self._at_once = 0  # calls that run without a batch, because a worker was idle
        self._timer: asyncio.Handle | None = None
        self._soon = False
        pool.on_capacity = self._dispatch_soon

    def begin(self, request: Request[Any]) -> Coroutine[Any, Any, Any] | None:
        """Return a coroutine that answers a call, which may be merged with others; None if it must not be merged."""
        count = self._rows(request)
        return None if count is None else self._call(request, count)

    def _rows(self, request: Request[Any]) -> int | None:
        """Return the rows of a call that may be merged, else None. Raises InvalidInput if they are too many."""
        call = request.call
        count = rows(call, request.metadata) if isinstance(call, Infer) else None
        if count is not None and count > self.max_rows:
            if self._accepts_larger:
                return None
            raise InvalidInput(f"{error_texts.too_many_rows(self._model, self.max_rows)}, got {count}")
        return count

    def _group_key(self, request: Request[Any]) -> Key:
        """Return a key of an inference request. Requests with equal keys may be merged."""
        key = group_key(request.call)  # type: ignore[arg-type]
        return (request.caller.owner, *key) if self._by_owner else key

    async def _call(self, request: Request[Any], count: int) -> Inference:
        is_queued = self._always_queues or self._waiting or self._delay.is_active
        if not is_queued and self._has_idle_worker():
            return await self._call_at_once(request, count)
        assert isinstance(request.call, Infer)
        loop = asyncio.get_running_loop()
        member = Member(request, request.call, count, loop.create_future(), time.monotonic(), get_context())
        key = self._group_key(request)
        self._waiting.setdefault(key, deque()).append(member)
        self._dispatch_soon()  # at the end of this turn, so that calls that arrived together are merged
        answer: Inference = await self._wait_for_answer(key, member)
        return answer

    async def _wait_for_answer(self, key: Key, member: Member) -> Any:
        """Return the answer of a queued call, whose owner has a share meanwhile."""
        caller = member.request.caller
        if caller is not ANYONE:
            self._shares.enter(caller)
        try:
            return await member.answer
        except asyncio.CancelledError:
            self._cancel(key, member)
            raise
        finally:
            if caller is not ANYONE:
                self._shares.leave(caller)

    def _has_idle_worker(self) -> bool:
        return len(self._running) + self._at_once < self._pool.capacity

    async def _call_at_once(self, request: Request[Any], count: int) -> Inference:
        """Compute a call in the caller's task, since a worker is idle and there is no call to merge it with.

        With one client of W5 this takes 5 % (20 us) longer than without batching, instead of 14 % through the queue and
        a task.
        """
        start_s = time.monotonic()
        self._count((0.0,), count, (request.times,), get_context())
        self._at_once += 1
        try:
            answer: Inference = await complete(self._pool.call(request))
        finally:
            self._at_once -= 1
            if self._waiting:
                self._record_batch(1, start_s)
                self._dispatch_soon()
        self.counters.executions.count(count, request.times.compute_s)
        return answer

    def _record_batch(self, size: int, start_s: float) -> None:
        now_s = time.monotonic()
        self._delay.batch_finished(size, sum(map(len, self._waiting.values())), now_s - start_s, now_s)

    def _cancel(self, key: Key, member: Member) -> None:
        if member.batch is not None:
            member.request.times.started_s = member.batch.dispatched_s
            member.batch.cancel_one()
        elif (queue := self._waiting.get(key)) is not None and member in queue:
            queue.remove(member)  # its tensors are freed, even if the workers stay busy for long
            if not queue:
                del self._waiting[key]

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        waiting = [member for queue in self._waiting.values() for member in queue]
        self._waiting.clear()
        for member in waiting:
            member.fail(NotReady("the model is unloading"))
        running = dict(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for member in (member for batch in running.values() for member in batch.members):
            member.fail(NotReady("the model is unloading"))

    def _dispatch_soon(self) -> None:
        if not self._soon:
            self._soon = True
            asyncio.get_running_loop().call_soon(self._dispatch)

    def _wake(self, after_s: float, *, exactly: bool) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if exactly and after_s < _SHORT_S:
            self._dispatch_soon()
        else:
            self._timer = asyncio.get_running_loop().call_later(after_s, self._dispatch)

    def _dispatch(self) -> None:
        self._soon = False
        while self._waiting and self._has_idle_worker():
            now_s = time.monotonic()
            delay_s = self._delay.remaining_s(sum(map(len, self._waiting.values())), now_s)
            waits_s = {key: self._wait_s(queue, delay_s, now_s) for key, queue in self._waiting.items()}
            if not (ready := [key for key, wait_s in waits_s.items() if wait_s <= 0]):
                self._was_delayed = delay_s > 0
                self._wake(min(waits_s.values()), exactly=delay_s > 0)
                return
            is_shared = self._shares.is_shared
            key = self._next_fairly(ready) if is_shared else self._next(ready)
            queue = self._waiting.pop(key)
            members = self._take_fairly(queue) if is_shared else _take(queue, self.max_rows)
            if queue:  # the rest goes to the end, so that no key starves another
                self._waiting[key] = queue
            if members:
                waited_s = [now_s - member.arrived_s for member in members]
                times = [member.request.times for member in members]
                contexts = [member.context for member in members]
                if log.isEnabledFor(logging.DEBUG):
                    set_context(contexts)  # the log line is about these calls, not about the one that has just ended
                self._count(waited_s, sum(member.rows for member in members), times, contexts)
                batch = _Batch(members, now_s)
                task = asyncio.get_running_loop().create_task(self._run(batch))
                self._running[task] = batch
                task.add_done_callback(self._on_task_end)

        self._was_busy = bool(self._waiting)

    def _count(
        self,
        waits_s: Sequence[float],
        total: int,
        calls: Sequence[CallTimes],
        context: Context | list[Context],
    ) -> None:
        """Count a batch and why it is dispatched now, and explain that in the log at the level `debug`."""
        reason: Reason = "idle_worker"
        if total >= self.max_rows:
            reason = "full"
        elif 0 < self._max_wait_s <= waits_s[0]:
            reason = "max_wait"
        elif self._was_delayed:
            reason = "batch_delay"
        elif self._was_busy:
            reason = "worker_free"
        self._was_delayed = False
        self.counters.count(calls, total, reason)
        if log.isEnabledFor(logging.DEBUG):
            log.debug(
                "batch dispatched: model=%s reason=%s calls=%d rows=%d max_rows=%d oldest_waited_ms=%.3f running=%d "
                "workers=%d left_in_queue=%d request_ids=%s",
                self._model,
                reason,
                len(waits_s),
                total,
                self.max_rows,
                waits_s[0] * 1e3,
                len(self._running) + self._at_once,
                self._pool.capacity,
                sum(map(len, self._waiting.values())),
                request_id(context),
            )

    def _wait_s(self, queue: deque[Member], delay_s: float, now_s: float) -> float:
        if (self._max_wait_s <= 0 and delay_s <= 0) or sum(m.rows for m in queue) >= self.max_rows:
            return 0.0
        return max(delay_s, queue[0].arrived_s + self._max_wait_s - now_s, 0.0)

    def _next(self, ready: Sequence[Key]) -> Key:
        """Return the key of the next batch: the one that has waited the longest."""
        return ready[0]

    def _rank(self, _member: Any) -> tuple[Any, ...]:
        """Return what decides about the order of calls before the service of their owners."""
        return ()

    def _next_fairly(self, ready: Sequence[Key]) -> Key:
        """Return the key of the next batch, which has the first call of the owner that was served least."""
        served = self._shares.served

        def first(key: Key) -> tuple[Any, ...]:
            return min((self._rank(member), served(member.request.caller.owner)) for member in self._waiting[key])

        return min(ready, key=first)

    def _take_fairly(self, queue: deque[Member]) -> list[Member]:
        """Return the next batch, each call of the owner that was served least, as `_take` for one owner.

        What the calls will take is charged now; the difference to what they took in `_charge`.
        """
        shares = self._shares
        by_owner: dict[str, deque[Member]] = {}
        for member in queue:
            if not member.answer.done():
                by_owner.setdefault(member.request.caller.owner, deque()).append(member)
        members: list[Member] = []
        total = 0
        while by_owner:
            owner = min(by_owner, key=lambda each: (self._rank(by_owner[each][0]), shares.served(each)))
            member = by_owner[owner][0]
            if members and total + member.rows > self.max_rows:
                break
            by_owner[owner].popleft()
            if not by_owner[owner]:
                del by_owner[owner]
            members.append(member)
            total += member.rows
            member.charged_s = member.rows * self._row_s
            shares.charge(owner, member.charged_s)
        taken = set(map(id, members))
        rest = [member for member in queue if id(member) not in taken and not member.answer.done()]
        queue.clear()
        queue.extend(rest)
        return members

    def _charge(self, members: Sequence[Member], compute_s: float) -> None:
        """Count the seconds that a batch took as service of the owners of its calls, by their rows."""
        row_s = compute_s / max(1, sum(member.rows for member in members))
        self._row_s += (row_s - self._row_s) / _ROW_AVERAGE
        for member in members:
            self._shares.charge(member.request.caller.owner, member.rows * row_s - member.charged_s)
            member.charged_s = 0.0

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        del self._running[task]
        self._dispatch()

    async def _run(self, batch: _Batch) -> None:
        members, start_s = batch.members, time.monotonic()
        set_context([member.context for member in members])
        try:
            if len(members) == 1:
                await self._run_alone(batch)
            elif not await self._run_merged(batch):
                await asyncio.gather(
                    *(self._run_alone(_Batch([m], batch.dispatched_s)) for m in members if not m.answer.done())
                )
        except BaseException as error:
            for member in members:
                member.fail(error if isinstance(error, Exception) else NotReady("the server is stopping"))
            raise
        self._record_batch(len(members), start_s)

    async def _run_merged(self, batch: _Batch) -> bool:
        """Run the batch as one call; return False if that failed. Then each call runs alone: one cannot fail others."""
        members, times = batch.members, CallTimes()
        try:
            merged = merge([m.call for m in members])
            request = structs.replace(members[0].request, call=merged, deadline_s=None, times=times)
            answer = await self._compute(batch, request)
            responses = split_rows(answer, [m.rows for m in members])
        except DragomanError:
            return False
        finally:
            for member in members:
                member.request.times.share(times)
        self.counters.executions.count(sum(m.rows for m in members), times.compute_s)
        if self._shares.is_counted:
            self._charge(members, times.compute_s)
        for member, part in zip(members, responses, strict=True):
            member.succeed(part)
        return True

    async def _run_alone(self, batch: _Batch) -> None:
        (member,) = batch.members
        set_context(member.context)
        try:
            answer = await self._compute(batch, member.request)
        except DragomanError as error:
            member.fail(error)
        else:
            self.counters.executions.count(member.rows, member.request.times.compute_s)
            member.succeed(answer)
        if self._shares.is_counted:
            self._charge([member], member.request.times.compute_s)

    async def _compute(self, batch: _Batch, request: Request[Inference]) -> Inference:
        """Return the response of the pool. The computation is cancelled when all calls of the batch are."""
        batch.work = asyncio.current_task()
        try:
            return await complete(self._pool.call(request))
        except asyncio.CancelledError:
            if batch.active:
                raise
            if batch.work is not None:
                batch.work.uncancel()
            raise DeadlineExceeded("request cancelled: client disconnected or deadline exceeded") from None
        finally:
            batch.work = None


def _take(queue: deque[Member], max_rows: int) -> list[Member]:
    """Return the next batch, without calls that were just cancelled."""
    members: list[Member] = []
    total = 0
    while queue and (not members or total + queue[0].rows <= max_rows):
        member = queue.popleft()
        if not member.answer.done():
            members.append(member)
            total += member.rows
    return members
