"""Tell systemd the state of the service (sd_notify): a datagram to the socket that `NOTIFY_SOCKET` names."""

import logging
import os
import socket

log = logging.getLogger("dragoman.server")


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
