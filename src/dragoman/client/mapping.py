"""`Client.map`: many points over one model, with bounded concurrency, retries, a journal and a progress line."""

import asyncio
import shutil
import sys
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Generator, Iterable, Sized
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, replace
from itertools import islice
from os import PathLike
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TextIO

from dragoman.client.calls import ClientCalls, InferArguments
from dragoman.client.errors import ServerUnreachable
from dragoman.client.http_sync import run_blocking
from dragoman.client.journal import Journal
from dragoman.client.results import Result
from dragoman.core.calls import ModelDescription
from dragoman.core.errors import DragomanError, InvalidInput
from dragoman.core.signature import TensorSpec

_REFRESH_S = 0.1


@dataclass(frozen=True, slots=True)
class PointResult:
    """The outcome of one point of `Client.map`.

    index: position in `points`.
    inputs: the point.
    error: why it failed; None if it succeeded.
    is_from_journal: an earlier run computed it.
    """

    index: int
    inputs: Any
    error: DragomanError | None = None
    is_from_journal: bool = False
    _result: Result | None = None

    @property
    def result(self) -> Result:
        """The outputs. Raises the error of a point that failed."""
        if self._result is None:
            raise self.error or AssertionError("a point without outputs has an error")
        return self._result


@dataclass(frozen=True, slots=True)
class MapOptions:
    """Options of `Client.map` besides those of the calls."""

    concurrency: int
    window: int
    ordered: bool
    journal: Path | None
    journal_fsync: bool
    progress: bool

    @classmethod
    def of(
        cls,
        concurrency: int,
        window: int | None,
        ordered: bool,
        journal: str | PathLike[str] | None,
        journal_fsync: bool,
        progress: bool | None,
    ) -> "MapOptions":
        """Return the options with their defaults. Raises InvalidInput."""
        if concurrency < 1:
            raise InvalidInput(f"concurrency: expected 1 or more, got {concurrency}")
        if window is not None and window < concurrency:
            raise InvalidInput(f"window: expected at least the concurrency, {concurrency}, got {window}")
        shows = sys.stderr.isatty() if progress is None else progress
        path = None if journal is None else Path(journal)
        return cls(concurrency, window or 2 * concurrency, ordered, path, journal_fsync, shows)


class MapRun:
    """One run of `Client.map`: computes single points, and stores them in the journal if there is one.

    in_thread: calls a function that may block. unreachable: the error after which no further point is computed,
    because nothing listened until the timeout.
    """

    def __init__(
        self,
        calls: ClientCalls,
        arguments: InferArguments,
        options: MapOptions,
        points: Any,
        in_thread: Callable[..., Awaitable[Any]],
    ) -> None:
        self.options = options
        self.unreachable: ServerUnreachable | None = None
        self._calls = calls
        self._arguments = arguments
        self._in_thread = in_thread
        self._journal: Journal | None = None
        total = len(points) if isinstance(points, Sized) else None
        self._progress = ProgressLine(arguments.model, total, sys.stderr) if options.progress else None

    async def start(self) -> None:
        """Open the journal. Raises InvalidInput if it belongs to another model or call."""
        if self.options.journal is not None:
            description = await self._calls.metadata(self._arguments.model, self._arguments.version)
            run = _describe_run(self._arguments, description)
            fsync = self.options.journal_fsync
            self._journal = await self._in_thread(Journal, self.options.journal, run, fsync)

    async def compute(self, index: int, inputs: Any) -> PointResult:
        """Return the outcome of a point."""
        if self.unreachable is not None:
            return PointResult(index, inputs, self.unreachable)
        try:
            return await self._compute(index, inputs)
        except DragomanError as error:
            if isinstance(error, ServerUnreachable) and error.refused:
                self.unreachable = error
            return PointResult(index, inputs, error)

    def count(self, point: PointResult) -> PointResult:
        """Count a point that is about to be returned."""
        if self._progress is not None:
            self._progress.update(point)
        return point

    def finish(self) -> None:
        """Raise the error that ended the run early, if any."""
        if self.unreachable is not None:
            raise self.unreachable

    def close(self) -> None:
        if self._progress is not None:
            self._progress.close()
        if self._journal is not None:
            self._journal.close()

    async def _compute(self, index: int, inputs: Any) -> PointResult:
        arguments, journal = replace(self._arguments, inputs=inputs), self._journal
        deadline = self._calls.deadline(arguments.timeout_s)
        request = await self._calls.request(arguments, deadline)
        key = "" if journal is None else journal.key(request)
        stored = None if journal is None else journal.find(key)
        if stored is not None:
            return PointResult(index, inputs, None, True, self._calls.result(stored, arguments))
        response = await self._calls.send(arguments, request, deadline)
        if journal is not None:
            await self._in_thread(journal.store, key, response)
        return PointResult(index, inputs, None, False, self._calls.result(response, arguments))


def _describe_run(arguments: InferArguments, description: ModelDescription) -> dict[str, Any]:
    """Return what distinguishes this run from those of other models and calls."""
    outputs = [o if isinstance(o, str) else [o.name, dict(o.parameters)] for o in arguments.outputs or ()]
    return {
        "model": arguments.model,
        "version": arguments.version,
        "parameters": dict(arguments.parameters or {}),
        "outputs": outputs,
        "served versions": list(description.versions),
        "platform": description.platform,
        "model inputs": [_describe(spec) for spec in description.signature.inputs],
        "model outputs": [_describe(spec) for spec in description.signature.outputs],
    }


def _describe(spec: TensorSpec) -> list[Any]:
    return [spec.name, str(spec.datatype or ""), None if spec.shape is None else list(spec.shape)]


# --- drivers -----------------------------------------------------------------------------------------------------


def map_in_threads(
    run: MapRun, points: Iterable[Any], interrupt: Callable[[], None]
) -> Generator[PointResult, None, None]:
    """Compute points in threads; the caller's thread reads `points`, at most a window ahead of what it has received."""
    options, source = run.options, enumerate(points)
    pending: deque[Future[PointResult]] = deque()
    finished: SimpleQueue[Future[PointResult]] = SimpleQueue()

    def compute(index: int, inputs: Any) -> PointResult:
        return run_blocking(run.compute(index, inputs))

    executor = ThreadPoolExecutor(options.concurrency, thread_name_prefix="dragoman-map")
    try:
        run_blocking(run.start())
        while True:
            room = 0 if run.unreachable else options.window - len(pending)
            for index, inputs in islice(source, room):
                future = executor.submit(compute, index, inputs)
                pending.append(future)
                future.add_done_callback(finished.put)
            if not pending:
                run.finish()
                return
            future = pending[0] if options.ordered else finished.get()
            pending.remove(future)
            yield run.count(future.result())
    finally:
        interrupt()
        executor.shutdown(wait=False, cancel_futures=True)
        run.close()


async def map_in_tasks(run: MapRun, points: Iterable[Any] | AsyncIterable[Any]) -> AsyncGenerator[PointResult, None]:
    """Compute points in tasks of the running loop; see `map_in_threads`."""
    options = run.options
    pending: deque[asyncio.Task[PointResult]] = deque()
    finished: asyncio.Queue[asyncio.Task[PointResult]] = asyncio.Queue()
    slots = asyncio.Semaphore(options.concurrency)

    async def compute(index: int, inputs: Any) -> PointResult:
        async with slots:
            return await run.compute(index, inputs)

    try:
        await run.start()
        async with aclosing(_enumerate(points)) as source:
            is_exhausted = False
            while True:
                while not (is_exhausted or run.unreachable) and len(pending) < options.window:
                    point = await anext(source, None)
                    if point is None:
                        is_exhausted = True
                        break
                    task = asyncio.create_task(compute(*point))
                    pending.append(task)
                    task.add_done_callback(finished.put_nowait)
                if not pending:
                    run.finish()
                    return
                task = pending[0] if options.ordered else await finished.get()
                point_result = await task
                pending.remove(task)
                yield run.count(point_result)
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        run.close()


async def _enumerate(points: Iterable[Any] | AsyncIterable[Any]) -> AsyncGenerator[tuple[int, Any], None]:
    if isinstance(points, AsyncIterable):
        index = 0
        async for inputs in points:
            yield index, inputs
            index += 1
    else:
        for point in enumerate(points):
            yield point


# --- progress ----------------------------------------------------------------------------------------------------


class ProgressLine:
    """One line on a terminal that is rewritten at most ten times a second.

    The rate and the time left count only the points that this run computed.
    """

    def __init__(self, name: str, total: int | None, stream: TextIO) -> None:
        self._name = name
        self._total = total
        self._stream = stream
        self._started_s = time.monotonic()
        self._shown_s = 0.0
        self._done = self._stored = self._failed = 0

    def update(self, point: PointResult) -> None:
        self._done += 1
        self._stored += point.is_from_journal
        self._failed += point.error is not None
        now_s = time.monotonic()
        if now_s - self._shown_s >= _REFRESH_S:
            self._shown_s = now_s
            self._show()

    def close(self) -> None:
        """Show the final state and end the line."""
        self._show()
        self._stream.write("\n")
        self._stream.flush()

    def _show(self) -> None:
        width = max(20, shutil.get_terminal_size().columns - 1)
        self._stream.write(f"\r{self.text(time.monotonic() - self._started_s)[:width]}\x1b[K")
        self._stream.flush()

    def text(self, elapsed_s: float) -> str:
        of = "" if self._total is None else f" of {self._total:,}"
        notes = [f"{n:,} {what}" for n, what in ((self._stored, "from the journal"), (self._failed, "failed")) if n]
        rate = (self._done - self._stored) / elapsed_s if elapsed_s else 0.0
        parts = [f"{self._name}: {self._done:,}{of} points" + (f" ({', '.join(notes)})" if notes else "")]
        if rate:
            parts.append(f"{rate:,.0f}/s" if rate >= 10 else f"{rate:.2g}/s")
        if rate and self._total is not None and self._done < self._total:
            parts.append(f"{_duration((self._total - self._done) / rate)} left")
        return ", ".join(parts)


def _duration(seconds: float) -> str:
    for unit, length_s in (("h", 3600), ("min", 60)):
        if seconds >= 2 * length_s:
            return f"{seconds / length_s:.0f} {unit}"
    return f"{seconds:.0f} s"
