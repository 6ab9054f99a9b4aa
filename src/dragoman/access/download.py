"""Download a JSON Web Key Set."""

from typing import Any
from urllib.request import HTTPRedirectHandler, build_opener

from dragoman.access.urls import is_secure

_TIMEOUT_S = 10.0
_MAX_BYTES = 1 << 20


class _SecureRedirects(HTTPRedirectHandler):
    """Follows redirects to secure URLs only."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        if not is_secure(newurl):
            raise ValueError(f"redirect to {newurl!r}, which is not an https URL")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def download(url: str) -> bytes:
    """Return the body at a URL. Raises OSError, ValueError, HTTPException."""
    with build_opener(_SecureRedirects).open(url, timeout=_TIMEOUT_S) as response:
        text: bytes = response.read(_MAX_BYTES + 1)
    if len(text) > _MAX_BYTES:
        raise ValueError(f"expected at most {_MAX_BYTES} bytes, got more")
    return text
