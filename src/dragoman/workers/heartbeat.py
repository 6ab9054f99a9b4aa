"""Heartbeats of a worker process: find out that it hangs, without mistaking a busy one for a hung one."""

import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

# How many beats may be missed before a process hangs. They are counted, not timed: a server that was stopped or busy
# itself for a long time has missed one.
BEATS = 5


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped, by SIGSTOP or a debugger; False where the system does not tell."""
    if sys.platform == "linux":
        with suppress(OSError, IndexError):
            # proc(5): the state follows the command's name, which may itself hold blanks and parentheses.
            return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] in b"Tt"
    return False


class Heartbeat:
    """Whether a worker process hangs, looked at in each `beat`.

    A process hangs while it is stopped, whatever it does, and while it is idle and does not answer pings. A process
    that computes a call is never asked: it may hold the interpreter's lock for minutes, and no thread of it could
    answer then. `stopped` tells whether it is stopped, `ping` sends it a ping.
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
        return "it is stopped" if self._stopped_beats else "it does not answer"

    def heard(self) -> None:
        """Record that something came from the process."""
        self._pinged = False
        self._silent_beats = 0

    def beat(self, *, busy: bool) -> None:
        """Look at the process; called at equal intervals. `busy` while it computes a call."""
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
