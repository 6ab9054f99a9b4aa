"""The engine in a thread of its own, and its calls as asynchronous streams on any event loop."""

import asyncio
import logging
import queue
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence

from dragoman.core.errors import DragomanError, ModelFailed, Overloaded, WorkerLost
from dragoman.core.text import Generation, PromptInfo, Text, joined
from dragoman.generation.engine import Engine
from dragoman.generation.job import Asked, Job
from dragoman.generation.own_thread import living, wake

log = logging.getLogger("dragoman.generation")

# Memory that no text needs is given back after so many seconds without any.
_IDLE_S = 10.0


class Service:
    """Loads an engine in its thread and answers calls with it until it is closed.

    `capacity`: how many prompts may wait or be worked on; further ones are refused with Overloaded.
    """

    def __init__(self, make: Callable[[], Engine], capacity: int, name: str) -> None:
        self._capacity = capacity
        self._open = 0
        self._orders: queue.SimpleQueue[Callable[[Engine], None] | None] = queue.SimpleQueue()
        self._touched: dict[asyncio.AbstractEventLoop, set[_Call]] = {}
        self._jobs: set[Job] = set()
        self._closed = False
        self._thread = living(make, self._work, name)

    @property
    def active(self) -> int:
        """How many prompts wait or are worked on."""
        return self._open

    async def generate(self, prompts: Sequence[Asked]) -> AsyncGenerator[Generation, None]:
        """Pieces as they come; closing the generator frees what the prompts hold, at the next step.

        Raises Overloaded, WorkerLost when the service is closed, and what went wrong with any of the prompts.
        """
        if self._closed:
            raise WorkerLost("the text engine is stopped")
        if 0 < self._capacity < self._open + len(prompts):
            raise Overloaded(f"Exceeds maximum queue size of {self._capacity} prompts")
        call = _Call(self, len(prompts))
        jobs = [Job(asked, call) for asked in prompts]
        self._open += len(jobs)
        self._orders.put(lambda engine: self._begin(engine, jobs))
        try:
            if self._closed:  # meanwhile: nobody may be there to take the order
                raise WorkerLost("the text engine is stopped")
            async for piece in call.pieces(sum(_texts(asked) for asked in prompts)):
                yield piece
        finally:
            self._open -= len(jobs)
            self._orders.put(lambda engine: self._end(engine, jobs))

    def close(self) -> None:
        """Stop; calls that are open fail with WorkerLost."""
        self._closed = True
        self._orders.put(None)
        self._thread.join()

    # --- in the engine's thread --------------------------------------------------------------------------

    def _work(self, engine: Engine) -> None:
        while self._obeyed(engine):
            if engine.busy:
                try:
                    engine.step()
                except Exception as fault:
                    log.exception("the text engine failed in a step; its texts end")
                    self._abandon(engine, ModelFailed(f"generation failed: {type(fault).__name__}: {fault}"))
            self._flush()
        self._abandon(engine, WorkerLost("the text engine is stopped"))
        self._flush()

    def _obeyed(self, engine: Engine) -> bool:
        """Do what was ordered, waiting for an order where there is nothing else to do; False at the end."""
        while not (engine.busy and self._orders.empty()):
            try:
                order = self._orders.get(timeout=None if engine.rested else _IDLE_S)
            except queue.Empty:
                engine.rest()
                continue
            if order is None:
                return False
            try:
                order(engine)
            except Exception:  # the thread must outlive whatever it meets
                log.exception("an order to the text engine failed")
        return True

    def _begin(self, engine: Engine, jobs: Sequence[Job]) -> None:
        self._jobs.update(jobs)
        for job in jobs:
            engine.add(job)

    def _end(self, engine: Engine, jobs: Sequence[Job]) -> None:
        self._jobs.difference_update(jobs)
        for job in jobs:
            engine.cancel(job)

    def _abandon(self, engine: Engine, fault: DragomanError) -> None:
        for job in self._jobs:
            engine.cancel(job)
            job.outlet.fault(fault)
        self._jobs.clear()

    def touched(self, call: "_Call") -> None:
        self._touched.setdefault(call.loop, set()).add(call)

    def _flush(self) -> None:
        """One wake-up of a loop for all that a step has given."""
        touched, self._touched = self._touched, {}
        for loop, calls in touched.items():
            wake(loop, calls)


def _texts(asked: Asked) -> int:
    return asked.sampling.n


class _Call:
    """What has come for one call: written by the engine's thread, read on the loop."""

    def __init__(self, service: Service, prompts: int) -> None:
        self.loop = asyncio.get_running_loop()
        self.news = asyncio.Event()
        self._service = service
        self._infos: list[PromptInfo | None] = [None] * prompts
        self._come: deque[Text] = deque()  # the engine's thread adds at the end while the loop takes from the front
        self._fault: DragomanError | None = None

    def info(self, index: int, info: PromptInfo) -> None:
        self._infos[index] = info
        self._service.touched(self)

    def text(self, text: Text) -> None:
        self._come.append(text)
        self._service.touched(self)

    def fault(self, fault: DragomanError) -> None:
        self._fault = self._fault or fault
        self._service.touched(self)

    async def pieces(self, texts: int) -> AsyncGenerator[Generation, None]:
        """Pieces until so many texts have ended. The first one has what became of the prompts."""
        prompts: tuple[PromptInfo, ...] | None = None
        while texts:
            await self.news.wait()
            self.news.clear()
            if prompts is None:
                prompts = tuple(info for info in self._infos if info is not None)
                if len(prompts) < len(self._infos):
                    prompts = None
            if prompts is not None and self._come:
                come = [self._come.popleft() for _ in range(len(self._come))]
                texts -= sum(bool(text.finish) for text in come)
                found = Generation(tuple(come), prompts)
                yield found if len(come) == 1 else joined([found])
                prompts = ()
            if self._fault is not None:
                raise self._fault
