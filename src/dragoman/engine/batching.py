"""Merges calls that wait for a busy model into one, and splits its answer again."""

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import structs

from dragoman.core.bytes_tensor import came_as_text, joined
from dragoman.core.calls import Infer, Inference, Request
from dragoman.core.errors import DeadlineExceeded, DragomanError, InvalidInput, InvalidOutput, NotReady
from dragoman.core.tensor import Parameters, Tensor
from dragoman.core.vector_binding import config_key
from dragoman.engine.linger import Linger
from dragoman.workers.pool import Pool

Key = tuple[Any, ...]

# Event loops count timers in milliseconds: a shorter linger looks at the clock once in each turn.
_SHORT_S = 0.002

# --- the algebra: pure functions -------------------------------------------------------------------------


def group_key(call: Infer) -> Key:
    """Calls of equal keys may be merged: of equal names, datatypes, trailing shapes, wanted outputs, parameters and
    config."""
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


def mergeable(call: Infer, metadata: Mapping[str, str] | None = None) -> bool:
    """Whether all inputs of a call have the same number of rows; `bind` sees to it, except before a codec.

    One with metadata goes alone: what came with a caller reaches the answer of no other. So does one whose caller
    wants outputs written his own way.
    """
    if metadata or call.content_types:
        return False
    shapes = {t.shape[:1] for t in call.inputs.values()}
    return len(shapes) == 1 and () not in shapes


def rows(call: Infer) -> int:
    """How many rows a mergeable call has."""
    return int(next(iter(call.inputs.values())).shape[0])


def merge(calls: Sequence[Infer]) -> Infer:
    """One call with the rows of all, in order. They have equal keys."""
    first = calls[0]
    inputs = {name: joined([c.inputs[name] for c in calls]) for name in first.inputs}
    return structs.replace(first, inputs=inputs)


def split(answer: Inference, counts: Sequence[int]) -> list[Inference]:
    """One answer a call, as views; InvalidOutput where an output has not as many rows as went in."""
    total = sum(counts)
    for name, tensor in answer.outputs.items():
        if not tensor.data.shape or tensor.data.shape[0] != total:
            raise InvalidOutput(f"output '{name}': expected {total} rows for {total} rows in, got {tensor.data.shape}")
    parts, start = [], 0
    for count in counts:
        end = start + count
        outputs = {n: Tensor(t.data[start:end], t.datatype, t.parameters) for n, t in answer.outputs.items()}
        parts.append(Inference(outputs, answer.parameters))
        start = end
    return parts


# --- the shell: who waits, and when to go ------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Member:
    request: Request[Inference]
    call: Infer
    rows: int
    answer: asyncio.Future[Inference]
    arrived_s: float
    batch: "_Batch | None" = None

    def succeed(self, answer: Inference) -> None:
        if not self.answer.done():
            self.answer.set_result(answer)

    def fail(self, fault: Exception) -> None:
        if not self.answer.done():
            self.answer.set_exception(fault)


class _Batch:
    """Members that are computed together; when the last of them has left, the work is cancelled."""

    __slots__ = ("members", "waited_for", "work")

    def __init__(self, members: list[_Member]) -> None:
        self.members = members
        self.waited_for = len(members)
        self.work: asyncio.Task[Any] | None = None
        for member in members:
            member.batch = self

    def leave(self) -> None:
        self.waited_for -= 1
        if not self.waited_for and self.work is not None:
            self.work.cancel()


class Batcher:
    """Calls for one model. An idle worker takes at once what is there; a batch grows only while all are busy.

    `max_rows` bounds a batch. `max_wait_s` lets a batch that is not full wait longer, for models whose users
    prefer throughput to latency. `linger` is the share of the model's time that a batch waits for the callers who
    were just answered.
    """

    def __init__(self, pool: Pool, max_rows: int, max_wait_s: float, linger: float = 0.0) -> None:
        self._pool = pool
        self._max_rows = max_rows
        self._max_wait_s = max_wait_s
        self._linger = Linger(linger)
        self._waiting: OrderedDict[Key, deque[_Member]] = OrderedDict()
        self._running: dict[asyncio.Task[None], _Batch] = {}
        self._timer: asyncio.Handle | None = None
        self._soon = False

    async def call(self, request: Request[Inference]) -> Inference:
        """The answer to one call, wherever it was computed. Its call is an Infer whose inputs have rows."""
        assert isinstance(request.call, Infer)
        count = rows(request.call)
        if count > self._max_rows:
            raise InvalidInput(f"inference request batch-size must be <= {self._max_rows}, got {count}")
        loop = asyncio.get_running_loop()
        member = _Member(request, request.call, count, loop.create_future(), time.monotonic())
        key = group_key(request.call)
        self._waiting.setdefault(key, deque()).append(member)
        self._dispatch_soon()  # at the end of this turn, so that calls which arrived together go together
        try:
            return await member.answer
        except asyncio.CancelledError:
            if member.batch is not None:
                member.batch.leave()
            else:
                self._forget(key, member)
            raise

    def _forget(self, key: Key, member: _Member) -> None:
        """Let go of the tensors of a caller who left, however long the workers stay busy."""
        queue = self._waiting.get(key)
        if queue is not None and member in queue:
            queue.remove(member)
            if not queue:
                del self._waiting[key]

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        waiting = [member for queue in self._waiting.values() for member in queue]
        self._waiting.clear()
        for member in waiting:
            member.fail(NotReady("the model is stopped"))
        running = dict(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for member in (member for batch in running.values() for member in batch.members):
            member.fail(NotReady("the model is stopped"))

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
        while self._waiting and len(self._running) < self._pool.capacity:
            now_s = time.monotonic()
            linger_s = self._linger.left_s(sum(map(len, self._waiting.values())), now_s)
            waits_s = {key: self._wait_s(queue, linger_s, now_s) for key, queue in self._waiting.items()}
            key = min(waits_s, key=waits_s.__getitem__)
            if waits_s[key] > 0:
                self._wake(waits_s[key], exactly=linger_s > 0)
                return
            queue = self._waiting.pop(key)
            members = _take(queue, self._max_rows)
            if queue:  # the rest goes to the end, so that no kind of call starves another
                self._waiting[key] = queue
            if members:
                batch = _Batch(members)
                task = asyncio.get_running_loop().create_task(self._run(batch))
                self._running[task] = batch
                task.add_done_callback(self._finished)

    def _wait_s(self, queue: deque[_Member], linger_s: float, now_s: float) -> float:
        if (self._max_wait_s <= 0 and linger_s <= 0) or sum(m.rows for m in queue) >= self._max_rows:
            return 0.0
        return max(linger_s, queue[0].arrived_s + self._max_wait_s - now_s, 0.0)

    def _finished(self, task: asyncio.Task[None]) -> None:
        del self._running[task]
        self._dispatch()

    async def _run(self, batch: _Batch) -> None:
        members, began_s = batch.members, time.monotonic()
        try:
            if len(members) == 1:
                await self._run_alone(batch)
            elif not await self._run_merged(batch):
                await asyncio.gather(*(self._run_alone(_Batch([m])) for m in members if not m.answer.done()))
        except BaseException as fault:
            for member in members:
                member.fail(fault if isinstance(fault, Exception) else NotReady("the server is stopping"))
            raise
        now_s = time.monotonic()
        self._linger.answered(len(members), sum(map(len, self._waiting.values())), now_s - began_s, now_s)

    async def _run_merged(self, batch: _Batch) -> bool:
        """Whether the batch was answered. A bad member must sink nobody: where the batch fails, each runs alone."""
        members = batch.members
        try:
            merged = merge([m.call for m in members])
            answer = await self._compute(batch, structs.replace(members[0].request, call=merged, deadline_s=None))
            parts = split(answer, [m.rows for m in members])
        except DragomanError:
            return False
        for member, part in zip(members, parts, strict=True):
            member.succeed(part)
        return True

    async def _run_alone(self, batch: _Batch) -> None:
        (member,) = batch.members
        try:
            member.succeed(await self._compute(batch, member.request))
        except DragomanError as fault:
            member.fail(fault)

    async def _compute(self, batch: _Batch, request: Request[Inference]) -> Inference:
        """The pool's answer; the work is cancelled when nobody waits for it any more."""
        batch.work = asyncio.current_task()
        try:
            return await self._pool.call(request)
        except asyncio.CancelledError:
            if batch.waited_for:
                raise
            if batch.work is not None:
                batch.work.uncancel()
            raise DeadlineExceeded("nobody waits for this any more") from None
        finally:
            batch.work = None


def _take(queue: deque[_Member], max_rows: int) -> list[_Member]:
    """The next batch, without those whose caller left in this very turn."""
    members: list[_Member] = []
    total = 0
    while queue and (not members or total + queue[0].rows <= max_rows):
        member = queue.popleft()
        if not member.answer.done():
            members.append(member)
            total += member.rows
    return members
