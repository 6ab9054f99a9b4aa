"""Run one function in a process of its own: for code that must not run in the server's process."""

import json
import os
import socket
from collections.abc import Callable, Sequence
from typing import Any

from dragoman import plugins
from dragoman.core.errors import ModelFailed
from dragoman.core.options import child_environment
from dragoman.workers.child_process import kill, set_up_child, spawn


def probe(function: Callable[..., Any], arguments: Sequence[Any], timeout_s: float) -> Any:
    """Call a module's function in a new process and return its result, both as JSON.

    The output of the function is discarded. Raises ModelFailed if it raises, ends its process or takes too long.
    """
    path = f"{function.__module__}:{function.__qualname__}"
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            process = spawn(theirs.fileno(), child_environment(runs_models=True), module=__name__)
        try:
            ours.settimeout(timeout_s)
            ours.sendall(json.dumps([path, *arguments]).encode())
            ours.shutdown(socket.SHUT_WR)
            response = _receive_all(ours)
        except OSError as error:
            raise ModelFailed(f"{type(error).__name__}: {error}") from error
        finally:
            kill(process)
            process.wait()
    if not response:
        raise ModelFailed("the process ended without a result")
    outcome: dict[str, Any] = json.loads(response)
    if "error" in outcome:
        raise ModelFailed(outcome["error"])
    return outcome["result"]


def main(fd: int, parent: int, _memory: Sequence[int] = ()) -> None:
    """Call the function that the parent sends, and send its result."""
    set_up_child(parent, (fd,))
    with open(os.devnull, "wb") as null:
        os.dup2(null.fileno(), 1)
        os.dup2(null.fileno(), 2)
    with socket.socket(fileno=fd) as sock:
        function, *arguments = json.loads(_receive_all(sock))
        try:
            outcome = {"result": plugins.resolve(function)(*arguments)}
        except BaseException as error:  # a model file may call sys.exit
            outcome = {"error": f"{type(error).__name__}: {error}"[:1000]}
        sock.sendall(json.dumps(outcome).encode())


def _receive_all(sock: socket.socket) -> bytes:
    return b"".join(iter(lambda: sock.recv(1 << 16), b""))
