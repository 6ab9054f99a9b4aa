"""Whose the records are that protocols keep between requests."""

import hashlib

from dragoman.protocols.wire import HttpRequest, bearer_token


def owner_of(http: HttpRequest) -> str:
    """Return the owner of a request; where there is none, a name of its credential that does not disclose it, for a
    gateway that checks keys in place of the server and passes them on."""
    return http.caller.owner or hashlib.blake2b(bearer_token(http.headers).encode(), digest_size=16).hexdigest()
