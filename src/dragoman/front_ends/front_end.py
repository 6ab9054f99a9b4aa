"""A front end as the server sees it: its start, the calls that come from it, and its exit."""

import asyncio
from typing import Any

from dragoman.core.errors import DragomanError, ServerError
from dragoman.front_ends.service import FrontEndService
from dragoman.server_transports import Ports
from dragoman.settings import Settings
from dragoman.workers.child_process import ChildProcess
from dragoman.workers.frames import Frame, FrameKind
from dragoman.workers.heartbeat import Heartbeat, is_stopped
from dragoman.workers.worker import Worker

# How long a process may take to exit after its socket is closed, and to close its connections after its grace period.
_EXIT_S = 0.5
_CLOSING_S = 3.0


class FrontEnd:
    """A process that accepts connections and sends calls to `service`. When it exits, its calls are cancelled."""

    def __init__(self, service: FrontEndService, settings: Settings, ports: Ports) -> None:
        self.service = service
        self._start_message = settings, ports
        self._child: ChildProcess | None = None
        self.exited = asyncio.Event()
        self.has_responded = False
        self.was_killed = False
        self.exit_reason = ""
        self.heartbeat = Heartbeat(lambda: is_stopped(self.pid), lambda: None)

    @property
    def pid(self) -> int:
        """The process id, 0 before the start."""
        return self._child.pid if self._child is not None else 0

    async def start(self) -> None:
        """Return when it listens. Raises ServerError or InvalidInput, and then leaves nothing behind."""
        self._listens: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        try:
            child = self._child = ChildProcess("dragoman.front_ends.process")
        except OSError as error:
            raise ServerError(f"cannot start a process for a front end: {error}") from error
        self.exited = child.exited
        self._worker = Worker(
            self.service, child.socket, child.memory, on_frame=self._received, begin=self.service.begin
        )
        self._serving = asyncio.create_task(self._worker.serve())
        self._serving.add_done_callback(lambda _task: child.closed.set())
        self._waiting = asyncio.create_task(child.wait(lambda: _EXIT_S, self._has_exited))
        self._worker.send(FrameKind.SPEC, self._start_message)
        try:
            await self._listens
        except BaseException:
            await self.stop()
            raise
        self.has_responded = True

    def begin_drain(self) -> None:
        """Close idle connections, and all others after their next response."""
        self._worker.send(FrameKind.DRAIN)

    def set_ready(self, ready: bool) -> None:
        """Tell the process whether the server is ready."""
        self._worker.send(FrameKind.READY, ready)

    def beat(self) -> bool:
        """Look whether the process is stopped; return whether that has changed."""
        hung = self.heartbeat.is_hung
        self.heartbeat.beat(busy=True)  # it computes nothing, so it needs no ping
        return self.heartbeat.is_hung != hung

    async def stop(self, grace_s: float = 0.0) -> None:
        """Accept nothing new and finish the requests in flight, for at most `grace_s` seconds; then end the process."""
        self._worker.send(FrameKind.STOP, grace_s)
        done, _ = await asyncio.wait({self._waiting}, timeout=grace_s + _CLOSING_S)
        if not done and self._child is not None:
            self._child.kill()
            await asyncio.wait({self._waiting})
        await asyncio.wait({self._serving})

    def _received(self, frame: Frame) -> None:
        if self._listens.done():
            return
        value: Any = frame.value()
        if frame.kind == FrameKind.LOADED:
            self._listens.set_result(None)
        elif isinstance(value, DragomanError):
            self._listens.set_exception(value)
        else:
            self._listens.set_exception(ServerError(f"a front end cannot start: {value}"))

    def _has_exited(self) -> None:
        assert self._child is not None, "it has been started"
        self._worker.close()
        self.exit_reason = self._child.exit_reason
        if not self._listens.done():
            self._listens.set_exception(ServerError(f"a front end died ({self.exit_reason}) while it started"))
            self._listens.exception()  # mark as retrieved: `start` may have been cancelled
