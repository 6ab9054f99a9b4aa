"""Threads that share the work of one function of machine code."""

import threading
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue

# A function and its arguments; the objects are kept alive as long as a thread may look at them.
_Job = tuple[Callable[..., None], tuple[int, ...], object]


class _Mate:
    """A thread that sleeps until it has something to do."""

    def __init__(self) -> None:
        self.idle = True
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()  # one at most: who gives asks first whether it is idle
        threading.Thread(target=_works, args=(weakref.ref(self), self._jobs), name="dragoman-mate", daemon=True).start()
        weakref.finalize(self, self._jobs.put, None)

    def give(self, job: _Job) -> None:
        self.idle = False
        self._jobs.put(job)


def _works(mate: weakref.ref[_Mate], jobs: SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        job[0](*job[1])
        job = None
        if (here := mate()) is not None:
            here.idle = True
        del here


class ThreadTeam:
    """Calls a function that shares its work among its callers, in the thread that asks and in others beside it."""

    def __init__(self) -> None:
        self._mates: list[_Mate] = []

    def run(self, function: Callable[..., None], calls: Sequence[tuple[int, ...]], kept: object) -> None:
        """Call the function with each of the arguments at once; return when the first call has.

        A mate that is still about an earlier call is left out: the function must do all its work for whoever comes.
        `kept` lives as long as a call may be under way.
        """
        while len(self._mates) < len(calls) - 1:
            self._mates.append(_Mate())
        for mate, arguments in zip(self._mates, calls[1:], strict=False):
            if mate.idle:
                mate.give((function, arguments, kept))
        function(*calls[0])
