"""The ports of several processes that listen on the same ones, held for them while they come and go."""

import errno
import os
import socket
from collections.abc import Sequence

from dragoman.front import Address


def held(addresses: Sequence[Address]) -> list[socket.socket]:
    """A socket that is bound to each address and does not listen, all or none; the system chooses where the port is 0.

    Raises OSError where a port is taken, also by a server that would share it: to share it with strangers would give
    them some of our clients.
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
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # what an earlier server left behind does not matter
        if shared:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if made.family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)  # as `socket.create_server` has it
        made.bind(address)
    except OSError as fault:
        made.close()
        raise _taken(address, fault.errno or errno.EADDRINUSE) from fault
    return made


def _taken(address: Address, number: int) -> OSError:
    return OSError(number, f"{os.strerror(number)} (while attempting to bind on address {address!r})")
