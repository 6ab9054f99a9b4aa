"""Ports that several processes share, bound by the parent so that they stay taken while those restart."""

import errno
import os
import socket
from collections.abc import Sequence

from dragoman.server_transports import Address


def bind_all(addresses: Sequence[Address]) -> list[socket.socket]:
    """Return a socket bound to each address, not listening; the system chooses a port for 0.

    Raises OSError, with nothing bound, if a port is taken, also by another server with SO_REUSEPORT: sharing a port
    with it would give it some of our clients.
    """
    sockets: list[socket.socket] = []
    try:
        for address in addresses:
            if address[1] and address in addresses[: len(sockets)]:
                raise _taken(address, errno.EADDRINUSE)
            _bound(address, shared=False).close()
            sockets.append(_bound(address, shared=True))
    except OSError:
        for each in sockets:
            each.close()
        raise
    return sockets


def _bound(address: Address, *, shared: bool) -> socket.socket:
    made = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of an earlier server may linger
        if shared:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if made.family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)  # as in `socket.create_server`
        made.bind(address)
    except OSError as error:
        made.close()
        raise _taken(address, error.errno or errno.EADDRINUSE) from error
    return made


def _taken(address: Address, number: int) -> OSError:
    return OSError(number, f"{os.strerror(number)} (while attempting to bind on address {address!r})")
