"""Requests of web pages, to a server that needs no key: browsers send them for any site that their user visits."""

import re
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from ipaddress import ip_address
from urllib.parse import urlsplit

import msgspec

from dragoman.core.errors import Forbidden

ANY_HOST = ("*",)
# Names that no site on the internet can have: RFC 6761, RFC 6762, and the domain that ICANN reserves for private use.
_PRIVATE_DOMAINS = (".localhost", ".local", ".internal")
# Methods without effects, and media types that browsers send to other sites without asking them before (Fetch, 2.2.2).
_SAFE_METHODS = frozenset(("GET", "HEAD", "OPTIONS"))
_SIMPLE_TYPES = frozenset(("", "application/x-www-form-urlencoded", "multipart/form-data", "text/plain"))
_MAX_SHOWN = 256


class SiteRules(msgspec.Struct, frozen=True, kw_only=True):
    """Which hosts a request may be for, and which pages it may come from.

    allowed_hosts: patterns of host names, besides those that no site can have; `ANY_HOST` for all. A page whose name
    its owner binds to this machine's address (DNS rebinding) sends that name.
    allows_origin: whether pages of an origin may send requests, as CORS allows it.
    """

    allowed_hosts: tuple[str, ...] = ANY_HOST
    allows_origin: Callable[[str], bool] = lambda _: False

    def is_suspect(self, headers: Mapping[str, str]) -> bool:
        """Return whether a request has to be checked: a browser sends it, or its host is not allowed."""
        return "origin" in headers or "sec-fetch-site" in headers or not self._allows_host(headers)

    def check(self, method: str, headers: Mapping[str, str]) -> None:
        """Raise Forbidden for a request of a page of another site.

        Of other pages, browsers send requests with any other media type only after a preflight request, which CORS
        answers. Clients that are no browsers send neither `Origin` nor `Sec-Fetch-Site`.
        """
        if not self._allows_host(headers):
            raise Forbidden(
                f"host {headers['host'][:_MAX_SHOWN]!r}: expected localhost, an address or a name without a public "
                "domain, so that no page of another site can use this server; further names are in the setting "
                "'allowed_hosts' (--allowed-hosts)"
            )
        site, origin = headers.get("sec-fetch-site"), headers.get("origin")
        if method in _SAFE_METHODS or (site is None and origin is None) or site in ("same-origin", "none"):
            return
        if site is None and origin is not None and _is_of_host(origin, headers.get("host", "")):
            return
        media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
        if media_type in _SIMPLE_TYPES and not (origin is not None and self.allows_origin(origin)):
            name, value = ("Origin", origin) if origin is not None else ("Sec-Fetch-Site", site or "")
            raise Forbidden(
                f"this server rejects requests of pages of other sites, got one of {name} {value[:_MAX_SHOWN]!r}; "
                "allowed ones are in the setting 'cors_origins' (--cors-origins)"
            )

    def _allows_host(self, headers: Mapping[str, str]) -> bool:
        if self.allowed_hosts == ANY_HOST:
            return True
        try:
            name = (urlsplit(f"//{headers.get('host', '')}").hostname or "").rstrip(".")
        except ValueError:
            return False
        return (
            "." not in name  # an IPv6 address, or a name of a container or of this network
            or name.endswith(_PRIVATE_DOMAINS)
            or _is_address(name)
            or any(fnmatchcase(name, pattern.lower()) for pattern in self.allowed_hosts)
        )


def check_control(headers: Mapping[str, str]) -> None:
    """Raise Forbidden for a request of a web page to control models, where that needs no credential.

    Pages that this very server serves under an IP address or localhost may: browsers send such requests for any page,
    to any address that its host name is bound to.
    """
    origin, host = headers.get("origin"), headers.get("host", "")
    if origin is None:
        return
    try:
        name = urlsplit(origin).hostname or ""
        if _is_of_host(origin, host) and (name == "localhost" or _is_address(name)):
            return
    except ValueError:
        pass
    raise Forbidden(f"model control from a web page needs a control token, got none and Origin {origin[:_MAX_SHOWN]!r}")


def _is_of_host(origin: str, host: str) -> bool:
    """Return whether an origin is that of a page which a host serves, with its port unless that is the default."""
    match = _ORIGIN.fullmatch(origin.lower())
    return match is not None and match[1] == host.lower()


_ORIGIN = re.compile(r"https?://([^/?#@]+)")


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
