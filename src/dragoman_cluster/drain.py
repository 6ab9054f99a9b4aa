"""The orderly end of a worker that has joined a server: it gets no further calls on SIGTERM, or near its time limit."""

import contextlib
import logging
import os
import select
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Mapping

from dragoman.workers.frames import FrameKind, encode
from dragoman.workers.worker_messages import serialize_message
from dragoman_cluster.link import Link

log = logging.getLogger("dragoman.worker")

_SQUEUE_S = 20.0


class DrainOnSignal:
    """Tells each server once that this worker leaves; the server closes the connection after the last response.

    It has a thread, because the main thread may compute a call for long. Python runs signal handlers only between two
    steps of the main thread, but the system writes the numbers of signals to a pipe at once. Create and start it in the
    main thread.

    is_leaving: whether servers have been told, or would have been.
    time_limit_s: seconds until this process is ended from outside; None if unknown, then a SLURM job asks SLURM.
    drain_s: how long before that the worker leaves, at most half of the time.
    """

    def __init__(self, time_limit_s: float | None, drain_s: float) -> None:
        self._links: set[Link] = set()  # the present connections
        self.is_leaving = False
        self._reason = ""
        self._lock = threading.Lock()
        self._start_s = time.monotonic()
        self._time_limit_s = time_limit_s
        self._drain_s = drain_s
        self._signals, self._wakeup = os.pipe()
        os.set_blocking(self._wakeup, False)
        signal.signal(signal.SIGTERM, self._handle)
        signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=_restore_signals)

    def start(self) -> None:
        """Wait in a thread for the signal or for the time."""
        threading.Thread(target=self._run, name="dragoman-drain", daemon=True).start()

    def _run(self) -> None:
        limit_s = slurm_time_left_s(os.environ) if self._time_limit_s is None else self._time_limit_s
        reason = "SIGTERM"
        if limit_s is None:
            self._wait_for_signal(None)
        else:
            drain_s = min(self._drain_s, limit_s / 2)
            if not self._wait_for_signal(self._start_s + limit_s - drain_s):
                reason = f"its time limit is reached in {drain_s:g} s"
        log.info("this worker leaves: %s", reason)
        with self._lock:
            self.is_leaving, self._reason = True, reason
            for link in self._links:
                self._announce(link)

    def add(self, link: Link) -> None:
        """Use a new connection."""
        with self._lock:
            self._links.add(link)
            if self.is_leaving:
                self._announce(link)

    def remove(self, link: Link) -> None:
        """Forget a connection that has ended."""
        with self._lock:
            self._links.discard(link)

    def _announce(self, link: Link) -> None:
        with contextlib.suppress(OSError):  # the server is gone
            link.announce(b"".join(encode(FrameKind.DRAIN, 0, self._reason, serializer=serialize_message)))

    def _handle(self, _number: int, _frame: object) -> None:
        """Report the signal also if the model has set another descriptor for signals, as asyncio can do."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._wakeup, bytes([signal.SIGTERM]))

    def _wait_for_signal(self, end_s: float | None) -> bool:
        """Return whether the signal has come, False at `end_s`, by `time.monotonic()`."""
        while True:
            left_s = None if end_s is None else max(0.0, end_s - time.monotonic())
            if not select.select([self._signals], [], [], left_s)[0]:
                return False
            if signal.SIGTERM in os.read(self._signals, 512):
                return True


def _restore_signals() -> None:
    """Restore the default of SIGTERM in processes that the model forks: it does not concern the worker."""
    if signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, signal.SIG_IGN):
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def slurm_time_left_s(environment: Mapping[str, str]) -> float | None:
    """Return how long the SLURM job of this process may still run; None outside of a job, or without a limit."""
    job = environment.get("SLURM_JOB_ID", "")
    if end_s := environment.get("SLURM_JOB_END_TIME", ""):  # since SLURM 23.02
        return float(end_s) - time.time() if end_s.isdecimal() else None
    program = shutil.which("squeue")
    if not job.isdecimal() or program is None:
        return None
    command = [program, "--noheader", f"--jobs={job}", "--format=%L"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_SQUEUE_S, check=True)  # noqa: S603
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("squeue does not report the time limit of job %s: %s", job, error)
        return None
    return parse_duration_s(answer.stdout.strip())


def parse_duration_s(text: str) -> float | None:
    """Return the seconds of `[DAYS-][HOURS:]MINUTES:SECONDS`, None for other texts, as `UNLIMITED`."""
    days, dash, rest = text.rpartition("-")
    numbers = rest.split(":")
    if not all(number.isdecimal() for number in (*numbers, *([days] if dash else []))) or not 2 <= len(numbers) <= 3:
        return None
    hours, minutes, seconds = map(int, ["0", *numbers][-3:])
    return float(((24 * int(days or 0) + hours) * 60 + minutes) * 60 + seconds)
