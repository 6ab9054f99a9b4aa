"""Addresses of clients: which ones belong to one client."""

from ipaddress import IPv6Address, IPv6Network


def address_group(host: str) -> str:
    """Return the address of a client, or for IPv6 its network of 64 bits, which one client usually has."""
    address = _ipv6(host)
    return host if address is None else str(IPv6Network((int(address), 64), strict=False))


def without_mapping(host: str) -> str:
    """Return an IPv4 address that a socket of IPv6 reports as an IPv6 one in its own form, others unchanged."""
    address = _ipv6(host) if host.startswith("::ffff:") else None
    mapped = None if address is None else address.ipv4_mapped
    return host if mapped is None else str(mapped)


def _ipv6(host: str) -> IPv6Address | None:
    try:
        return IPv6Address(host)
    except ValueError:  # one of IPv4, or what a proxy in front of an ASGI server calls the client
        return None
