"""Sockets that listen, and errors that name the address."""

import os
import socket


def listening_socket(host: str, port: int, *, backlog: int, shared: bool = False) -> socket.socket:
    """Return a socket that listens on an address. Raises OSError, whose `filename` is the address.

    With `shared`, other processes of the same user may listen there too; the system distributes the connections.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=backlog, reuse_port=shared)
    except OSError as error:
        raise address_error(error, host, port) from error


def address_error(error: OSError, host: str, port: int) -> OSError:
    """Return the error of an address that a socket cannot be bound to."""
    number = error.errno or 0  # negative: an error of the resolver, of which the socket module has the text
    reason = os.strerror(number) if number > 0 else (error.strerror or str(error)).partition(" (while")[0]
    return OSError(number, reason, f"{host}:{port}")
