"""Whose the records are that protocols keep between requests."""

import hashlib

from dragoman.protocols.wire import HttpRequest, bearer_token


def owner_of(http: HttpRequest) -> str:
    """Return a name of the caller's key that does not disclose it."""
    return hashlib.blake2b(bearer_token(http.headers).encode(), digest_size=16).hexdigest()
