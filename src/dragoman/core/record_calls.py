"""Calls about the state that a server keeps between requests: records, loaded models and recent requests."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dragoman.core.calls import ServerCall


@dataclass(frozen=True, slots=True)
class SaveRecord(ServerCall[None]):
    """Store a value for later requests of the same owner, within the limits of the record store.

    parts: further values under ids of their own, which are dropped together with this one.
    """

    owner: str
    id: str
    value: bytes
    parts: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ReadRecord(ServerCall[bytes | None]):
    """Return a stored value or a part of one; None if it does not exist or belongs to another owner."""

    owner: str
    id: str
    is_part: bool = False


@dataclass(frozen=True, slots=True)
class DeleteRecord(ServerCall[bool]):
    """Delete a stored value; return whether it existed."""

    owner: str
    id: str


@dataclass(frozen=True, slots=True)
class KeepLoaded(ServerCall[None]):
    """Unload the model of the request after `idle_s` seconds without requests; `inf` keeps it loaded.

    This replaces the server's setting until the model is unloaded. It has no effect on pinned models, and none unless
    models
    are loaded on demand.
    """

    idle_s: float


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A loaded model: the size of its files in bytes, and the seconds until it is unloaded without further requests."""

    name: str
    file_bytes: int
    unload_in_s: float


@dataclass(frozen=True, slots=True)
class ListLoaded(ServerCall[tuple[LoadedModel, ...]]):
    """Return the models that are loaded now."""


@dataclass(frozen=True, slots=True)
class FindRequests(ServerCall[list[dict[str, Any]]]):
    """Return the last `count` requests that the processes of the server have recorded, newest first, as JSON values.

    With a request id, only requests with this id are returned. The processes of `--processes` send this call; a single
    process does not need it.
    """

    count: int
    request_id: str = ""
