"""The interface of an attack: a function that is given the addresses of a running server."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from benchmarks.processes import Process

HEALTH_MS = 250.0  # the aim of every attack: no health check waits longer
MEMORY_FACTOR = 4.0  # the aim of attacks that state their body's size: memory grows by at most this multiple
SLACK_MIB = 64.0  # growth of a server with its first requests of any size
SLACK_FILES = 32  # open files that a server may keep after an attack


@dataclass(frozen=True, slots=True)
class Target:
    """A running server. `process.pids()` lists the server first, then its workers. `arguments`: how it was started."""

    http_port: int
    grpc_port: int
    process: Process
    host: str = "127.0.0.1"
    arguments: Sequence[str] = ()

    def argument(self, flag: str) -> str:
        """Return the value of a flag with which the server was started."""
        return self.arguments[self.arguments.index(flag) + 1]


class AimMissedError(Exception):
    """Raised by an attack whose own aim is missed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attack:
    """One attack.

    Parameters
    ----------
    name : unique, in kebab case.
    about : one line, for the table.
    run : runs the attack and returns a note for the table, such as the status of the response. It must end by itself.
        It raises `AimMissedError` if an aim of its own is missed.
    body_bytes : size of the largest body after decompression; 0 if memory is not checked.
    tensor_bytes : bytes of the tensors that the body legally asks for, if these are more than 4 times the body: the
        input, the output, and the copy of the output that leaves the worker process.
    models : names of the served models, of `benchmarks.attack.server.MODELS`.
    options : further flags of `dragoman serve`; none, since the aim is about default settings, unless the attack is
        about a setting.
    prepare : makes files for the server in a folder that is given, and returns further models and flags.
    front : what clients reach: the `server` itself, its `asgi` application in uvicorn, which has no gRPC, or the server
        through `nginx` or `haproxy`.
    token : the credential that the well-behaved client sends.
    infer_may_fail : true if only health checks of the well-behaved client, and not its inference, must succeed.
    logs_tracebacks : true if a model fails, of which a traceback belongs in the log.
    max_files : the server's limit of open files, as of `ulimit -n`; 0 leaves it unchanged.
    health_ms : longest time that a health check may take.
    """

    name: str
    about: str
    run: Callable[[Target], str]
    body_bytes: int = 0
    tensor_bytes: int = 0
    models: tuple[str, ...] = ("doubled",)
    options: tuple[str, ...] = ()
    prepare: Callable[[Path], Sequence[str]] = lambda _: ()
    front: Literal["server", "asgi", "nginx", "haproxy"] = "server"
    token: str = ""
    infer_may_fail: bool = False
    logs_tracebacks: bool = False
    max_files: int = 0
    health_ms: float = HEALTH_MS

    @property
    def memory_limit_mib(self) -> float | None:
        """Return the allowed growth of memory; None if there is no limit."""
        if not self.body_bytes:
            return None
        return SLACK_MIB + max(MEMORY_FACTOR * self.body_bytes, self.tensor_bytes) / (1 << 20)
