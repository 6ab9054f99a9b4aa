"""Which URLs may be trusted."""

from contextlib import suppress
from ipaddress import ip_address
from urllib.parse import urlsplit


def is_secure(url: str) -> bool:
    """Return whether what a URL returns cannot be replaced between its host and this machine."""
    parts = urlsplit(url)
    if parts.scheme == "http":
        with suppress(ValueError):
            return parts.hostname == "localhost" or ip_address(parts.hostname or "").is_loopback
    return parts.scheme == "https" and bool(parts.hostname)
