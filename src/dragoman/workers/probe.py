"""Run one function in a process of its own: for code that the server's process must not run."""

import json
import os
import socket
from collections.abc import Callable, Sequence
from typing import Any

from dragoman import plugins
from dragoman.core.errors import ModelFailed
from dragoman.workers.child_process import kill, spawn
from dragoman.workers.worker import set_up_child


def probe(function: Callable[..., Any], arguments: Sequence[Any], timeout_s: float) -> Any:
    """Call a module's function in a new process and return its result, both as JSON.

    The output of the function is discarded. Raises ModelFailed if it raises, ends its process or takes too long.
    """
    path = f"{function.__module__}:{function.__qualname__}"
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            process = spawn(theirs.fileno(), 1, module=__name__)
        try:
            ours.settimeout(timeout_s)
            ours.sendall(json.dumps([path, *arguments]).encode())
            ours.shutdown(socket.SHUT_WR)
            result = b"".join(iter(lambda: ours.recv(1 << 16), b""))
        except OSError as error:
            raise ModelFailed(f"{type(error).__name__}: {error}") from error
        finally:
            kill(process)
            process.wait()
    if not result:
        raise ModelFailed("the process ended without a result")
    found: dict[str, Any] = json.loads(result)
    if "error" in found:
        raise ModelFailed(found["error"])
    return found["result"]


def main(fd: int, parent: int, _memory: Sequence[int] = ()) -> None:
    """Answer the one request that comes through the socket."""
    set_up_child(parent, (fd,))
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    with socket.socket(fileno=fd) as sock:
        function, *arguments = json.loads(b"".join(iter(lambda: sock.recv(1 << 16), b"")))
        try:
            answer = {"result": plugins.resolve(function)(*arguments)}
        except BaseException as error:  # SystemExit of a model's file too
            answer = {"error": f"{type(error).__name__}: {error}"[:1000]}
        sock.sendall(json.dumps(answer).encode())
