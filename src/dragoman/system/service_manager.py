"""The interface of systemd: the state of the service (sd_notify), and sockets that it hands over (sd_listen_fds)."""

import logging
import os
import socket
from collections.abc import MutableMapping

log = logging.getLogger("dragoman.server")

# The descriptors that a service manager hands over begin with this one.
_FIRST_DESCRIPTOR = 3
_NAMES = ("http", "grpc", "admin")


def notify(*states: str) -> None:
    """Send states, such as `READY=1`; do nothing if no service manager has started this process."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):  # of Linux's abstract name space
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.connect(address)
            sock.send("\n".join(states).encode())
    except OSError as error:
        log.warning("the service manager cannot be told %s: %s", states[0], error)


def take_sockets(environment: MutableMapping[str, str], first: int = _FIRST_DESCRIPTOR) -> dict[str, socket.socket]:
    """Return the listening sockets that a service manager has opened for this process, by name; remove its variables.

    The names, of `LISTEN_FDNAMES`, are http, grpc and admin. Child processes do not inherit the sockets. Raises
    ValueError for another name, and for a descriptor that is no listening TCP socket.
    """
    found = {name: environment.pop(name, "") for name in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")}
    if found["LISTEN_PID"] != str(os.getpid()):  # none, or for another process, whose child this is
        return {}
    count = int(found["LISTEN_FDS"]) if found["LISTEN_FDS"].isdecimal() else 0
    names = found["LISTEN_FDNAMES"].split(":") if found["LISTEN_FDNAMES"] else ["unknown"] * count
    if len(names) != count:
        raise ValueError(f"LISTEN_FDNAMES: expected {count} names, as LISTEN_FDS says, got {len(names)}")
    if len({*names}) != count or not {*names} <= {*_NAMES}:
        raise ValueError(
            f"LISTEN_FDNAMES: expected each of http, grpc and admin at most once, got '{':'.join(names)}'; "
            "set FileDescriptorName= in the [Socket] section of each unit"
        )
    return {name: _listening(name, descriptor) for descriptor, name in enumerate(names, first)}


def _listening(name: str, descriptor: int) -> socket.socket:
    expected = f"LISTEN_FDS: expected a listening TCP socket for '{name}'"
    try:
        os.set_inheritable(descriptor, False)
        sock = socket.socket(fileno=descriptor)
        listens = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError as error:
        raise ValueError(f"{expected}, got descriptor {descriptor}: {error.strerror}") from error
    if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM or not listens:
        kind = f"{sock.family.name} {sock.type.name}{'' if listens else ' that does not listen (Accept=yes?)'}"
        sock.close()
        raise ValueError(f"{expected}, got {kind}")
    return sock
