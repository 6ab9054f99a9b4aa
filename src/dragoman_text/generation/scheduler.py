"""Scheduler: chooses the sequences of the next step and the number of tokens of each; metrics of the steps."""

import heapq
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol, cast

from msgspec import Struct

from dragoman.core.callers import Caller
from dragoman.core.fair_share import FairShares
from dragoman.core.metrics import SECONDS, Family, Histogram, Sample
from dragoman_text.generation.job import GenerationJob, Sequence

# The service of a generated token, in tokens of a prompt, as in Sheng et al.
_OUTPUT_TOKEN = 2.0


class SchedulerTask(Protocol):
    """A unit of scheduling: the sequences of one prompt.

    sequences: those that run. width: maximum number of them. spare: further slots reserved for the task.
    caller: its owner, and the weight of that.
    """

    sequences: list[Sequence]
    spare: list[int]
    caller: Caller

    @property
    def width(self) -> int: ...

    @property
    def uses_prefix_cache(self) -> bool:
        """Whether the prompt may be loaded from the prefix cache."""

    def restart(self) -> None:
        """Forget computed states after preemption."""


class CacheCapacity(Protocol):
    """Cache memory as the scheduler uses it."""

    @property
    def budget(self) -> int:
        """Tokens that fit into memory, of all slots together."""

    def fits(self, slots: int, length: int) -> bool: ...
    def reserve(self, slots: int, length: int) -> None: ...
    def move(self, source: int, target: int, length: int) -> None: ...
    def clear(self, slot: int, length: int) -> None: ...
    def load_prefix(self, sequence: Sequence) -> int: ...


class StepWork(Struct, frozen=True):
    """`count` tokens of a sequence, drafts included, to compute in the next step."""

    task: SchedulerTask
    sequence: Sequence
    count: int


class Scheduler:
    """First come, first served, in at most `max_batch` slots; of several owners, the least served is next.

    A step computes one token of every decoding sequence and at most `chunk` prompt tokens in all, so that a long prompt
    delays other sequences only by one chunk. A task is admitted when its prompt fits into memory. When running
    sequences outgrow memory, the newest task is preempted and starts again later.

    Owners share by the tokens that are computed for them (`FairShares`). An owner that has fewer slots than its part,
    and finds none free, gets one of the owner that has the most beyond its own part, whose newest task is preempted.
    """

    def __init__(self, capacity: CacheCapacity, max_batch: int, chunk: int) -> None:
        self._capacity, self._max_batch, self._chunk = capacity, max_batch, chunk
        self.waiting: deque[SchedulerTask] = deque()
        self.running: dict[SchedulerTask, None] = {}  # in order of admission
        self._slots = _Slots(max_batch)
        self.preempted = 0
        self._shares = FairShares()

    def add(self, task: SchedulerTask) -> None:
        self.waiting.append(task)
        self._shares.enter(task.caller)

    def remove(self, task: SchedulerTask) -> None:
        """Remove a finished or cancelled task and free its slots."""
        if task in self.running:
            del self.running[task]
            self._release_slots(task)
        elif task in self.waiting:
            self.waiting.remove(task)
        else:
            return
        self._shares.leave(task.caller)

    def remove_sequence(self, task: SchedulerTask, sequence: Sequence) -> None:
        task.sequences.remove(sequence)
        self._free_slot(sequence)

    @property
    def active(self) -> int:
        """Number of sequences in memory."""
        return sum(len(task.sequences) for task in [*self.running])

    @property
    def cache_tokens(self) -> tuple[int, int]:
        """Tokens in the key-value cache, and how many it has memory for. Callable from any thread."""
        tokens = [len(each.tokens) for task in [*self.running] for each in [*task.sequences]]
        return sum(tokens), self._capacity.budget

    def plan(self) -> list[StepWork]:
        """Return the work of the next step: decoding sequences by slot, then prompts in order of arrival."""
        self._preempt_if_full()
        self._admit()
        self._compact()
        decoding, prompts, remaining = [], [], self._chunk
        shares = self._shares
        running: Iterable[SchedulerTask] = self.running
        if shares.is_shared:  # the chunk is first for owners with few slots: what they get in all, `_next` decides
            used = self._slots_by_owner()
            running = sorted(running, key=lambda task: used[task.caller.owner] / shares.weight(task.caller.owner))
        for task in running:
            for sequence in task.sequences:
                length, computed = len(sequence.tokens), sequence.computed
                if length == computed:
                    continue  # its next token is not chosen yet
                if length == computed + 1 and computed:  # it is decoding
                    count = 1 + len(sequence.drafts)
                    decoding.append(StepWork(task, sequence, count))
                    if shares.is_counted:
                        shares.charge(task.caller.owner, _OUTPUT_TOKEN)
                    if count > 1:
                        sequence.written = max(sequence.written, computed + count)
                    continue
                # Prompts are always split at the same positions, so that results do not depend on the batch.
                count = min(self._chunk - computed % self._chunk, length - computed)
                if count <= remaining:
                    prompts.append(StepWork(task, sequence, count))
                    if shares.is_counted:
                        shares.charge(task.caller.owner, count)
                    remaining -= count
        decoding.sort(key=_slot)
        # Rows of one token come first; the last chunk of a prompt can be one.
        return decoding + sorted(prompts, key=_is_chunk) if prompts else decoding

    # ------------------------------------------------------------------------------------------------------

    def _longest(self) -> int:
        lengths = [len(each.tokens) + len(each.drafts) for task in self.running for each in task.sequences]
        return max(lengths, default=0)

    def _preempt_if_full(self) -> None:
        while self.running:
            longest = self._longest()
            if not self._capacity.fits(self._slots.top, longest):
                self._compact(always=True)
            if self._capacity.fits(self._slots.top, longest) or len(self.running) == 1:
                self._capacity.reserve(self._slots.top, longest)
                return
            self._preempt(self._newest())

    def _newest(self) -> SchedulerTask:
        """Return the newest task, of several owners that of the one with the most slots for its part."""
        tasks = [*reversed(self.running)]
        if not self._shares.is_shared:
            return tasks[0]
        used = self._slots_by_owner()
        return max(tasks, key=lambda task: used[task.caller.owner] / self._shares.part(task.caller.owner))

    def _slots_by_owner(self) -> Counter[str]:
        used: Counter[str] = Counter()
        for task in self.running:
            used[task.caller.owner] += len(task.sequences) + len(task.spare)
        return used

    def _preempt(self, task: SchedulerTask) -> None:
        """Stop a task, which is the first to start again."""
        del self.running[task]
        self._release_slots(task)
        task.restart()
        self.waiting.appendleft(task)
        self.preempted += 1

    def _next(self) -> SchedulerTask:
        """Return the task to admit: the first of the owner that has been served least, with its admitted prompts."""
        if not self._shares.is_shared:
            return self.waiting[0]
        shares, used, admitted = self._shares, self._slots_by_owner(), Counter[str]()
        for task in self.running:
            admitted[task.caller.owner] += sum(each.pending for each in task.sequences if not each.decoding)

        def served(task: SchedulerTask) -> tuple[float, int]:
            owner = task.caller.owner
            return shares.served(owner) + admitted[owner] / shares.weight(owner), used[owner]

        return min(self.waiting, key=served)

    def _make_room(self, task: SchedulerTask, needed: int) -> bool:
        """Preempt a task for another owner's that waits; return False if no owner has more slots than its part."""
        if not self._shares.is_shared:
            return False
        used = self._slots_by_owner()
        parts = {o: max(1, int(self._max_batch * self._shares.part(o))) for o in {*used, task.caller.owner}}
        if used[task.caller.owner] + needed > parts[task.caller.owner]:
            return False
        for owner in sorted(used, key=lambda owner: parts[owner] - used[owner]):
            for each in reversed(self.running):
                if each.caller.owner == owner and owner != task.caller.owner:
                    if used[owner] - len(each.sequences) - len(each.spare) >= parts[owner]:
                        self._preempt(each)
                        return True
                    break
        return False

    def _admit(self) -> None:
        while self.waiting:
            task = self._next()
            needed = max(task.width, len(task.sequences))
            slots = self._slots.lowest(needed)
            if len(slots) < needed:
                if self._make_room(task, needed):
                    continue
                return
            length = max(self._longest(), *(len(each.tokens) + 1 for each in task.sequences))
            if self.running and not self._capacity.fits(max(self._slots.top, slots[-1] + 1), length):
                if self._make_room(task, needed):
                    continue
                return
            self.waiting.remove(task)
            for _ in slots:
                self._slots.take()
            for sequence in task.sequences:
                sequence.slot = slots.pop(0)
            task.spare = slots
            self.running[task] = None
            self._capacity.reserve(self._slots.top, length)
            if task.uses_prefix_cache:
                for sequence in task.sequences:
                    sequence.computed = sequence.cached = self._capacity.load_prefix(sequence)

    def _compact(self, *, always: bool = False) -> None:
        """Move sequences to lower free slots: attention is computed for all slots up to the highest one in use."""
        used = self._slots.used
        if not always and self._slots.top <= used + max(1, used // 2):
            return
        for task in self.running:
            task.spare = [self._slots.exchange(slot) if slot >= used else slot for slot in task.spare]
            for sequence in task.sequences:
                if sequence.slot >= used and (low := self._slots.lowest(1)) and low[0] < sequence.slot:
                    self._capacity.move(sequence.slot, low[0], sequence.computed)
                    self._slots.take()
                    self._free_slot(sequence)
                    sequence.slot = low[0]

    def _release_slots(self, task: SchedulerTask) -> None:
        for slot in task.spare:
            self._slots.release(slot)
        for sequence in task.sequences:
            self._free_slot(sequence)
            sequence.slot, sequence.computed, sequence.written = -1, 0, 0
            sequence.drafts = []
        task.spare = []

    def _free_slot(self, sequence: Sequence) -> None:
        self._slots.release(sequence.slot)
        self._capacity.clear(sequence.slot, max(len(sequence.tokens), sequence.written))


class _Slots:
    """Slots from 0 to count - 1. used: number of those in use. top: number of slots up to the highest in use."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count))  # a heap
        self._is_used = [False] * count
        self.used = self.top = 0

    def lowest(self, count: int) -> list[int]:
        """Return the lowest free slots, fewer if there are fewer."""
        return heapq.nsmallest(count, self._free)

    def take(self) -> int:
        """Use the lowest free slot."""
        slot = heapq.heappop(self._free)
        self._is_used[slot] = True
        self.used, self.top = self.used + 1, max(self.top, slot + 1)
        return slot

    def release(self, slot: int) -> None:
        heapq.heappush(self._free, slot)
        self._is_used[slot] = False
        self.used -= 1
        while self.top and not self._is_used[self.top - 1]:
            self.top -= 1

    def exchange(self, slot: int) -> int:
        """Release a slot and use the lowest free one."""
        self.release(slot)
        return self.take()


def _slot(work: StepWork) -> int:
    return work.sequence.slot


def _is_chunk(work: StepWork) -> bool:
    return work.count > 1


_STEPS = "dragoman_text_steps_total"
_STEP = "dragoman_text_step_seconds"
_FORWARD = "dragoman_text_forward_seconds"
_CACHE = "dragoman_text_cache_usage"
_BLOCKS = "dragoman_text_cache_blocks"
_BLOCK_SIZE = 16  # tokens
_QUEUE = "dragoman_text_queue_size"
_BATCH = "dragoman_text_batch_size"
_MAX_TOKENS = "dragoman_text_batch_max_tokens"
_PREEMPTIONS = "dragoman_text_preemptions_total"
_METHODS = ("prefill", "decode")


class StepMetrics:
    """Counts and durations of steps: `prefill` if a step computes prompts, else `decode`.

    waits: whether a step is complete when its function returns, which is not so on a GPU.
    """

    def __init__(self, *, waits: bool) -> None:
        self._waits = waits
        self._method = "decode"
        self._failed = False
        # All keys exist from the start: other threads read while the engine's thread counts.
        self._ends = {(method, end): 0 for method in _METHODS for end in ("ok", "failed")}
        self._whole = {method: Histogram(SECONDS) for method in _METHODS}
        self._forward = {method: Histogram(SECONDS) for method in _METHODS}

    @contextmanager
    def step(self, works: list[StepWork]) -> Iterator[None]:
        self._method = "decode" if works and works[-1].sequence.decoding else "prefill"  # prompts come last
        self._failed = True
        began_s = time.monotonic()
        try:
            yield
        finally:
            if works:
                self._ends[self._method, "failed" if self._failed else "ok"] += 1
                self._whole[self._method].observe(time.monotonic() - began_s)

    def record_step(self, began_s: float) -> None:
        """Record that the model computed the whole step, which began at `began_s` on the monotonic clock."""
        self._failed = False
        if self._waits:
            self._forward[self._method].observe(time.monotonic() - began_s)

    def families(self) -> Iterable[Family]:
        ends = self._ends.items()
        counts = tuple(Sample(_STEPS, {"method": method, "outcome": end}, n) for (method, end), n in ends)
        yield Family(_STEPS, "counter", "Steps of the text engine, with prompts (prefill) or without (decode).", counts)
        yield Family(_STEP, "histogram", "Seconds of a step of the text engine.", _samples(_STEP, self._whole))
        if self._waits:
            line = "Seconds of the forward pass in a step of the text engine."
            yield Family(_FORWARD, "histogram", line, _samples(_FORWARD, self._forward))


def queue_metrics(scheduler: Scheduler, active: int) -> Iterable[Family]:
    """Return metrics of the queue and the batch; the scheduler may change meanwhile in its own thread."""
    jobs = [cast("GenerationJob", task) for task in list(scheduler.running)]
    texts = [(job, len(job.sequences)) for job in jobs]
    max_tokens = sum((len(job.request.tokens) + job.request.length) * count for job, count in texts)
    used, budget = scheduler.cache_tokens
    for name, line, value in (
        (_CACHE, "Tokens in the key-value cache, as a fraction of its memory.", used / max(1, budget)),
        (_QUEUE, "Prompts in the queue of the text engine.", max(0, active - len(jobs))),
        (_BATCH, "Sequences in the batch of the text engine.", sum(n for _, n in texts)),
        (_MAX_TOKENS, "Maximum number of tokens of these sequences.", max_tokens),
    ):
        yield Family(name, "gauge", line, (Sample(name, {}, value),))
    line = "Prompts that were preempted because the key-value cache was full; they are computed again later."
    yield Family(_PREEMPTIONS, "counter", line, (Sample(_PREEMPTIONS, {}, scheduler.preempted),))
    blocks = Sample(_BLOCKS, {"block_size": str(_BLOCK_SIZE)}, budget // _BLOCK_SIZE)
    yield Family(_BLOCKS, "gauge", "Blocks of tokens for which the key-value cache has memory.", (blocks,))


def _samples(name: str, by_method: dict[str, Histogram]) -> tuple[Sample, ...]:
    return tuple(sample for method, each in by_method.items() for sample in each.samples(name, {"method": method}))
