"""Which sequences take part in the next step, and with how many tokens: policy alone, nothing is computed here."""

import heapq
from collections import deque
from dataclasses import dataclass
from typing import Protocol

from dragoman.generation.sequence import Sequence


class Task(Protocol):
    """What is scheduled as one: the sequences that come of one prompt.

    `sequences` are those that run; `width` is how many there may be; `spare` are slots that it holds besides.
    """

    sequences: list[Sequence]
    spare: list[int]

    @property
    def width(self) -> int: ...

    @property
    def recalls(self) -> bool:
        """Whether its prompt may be taken from the prefix cache."""

    def restart(self) -> None:
        """Forget what was computed: memory was needed for others."""


class Room(Protocol):
    """The memory, as the scheduler sees it."""

    def fits(self, slots: int, length: int) -> bool: ...
    def reserve(self, slots: int, length: int) -> None: ...
    def move(self, source: int, target: int, length: int) -> None: ...
    def clear(self, slot: int, length: int) -> None: ...
    def recall(self, sequence: Sequence) -> int: ...


@dataclass(frozen=True, slots=True)
class Work:
    """`count` tokens of a sequence that the next step computes."""

    task: Task
    sequence: Sequence
    count: int


class Scheduler:
    """First come, first served, in at most `max_batch` slots.

    A step has a token of every sequence that is being written, and of prompts at most `chunk` tokens together, so
    that a long prompt makes nobody wait for more than that. A task is admitted when its prompt fits; when running
    texts outgrow memory, the task that came last gives way and starts again later.
    """

    def __init__(self, room: Room, max_batch: int, chunk: int) -> None:
        self._room, self._max_batch, self._chunk = room, max_batch, chunk
        self.waiting: deque[Task] = deque()
        self.running: list[Task] = []
        self._free = list(range(max_batch))
        self.preempted = 0

    def add(self, task: Task) -> None:
        self.waiting.append(task)

    def remove(self, task: Task) -> None:
        """The task is over, or nobody waits for it: its slots are free at once."""
        if task in self.running:
            self.running.remove(task)
            self._vacate(task)
        elif task in self.waiting:
            self.waiting.remove(task)

    def leave(self, task: Task, sequence: Sequence) -> None:
        """One of several sequences of a task is over."""
        task.sequences.remove(sequence)
        self._free_slot(sequence)

    @property
    def active(self) -> int:
        """How many sequences hold memory."""
        return sum(len(task.sequences) for task in self.running)

    def plan(self) -> list[Work]:
        """The next step's work: texts first, by slot, then prompts in the order in which they came."""
        self._make_room()
        self._admit()
        self._compact()
        texts, prompts, left = [], [], self._chunk
        for task in self.running:
            for sequence in task.sequences:
                if not sequence.pending:
                    continue  # its next token is not decided yet
                if sequence.decoding:
                    texts.append(Work(task, sequence, 1))
                    continue
                # A prompt is always cut at the same places, so that its numbers do not depend on who is beside it.
                count = min(self._chunk - sequence.computed % self._chunk, sequence.pending)
                if count <= left:
                    prompts.append(Work(task, sequence, count))
                    left -= count
        texts.sort(key=_slot)
        # Rows of one token come first, as one of a prompt may be.
        return texts + sorted(prompts, key=_several) if prompts else texts

    # ------------------------------------------------------------------------------------------------------

    def _longest(self) -> int:
        return max([len(each.tokens) for task in self.running for each in task.sequences], default=0)

    def _top(self) -> int:
        """How many slots there must be for those in use."""
        return 1 + max(self._used(), default=-1)

    def _used(self) -> list[int]:
        return [slot for task in self.running for slot in _slots(task)]

    def _make_room(self) -> None:
        while self.running:
            top, longest = self._top(), self._longest()
            if not self._room.fits(top, longest):
                self._compact(always=True)
                top = self._top()
            if self._room.fits(top, longest) or len(self.running) == 1:
                self._room.reserve(top, longest)
                return
            task = self.running.pop()
            self._vacate(task)
            task.restart()
            self.waiting.appendleft(task)
            self.preempted += 1

    def _admit(self) -> None:
        while self.waiting:
            task = self.waiting[0]
            wanted = max(task.width, len(task.sequences))
            if len(self._free) < wanted:
                return
            length = max(self._longest(), *(len(each.tokens) + 1 for each in task.sequences))
            slots = heapq.nsmallest(wanted, self._free)
            top = max(self._top(), slots[-1] + 1)
            if self.running and not self._room.fits(top, length):
                return
            self.waiting.popleft()
            for _ in slots:
                heapq.heappop(self._free)
            for sequence in task.sequences:
                sequence.slot = slots.pop(0)
            task.spare = slots
            self.running.append(task)
            self._room.reserve(top, length)
            if task.recalls:
                for sequence in task.sequences:
                    sequence.computed = sequence.cached = self._room.recall(sequence)

    def _compact(self, *, always: bool = False) -> None:
        """Move sequences out of high slots where many below are empty: attention runs over all up to the highest."""
        slots = self._used()
        used = len(slots)
        if not always and max(slots, default=-1) < used + max(1, used // 2):
            return
        for task in self.running:
            task.spare = [heapq.heappushpop(self._free, slot) if slot >= used else slot for slot in task.spare]
            for sequence in task.sequences:
                if sequence.slot >= used and self._free and self._free[0] < sequence.slot:
                    self._room.move(sequence.slot, self._free[0], sequence.computed)
                    low = heapq.heappop(self._free)
                    self._free_slot(sequence)
                    sequence.slot = low

    def _vacate(self, task: Task) -> None:
        for slot in task.spare:
            heapq.heappush(self._free, slot)
        for sequence in task.sequences:
            self._free_slot(sequence)
            sequence.slot, sequence.computed = -1, 0
        task.spare = []

    def _free_slot(self, sequence: Sequence) -> None:
        heapq.heappush(self._free, sequence.slot)
        self._room.clear(sequence.slot, len(sequence.tokens))


def _slot(work: Work) -> int:
    return work.sequence.slot


def _several(work: Work) -> bool:
    return work.count > 1


def _slots(task: Task) -> list[int]:
    return [*(sequence.slot for sequence in task.sequences), *task.spare]
