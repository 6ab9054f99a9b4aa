"""Parse and format messages in threads, or on the event loop within a budget for work of its own."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextvars import copy_context
from math import prod
from typing import Any, TypeVar

from dragoman.core.calls import Inference, Response
from dragoman.core.datatypes import BYTES
from dragoman.core.metrics import Family
from dragoman.core.sizes import INLINE, THREAD
from dragoman.core.tensor import Tensor
from dragoman.protocols.wire import HttpRequest
from dragoman.system.request_context import variables_of
from dragoman.system.threads import DaemonThreads, settable
from dragoman.transports.bodies import BodyMemory
from dragoman.transports.counters import TransportCounters
from dragoman.transports.loop_delay import LoopDelay

A = TypeVar("A")
B = TypeVar("B")

# Parsing a byte of text takes as long as this many bytes of numbers: up to 40 ms for a list of objects of 256 KiB.
_TEXT_BYTE_SIZE = 4
# Only one thread of Python runs at a time; more of them would leave less time to the event loop.
_THREADS = 2
# Formatting an element of BYTES takes as long as this many bytes of numbers.
_BYTES_ELEMENT_SIZE = 64


class MessageExecutor:
    """Parses and formats messages: small ones at once, large ones within `budget`, very large ones in threads.

    The transports of a server share it, with the memory of bodies and the counters.
    """

    def __init__(self, bodies: BodyMemory, max_loop_delay_s: float = 0.0) -> None:
        self.bodies = bodies
        self.counters = TransportCounters()
        self.observation: Any = None  # of requests
        self.loop_delay = LoopDelay(max_loop_delay_s, self.counters.rejected)
        self.budget = LoopBudget(loop_delay=self.loop_delay)
        self._threads = DaemonThreads(_THREADS, "dragoman-messages")

    def metrics(self) -> Iterable[Family]:
        """Return the metrics of the transports."""
        self.counters.rejected["bodies_memory"] = self.bodies.rejected
        return (*self.counters.families(), *(() if self.observation is None else self.observation.families()))

    async def parse(self, function: Callable[[A], B], argument: A, size: int, *, in_thread: bool) -> B:
        if in_thread:
            return await self.run_in_thread(function, argument)
        return function(argument) if size <= INLINE else await self.budget.call(function, argument)

    async def format(self, function: Callable[[A], B], response: A, size: int = -1) -> B:
        """Return `function(response)`, which formats about `size` bytes; by default those of the response's tensors.

        Very large ones count among the bodies meanwhile. Raises Overloaded if these are at their limit.
        """
        size = weight(getattr(response, "answer", None)) if size < 0 else size
        if size <= INLINE:
            return function(response)
        if size <= THREAD:
            return await self.budget.call(function, response)
        if self.bodies.is_over_limit:
            raise self.bodies.unread_error
        self.bodies.count_unread(size)
        try:
            return await self.run_in_thread(function, response)
        finally:
            self.bodies.count_unread(-size)

    async def run_in_thread(self, function: Callable[[A], B], argument: A) -> B:
        return await asyncio.get_running_loop().run_in_executor(self._threads, copy_context().run, function, argument)


def is_large(request: HttpRequest) -> bool:
    size = len(request.body)
    return size * _TEXT_BYTE_SIZE > THREAD and max(size, request.text_size * _TEXT_BYTE_SIZE) > THREAD


def weight(answer: Any) -> int:
    """Return about how many bytes of tensors there are to format."""
    if isinstance(answer, Inference):
        total = 0
        for tensor in answer.outputs.values():
            total += prod(tensor.shape) * _BYTES_ELEMENT_SIZE if tensor.datatype is BYTES else tensor.data.nbytes
        return total
    if type(answer) is tuple:  # of concurrent calls
        return sum(weight(response.answer) for response in answer if isinstance(response, Response))
    return answer.data.nbytes if isinstance(answer, Tensor) else 0


log = logging.getLogger("dragoman.http")

# Time for large messages in an iteration of the event loop. At least one is handled in each iteration that has any.
_BUDGET_S = 0.01
# After this much time the loop gets an iteration without large messages: a new connection needs several of them.
_REST_AFTER_S = 0.002
# Bytes read in an iteration before connections pause, and about the time that reading and copying a byte takes.
_MAX_READ_BYTES = 1 << 21
# Each connection may still read once in that iteration: most bodies whole, little once this many bytes were read.
_READ_SIZE = 1 << 20
_SMALL_READS_AFTER = 1 << 24
_SMALL_READ_SIZE = 1 << 16
_READ_S_PER_BYTE = 2e-9


class LoopBudget:
    """Runs functions on the event loop in order: at once while this iteration has time left, else in a later one.

    The time counts for `loop_delay`, which may allow less than `budget_s`.
    """

    def __init__(
        self,
        budget_s: float = _BUDGET_S,
        clock: Callable[[], float] = time.perf_counter,
        loop_delay: LoopDelay | None = None,
    ) -> None:
        self._budget_s = budget_s if loop_delay is None else min(budget_s, loop_delay.large_messages_s)
        self._clock = clock
        self._loop_delay = loop_delay
        self._spent_s = 0.0
        self._queue: deque[Callable[[], object]] = deque()
        self._is_scheduled = False
        self._is_running = False
        self._rests = 0  # iterations still to come without large messages
        self._read_bytes = 0

    def run(self, work: Callable[[], object]) -> bool:
        """Run `work` now or later; return whether it was run now. Its exceptions are logged."""
        now = not self._is_exhausted()
        if now:
            self._run(work)
        else:
            self._queue.append(work)
        return now

    async def call(self, function: Callable[[A], B], argument: A) -> B:
        """Return `function(argument)`, computed now or in a later iteration."""
        if self._is_running:  # `run` measures it
            return function(argument)
        if not self._is_exhausted():
            return self._measure(lambda: function(argument))
        result: asyncio.Future[B] = asyncio.get_running_loop().create_future()
        context = copy_context()

        def work() -> None:
            if not result.cancelled():
                try:
                    result.set_result(context.run(function, argument))
                except BaseException as error:
                    result.set_exception(settable(error))

        self._queue.append(work)
        return await result

    def run_later(self, work: Callable[[], object], cost_s: float) -> None:
        """Run `work` in a later iteration; `cost_s` is the time that its consequences will take."""

        def run() -> None:
            work()
            self._spend(cost_s)

        self._queue.append(run)
        self._spend(0.0)

    def read_size(self) -> int:
        """Return how many bytes of a body a connection may read at once."""
        return _READ_SIZE if self._read_bytes < _SMALL_READS_AFTER else _SMALL_READ_SIZE

    def count_read(self, size: int) -> bool:
        """Count bytes read from a connection; return whether no more should be read in this iteration."""
        self._read_bytes += size
        self._spend(0.0)
        return self._read_bytes > _MAX_READ_BYTES

    def _is_exhausted(self) -> bool:
        return self._is_scheduled and (bool(self._queue) or self._rests > 0 or self._spent_s >= self._budget_s)

    def _run(self, work: Callable[[], object]) -> None:
        try:
            self._measure(work)
        except BaseException:
            log.exception("a request failed")

    def _measure(self, work: Callable[[], B]) -> B:
        was_running, self._is_running = self._is_running, True
        started_s = self._clock()
        try:
            return work()
        finally:
            self._is_running = was_running
            if not was_running:
                self._spend(self._clock() - started_s)

    def _spend(self, time_s: float) -> None:
        self._spent_s += time_s
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._next_iteration, context=variables_of(()))

    def _next_iteration(self) -> None:
        self._rests += int(self._spent_s / _REST_AFTER_S)
        self._spent_s, self._read_bytes = 0.0, 0
        if self._rests:
            self._rests -= 1
            asyncio.get_running_loop().call_soon(self._next_iteration, context=variables_of(()))
            return
        self._is_scheduled = False
        if self._queue and self._loop_delay is not None:
            self._loop_delay.begin_iteration(time.monotonic())
        while self._queue and self._spent_s < self._budget_s:
            self._run(self._queue.popleft())


class ReadLimiter:
    """Pauses reading from a connection if much has been read from all of them in one iteration of the event loop.

    libuv reads up to 32 times from a connection before it lets others have their turn. `update` is called when reading
    may continue.
    """

    __slots__ = ("_budget", "_update", "is_paused")

    def __init__(self, budget: LoopBudget, update: Callable[[], None]) -> None:
        self.is_paused = False
        self._budget = budget
        self._update = update

    def count(self, size: int) -> None:
        """Count bytes that were read, and pause if they are too many."""
        if self._budget.count_read(size) and not self.is_paused:
            self.is_paused = True
            self._update()
            self._budget.run_later(self._resume, size * _READ_S_PER_BYTE)

    def _resume(self) -> None:
        self.is_paused = False
        self._update()
