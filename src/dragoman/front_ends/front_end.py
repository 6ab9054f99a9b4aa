"""One front end as the server sees it: its birth, the calls that come from it, and its end."""

import asyncio
import socket
import subprocess
from typing import Any

from dragoman.core.errors import DragomanError, ServerError
from dragoman.front import Ports
from dragoman.front_ends.desk import Desk
from dragoman.settings import Settings
from dragoman.workers import shared
from dragoman.workers.channel import pair
from dragoman.workers.child import Worker
from dragoman.workers.frames import Frame, Kind
from dragoman.workers.heartbeat import Heartbeat, is_stopped
from dragoman.workers.spawn import exit_of, kill, spawn, told

# How long a process may take to end once its socket is closed, and to cut its connections when its time is over.
_END_S = 0.5
_PARTING_S = 3.0


class FrontEnd:
    """A process that listens. `gone` is set when it has ended, which `end` tells of; its calls are cancelled then.

    `heartbeat` tells whether it is stopped.
    """

    def __init__(self, desk: Desk, settings: Settings, where: Ports) -> None:
        self.desk = desk
        self._hello = settings, where
        self._process: subprocess.Popen[bytes] | None = None
        self.gone = asyncio.Event()
        self.answered = False
        self.overdue = False
        self.end = ""
        self.heartbeat = Heartbeat(lambda: is_stopped(self.pid), lambda: None)

    @property
    def pid(self) -> int:
        """The number of its process, 0 where there is none."""
        return self._process.pid if self._process is not None else 0

    async def start(self) -> None:
        """Returns when it listens. Raises what it could not do as ServerError or InvalidInput; nothing is left then."""
        self._eof = asyncio.Event()
        self._listens: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        try:
            self._process, ours, memory = _born()
        except OSError as fault:
            raise ServerError(f"there is no process for a front end: {fault}") from fault
        self._worker = Worker(self.desk, ours, memory, told=self._told, begin=self.desk.begin)
        self._watching = asyncio.create_task(self._watch(self._process))
        self._worker.tell(Kind.SPEC, self._hello)
        try:
            await self._listens
        except BaseException:
            await self.stop(0.0)
            raise
        self.answered = True

    def begin_drain(self) -> None:
        """Have it close idle connections, and every other one after its next answer."""
        self._worker.tell(Kind.DRAIN)

    def be(self, ready: bool) -> None:
        """Tell it whether the server is ready."""
        self._worker.tell(Kind.READY, ready)

    async def stop(self, grace_s: float) -> None:
        """Have it take nothing new and finish what is under way, for at most `grace_s` seconds; then end it."""
        self._worker.tell(Kind.STOP, grace_s)
        done, _ = await asyncio.wait({self._watching}, timeout=grace_s + _PARTING_S)
        if not done and self._process is not None:
            kill(self._process)
            await asyncio.wait({self._watching})

    def _told(self, frame: Frame) -> None:
        if self._listens.done():
            return
        value: Any = frame.value()
        if frame.kind == Kind.LOADED:
            self._listens.set_result(None)
        elif isinstance(value, DragomanError):
            self._listens.set_exception(value)
        else:
            self._listens.set_exception(ServerError(f"a front end cannot start: {value}"))

    async def _watch(self, process: subprocess.Popen[bytes]) -> None:
        """Wait for the end of the process, whichever way it shows, and see to it that it is one."""
        exited = asyncio.create_task(exit_of(process, self._eof))
        serving = asyncio.create_task(self._worker.serve())
        try:
            await asyncio.wait({exited, serving}, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait({exited}, timeout=_END_S)
        finally:
            kill(process)
            process.wait()
            self._worker.close()
            self._eof.set()
            await asyncio.wait({exited, serving})
            self.end = told(process.returncode)
            if not self._listens.done():
                self._listens.set_exception(ServerError(f"a front end died ({self.end}) while it started"))
                self._listens.exception()  # nobody may be waiting any more
            self.gone.set()


def _born() -> tuple[subprocess.Popen[bytes], socket.socket, tuple[int, int] | None]:
    """A new process, our end of the way to it, and the memory that both share. Raises OSError; nothing is left then."""
    ours, theirs = pair()
    memory = shared.files()
    try:
        with theirs:
            return spawn(theirs.fileno(), 1, memory or (), "dragoman.front_ends.child"), ours, memory
    except OSError:
        ours.close()
        shared.close(memory or ())
        raise
