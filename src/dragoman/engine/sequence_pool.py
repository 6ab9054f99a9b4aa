"""The pool of a stateful model: each sequence stays on one replica, which computes its requests one after the other."""

import asyncio
import itertools
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from msgspec import structs

from dragoman import plugins
from dragoman.core import error_texts
from dragoman.core.callers import share_of
from dragoman.core.calls import Infer, Inference, Request
from dragoman.core.chunks import ChunkStream, Take
from dragoman.core.errors import DragomanError, InvalidInput, Overloaded, SequenceLost
from dragoman.core.metrics import Family, Sample, sum_families
from dragoman.core.schedule import requested_timeout_s
from dragoman.core.sequences import SequenceOptions
from dragoman.core.spec import ModelSpec, Placement
from dragoman.core.worker_status import WorkerStatus
from dragoman.engine.batch_counters import BatchCounters
from dragoman.engine.batching import group_key, merge, split_rows
from dragoman.engine.sequences import (
    LiveSequence,
    SequenceKey,
    SequenceTurn,
    SequenceWorker,
    earlier_request_cancelled,
    pop_step,
    unloading_error,
)
from dragoman.system.call_times import CallTimes
from dragoman.system.coroutines import complete
from dragoman.system.request_context import set_context
from dragoman.workers.pool import Loaded, Pool


class SequencePool:
    """The replicas of a stateful model, each a pool of its own.

    A sequence gets a slot of one replica at its start and keeps it until its end, or until it is idle for too long.
    Each batch has at most one request of a sequence. A batch that fails is not computed again: the model may have
    changed the states.
    """

    is_replicated = True

    def __init__(self, pools: Sequence[Pool], loaded: Loaded, spec: ModelSpec, options: SequenceOptions) -> None:
        self._spec = spec
        self._options = options
        # Whether the timeout of a request is that of waiting for a slot; otherwise it is its deadline.
        self._limits_waits = spec.dialect is not None and spec.dialect.timeout == "queue"
        self.max_rows = spec.max_batch_size if loaded.signature.batched else 0
        slots = options.max_candidates if options.strategy == "oldest" else max(1, self.max_rows)
        self._workers = [SequenceWorker(pool, slots) for pool in pools]
        self._sequences: OrderedDict[SequenceKey, LiveSequence] = OrderedDict()  # the least recently used first
        self._counts: Counter[str] = Counter()  # of live sequences by owner
        self._backlog: deque[LiveSequence] = deque()
        self._numbers = itertools.count(1)
        self._timer: asyncio.TimerHandle | None = None
        self._is_scheduled = False
        self.on_capacity: Callable[[], None] = lambda: None  # it never grows
        self.counters = BatchCounters(lambda: sum(len(s.turns) for s in self._sequences.values()))

    # --- the interface of a pool -------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        return any(worker.pool.ready for worker in self._workers)

    @property
    def unavailable(self) -> str:
        reasons = [worker.pool.unavailable for worker in self._workers]
        return "" if "" in reasons else reasons[0]

    @property
    def waiting(self) -> str:
        return next(filter(None, (worker.pool.waiting for worker in self._workers)), "")

    @property
    def capacity(self) -> int:
        return sum(worker.pool.capacity for worker in self._workers)

    async def start(self) -> Loaded:
        raise NotImplementedError("the pools of the replicas are started before")

    def measurements(self) -> Sequence[Family]:
        name = "dragoman_sequences"
        own = Family(name, "gauge", "Live sequences of stateful models.", (Sample(name, {}, len(self._sequences)),))
        return (own, *sum_families(worker.pool.measurements() for worker in self._workers))

    def workers(self) -> tuple[WorkerStatus, ...]:
        return tuple(status for worker in self._workers for status in worker.pool.workers())

    def states(self) -> Mapping[str, int]:
        return sum((Counter(worker.pool.states()) for worker in self._workers), Counter())

    def process_ids(self) -> Mapping[int, int]:
        found = enumerate(worker.pool.process_ids().values() for worker in self._workers)
        return {number: pid for number, pids in found for pid in pids}

    def call(self, request: Request[Any]) -> Any:
        if isinstance(request.call, Infer):
            return self._infer(request)
        return self._workers[0].pool.call(request)

    def stream(self, request: Request[Any]) -> ChunkStream[Any]:
        if not isinstance(request.call, Infer):
            return self._workers[0].pool.stream(request)
        return ChunkStream(partial(self._stream, request))

    async def _stream(self, request: Request[Any], take: Take[Any]) -> None:
        ended = asyncio.Event()
        sequence, turn = self._join(request, ended)
        try:
            pool: Pool = await turn.response
            await pool.stream(structs.replace(request, call=turn.call)).send_to(take)
        except asyncio.CancelledError:
            self._abandon(sequence, turn)
            raise
        finally:
            ended.set()

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for sequence in [*self._sequences.values(), *self._backlog, *(s for w in self._workers for s in w.ready)]:
            self._fail_turns(sequence, unloading_error(self._spec.name))
        tasks = [task for worker in self._workers for task in worker.tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(worker.pool.close() for worker in self._workers))

    # --- requests ----------------------------------------------------------------------------------------------

    async def _infer(self, request: Request[Inference]) -> Inference:
        sequence, turn = self._join(request, None)
        try:
            answer: Inference = await turn.response
            return answer
        except asyncio.CancelledError:
            if sequence.running is not None and turn not in sequence.turns and self.max_rows <= 1:
                sequence.running.cancel()
            self._abandon(sequence, turn)
            raise

    def _abandon(self, sequence: LiveSequence, turn: SequenceTurn) -> None:
        """End a sequence of which a request was cancelled: later ones would be computed without it."""
        if turn in sequence.turns:
            while sequence.turns[-1] is not turn:
                self._fail_turn(sequence.turns.pop(), earlier_request_cancelled(sequence.id, self._spec.name))
        else:
            self._fail_turns(sequence, earlier_request_cancelled(sequence.id, self._spec.name))
        self._end(sequence)

    def _join(self, request: Request[Any], stream_ended: asyncio.Event | None) -> tuple[LiveSequence, SequenceTurn]:
        """Add a request to its sequence. Raises InvalidInput, or Overloaded if there are too many sequences."""
        call, step = pop_step(request.call, self._spec.name, self._options.ids)  # type: ignore[arg-type]
        if self.max_rows and any(tensor.shape[:1] != (1,) for tensor in call.inputs.values()):
            raise InvalidInput(error_texts.too_many_rows_of_sequence(self._spec.name))
        step.owner = request.caller.owner
        key = step.owner, step.id
        sequence = self._sequences.get(key)
        if step.start:
            sequence = self._begin(key, sequence)
        elif sequence is None:
            raise InvalidInput(error_texts.missing_start(step.id, self._spec.name))
        sequence.last_s = time.monotonic()
        step.number, step.slot = sequence.number, sequence.slot
        call = structs.replace(call, sequences=(step,))
        turn = SequenceTurn(request, call, asyncio.get_running_loop().create_future(), stream_ended)
        sequence.turns.append(turn)
        if sequence.worker is None and self._limits_waits:
            self._limit_wait(sequence, turn)
        if step.end:
            self._forget(sequence)
        else:
            self._sequences.move_to_end(key)
            self._set_timer()
        if sequence.worker is not None and len(sequence.turns) == 1 and sequence.running is None:
            sequence.worker.ready.append(sequence)
            self._dispatch_soon()
        return sequence, turn

    def _limit_wait(self, sequence: LiveSequence, turn: SequenceTurn) -> None:
        """Reject a sequence that still waits for a slot after the timeout of one of its requests, if that has one."""

        def reject() -> None:
            if sequence.worker is None and sequence in self._backlog:
                self._backlog.remove(sequence)
                self._forget(sequence)
                self._fail_turns(sequence, Overloaded(error_texts.SEQUENCE_TIMEOUT))

        if timeout_s := requested_timeout_s(turn.call.parameters):
            timer = asyncio.get_running_loop().call_later(timeout_s, reject)
            turn.response.add_done_callback(lambda _: timer.cancel())

    def _begin(self, key: SequenceKey, live: LiveSequence | None) -> LiveSequence:
        """Start a sequence, which ends a live one of the same id: what is queued of that is still computed."""
        owner, most = key[0], self._options.max_sequences
        if live is None and (len(self._sequences) >= most or self._counts[owner] >= share_of(owner, most)):
            raise Overloaded(f"model '{self._spec.name}': expected at most {share_of(owner, most)} sequences")
        if live is not None:
            self._end(live)
        sequence = self._sequences[key] = LiveSequence(key, next(self._numbers))
        self._counts[owner] += 1
        if not self._assign(sequence):
            self._backlog.append(sequence)
        return sequence

    def _assign(self, sequence: LiveSequence) -> bool:
        """Give a sequence a slot of the replica with the most free ones; return whether there was one."""
        able = [worker for worker in self._workers if worker.free and worker.pool.ready]
        worker = max(able or self._workers, key=lambda each: len(each.free))
        if not worker.free:
            return False
        sequence.worker, sequence.slot = worker, worker.free.pop()
        for turn in sequence.turns:
            turn.call.sequence.slot = sequence.slot
        if sequence.turns:
            worker.ready.append(sequence)
            self._dispatch_soon()
        return True

    def _forget(self, sequence: LiveSequence) -> None:
        """Let no further request join a sequence."""
        sequence.is_over = True
        if self._sequences.get(sequence.key) is sequence:
            del self._sequences[sequence.key]
            owner = sequence.key[0]
            self._counts[owner] -= 1
            if not self._counts[owner]:
                del self._counts[owner]

    def _end(self, sequence: LiveSequence) -> None:
        """End a sequence: free its slot once all its requests are answered."""
        if not sequence.is_over:
            self._forget(sequence)
            self._release_if_over(sequence)

    def _release_if_over(self, sequence: LiveSequence) -> None:
        worker = sequence.worker
        if worker is None or not sequence.is_over or not sequence.is_idle:
            return
        sequence.worker = None
        worker.free.append(sequence.slot)
        while self._backlog:
            first = self._backlog[0]
            is_cancelled = first.is_over and all(turn.response.done() for turn in first.turns)
            if not is_cancelled and not self._assign(first):
                return
            self._backlog.popleft()

    def _fail_turns(self, sequence: LiveSequence, error: Exception) -> None:
        while sequence.turns:
            self._fail_turn(sequence.turns.pop(), error)

    def _fail_turn(self, turn: SequenceTurn, error: Exception) -> None:
        if not turn.response.done():
            turn.response.set_exception(error)

    # --- idle sequences ----------------------------------------------------------------------------------------

    def _set_timer(self) -> None:
        if self._timer is None and self._sequences:
            first = next(iter(self._sequences.values()))
            wait_s = max(0.0, first.last_s + self._options.idle_s - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._end_idle)

    def _end_idle(self) -> None:
        """End the sequences that had no request for `idle_s`. Those that are computed or wait for a slot stay."""
        self._timer = None
        now_s = time.monotonic()
        for sequence in list(self._sequences.values()):
            if sequence.last_s + self._options.idle_s > now_s:
                break
            if sequence.is_idle:
                self._end(sequence)
            else:
                sequence.last_s = now_s
                self._sequences.move_to_end(sequence.key)
        self._set_timer()

    # --- batches -----------------------------------------------------------------------------------------------

    def _dispatch_soon(self) -> None:
        """Dispatch at the end of this turn of the event loop, so that requests that arrived together are merged."""
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._dispatch)

    def _dispatch(self) -> None:
        self._is_scheduled = False
        for worker in self._workers:
            while worker.ready and len(worker.tasks) < worker.pool.capacity:
                batch = self._next_batch(worker)
                if not batch:
                    continue
                task = asyncio.get_running_loop().create_task(self._run(worker, batch))
                for sequence, _ in batch:
                    sequence.running = task
                worker.tasks.add(task)
                task.add_done_callback(partial(self._on_task_end, worker))

    def _on_task_end(self, worker: SequenceWorker, task: asyncio.Task[None]) -> None:
        worker.tasks.discard(task)
        self._dispatch()

    def _next_batch(self, worker: SequenceWorker) -> list[tuple[LiveSequence, SequenceTurn]]:
        """Return the next request of each sequence that has waited longest and may be merged with the first."""
        batch: list[tuple[LiveSequence, SequenceTurn]] = []
        left: deque[LiveSequence] = deque()
        key = None
        while worker.ready and len(batch) < max(1, self.max_rows):
            sequence = worker.ready.popleft()
            turn = self._next_turn(sequence)
            if turn is None:
                continue
            is_alone = turn.stream_ended is not None or bool(turn.request.metadata) or bool(turn.call.content_types)
            own_key = object() if is_alone else group_key(turn.call)
            if key is None or key == own_key:
                key = own_key
                batch.append((sequence, sequence.turns.popleft()))
            else:
                left.append(sequence)
        worker.ready.extendleft(reversed(left))
        if batch:
            self.counters.count([turn.request.times for _, turn in batch], len(batch), "worker_free")
        return batch

    def _next_turn(self, sequence: LiveSequence) -> SequenceTurn | None:
        """Return the next request of a sequence, without those that were cancelled."""
        while sequence.turns and sequence.turns[0].response.done():
            sequence.turns.popleft()
        if not sequence.turns:
            self._release_if_over(sequence)
            return None
        return sequence.turns[0]

    async def _run(self, worker: SequenceWorker, batch: list[tuple[LiveSequence, SequenceTurn]]) -> None:
        turns = [turn for _, turn in batch]
        set_context([turn.context for turn in turns] if len(turns) > 1 else turns[0].context)
        try:
            if turns[0].stream_ended is not None:
                if not turns[0].response.done():
                    turns[0].response.set_result(worker.pool)
                    await turns[0].stream_ended.wait()
            else:
                await self._compute(worker, turns)
        except BaseException as error:
            public = error if isinstance(error, DragomanError) else unloading_error(self._spec.name)
            for turn in turns:
                self._fail_turn(turn, public)
            if not isinstance(error, Exception | asyncio.CancelledError):
                raise
        finally:
            self._finish(batch)

    async def _compute(self, worker: SequenceWorker, turns: list[SequenceTurn]) -> None:
        try:
            await self._compute_batch(worker, turns)
        except SequenceLost:
            if len(turns) == 1:
                raise
            for turn in turns:  # no state has changed: those of other sequences are computed
                try:
                    await self._compute_batch(worker, [turn])
                except DragomanError as error:
                    self._fail_turn(turn, error)

    async def _compute_batch(self, worker: SequenceWorker, turns: list[SequenceTurn]) -> None:
        start_s, first = time.monotonic(), turns[0]
        times = CallTimes()
        call, deadline_s = first.call, first.request.deadline_s
        if len(turns) > 1:
            steps = tuple(turn.call.sequence for turn in turns)
            call, deadline_s = structs.replace(merge([turn.call for turn in turns]), sequences=steps), None
        for turn in turns:  # until the worker has reported it
            turn.request.times.started_s = start_s
        request = structs.replace(first.request, call=call, deadline_s=deadline_s, times=times)
        try:
            answer: Inference = await complete(worker.pool.call(request))
        finally:
            for turn in turns:
                turn.request.times.share(times)
        answers = [answer] if len(turns) == 1 else split_rows(answer, [1] * len(turns))
        self.counters.executions.count(len(turns), times.compute_s)
        for turn, each in zip(turns, answers, strict=True):
            if not turn.response.done():
                turn.response.set_result(each)

    def _finish(self, batch: list[tuple[LiveSequence, SequenceTurn]]) -> None:
        """Go on with the sequences of a batch, or end those whose state is lost or that have answered all requests."""
        now_s = time.monotonic()
        for sequence, turn in batch:
            sequence.running, sequence.last_s = None, now_s
            error = None if turn.response.cancelled() or not turn.response.done() else turn.response.exception()
            if isinstance(error, SequenceLost):
                self._forget(sequence)
            if self._sequences.get(sequence.key) is sequence:
                self._sequences.move_to_end(sequence.key)
            if sequence.turns and sequence.worker is not None:
                sequence.worker.ready.append(sequence)
            else:
                self._release_if_over(sequence)
        self._set_timer()


async def start_pool(
    placement: Placement, spec: ModelSpec, on_change: Callable[[], None], on_create: Callable[[Pool], None]
) -> tuple[Pool, Loaded]:
    """Return the pool of a model, once it is loaded. `on_create` is called with it before."""

    def make(spec: ModelSpec) -> Pool:
        inner_pool: Pool = plugins.find("pools", placement)(spec, on_change)
        return inner_pool

    pool = make(spec if spec.sequences is None else _one_replica(spec))
    on_create(pool)
    try:
        loaded = await pool.start()
        if loaded.sequences is not None:
            pools = await _start_replicas(spec, pool, make)
            return SequencePool(pools, loaded, spec, loaded.sequences), loaded
        return pool, loaded
    except BaseException:
        await pool.close()
        raise


async def _start_replicas(spec: ModelSpec, first: Pool, make: Callable[[ModelSpec], Pool]) -> Sequence[Pool]:
    """Return a pool for each replica; `first` is started, with one replica or with all of them."""
    pools = [first]
    if spec.replicas > 1 and first.is_replicated:
        if spec.sequences is None:  # only the model itself declares that it is stateful
            await first.close()
            pools = []
        new = [make(_one_replica(spec, number)) for number in range(len(pools), spec.replicas)]
        pools += new
        results = await asyncio.gather(*(pool.start() for pool in new), return_exceptions=True)
        errors = [result for result in results if isinstance(result, BaseException)]
        if errors:
            await asyncio.gather(*(pool.close() for pool in pools))
            raise errors[0]
    return pools


def _one_replica(spec: ModelSpec, number: int = 0) -> ModelSpec:
    """Return the spec of one of the replicas of a stateful model."""
    launch = spec.launch
    if launch is not None:
        devices = launch.devices[number : number + 1]
        launch = replace(launch, replicas=1, min_replicas=None, min_ready=1, devices=devices)
    return replace(spec, replicas=1, launch=launch)
