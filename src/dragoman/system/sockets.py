"""Sockets that listen, and errors that name the address."""

import os
import socket
import sys


def listening_socket(host: str, port: int, *, backlog: int, shared: bool = False) -> socket.socket:
    """Return a socket that listens on an address. Raises OSError, whose `filename` is the address.

    With `shared`, other processes of the same user may listen there too; the system distributes the connections. The
    host `::` is every interface, over IPv4 and IPv6.
    """
    sock = bound_socket(host, port, shared=shared)
    try:
        sock.listen(backlog)
    except OSError as error:
        sock.close()
        raise address_error(error, host, port) from error
    return sock


def bound_socket(host: str, port: int, *, shared: bool) -> socket.socket:
    """Return a socket bound to an address, as `listening_socket`, that does not listen yet."""
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        if os.name == "posix":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of an earlier server may remain
        if shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if sock.family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, host != "::")
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise address_error(error, host, port) from error
    return sock


def can_share_ports() -> bool:
    """Return whether the system distributes the connections to a port over several processes: not all of Linux does."""
    if sys.platform != "linux":
        return False
    try:
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    except (AttributeError, OSError):  # built without it; not in this kernel or sandbox
        return False
    return True


def address_error(error: OSError, host: str, port: int) -> OSError:
    """Return the error of an address that a socket cannot be bound to."""
    number = error.errno or 0  # negative: an error of the resolver, of which the socket module has the text
    reason = os.strerror(number) if number > 0 else (error.strerror or str(error)).partition(" (while")[0]
    return OSError(number, reason, f"{host}:{port}")
