"""Handle of a server process in the engine's process: its start, the calls that it sends, and its exit."""

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, NoReturn

from msgspec import structs

from dragoman.access.caller_engine import CallerEngine, KeyLimits, LimitedCall
from dragoman.access.grants import EVERYTHING, Grant
from dragoman.core.audit import write_line
from dragoman.core.calls import Load, Measure, ReadStatistics, Ready, Request, Response, ScaleModel, Unload
from dragoman.core.chunks import Take
from dragoman.core.errors import DragomanError, ServerError
from dragoman.core.metrics import Family, Kind, Sample, sum_families
from dragoman.core.record_calls import FindRequests
from dragoman.core.usage import ReadUsage
from dragoman.engine.call_handler import CallHandler
from dragoman.engine.counters import PROCESS_METRICS
from dragoman.processes.model_copies import CopyCounts, ProcessMetrics
from dragoman.server_transports import Ports, StoredResultCall
from dragoman.settings import Settings
from dragoman.system.coroutines import begin
from dragoman.system.request_context import request_id
from dragoman.workers.child_process import ChildProcess
from dragoman.workers.frames import Frame, FrameKind, serialize
from dragoman.workers.supervisor import Heartbeat
from dragoman.workers.worker import Worker

log = logging.getLogger("dragoman.processes")

# How long a process may take to exit after its socket is closed, and to close its connections after its grace period.
_EXIT_S = 0.5
_CLOSING_S = 3.0
# How long a scrape of metrics waits for those of a server process.
_METRICS_S = 1.0
# A server process that does not respond to a change of the models within this time, or that hangs, is killed.
_COPIES_S = 30.0


class ProcessService:
    """The engine, for the calls of one server process and of the processes that replace it after restarts.

    is_complete: whether every server process runs.
    measure: updates the metrics of all processes.
    fetch: answers a request of a key to the async result store.
    limit: returns the engine for calls with these limits, the same one for all processes.
    find_requests: returns recent requests of all processes.
    update_copies: returns once no server process computes a model that was changed.
    add_counts: adds counts of copies to those of the engine.
    calls, restarts: counters of this server process.
    copies: number of models that the current process computes.
    in_flight: calls that it computed when it reported its metrics.
    """

    name = "server"

    is_lost = False

    def __init__(
        self,
        engine: CallHandler,
        is_complete: Callable[[], bool],
        measure: Callable[[], Awaitable[None]],
        fetch: Callable[[StoredResultCall, Grant], Awaitable[Any]],
        limit: Callable[[KeyLimits], CallerEngine],
        find_requests: Callable[[FindRequests], Awaitable[list[dict[str, Any]]]],
        update_copies: Callable[[], Awaitable[None]],
        add_counts: Callable[[Iterable[CopyCounts]], None],
    ) -> None:
        self._engine = engine
        self._is_complete = is_complete
        self._measure = measure
        self._fetch = fetch
        self._limit = limit
        self._find_requests = find_requests
        self._update_copies = update_copies
        self._add_counts = add_counts
        self._transport_metrics: tuple[Family, ...] = ()
        self._earlier_metrics: tuple[Family, ...] = ()  # of processes that have exited
        self.resource_usage: Mapping[str, float] = {}  # of the current process
        self.copies = 0
        self.in_flight = 0
        self.calls = 0
        self.restarts = 0

    def unavailable(self) -> str:
        return ""

    def call(self, request: Request[Any]) -> NoReturn:
        raise AssertionError("server processes send concurrent calls")

    def begin(self, request: Request[Any]) -> Response[Any] | Awaitable[Response[Any]]:
        """Start a call: return its response, or an awaitable of it if something has to wait."""
        return begin(self.call_async(request))

    async def call_async(self, request: Request[Any]) -> Response[Any]:
        self.calls += 1
        try:
            engine = self._engine
            caller = request.caller
            grant = Grant(caller.name, EVERYTHING, request.models, owner=caller.owner)
            if isinstance(request.call, LimitedCall):
                limited = engine = self._limit(request.call.limits)
                request, grant = structs.replace(request, call=request.call.call), limited.grant
            match request.call:
                case StoredResultCall() as call:
                    return Response(await self._fetch(call, grant))
                case Ready() if not request.model and not self._is_complete():
                    return Response(False)
                case FindRequests() as call:
                    return Response(await self._find_requests(call))
                case Measure() | ReadStatistics() | ReadUsage():
                    await self._measure()
                case Load() | Unload() | ScaleModel():
                    return await self._change(engine, request)
            return await engine.call(request)
        except Exception as error:
            raise _public_error(error, request) from error

    async def stream_async(self, request: Request[Any], take: Take[Response[Any]]) -> None:
        self.calls += 1
        try:
            engine = self._engine
            if isinstance(request.call, LimitedCall):
                engine = self._limit(request.call.limits)
                request = structs.replace(request, call=request.call.call)
            await engine.stream(request).send_to(take)
        except Exception as error:
            raise _public_error(error, request) from error

    async def _change(self, engine: CallHandler, request: Request[Any]) -> Response[Any]:
        """Change a model; return once all processes have the change."""
        try:
            return await engine.call(request)
        finally:
            await self._update_copies()

    def set_metrics(self, metrics: ProcessMetrics) -> None:
        """Store the metrics of the current process, and add what it has counted."""
        self._transport_metrics, self.resource_usage = metrics.families, metrics.resource_usage
        self.copies, self.in_flight = metrics.copies, metrics.in_flight
        self._add_counts(metrics.counts)

    def begin_restart(self) -> None:
        """Count a restart, and keep the counters of the process that has exited."""
        self.restarts += 1
        counters = [family for family in self._transport_metrics if family.kind != "gauge"]
        self._earlier_metrics, self._transport_metrics = sum_families((self._earlier_metrics, counters)), ()
        self.resource_usage, self.copies, self.in_flight = {}, 0, 0

    def transport_metrics(self) -> tuple[Family, ...]:
        """Return the metrics of the transports, summed over this process and those that it replaced."""
        return sum_families((self._earlier_metrics, self._transport_metrics))


class ServerProcess:
    """A process that accepts connections and sends calls to `service`. When it exits, its calls are cancelled."""

    def __init__(self, service: ProcessService, settings: Settings, ports: Ports) -> None:
        self.service = service
        self._settings = settings, ports
        self._processes = ports.processes  # that share the cores for models
        self._child: ChildProcess | None = None
        self.exited = asyncio.Event()
        self.has_responded = False
        self.was_killed = False
        self.exit_reason = ""
        self.heartbeat = Heartbeat(self._is_stopped, lambda: None)
        self._measured: asyncio.Future[None] | None = None
        self._copies: bytes | None = None
        self._tables = 0  # number of the last table of models that was sent
        self._updates: dict[int, asyncio.Future[None]] = {}  # by number of the table, until the process has it
        self._queries: dict[int, asyncio.Future[list[dict[str, Any]]]] = {}  # for recent requests
        self._numbers = itertools.count()

    @property
    def pid(self) -> int:
        """The process id, 0 before the start."""
        return self._child.pid if self._child is not None else 0

    async def start(self) -> None:
        """Return when it listens. Raises ServerError or InvalidInput, then nothing is left running."""
        self._listening: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        try:
            child = self._child = ChildProcess("dragoman.processes.child", self._processes, runs_models=False)
        except OSError as error:
            raise ServerError(f"cannot start a server process: {error}") from error
        self.exited = child.exited
        self._worker = Worker(
            self.service,
            child.socket,
            child.memory,
            on_frame=self._handle_frame,
            begin=self.service.begin,
            serializer=serialize,
        )
        self._serving = asyncio.create_task(self._worker.serve())
        self._serving.add_done_callback(lambda _task: child.closed.set())
        self._waiting = asyncio.create_task(child.wait(lambda: _EXIT_S, self._clean_up))
        self._worker.send(FrameKind.SPEC, self._settings)
        try:
            await self._listening
        except BaseException:
            await self.stop()
            raise
        self.has_responded = True

    def begin_drain(self, *, leaves: bool = False) -> None:
        """Close idle connections, and all others after their next response; none that is idle if it only `leaves`."""
        self._worker.send(FrameKind.DRAIN, leaves)

    def set_ready(self, ready: bool) -> None:
        self._worker.send(FrameKind.READY, ready)

    def _is_stopped(self) -> bool:
        return self._child is not None and self._child.is_stopped()

    async def measure(self) -> None:
        """Update the metrics of the service. A process that does not respond soon keeps its last ones."""
        if self._measured is None or self._measured.done():
            self._measured = asyncio.get_running_loop().create_future()
            self._worker.send(FrameKind.METRICS)
        await asyncio.wait({self._measured}, timeout=_METRICS_S)

    async def set_copies(self, table: bytes) -> None:
        """Return once the process computes no other models than these, or was killed because it does not respond."""
        if table != self._copies:
            self._copies = table
            self._tables += 1
            self._updates[self._tables] = asyncio.get_running_loop().create_future()
            self._worker.send(FrameKind.COPIES, (self._tables, table))
        updated, end_s = self._updates.get(self._tables), time.monotonic() + _COPIES_S
        while updated is not None and not updated.done():
            await asyncio.wait({updated}, timeout=_METRICS_S)
            if self._child is not None and (self.heartbeat.is_hung or time.monotonic() > end_s) and not updated.done():
                log.error("server process %d does not respond to a change of the models and is killed", self.pid)
                self._child.kill()
                end_s += _COPIES_S

    async def find_requests(self, query: FindRequests) -> list[dict[str, Any]]:
        """Return recent requests of the process; none if it does not respond soon."""
        number, found = next(self._numbers), asyncio.get_running_loop().create_future()
        self._queries[number] = found
        self._worker.send(FrameKind.REQUESTS, (number, query))
        try:
            await asyncio.wait({found}, timeout=_METRICS_S)
        finally:
            del self._queries[number]
        return found.result() if found.done() else []

    def check_heartbeat(self) -> bool:
        return self.heartbeat.check(busy=True)  # no ping: only a stopped server process counts as hung

    async def stop(self, grace_s: float = 0.0) -> None:
        """Accept nothing new and finish the requests in flight, for at most `grace_s` seconds; then end the process."""
        self._worker.send(FrameKind.STOP, grace_s)
        done, _ = await asyncio.wait({self._waiting}, timeout=grace_s + _CLOSING_S)
        if not done and self._child is not None:
            self._child.kill()
            await asyncio.wait({self._waiting})
        await asyncio.wait({self._serving})

    def _handle_frame(self, frame: Frame) -> None:
        value: Any = frame.value()
        if frame.kind == FrameKind.METRICS:
            self.service.set_metrics(value)
            self._end_measuring()
        elif frame.kind == FrameKind.COPIES:
            self._end_updates(value)
        elif frame.kind == FrameKind.AUDIT:
            write_line(value)
        elif frame.kind == FrameKind.REQUESTS:
            number, query_result = value
            if (query := self._queries.get(number)) is not None:
                query.set_result(query_result)
        elif self._listening.done():
            return
        elif frame.kind == FrameKind.LOADED:
            self._listening.set_result(None)
        elif isinstance(value, DragomanError):
            self._listening.set_exception(value)
        else:
            self._listening.set_exception(ServerError(f"a server process cannot start: {value}"))

    def _end_measuring(self) -> None:
        if self._measured is not None and not self._measured.done():
            self._measured.set_result(None)

    def _end_updates(self, last: int) -> None:
        """End the waits for tables up to this one."""
        for number in [number for number in self._updates if number <= last]:
            self._updates.pop(number).set_result(None)

    def _clean_up(self) -> None:
        assert self._child is not None, "the process has been started"
        self._worker.close()
        self._end_measuring()
        self._end_updates(self._tables)
        self.exit_reason = self._child.exit_reason
        if not self._listening.done():
            self._listening.set_exception(ServerError(f"a server process died ({self.exit_reason}) while it started"))
            self._listening.exception()  # mark as retrieved: `start` may have been cancelled


def process_metrics(services: Iterable[ProcessService]) -> tuple[Family, ...]:
    """Return the metrics of processes, labelled with their numbers, and the sums of those of their transports."""
    services = [*services]

    def family(name: str, kind: Kind, help_text: str, values: Iterable[float | None]) -> Family:
        name = f"dragoman_server_process_{name}"
        samples = [Sample(name, {"process": str(n)}, v) for n, v in enumerate(values) if v is not None]
        return Family(name, kind, help_text, tuple(samples))

    return (
        family("calls_total", "counter", "Calls that each process forwarded.", (s.calls for s in services)),
        family("restarts_total", "counter", "Restarts of each process.", (s.restarts for s in services)),
        family("models", "gauge", "Models that each process computes.", (s.copies for s in services)),
        *(
            family(
                name.removeprefix("process_"),
                kind,
                f"Each server process: {help_text}",
                [s.resource_usage.get(name) for s in services],
            )
            for name, (kind, help_text) in PROCESS_METRICS.items()
        ),
        *sum_families(service.transport_metrics() for service in services),
    )


def _public_error(error: Exception, request: Request[Any]) -> DragomanError:
    """Return the error for the client; log an unexpected one with the request id that the client gets."""
    if isinstance(error, DragomanError):
        return error
    number = request.id or request_id()
    log.error("unexpected error, request id %r", number, exc_info=error)
    return ServerError(f"internal error; the log has more under request id {number}")
