"""Threads that call a kernel together, which divides its work among them."""

import threading
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue

# A function, its arguments, and objects to keep alive until it has returned.
_Job = tuple[Callable[..., None], tuple[int, ...], object]


class _StepThread:
    """A thread that sleeps until it gets a job."""

    def __init__(self) -> None:
        self.idle = True
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()  # at most one: `idle` is checked before `submit`
        target, arguments = _run_jobs, (weakref.ref(self), self._jobs)
        threading.Thread(target=target, args=arguments, name="dragoman-step", daemon=True).start()
        weakref.finalize(self, self._jobs.put, None)

    def submit(self, job: _Job) -> None:
        self.idle = False
        self._jobs.put(job)


def _run_jobs(owner: weakref.ref[_StepThread], jobs: SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        job[0](*job[1])
        job = None
        if (thread := owner()) is not None:
            thread.idle = True
        del thread


class StepThreads:
    """Executes a function that divides its work among all threads that call it."""

    def __init__(self) -> None:
        self._threads: list[_StepThread] = []

    def run(self, function: Callable[..., None], calls: Sequence[tuple[int, ...]], keep_alive: object) -> None:
        """Call the function with each of the arguments concurrently, and wait for the first call, in this thread.

        A thread that still executes an earlier call is skipped, so the function must complete with any number of
        callers. `keep_alive` is referenced until the last call has returned.
        """
        while len(self._threads) < len(calls) - 1:
            self._threads.append(_StepThread())
        for thread, arguments in zip(self._threads, calls[1:], strict=False):
            if thread.idle:
                thread.submit((function, arguments, keep_alive))
        function(*calls[0])
