"""The program of a server process: transports, copies of models, and a client of the engine in the parent process."""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from dragoman.core.audit import AuditWriter
from dragoman.core.calls import Request, Response
from dragoman.core.errors import DragomanError, ServerError, WorkerLost
from dragoman.core.options import forget_secrets
from dragoman.core.record_calls import FindRequests
from dragoman.engine.loop_monitor import LoopMonitor
from dragoman.processes.model_copies import ModelCopies, ProcessMetrics
from dragoman.server_transports import Ports, ServerTransports
from dragoman.settings import Settings
from dragoman.system import event_loop, process
from dragoman.system.call_times import CallTimes
from dragoman.system.coroutines import begin
from dragoman.workers.channel import Channel, receive
from dragoman.workers.child_process import set_up_child
from dragoman.workers.frames import Frame, FrameKind, encode
from dragoman.workers.jobs import Job, JobRunner, JobSender
from dragoman.workers.local import GRACE_S
from dragoman.workers.shared_blocks import close_files

A = TypeVar("A")
log = logging.getLogger("dragoman.processes")


def main(fd: int, parent: int, memory: Sequence[int] = ()) -> None:
    """Listen on the ports that the parent sends and forward calls to it, until it stops this process or exits."""
    set_up_child(parent, (fd, *memory))
    process.shorten_switch_interval()
    forget_secrets()  # copies of models run here
    with socket.socket(fileno=fd) as sock:
        first = receive(sock)
        if first is not None:
            event_loop.run(_serve(sock, (memory[1], memory[0]) if memory else None, *first.value()))


async def _serve(sock: socket.socket, memory: tuple[int, int] | None, settings: Settings, ports: Ports) -> None:
    engine = EngineClient(sock, memory)
    copies = ModelCopies(engine)
    transports, monitor = ServerTransports(copies, settings), LoopMonitor()
    engine.begin_leave, engine.begin_drain = transports.begin_leave, transports.begin_drain
    engine.set_copies = copies.set_table
    engine.find_requests = transports.find_requests
    engine.measure = lambda: ProcessMetrics(
        (*transports.metrics(), *copies.gauges(), *monitor.families()),
        process.resource_usage(),
        copies.count,
        copies.in_flight,
        copies.take_counts(),
    )
    if settings.audit_log:
        _AuditForwarder(engine).attach()
    try:
        await transports.start(ports)
    except Exception as error:
        log.debug("a server process could not start", exc_info=True)
        engine.send_control(FrameKind.ERROR, error)
        return
    process.collect_rarely()  # before copies of models are loaded
    collecting = asyncio.create_task(process.collect_regularly(copies.deployments, 2 * GRACE_S))
    monitoring = asyncio.create_task(monitor.run())
    engine.send_control(FrameKind.LOADED)
    grace_s = await engine.stopping
    collecting.cancel()
    monitoring.cancel()
    await copies.close()
    await transports.stop(grace_s)


class _AuditForwarder(AuditWriter):
    """Sends the lines of the audit log to the process of the engine, which writes those of all processes."""

    def __init__(self, engine: "EngineClient") -> None:
        super().__init__()
        self._engine = engine
        self._loop = asyncio.get_running_loop()

    def write(self, line: Mapping[str, object]) -> None:
        if asyncio._get_running_loop() is self._loop:
            self._engine.send_control(FrameKind.AUDIT, line)
        else:
            self._loop.call_soon_threadsafe(self._engine.send_control, FrameKind.AUDIT, line)


class EngineClient(JobSender, JobRunner):
    """The interface of the engine, in another process.

    begin_leave: called when the server is no longer ready, but answers.
    begin_drain: called when the server begins to drain.
    set_copies: called with the models that this process may compute.
    find_requests: returns recent requests of this process.
    measure: returns its metrics.
    stopping: set to the seconds that requests in flight may take when the server process is to stop; 0 if the engine's
        process has exited.
    """

    limits_readers = False  # the engine and the transport do
    is_remote = True

    def __init__(self, sock: socket.socket, memory: tuple[int, int] | None) -> None:
        JobSender.__init__(self)
        JobRunner.__init__(self)
        self._ready = False
        self._change = asyncio.Event()
        self.begin_leave: Callable[[], None] = lambda: None
        self.begin_drain: Callable[[], None] = lambda: None
        self.set_copies: Callable[[bytes], None] = lambda _table: None
        self.find_requests: Callable[[FindRequests], list[dict[str, Any]]]
        self.measure: Callable[[], ProcessMetrics]
        self.stopping: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self.channel = Channel(sock, self._handle_frame, self._handle_close, memory=memory)
        close_files(memory or ())

    def send_control(self, kind: FrameKind, value: object = None) -> None:
        """Send a frame that belongs to no call, at once."""
        self.channel.send(encode(kind, 0, value), now=True)
        self.channel.flush_all()

    def ready(self) -> bool:
        return self._ready

    async def wait_for_change(self) -> None:
        await self._change.wait()

    def begin(self, request: Request[A]) -> Response[A] | Awaitable[Response[A]]:
        response: Response[A] | Awaitable[Response[A]] = begin(self.call(request))
        return response

    def submit(self, job: Job) -> None:
        if self.channel.closed:
            raise _engine_lost()
        self.send(job, self.encode(job))

    def take_stamps(self, job: Job, frame: Frame) -> None:
        """Record the moments of a call as the engine did: its process has the same clock."""
        if job.request is None:
            return
        times = job.request.times
        times.arrived_s, times.started_s, times.computed_s, times.ended_s = frame.stamps
        if frame.kind == FrameKind.CHUNK:
            times.first_chunk_s = times.first_chunk_s or times.ended_s

    def take_times(self, job: Job, frame: Frame) -> None:
        """Record the batch of a call and the calls that it made."""
        if job.request is not None:
            recorded: CallTimes = frame.value()
            times = job.request.times
            times.served_by = recorded.served_by
            times.batch, times.nested, times.tokens = recorded.batch, recorded.nested, recorded.tokens

    def undecodable(self, error: Exception) -> DragomanError:
        return ServerError(f"a response of the engine cannot be decoded: {error}")

    def _handle_frame(self, frame: Frame) -> None:
        if frame.job in self.held:
            self.deliver(frame)
        elif frame.kind == FrameKind.READY:
            self._ready = frame.value()
            self._change.set()
            self._change = asyncio.Event()
        elif frame.kind == FrameKind.DRAIN:
            (self.begin_leave if frame.value() else self.begin_drain)()
        elif frame.kind == FrameKind.METRICS:
            self.send_control(FrameKind.METRICS, self.measure())
        elif frame.kind == FrameKind.REQUESTS:
            number, query = frame.value()
            self.send_control(FrameKind.REQUESTS, (number, self.find_requests(query)))
        elif frame.kind == FrameKind.COPIES:
            number, table = frame.value()
            self.set_copies(table)
            self.send_control(FrameKind.COPIES, number)
        elif frame.kind == FrameKind.STOP and not self.stopping.done():
            self.stopping.set_result(frame.value())

    def _handle_close(self) -> None:
        held, self.held = self.held, {}
        for job in held.values():
            job.deliver(None, _engine_lost(), True)
        if not self.stopping.done():
            self.stopping.set_result(0.0)


def _engine_lost() -> WorkerLost:
    return WorkerLost("the process of the engine has exited")
