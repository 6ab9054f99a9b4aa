"""Start and end of worker processes: the interface of launchers, and the launcher for this machine."""

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from dragoman.core.spec import ModelSpec
from dragoman.system.files import TemporaryFolder
from dragoman.system.process import explain_temporary_folder
from dragoman.workers.child_process import ChildProcess
from dragoman.workers.pool import load_error
from dragoman.workers.spare_process import WORKER


class WorkerProcess(Protocol):
    """A process that was started for one replica, wherever it runs, and the connection to it.

    has_own_clock: its clock may differ from the clock of this machine.
    host: the name of its machine; "" for this machine.
    socket, memory: this process's end of the connection, and the files of the memory that both map; for one `Channel`.
    closed: set by the owner when the other end of the socket is closed.
    exited: set when the process has ended.
    """

    has_own_clock: bool
    host: str
    socket: Any
    memory: tuple[int, int] | None
    closed: asyncio.Event
    exited: asyncio.Event

    @property
    def needs_farewell(self) -> bool:
        """Whether it would look for the server again at the end of the connection, and must not: FAREWELL says so."""

    @property
    def pid(self) -> int:
        """Its process id on this machine; 0 if it has joined, perhaps from another one."""

    @property
    def description(self) -> str:
        """Name of the process in log lines, such as `worker process 4711`."""

    @property
    def exit_reason(self) -> str:
        """How it ended, such as `exit code 1`."""

    @property
    def was_killed_by_system(self) -> bool:
        """Whether it was ended by SIGKILL, as the kernel does if memory runs out."""

    def is_stopped(self) -> bool:
        """Return whether it does not run at the moment. Called at equal intervals."""

    def kill(self) -> None:
        """End it at once."""

    async def wait(self, grace_s: Callable[[], float], cleanup: Callable[[], None]) -> None:
        """Wait until the process ends, or closes its socket and then has `grace_s()` seconds to exit; kill the rest.

        `cleanup` is called when it has ended, before `exited` is set, also if this task is cancelled.
        """


class Launcher(Protocol):
    """Starts the worker processes of one model. Created with its spec; raises ModelFailed if that has wrong options.

    starts_workers: whether `launch` starts a process. Otherwise it only waits for a worker to join; the pool accepts
    workers up to its maximum then, and stops none of them when they are idle.
    """

    starts_workers: bool

    @property
    def waiting_for(self) -> str:
        """Names the workers while they have not started, in the reason why a model is not ready."""

    async def launch(self) -> WorkerProcess:
        """Return a new process that is connected. Raises ModelFailed, NotReady or StartDelayed, then nothing is left
        running.
        """


class LocalLauncher:
    """Starts child processes of this one."""

    starts_workers = True
    waiting_for = "worker processes"

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self._devices = spec.launch.devices if spec.launch is not None else ()
        self._processes: list[tuple[str, ChildProcess]] = []  # with the device that each has

    async def launch(self) -> ChildProcess:
        folder = self._make_folder() if self._spec.working_directory == "own" else None
        try:
            device = self._free_device()
            process = ChildProcess(WORKER, self._spec.replicas, folder, device=device)
        except OSError as error:
            if folder is not None:
                folder.cleanup()
            raise load_error(self._spec.name, f"cannot start a process: {error}", error) from error
        if device:
            self._processes.append((device, process))
        return process

    def _make_folder(self) -> TemporaryFolder:
        """Return a working directory of the process's own. Raises ModelFailed."""
        try:
            return TemporaryFolder(self._spec.name)
        except OSError as error:
            raise load_error(self._spec.name, f"working_directory 'own': {explain_temporary_folder(error)}") from error

    def _free_device(self) -> str:
        """Return the device with the fewest processes; "" if the workers have no devices."""
        self._processes = [entry for entry in self._processes if not entry[1].exited.is_set()]
        used = [device for device, _ in self._processes]
        return min(self._devices, key=lambda device: used.count(device) / self._devices.count(device), default="")
