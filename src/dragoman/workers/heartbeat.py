"""Heartbeats of a worker process: detect that it hangs, without taking a busy one for a hung one."""

import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

# Missed beats after which a process counts as hung. They are counted, not timed: if the server itself was stopped or
# busy for a long time, only one beat is missed.
BEATS = 5


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by SIGSTOP or a debugger; False if the system does not report it."""
    if sys.platform == "linux":
        with suppress(OSError, IndexError):
            # proc(5): the state follows the command's name, which may itself hold blanks and parentheses.
            return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] in b"Tt"
    return False


class Heartbeat:
    """Whether a worker process hangs, checked in each `beat`.

    A process hangs if it is stopped, or if it is idle and does not respond to pings. No ping is sent to a process that
    computes a call: it may hold the interpreter lock for minutes, during which none of its threads could respond.
    stopped: returns whether the process is stopped. ping: sends it a ping.
    """

    def __init__(self, stopped: Callable[[], bool], ping: Callable[[], None]) -> None:
        self._stopped = stopped
        self._ping = ping
        self._stopped_beats = 0
        self._silent_beats = 0
        self._pinged = False

    @property
    def is_hung(self) -> bool:
        return self._stopped_beats >= BEATS or self._silent_beats >= BEATS

    @property
    def reason(self) -> str:
        return "it is stopped" if self._stopped_beats else "it does not respond"

    def heard(self) -> None:
        """Record a response of the process."""
        self._pinged = False
        self._silent_beats = 0

    def beat(self, *, busy: bool) -> None:
        """Check the process; called at equal intervals. busy: it computes a call."""
        if self._stopped():
            self._stopped_beats += 1
            return
        self._stopped_beats = 0
        if busy and self._silent_beats < BEATS:
            self._silent_beats = 0
        elif self._pinged:
            self._silent_beats += 1
        if not (busy or self._pinged):
            self._pinged = True
            self._ping()
