"""Errors of files and batches."""

from dragoman.core.errors import CallerError, ServerError

# Names of errors in Anthropic's API, by status.
ANTHROPIC_ERRORS = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip


class ObjectNotFound(CallerError):
    """Unknown file or batch, or one of another key."""

    status = 404


class StorageFull(ServerError):
    """The disk, or the server's part of it, is full."""

    status = 507
