"""Calls to the record store: values that protocols keep between requests."""

from dataclasses import dataclass

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
