"""The address of a client, as limits that hold for each client count it."""

import ipaddress
from typing import Any


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
