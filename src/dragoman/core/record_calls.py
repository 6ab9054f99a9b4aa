"""Calls about the state that a server keeps between requests: records, loaded models and recent requests."""

from collections.abc import Mapping
from typing import Any

import msgspec

from dragoman.core.calls import ServerCall


class SaveRecord(msgspec.Struct, ServerCall[None], frozen=True):
    """Store a value for later requests of the same owner, within the limits of the record store.

    parts: further values under ids of their own, which are dropped together with this one.
    """

    owner: str
    id: str
    value: bytes
    parts: Mapping[str, bytes] = msgspec.field(default_factory=dict)


class AppendRecord(msgspec.Struct, ServerCall[bool], frozen=True):
    """Append to a stored value in one step; return whether it existed. `also` is stored in either case."""

    owner: str
    id: str
    value: bytes
    also: SaveRecord | None = None


class ReadRecord(msgspec.Struct, ServerCall[bytes | None], frozen=True):
    """Return a stored value or a part of one; None if it does not exist or belongs to another owner."""

    owner: str
    id: str
    is_part: bool = False


class DeleteRecord(msgspec.Struct, ServerCall[bool], frozen=True):
    """Delete a stored value; return whether it existed."""

    owner: str
    id: str


class KeepLoaded(msgspec.Struct, ServerCall[None], frozen=True):
    """Unload the model of the request after `idle_s` seconds without requests; `inf` keeps it loaded.

    This replaces the server's setting until the model is unloaded. It has no effect on pinned models, and none unless
    models
    are loaded on demand.
    """

    idle_s: float


class LoadedModel(msgspec.Struct, frozen=True):
    """A loaded model: the size of its files in bytes, and the seconds until it is unloaded without further requests."""

    name: str
    file_bytes: int
    unload_in_s: float


class ListLoaded(msgspec.Struct, ServerCall[tuple[LoadedModel, ...]], frozen=True):
    """Return the models that are loaded now."""


class FindRequests(msgspec.Struct, ServerCall[list[dict[str, Any]]], frozen=True):
    """Return the last `count` requests that the processes of the server have recorded, newest first, as JSON values.

    With a request id, only requests with this id are returned. The processes of `--processes` send this call; a single
    process does not need it.
    """

    count: int
    request_id: str = ""
