"""Addresses of clients: which ones belong to one client."""

import ipaddress


def address_group(host: str) -> str:
    """Return the address of a client, or for IPv6 its network of 64 bits, which one client usually has."""
    if ":" not in host:
        return host
    try:
        address = ipaddress.IPv6Address(host)
    except ValueError:
        return host
    return str(ipaddress.IPv6Network((int(address) >> 64 << 64, 64)))


def without_mapping(host: str) -> str:
    """Return an IPv4 address that a socket of IPv6 reports as an IPv6 one in its own form, others unchanged."""
    if not host.startswith("::ffff:"):
        return host
    mapped = ipaddress.IPv6Address(host).ipv4_mapped
    return host if mapped is None else str(mapped)
