"""Calls about what a server keeps between requests: values of protocols, and descriptions of recent requests."""

from dataclasses import dataclass
from typing import Any

from dragoman.core.calls import ServerCall


@dataclass(frozen=True, slots=True)
class SaveRecord(ServerCall[None]):
    """Keep a value for later requests of the same owner, as long as the limits of the record store allow it."""

    owner: str
    id: str
    value: bytes


@dataclass(frozen=True, slots=True)
class ReadRecord(ServerCall[bytes | None]):
    """Return a kept value; None if there is none, or it is of another owner."""

    owner: str
    id: str


@dataclass(frozen=True, slots=True)
class DeleteRecord(ServerCall[bool]):
    """Delete a kept value; return whether there was one."""

    owner: str
    id: str


@dataclass(frozen=True, slots=True)
class FindRequests(ServerCall[list[dict[str, Any]]]):
    """Return the last `count` requests that the processes of the server have kept, newest first, for JSON.

    With an id, only those that had it. Only front ends send it; one process finds them by itself.
    """

    count: int
    request_id: str = ""
