"""Scheduler: chooses the sequences of the next step and the number of tokens of each."""

import heapq
from collections import deque
from dataclasses import dataclass
from typing import Protocol

from dragoman.generation.sequence import Sequence


class SchedulerTask(Protocol):
    """A unit of scheduling: the sequences of one prompt.

    sequences: those that run. width: maximum number of them. spare: further slots reserved for the task.
    """

    sequences: list[Sequence]
    spare: list[int]

    @property
    def width(self) -> int: ...

    @property
    def uses_prefix_cache(self) -> bool:
        """Whether the prompt may be loaded from the prefix cache."""

    def restart(self) -> None:
        """Forget computed states after preemption."""


class CacheCapacity(Protocol):
    """Cache memory as the scheduler uses it."""

    def fits(self, slots: int, length: int) -> bool: ...
    def reserve(self, slots: int, length: int) -> None: ...
    def move(self, source: int, target: int, length: int) -> None: ...
    def clear(self, slot: int, length: int) -> None: ...
    def load_prefix(self, sequence: Sequence) -> int: ...


@dataclass(frozen=True, slots=True)
class StepWork:
    """`count` tokens of a sequence to compute in the next step."""

    task: SchedulerTask
    sequence: Sequence
    count: int


class Scheduler:
    """First come, first served, in at most `max_batch` slots.

    A step computes one token of every decoding sequence and at most `chunk` prompt tokens in all, so that a long prompt
    delays other sequences only by one chunk. A task is admitted when its prompt fits into memory. When running
    sequences outgrow memory, the newest task is preempted and starts again later.
    """

    def __init__(self, capacity: CacheCapacity, max_batch: int, chunk: int) -> None:
        self._capacity, self._max_batch, self._chunk = capacity, max_batch, chunk
        self.waiting: deque[SchedulerTask] = deque()
        self.running: list[SchedulerTask] = []
        self._free = list(range(max_batch))
        self.preempted = 0

    def add(self, task: SchedulerTask) -> None:
        self.waiting.append(task)

    def remove(self, task: SchedulerTask) -> None:
        """Remove a finished or cancelled task and free its slots."""
        if task in self.running:
            self.running.remove(task)
            self._release_slots(task)
        elif task in self.waiting:
            self.waiting.remove(task)

    def remove_sequence(self, task: SchedulerTask, sequence: Sequence) -> None:
        """Remove one of several sequences of a task."""
        task.sequences.remove(sequence)
        self._free_slot(sequence)

    @property
    def active(self) -> int:
        """Number of sequences in memory."""
        return sum(len(task.sequences) for task in self.running)

    def plan(self) -> list[StepWork]:
        """Return the work of the next step: decoding sequences by slot, then prompts in order of arrival."""
        self._preempt_if_full()
        self._admit()
        self._compact()
        decoding, prompts, left = [], [], self._chunk
        for task in self.running:
            for sequence in task.sequences:
                if not sequence.pending:
                    continue  # its next token is not chosen yet
                if sequence.decoding:
                    decoding.append(StepWork(task, sequence, 1))
                    continue
                # Prompts are always split at the same positions, so that results do not depend on the batch.
                count = min(self._chunk - sequence.computed % self._chunk, sequence.pending)
                if count <= left:
                    prompts.append(StepWork(task, sequence, count))
                    left -= count
        decoding.sort(key=_slot)
        # Rows of one token come first; the last chunk of a prompt can be one.
        return decoding + sorted(prompts, key=_is_chunk) if prompts else decoding

    # ------------------------------------------------------------------------------------------------------

    def _longest(self) -> int:
        return max([len(each.tokens) for task in self.running for each in task.sequences], default=0)

    def _top(self) -> int:
        """Number of slots up to the highest in use."""
        return 1 + max(self._slots_in_use(), default=-1)

    def _slots_in_use(self) -> list[int]:
        return [slot for task in self.running for slot in _slots(task)]

    def _preempt_if_full(self) -> None:
        while self.running:
            top, longest = self._top(), self._longest()
            if not self._capacity.fits(top, longest):
                self._compact(always=True)
                top = self._top()
            if self._capacity.fits(top, longest) or len(self.running) == 1:
                self._capacity.reserve(top, longest)
                return
            task = self.running.pop()
            self._release_slots(task)
            task.restart()
            self.waiting.appendleft(task)
            self.preempted += 1

    def _admit(self) -> None:
        while self.waiting:
            task = self.waiting[0]
            needed = max(task.width, len(task.sequences))
            if len(self._free) < needed:
                return
            length = max(self._longest(), *(len(each.tokens) + 1 for each in task.sequences))
            slots = heapq.nsmallest(needed, self._free)
            top = max(self._top(), slots[-1] + 1)
            if self.running and not self._capacity.fits(top, length):
                return
            self.waiting.popleft()
            for _ in slots:
                heapq.heappop(self._free)
            for sequence in task.sequences:
                sequence.slot = slots.pop(0)
            task.spare = slots
            self.running.append(task)
            self._capacity.reserve(top, length)
            if task.uses_prefix_cache:
                for sequence in task.sequences:
                    sequence.computed = sequence.cached = self._capacity.load_prefix(sequence)

    def _compact(self, *, always: bool = False) -> None:
        """Move sequences to lower free slots: attention is computed for all slots up to the highest one in use."""
        slots = self._slots_in_use()
        used = len(slots)
        if not always and max(slots, default=-1) < used + max(1, used // 2):
            return
        for task in self.running:
            task.spare = [heapq.heappushpop(self._free, slot) if slot >= used else slot for slot in task.spare]
            for sequence in task.sequences:
                if sequence.slot >= used and self._free and self._free[0] < sequence.slot:
                    self._capacity.move(sequence.slot, self._free[0], sequence.computed)
                    low = heapq.heappop(self._free)
                    self._free_slot(sequence)
                    sequence.slot = low

    def _release_slots(self, task: SchedulerTask) -> None:
        for slot in task.spare:
            heapq.heappush(self._free, slot)
        for sequence in task.sequences:
            self._free_slot(sequence)
            sequence.slot, sequence.computed = -1, 0
        task.spare = []

    def _free_slot(self, sequence: Sequence) -> None:
        heapq.heappush(self._free, sequence.slot)
        self._capacity.clear(sequence.slot, len(sequence.tokens))


def _slot(work: StepWork) -> int:
    return work.sequence.slot


def _is_chunk(work: StepWork) -> bool:
    return work.count > 1


def _slots(task: SchedulerTask) -> list[int]:
    return [*(sequence.slot for sequence in task.sequences), *task.spare]
