"""Starts worker processes, tells when one has ended and how."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

from dragoman.core.secrets import child_environment
from dragoman.workers.cores import share

# The path is taken from the parent, so that the child finds what the parent finds, and nothing that merely lies in
# the working directory under a name that we import.
_START = (
    "import sys, importlib; sys.path[:] = sys.argv[5:]; "
    "importlib.import_module(sys.argv[1]).main(*map(int, sys.argv[2:4]), [int(n) for n in sys.argv[4].split(',') if n])"
)


def spawn(
    fd: int,
    replicas: int,
    memory: Sequence[int] = (),
    module: str = "dragoman.workers.group",
    folder: str | None = None,
) -> subprocess.Popen[bytes]:
    """A new Python process that runs `main` of a module, with its end of a socket and what it shares. Raises OSError.

    Not a fork: the server has threads, and the model must not meet what they hold. It leads a process group of its
    own, so that `kill` ends the programs that it has started too; its working directory is `folder`, or ours.
    """
    # They may be relative to our working directory.
    path = [os.path.abspath(entry) for entry in sys.path]
    # On this thread: PR_SET_PDEATHSIG means the death of the thread that started the process.
    return subprocess.Popen(  # noqa: S603
        [sys.executable, "-c", _START, module, str(fd), str(os.getpid()), ",".join(map(str, memory)), *path],
        pass_fds=[fd, *memory],
        stdin=subprocess.DEVNULL,
        env=_environment(replicas),
        cwd=folder,
        process_group=0,
    )


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and all that it has started, unless it has ended and was reaped: its number may be another's."""
    if process.returncode is None:
        _kill_group(process.pid)


def _kill_group(group: int) -> None:
    with contextlib.suppress(OSError):  # nobody is left
        os.killpg(group, signal.SIGKILL)


def _environment(replicas: int) -> dict[str, str]:
    environment = child_environment()
    if replicas > 1:  # each would start a thread for every core
        for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
            environment.setdefault(name, str(share(replicas)))
    return environment


async def exit_of(process: subprocess.Popen[bytes], eof: asyncio.Event) -> None:
    """Wait until the process has ended, kill what it has left running, and reap it. `eof` is set when its socket is
    closed."""
    fd = _pidfd(process.pid)
    if fd is None:  # its end shows in the socket alone
        await eof.wait()
    else:
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        loop.add_reader(fd, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(fd)
            os.close(fd)
    while not _has_ended(process):  # noqa: ASYNC110 (no event tells; it takes a moment at most)
        await asyncio.sleep(0.02)
    _kill_group(process.pid)
    process.poll()
    while _has_orphans(process.pid):  # noqa: ASYNC110 (likewise)
        await asyncio.sleep(0.02)


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether a process has ended. Where possible it is not reaped, so that its number stays that of its group."""
    if sys.platform == "linux" and process.returncode is None:
        with contextlib.suppress(ChildProcessError):  # somebody else has reaped it
            return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    return process.poll() is not None


def _has_orphans(group: int) -> bool:
    """Reap what has been killed of a group; true while some of it is still to be reaped by this process.

    Orphans are the children of the first process of a container, which the server may be.
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


def told(code: int) -> str:
    """How a process ended, in words."""
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return f"signal {signal.Signals(-code).name}"
    return f"signal {-code}"
