"""The repository as custom code may name it."""

from enum import StrEnum
from typing import ClassVar

from dragoman.compat.mlserver.types.base import BaseModel


class State(StrEnum):
    """What may be said of a model version."""

    UNKNOWN = "UNKNOWN"
    READY = "READY"
    UNAVAILABLE = "UNAVAILABLE"
    LOADING = "LOADING"
    UNLOADING = "UNLOADING"


class RepositoryIndexRequest(BaseModel):
    """Asks for the index."""

    ready: bool | None = None


class RepositoryIndexResponseItem(BaseModel):
    """One model version in the index."""

    name: str
    version: str | None = None
    state: State
    reason: str
    _readers: ClassVar = {"state": State}


class RepositoryIndexResponse(list[RepositoryIndexResponseItem]):
    """The index."""


class RepositoryLoadErrorResponse(BaseModel):
    """A fault in loading."""

    error: str | None = None


class RepositoryUnloadErrorResponse(BaseModel):
    """A fault in unloading."""

    error: str | None = None
