"""Supervision of child processes: start them, restart those that exit, watch their heartbeats."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from dragoman.core.errors import DragomanError
from dragoman.workers.heartbeat import BEATS

log = logging.getLogger("dragoman.worker")

# Delay before a restart: 0.1 s, then 0.2 s, ... up to 30 s; back to 0.1 s once a process has run for 10 s.
_FIRST_DELAY_S = 0.1
_LONGEST_DELAY_S = 30.0
_HEALTHY_S = 10.0
# A process that exits this many times in a row without a response is given up: calls fail at once.
_MOST_FAILURES = 3


class SupervisedProcess(Protocol):
    """A process that a supervisor can start and watch."""

    exited: asyncio.Event  # set when the process has exited
    has_responded: bool  # it has answered at least one call
    was_killed: bool  # this process killed it, so its exit says nothing about its health

    async def start(self) -> Any:
        """Start the process. Raises DragomanError, after which nothing is left running."""

    async def stop(self) -> None:
        """End the process."""

    def beat(self) -> bool:
        """Look at the heartbeat; return whether the process has begun or ceased to hang."""


P = TypeVar("P", bound=SupervisedProcess)


class Supervisors(Generic[P]):
    """Keep `count` processes running.

    make: return a new process that has not been started, given its number from 0.
    on_exit: called with each process that has exited. on_restart: called with each new one that takes its place.
    on_restart_failed: called after each failed attempt.
    on_heartbeats: called at each heartbeat interval with the processes that have begun or ceased to hang.
    """

    def __init__(
        self,
        count: int,
        make: Callable[[int], P],
        *,
        on_exit: Callable[[P], None],
        on_restart: Callable[[P], None],
        on_restart_failed: Callable[[], None] = lambda: None,
        on_heartbeats: Callable[[Sequence[P]], None],
        heartbeat_s: float,
    ) -> None:
        self.running: list[P] = []
        self._make = make
        self._on_exit = on_exit
        self._on_restart = on_restart
        self._on_restart_failed = on_restart_failed
        self._on_heartbeats = on_heartbeats
        self._heartbeat_s = heartbeat_s
        self._failures = [0] * count
        self._cannot_start = [False] * count
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def is_complete(self) -> bool:
        """Whether every process is running."""
        return len(self.running) == len(self._failures)

    @property
    def has_given_up(self) -> bool:
        """Whether no process runs and each one cannot be started or has exited three times without a response."""
        failing = (failures >= _MOST_FAILURES for failures in self._failures)
        return not self.running and all(a or b for a, b in zip(failing, self._cannot_start, strict=True))

    async def start(self) -> list[Any]:
        """Start all processes; return what their `start` returns. If one cannot start, raise its error and end all."""
        processes = [self._make(number) for number in range(len(self._failures))]
        starting = [asyncio.create_task(process.start()) for process in processes]
        try:
            results = await asyncio.gather(*starting)
        except BaseException:
            for task in starting:
                task.cancel()
            done = await asyncio.gather(*starting, return_exceptions=True)
            started = (p for p, result in zip(processes, done, strict=True) if not isinstance(result, BaseException))
            await asyncio.gather(*(process.stop() for process in started))
            raise
        self.running = list(processes)
        self._tasks = [asyncio.create_task(self._supervise(number, each)) for number, each in enumerate(processes)]
        if self._heartbeat_s:
            self._tasks.append(asyncio.create_task(self._watch_heartbeats(self._heartbeat_s / BEATS)))
        return results

    async def close(self) -> list[P]:
        """Stop supervising; return the processes that still run, for the caller to end."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        running, self.running = self.running, []
        return running

    async def _supervise(self, number: int, process: P) -> None:
        delay_s = _FIRST_DELAY_S
        while True:
            started_s = time.monotonic()
            await process.exited.wait()
            if not process.was_killed:
                self._failures[number] = 1 if process.has_responded else self._failures[number] + 1
            if process.was_killed or time.monotonic() - started_s > _HEALTHY_S:
                delay_s = _FIRST_DELAY_S
            self.running.remove(process)
            self._on_exit(process)
            process, delay_s = await self._restart(number, delay_s)
            self.running.append(process)
            self._on_restart(process)

    async def _restart(self, number: int, delay_s: float) -> tuple[P, float]:
        """Start a new process, however long it takes; return it with the next delay."""
        while True:
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, _LONGEST_DELAY_S)
            process = self._make(number)
            try:
                await process.start()
            except DragomanError as error:
                log.error("%s; trying again in %g s", error.message, delay_s)
                self._cannot_start[number] = True
                self._on_restart_failed()
            else:
                self._cannot_start[number] = False
                return process, delay_s

    async def _watch_heartbeats(self, interval_s: float) -> None:
        while True:
            await asyncio.sleep(interval_s)
            self._on_heartbeats([process for process in self.running if process.beat()])
