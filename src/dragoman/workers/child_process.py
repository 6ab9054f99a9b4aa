"""Child processes: start them with a socket and shared memory, wait for their exit, kill their descendants."""

import asyncio
import contextlib
import faulthandler
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

from dragoman.core.options import child_environment
from dragoman.system import logs
from dragoman.system.cpus import variables_of_threads
from dragoman.system.files import TemporaryFolder
from dragoman.system.parent_exit import signal_on_parent_exit
from dragoman.workers.channel import socket_pair
from dragoman.workers.shared_blocks import close_files, create_arena_files
from dragoman.workers.spare_process import WORKER, StartedProcess, take_spare
from dragoman.workers.supervisor import is_stopped

# How long data that a process has sent may take to arrive after its exit.
_EXIT_S = 0.5

# The child uses the path of its parent, so that it finds the same modules: in the working directory a file may have
# the name of one that we import.
_START = (
    "import sys, importlib; sys.path[:] = sys.argv[5:]; "
    "importlib.import_module(sys.argv[1]).main(*map(int, sys.argv[2:4]), [int(n) for n in sys.argv[4].split(',') if n])"
)


class ChildProcess:
    """A child process that runs `main` of a module. Raises OSError if it cannot be started.

    socket, memory: this process's end of the connection, and the files of the memory that both map; for one `Channel`.
    closed: set by the owner when the child has closed its end.
    exited: set when the child has exited and was reaped.
    device: the GPU that it sees, "" for those of this process.
    folder: its working directory, deleted when it has exited; by default that of this process.
    """

    has_own_clock = False
    needs_farewell = False
    host = ""

    def __init__(
        self,
        module: str,
        replicas: int = 1,
        folder: TemporaryFolder | None = None,
        *,
        runs_models: bool = True,
        device: str = "",
    ) -> None:
        self.closed = asyncio.Event()
        self.exited = asyncio.Event()
        self._folder = folder
        self.socket, theirs = socket_pair()
        self.memory = create_arena_files()
        try:
            with theirs:
                path = None if folder is None else folder.name
                environment = _environment(replicas, device, runs_models=runs_models)
                descriptors, is_plain = self.memory or (), path is None and not device and replicas <= 1
                spare = take_spare(theirs.fileno(), environment, descriptors) if module == WORKER and is_plain else None
                self._process: StartedProcess = spare or spawn(theirs.fileno(), environment, descriptors, module, path)
        except OSError:
            self.socket.close()
            close_files(self.memory or ())
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def description(self) -> str:
        return f"worker process {self.pid}"

    @property
    def was_killed_by_system(self) -> bool:
        """Whether it was ended by SIGKILL, as the kernel does if memory runs out."""
        return self._process.returncode == -signal.SIGKILL

    @property
    def exit_reason(self) -> str:
        return describe_exit(self._process.returncode or 0)

    def is_stopped(self) -> bool:
        return is_stopped(self.pid)

    def kill(self) -> None:
        kill(self._process)

    async def wait(self, grace_s: Callable[[], float], cleanup: Callable[[], None]) -> None:
        """Wait until the process exits, or closes its socket and then has `grace_s()` seconds to exit; kill the rest.

        `cleanup` is called when it has exited, before `exited` is set, also if this task is cancelled.
        """
        exited = asyncio.create_task(_wait_for_exit(self._process, self.closed))
        closed = asyncio.create_task(self.closed.wait())
        try:
            await asyncio.wait({exited, closed}, return_when=asyncio.FIRST_COMPLETED)
            if exited.done():  # data that it has sent arrives before EOF, unless a descendant holds the socket
                await asyncio.wait({closed}, timeout=_EXIT_S)
            else:
                await asyncio.wait({exited}, timeout=grace_s())
                if not exited.done():
                    self.kill()
                    await asyncio.wait({exited})
        finally:
            self.kill()
            self._process.wait()
            self.closed.set()
            exited.cancel()
            closed.cancel()
            await asyncio.wait({exited, closed})
            if self._folder is not None:
                self._folder.cleanup()
            cleanup()
            self.exited.set()


def spawn(
    fd: int,
    environment: Mapping[str, str],
    memory: Sequence[int] = (),
    module: str = WORKER,
    folder: str | None = None,
) -> subprocess.Popen[bytes]:
    """Start a Python process that runs `main` of a module, with its end of a socket and shared memory. Raises OSError.

    It is not a fork, because threads of the server may hold locks that a model needs. It leads a process group of its
    own, so that `kill` ends its descendants too; its working directory is `folder`, by default that of this process.
    """
    # Entries may be relative to the working directory of this process.
    path = [os.path.abspath(entry) for entry in sys.path]
    # PR_SET_PDEATHSIG refers to the thread that starts the process: this one.
    return subprocess.Popen(  # noqa: S603
        [sys.executable, "-c", _START, module, str(fd), str(os.getpid()), ",".join(map(str, memory)), *path],
        pass_fds=[fd, *memory],
        stdin=subprocess.DEVNULL,
        env=environment,
        cwd=folder,
        process_group=0,
    )


def kill(process: StartedProcess) -> None:
    """Kill a process and its descendants, unless it was reaped: its process id may have been reused."""
    if process.returncode is None:
        _kill_group(process.pid)


def _kill_group(group: int) -> None:
    with contextlib.suppress(OSError):  # the group is empty
        os.killpg(group, signal.SIGKILL)


def _environment(replicas: int, device: str, *, runs_models: bool) -> dict[str, str]:
    environment = child_environment(runs_models=runs_models)
    if device:
        environment["CUDA_VISIBLE_DEVICES"] = device
    return environment | variables_of_threads(environment, replicas)


async def _wait_for_exit(process: StartedProcess, closed: asyncio.Event) -> None:
    """Wait until a process has exited; kill and reap its descendants. `closed` is set when its socket is closed."""
    fd = _pidfd(process.pid)
    if fd is None:  # only the socket shows its exit
        await closed.wait()
    else:
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        loop.add_reader(fd, readable.set)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(fd)
            os.close(fd)
    while not _has_exited(process):  # noqa: ASYNC110 (there is no event for it, and it takes milliseconds)
        await asyncio.sleep(0.02)
    _kill_group(process.pid)
    process.poll()
    while _has_orphans(process.pid):  # noqa: ASYNC110 (as above)
        await asyncio.sleep(0.02)


def _has_exited(process: StartedProcess) -> bool:
    """Return whether a process has exited. On Linux it is not reaped, so that its id remains that of its group."""
    if sys.platform == "linux" and process.returncode is None:
        with contextlib.suppress(ChildProcessError):  # it was reaped elsewhere
            return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    return process.poll() is not None


def _has_orphans(group: int) -> bool:
    """Reap killed processes of a group; return whether some remain.

    The server is the parent of orphans if it is the first process of a container.
    """
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-group, os.WNOHANG)[0]:
            pass
        return True
    return False


def _pidfd(pid: int) -> int | None:
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # an old kernel, or a sandbox
            return os.pidfd_open(pid)
    return None


def describe_exit(code: int) -> str:
    """Return how a process ended, for a message."""
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return f"signal {signal.Signals(-code).name}"
    return f"signal {-code}"


# --- in the child ----------------------------------------------------------------------------------------


def set_up_child(parent: int, descriptors: Sequence[int]) -> None:
    """Prepare this process, a child of `parent` that has inherited these file descriptors.

    On Linux the kernel kills it when its parent exits; elsewhere EOF of the socket ends it.
    """
    if sys.platform == "linux":
        signal_on_parent_exit(signal.SIGKILL)
        if os.getppid() != parent:  # it has exited already
            os._exit(0)
    del sys.argv[1:]  # a model may parse the arguments of its process
    _ignore_signals()
    faulthandler.enable()
    with contextlib.suppress(AttributeError):  # stdout may have been replaced
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    logs.set_up_from_environment()
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)


def _ignore_signals() -> None:
    """Ignore signals that a service manager sends to all processes: the parent drains first, then ends this one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    os.register_at_fork(after_in_child=_restore_signals)


def _restore_signals() -> None:
    """Restore the default handlers, for programs that the model forks."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
