"""The spare process: a worker that is forked before the server has threads, for the first model in a process.

A new interpreter takes 0.2 s of CPU time to import NumPy and the worker: a third of the start of `dragoman serve` with
one function (W7). A model that was found to run in the server itself has started a process before, too. A fork has
imported all of it, in a process without other threads, so that no lock is held that the model needs. There is one, and
only where the program owns its process; later workers, and those that come again, are new interpreters.

    state    it                                                          becomes
    WAITING  waits for a model, or the end of its socket                 TAKEN (`take`), exits (`release`)
    TAKEN    is a worker like those that `child_process.spawn` starts
"""

import atexit
import gc
import importlib
import os
import pickle
import signal
import socket
import sys
import threading
import traceback
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import ModuleType
from typing import NoReturn, Protocol

from dragoman.core.options import forget_secrets
from dragoman.system.parent_exit import signal_on_parent_exit
from dragoman.system.process import keep_freed_memory, raise_open_files_limit

# The module whose `main` is a worker of a model.
WORKER = "dragoman.workers.process_group"
_SIZE_BYTES = 8
_MAX_DESCRIPTORS = 3  # the socket of the worker, and its shared memory


class StartedProcess(Protocol):
    """The part of `subprocess.Popen` that the owner of a child process uses."""

    pid: int

    @property
    def returncode(self) -> int | None:
        """The exit code, negative for a signal; None before the process was reaped."""

    def poll(self) -> int | None:
        """Reap the process if it has exited; return its `returncode`."""

    def wait(self) -> int:
        """Wait until the process has exited, and reap it; return its `returncode`."""


class ForkedProcess:
    """A `StartedProcess` that was forked."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self._reap(os.WNOHANG)

    def wait(self) -> int:
        code = self._reap(0)
        assert code is not None
        return code

    def _reap(self, options: int) -> int | None:
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, options)
            except ChildProcessError:  # it was reaped elsewhere; `subprocess` assumes the same
                pid, status = self.pid, 0
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


class _Spare:
    """The server's side of the process that waits."""

    def __init__(self, process: ForkedProcess, connection: socket.socket) -> None:
        self.process = process
        self.connection = connection


_spare: _Spare | None = None  # of this process, as its children are


def fork_spare() -> None:
    """Fork a process that waits for a model. Without effect if this process has other threads, or not on Linux.

    What a worker needs should have been imported, and as little else as possible.
    """
    global _spare
    if sys.platform != "linux" or _spare is not None or threading.active_count() > 1:
        return
    ours, theirs = socket.socketpair()
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # none, or closed
            stream.flush()
    parent = os.getpid()
    try:
        with warnings.catch_warnings():  # Python 3.12 warns of the threads of OpenBLAS, which it ends first
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
    except OSError:  # no process may be added: a model says so, if there is one
        ours.close()
        theirs.close()
        return
    if not pid:
        ours.close()
        _run_child(theirs, parent)
    theirs.close()
    with suppress(OSError):  # the child has done it
        os.setpgid(pid, pid)
    _spare = _Spare(ForkedProcess(pid), ours)


def take_spare(fd: int, environment: Mapping[str, str], memory: Sequence[int]) -> ForkedProcess | None:
    """Let the process that waits run as a worker with these descriptors; return None if there is none."""
    global _spare
    if _spare is None:
        return None
    spare, _spare = _spare, None
    path = [os.path.abspath(entry) for entry in sys.path]
    message = pickle.dumps((dict(environment), path))
    try:
        with spare.connection as connection:
            socket.send_fds(connection, [len(message).to_bytes(_SIZE_BYTES, "little")], [fd, *memory])
            connection.sendall(message)
    except OSError:  # it has exited
        _end(spare)
        return None
    return spare.process


def release_spare() -> None:
    """End the process that waits, if no model has taken it."""
    global _spare
    spare, _spare = _spare, None
    if spare is not None:
        spare.connection.close()
        _end(spare)


def _end(spare: _Spare) -> None:
    with suppress(OSError):
        os.kill(spare.process.pid, signal.SIGKILL)
    spare.process.wait()


# --- in the child ----------------------------------------------------------------------------------------


def _run_child(connection: socket.socket, parent: int) -> NoReturn:
    """Wait for a model and run as its worker; then exit as an interpreter does, without the frames below this one."""
    code = 1
    try:
        atexit._clear()  # those of the server
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__  # as a new interpreter has them
        code = _wait_and_work(connection, parent)
    except BaseException as error:
        if isinstance(error, SystemExit):
            code = error.code if isinstance(error.code, int) else error.code is not None
        else:
            traceback.print_exc()
    finally:
        with suppress(BaseException):
            vars(threading)["_shutdown"]()  # as an interpreter does: waits for threads of the model
            atexit._run_exitfuncs()
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
        os._exit(code)


def _wait_and_work(connection: socket.socket, parent: int) -> int:
    signal_on_parent_exit(signal.SIGKILL)
    if os.getppid() != parent:  # it has exited already
        return 0
    with suppress(OSError):  # the parent has done it
        os.setpgid(0, 0)
    forget_secrets(runs_models=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with connection:
        size, descriptors, _, _ = socket.recv_fds(connection, _SIZE_BYTES, _MAX_DESCRIPTORS)
        if not size:  # released
            return 0
        content = _receive(connection, int.from_bytes(size, "little"))
    _become_worker(*pickle.loads(content))  # noqa: S301 - of the server
    fd, *memory = descriptors
    importlib.import_module(WORKER).main(fd, parent, memory)
    return 0


def _receive(connection: socket.socket, size: int) -> bytes:
    content = bytearray()
    while len(content) < size:
        chunk = connection.recv(size - len(content))
        if not chunk:
            raise EOFError("the server has exited")
        content += chunk
    return bytes(content)


def _become_worker(environment: Mapping[str, str], path: list[str]) -> None:
    """Give this process what a new interpreter would have: environment, path, standard input and `__main__`."""
    if "MALLOC_TRIM_THRESHOLD_" in environment:  # the C library has read its variables already
        keep_freed_memory()
    os.environ.clear()
    os.environ.update(environment)
    raise_open_files_limit()
    sys.path[:] = path
    sys.argv[:] = ["-c"]
    sys.modules["__main__"] = ModuleType("__main__")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    gc.freeze()  # pages with these objects stay shared with the server
    gc.enable()
