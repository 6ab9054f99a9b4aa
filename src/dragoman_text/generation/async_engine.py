"""Engine in its own thread, with calls as asynchronous streams on any event loop."""

import asyncio
import logging
import queue
import time
from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

from msgspec import structs

from dragoman.core.callers import current_caller
from dragoman.core.chunks import NOTHING, Relay, StreamEnd, Take, pushes
from dragoman.core.errors import DragomanError, Overloaded, WorkerLost
from dragoman.core.fair_share import has_place
from dragoman.core.foreign_code import public_error
from dragoman.core.text import Generation, PromptInfo, Text, merge_chunks
from dragoman.system.call_times import count_wait, current_call, note_tokens
from dragoman_text.generation.engine import GenerationEngine
from dragoman_text.generation.job import GenerationJob, PromptRequest
from dragoman_text.generation.text_engine import notify, start_thread

log = logging.getLogger("dragoman.generation")

# Cache memory is freed after this time without work.
_IDLE_S = 10.0
_STOPPED = "the text engine is stopped"


class AsyncEngine:
    """Creates an engine in its own thread and executes calls until it is closed.

    capacity: maximum number of waiting and running prompts; further ones are rejected with Overloaded. One owner leaves
        a part of them to others.
    """

    def __init__(self, make: Callable[[], GenerationEngine], capacity: int, name: str) -> None:
        self._capacity = capacity
        self._open = 0
        self._open_of: Counter[str] = Counter()  # by owner
        self.commands: queue.SimpleQueue[Callable[[GenerationEngine], None] | None] = queue.SimpleQueue()
        self._updated: defaultdict[asyncio.AbstractEventLoop, set[_CallResults]] = defaultdict(set)
        self._jobs: set[GenerationJob] = set()
        self._closed = False
        self.ended = ""  # why the thread has ended without `close`
        self._thread = start_thread(make, self._work, name)

    @property
    def active(self) -> int:
        """Number of waiting and running prompts."""
        return self._open

    @pushes
    async def generate(self, prompts: Sequence[PromptRequest], take: Take[Generation]) -> None:
        """Return the chunks as they are generated; the end of the reader cancels the prompts at the next step.

        Raises Overloaded, WorkerLost if the engine is closed, and the error of any of the prompts.
        """
        if self._closed:
            raise WorkerLost(self.ended or _STOPPED)
        if 0 < self._capacity < self._open + len(prompts):
            raise Overloaded(f"Exceeds maximum queue size of {self._capacity} prompts")
        caller = current_caller.get()
        owner, before = caller.owner, len(prompts) - 1
        if (
            self._capacity
            and owner
            and not has_place(self._open_of[owner] + before, self._open + before, self._capacity)
        ):
            raise Overloaded(f"Exceeds the part of key '{caller.name}' in the queue of {self._capacity} prompts")
        call = _CallResults(self, len(prompts), sum(request.sampling.n for request in prompts))
        jobs = [GenerationJob(request, call, caller=caller) for request in prompts]
        times, is_waiting = current_call.get(), True

        def take_chunk(chunk: Generation) -> Awaitable[None] | None:
            nonlocal is_waiting
            if is_waiting:
                is_waiting = False
                count_wait(_waited_s(jobs), times)
            return take(chunk)

        relay = Relay(take_chunk, call.next_chunk)
        call.wake = relay.wake
        self._open += len(jobs)
        self._open_of[owner] += len(jobs)
        self.commands.put(lambda engine: self._begin(engine, jobs))
        try:
            if self._closed:  # closed meanwhile: the command may never be executed
                raise WorkerLost(self.ended or _STOPPED)
            await relay.run()
        finally:
            if is_waiting:
                count_wait(_waited_s(jobs), times)
            note_tokens(sum(len(request.tokens) for request in prompts), sum(job.generated for job in jobs))
            self._open -= len(jobs)
            self._open_of[owner] -= len(jobs)
            if not self._open_of[owner]:
                del self._open_of[owner]
            self.commands.put(lambda engine: self._end(engine, jobs))

    def execute(self, function: Callable[[GenerationEngine], None]) -> "Future[None]":
        """Execute a function between two steps, in the engine's thread. If the engine is closed, the future fails with
        WorkerLost."""
        future: Future[None] = Future()

        def command(engine: GenerationEngine) -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                function(engine)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(None)

        self.commands.put(command)
        if self._closed and future.cancel():  # it may never be executed
            future = Future()
            future.set_exception(WorkerLost(self.ended or _STOPPED))
        return future

    def close(self) -> None:
        """Stop the engine; open calls fail with WorkerLost."""
        self._closed = True
        self.commands.put(None)
        self._thread.join()

    # --- in the engine's thread --------------------------------------------------------------------------

    def _work(self, engine: GenerationEngine) -> None:
        """Execute steps and commands until the engine is closed. An error of the model ends its generations only."""
        reason = _STOPPED
        try:
            while self._run_commands(engine):
                if engine.has_work:
                    try:
                        engine.step()
                    except BaseException as error:
                        log.exception("a step of the text engine failed; its generations end")
                        self._abandon(engine, public_error(error, "generation failed"))
                self._flush()
        except BaseException:
            log.exception("the thread of the text engine has ended")
            reason = self.ended = "the text engine has ended; the log has the reason"
            self._closed = True
        while not self.commands.empty():  # calls that began meanwhile end, too
            if (command := self.commands.get()) is not None:
                self._execute(engine, command)
        self._abandon(engine, WorkerLost(reason))
        self._flush()

    def _run_commands(self, engine: GenerationEngine) -> bool:
        """Execute commands, waiting for one if there is no other work; return False when closed."""
        while not (engine.has_work and self.commands.empty()):
            try:
                command = self.commands.get(timeout=None if engine.is_idle else _IDLE_S)
            except queue.Empty:
                self._execute(engine, lambda engine: engine.release_memory())
                continue
            if command is None:
                return False
            self._execute(engine, command)
        return True

    def _execute(self, engine: GenerationEngine, command: Callable[[GenerationEngine], None]) -> None:
        try:
            command(engine)
        except BaseException:  # the thread must survive any error
            log.exception("a command of the text engine failed")

    def _begin(self, engine: GenerationEngine, jobs: Sequence[GenerationJob]) -> None:
        self._jobs.update(jobs)
        for job in jobs:
            engine.add(job)

    def _end(self, engine: GenerationEngine, jobs: Sequence[GenerationJob]) -> None:
        self._jobs.difference_update(jobs)
        for job in jobs:
            engine.cancel(job)

    def _abandon(self, engine: GenerationEngine, error: DragomanError) -> None:
        jobs, self._jobs = self._jobs, set()
        for job in jobs:
            job.sink.error(error)
            self._execute(engine, partial(GenerationEngine.cancel, job=job))

    def mark_updated(self, call: "_CallResults") -> None:
        self._updated[call.loop].add(call)

    def _flush(self) -> None:
        """Wake each event loop once for all results of a step."""
        updated, self._updated = self._updated, defaultdict(set)
        for loop, calls in updated.items():
            notify(loop, calls)


def _waited_s(jobs: Sequence[GenerationJob]) -> float:
    """Return the longest time that a prompt of a call waited for its first step, which may still be to come."""
    now_s = time.monotonic()
    return max((now_s - job.since_s if job.waited_s < 0 else job.waited_s for job in jobs), default=0.0)


class _CallResults:
    """Results of one call: added by the engine's thread, consumed on the event loop.

    wake: called on the event loop when there are more.
    """

    def __init__(self, service: AsyncEngine, prompts: int, texts: int) -> None:
        self.loop = asyncio.get_running_loop()
        self.wake: Callable[[], None] = lambda: None
        self._remaining = texts  # that are not yet returned whole
        self._service = service
        self._infos: list[PromptInfo | None] = [None] * prompts
        self._is_begun = False  # whether a chunk contained the prompts' information
        self._results: deque[Text] = deque()  # the engine's thread appends while the loop pops from the left
        self._failure: DragomanError | None = None  # the first one
        self._since_s = time.monotonic()

    def info(self, index: int, info: PromptInfo) -> None:
        read_s = time.monotonic() - self._since_s - (info.waited_s or 0.0)
        self._infos[index] = replace(info, read_s=max(0.0, read_s))
        self._service.mark_updated(self)

    def text(self, text: Text) -> None:
        if text.finish:
            text = structs.replace(text, took_s=time.monotonic() - self._since_s)
        self._results.append(text)
        self._service.mark_updated(self)

    def error(self, error: DragomanError) -> None:
        self._failure = self._failure or error
        self._service.mark_updated(self)

    def next_chunk(self) -> Generation:
        """Return the results since the last chunk, the first one with the prompts' information; NOTHING without any.

        Raises the error of any of the prompts, and StreamEnd after the last chunk.
        """
        if not self._remaining:
            raise StreamEnd
        prompts: tuple[PromptInfo, ...] = ()
        if not self._is_begun:
            prompts = tuple(info for info in self._infos if info is not None)
        if not self._results or (not self._is_begun and len(prompts) < len(self._infos)):
            if self._failure is not None:
                raise self._failure
            nothing: Generation = NOTHING
            return nothing
        self._is_begun = True
        results = [self._results.popleft() for _ in range(len(self._results))]
        self._remaining -= sum([1 for text in results if text.finish])
        generation = Generation(tuple(results), prompts)
        return generation if len(results) == 1 else merge_chunks([generation])
