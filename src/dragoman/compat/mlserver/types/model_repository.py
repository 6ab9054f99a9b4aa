"""Types of the model repository."""

from enum import StrEnum
from typing import ClassVar

from dragoman.compat.mlserver.types.base import BaseModel


class State(StrEnum):
    """State of a model version."""

    UNKNOWN = "UNKNOWN"
    READY = "READY"
    UNAVAILABLE = "UNAVAILABLE"
    LOADING = "LOADING"
    UNLOADING = "UNLOADING"


class RepositoryIndexRequest(BaseModel):
    """A request for the index."""

    ready: bool | None = None


class RepositoryIndexResponseItem(BaseModel):
    """One model version in the index."""

    name: str
    version: str | None = None
    state: State
    reason: str
    _converters: ClassVar = {"state": State}


class RepositoryIndexResponse(list[RepositoryIndexResponseItem]):
    """The index."""


class RepositoryLoadErrorResponse(BaseModel):
    """Error of a load request."""

    error: str | None = None


class RepositoryUnloadErrorResponse(BaseModel):
    """Error of an unload request."""

    error: str | None = None
