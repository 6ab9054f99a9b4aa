"""Errors of files and batches."""

from dragoman.core.errors import CallerError, ServerError


class ObjectNotFound(CallerError):
    """Unknown file or batch, or one of another key."""

    status = 404


class StorageFull(ServerError):
    """The disk, or the server's part of it, is full."""

    status = 507
