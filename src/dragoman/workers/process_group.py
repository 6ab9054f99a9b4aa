"""Entry point of a worker process: a guard kills the whole process group when the worker ends, however that happens.

A model may start programs of its own, a simulator for example. They belong to the worker's process group, which the
server kills as a whole. If the server itself was killed, the guard does it: a process that only waits for the end of
the worker. It is forked before anything large is imported, so that it takes about 5 MiB.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from dragoman.system.parent_exit import signal_on_parent_exit

_PR_SET_NAME = 15  # linux/prctl.h


def main(fd: int, parent: int, memory: Sequence[int] = ()) -> None:
    """Start the guard, then run the worker; see `dragoman.workers.worker.main`."""
    start_guard((fd, *memory))
    from dragoman.workers import worker  # after the fork: it imports NumPy

    worker.main(fd, parent, memory)


def start_guard(descriptors: Sequence[int] = ()) -> None:
    """Start the guard, which closes the worker's descriptors, if this process leads its group. Linux only."""
    worker = os.getpid()
    if sys.platform == "linux" and os.getpgrp() == worker and not os.fork():
        _guard(worker, descriptors)


def _guard(worker: int, descriptors: Sequence[int]) -> NoReturn:
    """Wait until the worker has exited, then kill the rest of its group, this process included."""
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        signal_on_parent_exit(signal.SIGUSR1)
        ctypes.CDLL(None).prctl(_PR_SET_NAME, b"dragoman-guard", 0, 0, 0)
        for descriptor in (0, 1, 2, *descriptors):  # so that readers at the other ends see EOF when the worker exits
            os.close(descriptor)
        while os.getppid() == worker:
            signal.sigwait({signal.SIGUSR1})
    finally:
        os.killpg(0, signal.SIGKILL)
        os._exit(0)
