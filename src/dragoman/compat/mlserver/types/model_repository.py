"""Types of the model repository."""

from enum import StrEnum

from dragoman.compat.mlserver.types.base import BaseModel, ErrorResponse


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


class RepositoryIndexResponse(list[RepositoryIndexResponseItem]):
    """The index."""


class RepositoryLoadErrorResponse(ErrorResponse):
    """Error of a load request."""


class RepositoryUnloadErrorResponse(ErrorResponse):
    """Error of an unload request."""
