"""Worker processes that hang."""

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from http.client import HTTPConnection
from pathlib import Path

from benchmarks.attack.attack import AimMissedError, Attack, Target
from benchmarks.attack.http import post

_DEADLINE_S = 2.0
_NOTICED_S = 10.0  # by when readiness has to change; heartbeat_s is 5
_BODY = b'{"inputs":[{"name":"x","datatype":"FP64","shape":[4],"data":[1,2,3,4]}]}'


def _stop_workers(target: Target) -> str:
    """Stop every worker for a while: a call with a deadline gets an error, readiness turns false and then true."""
    workers = [pid for pid in target.process.pids()[1:] if _is_worker(pid)]
    for pid in workers:
        os.kill(pid, signal.SIGSTOP)
    began_s = time.monotonic()
    try:
        response = post(target, "/v2/models/doubled/infer", _BODY)
        if not response.startswith("504 "):
            raise AimMissedError(f"a call to a stopped worker got {response}")
        noticed_s = _wait_until(lambda: _readiness(target) == 400, began_s, "not ready")
    finally:
        for pid in workers:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
    again_s = _wait_until(lambda: _readiness(target) == 200, time.monotonic(), "ready again")
    return f"{response}; not ready after {noticed_s:.1f} s, ready {again_s:.1f} s after the workers went on"


def _is_worker(pid: int) -> bool:
    with suppress(OSError):
        return b"dragoman.workers" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def _wait_until(condition: Callable[[], bool], began_s: float, state: str) -> float:
    """Wait for a condition and return the seconds since `began_s`. Raises AimMissedError after the limit."""
    while not condition():
        if time.monotonic() - began_s > _NOTICED_S:
            raise AimMissedError(f"the server was not {state} within {_NOTICED_S:.0f} s")
        time.sleep(0.01)
    return time.monotonic() - began_s


def _readiness(target: Target) -> int:
    connection = HTTPConnection(target.host, target.http_port, timeout=_NOTICED_S)
    try:
        connection.request("GET", "/v2/health/ready")
        return connection.getresponse().status
    finally:
        connection.close()


ATTACKS = (
    Attack(
        name="hung-workers",
        about=f"every worker process stopped (SIGSTOP), with --timeout-s {_DEADLINE_S:g}",
        run=_stop_workers,
        options=("--timeout-s", f"{_DEADLINE_S:g}"),
        infer_may_fail=True,
    ),
)
