"""What the operator says of one model version: where it lies, what runs it, and where and how it is run."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from dragoman.core.errors import InvalidInput
from dragoman.core.peers import Peers
from dragoman.core.signature import TensorSpec

Placement = Literal["", "inline", "thread", "process"]
PLACEMENTS: tuple[Placement, ...] = ("inline", "thread", "process")
WorkingDirectory = Literal["shared", "own"]

# What a model or version may be called: safe in a URL and as the name of a folder.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,255}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """One version of one model, before it is loaded.

    name, version: as clients address it; version "" where the model has none.
    runtime: the plugin that loads it (`sklearn`, `onnx`, `python`, ...).
    uri: its file or folder, or `module:attribute` / `file.py:attribute` for Python.
    url: where it lies, as whoever registered it while the server ran said; "" of what the repository holds.
    target: a live Python object instead of a uri; it stays in this process.
    peers: the server's other models, for a model in the server's process; set by the server.
    platform, inputs, outputs: override what the model tells of itself.
    parameters: further settings that the runtime understands.
    protocols: what protocols are to know of it, by their names: how LMI formats its answers, say.
    placement: `inline` (on the event loop), `thread`, `process`; "" leaves it to the runtime.
    replicas: how many copies answer at the same time.
    max_batch_size: the most rows that calls are merged to; 0 and 1 merge nothing.
    max_batch_wait_s: how long a batch may wait for more rows, in seconds, beyond the wait for an idle worker.
    batch_linger: how long a batch waits for callers who were just answered to ask again, as a share of the model's
        own time; 0 is not at all.
    max_queue: how many calls may wait or run before further ones are refused; 0 is no limit.
    timeout_s: the deadline in seconds of calls that bring none; 0 is no limit.
    cancel_grace_s: how long a worker process may go on with a call that nobody waits for before it is killed, in
        seconds; 0 is no limit.
    heartbeat_s: how long a worker process may be stopped, or idle and silent, before it counts as hung, in seconds;
        0 is for ever.
    working_directory: `shared` where worker processes have that of the server, `own` where each has an empty one.
    allow_pickle: whether files that can run code when loaded may be loaded.
    """

    name: str
    version: str = ""
    runtime: str = ""
    uri: str = ""
    url: str = ""
    target: Any = None
    peers: Peers | None = field(default=None, compare=False, repr=False)
    platform: str = ""
    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    parameters: Mapping[str, Any] = field(default_factory=dict)
    protocols: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    placement: Placement = ""
    replicas: int = 1
    max_batch_size: int = 0
    max_batch_wait_s: float = 0.0
    batch_linger: float = 0.5
    max_queue: int = 1024
    timeout_s: float = 0.0
    cancel_grace_s: float = 10.0
    heartbeat_s: float = 5.0
    working_directory: WorkingDirectory = "shared"
    allow_pickle: bool = False


def check_name(name: str, what: str = "model name") -> str:
    """`name` itself, if it may name a model or version; else InvalidInput."""
    if not _NAME.fullmatch(name):
        raise InvalidInput(
            f"{what} {name!r} is not allowed; expected 1 to 256 letters, digits, '_', '-' and '.', not beginning "
            "with '.' or '-'"
        )
    return name
