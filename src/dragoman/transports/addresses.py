"""Addresses of clients, and the syntax of hosts."""

import ipaddress
import re
from typing import Any

# RFC 3986, 3.2
_HOST = re.compile(r"(?:\[[0-9A-Za-z:.%_~-]+\]|(?:[A-Za-z0-9._~!$&'()*+,;=-]|%[0-9A-Fa-f]{2})*)(?::[0-9]*)?", re.ASCII)


def client_address(transport: Any) -> str:
    """Return a text that is equal for all connections of one client; "" if the address is not known.

    A client with IPv6 usually has a whole /64 network, so that is what counts.
    """
    peer = transport.get_extra_info("peername")
    host = peer[0] if isinstance(peer, tuple) and peer and isinstance(peer[0], str) else ""
    if ":" not in host:
        return host
    try:
        address = ipaddress.IPv6Address(host)
    except ValueError:
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(address) >> 64 << 64, 64)))


def is_host(text: str) -> bool:
    """Return whether a Host header or an authority is `host`, `host:port` or empty (RFC 9110, 7.2), without user."""
    return _HOST.fullmatch(text) is not None
