"""How a worker that is busy finds out that its server is silent."""

import socket
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from dragoman_cluster.link import HEARTBEAT, Link

LIMIT_S = 60.0

Ends = Callable[[], tuple[socket.socket, Link]]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells when data has arrived")


@pytest.fixture
def connect() -> Iterator[Ends]:
    """Return the server's socket and the worker's link of a new connection."""
    opened: list[socket.socket | Link] = []

    def pair() -> tuple[socket.socket, Link]:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            worker = socket.create_connection(listener.getsockname())
            server, _ = listener.accept()
        opened.extend((server, link := Link(worker, 60.0)))
        return server, link

    yield pair
    for each in opened:
        each.close()


def wait_until_silent(link: Link) -> None:
    end_s = time.monotonic() + LIMIT_S
    while link.silent_s() < 0.1:
        assert time.monotonic() < end_s
        time.sleep(0.01)


def test_heartbeats_that_wait_for_a_busy_worker_do_not_hide_the_silence_after_them(connect: Ends) -> None:
    server, link = connect()
    for _ in range(100):
        server.sendall(HEARTBEAT)
    wait_until_silent(link)


def test_a_server_that_has_no_room_to_send_is_not_silent(connect: Ends) -> None:
    server, full = connect()
    server.setblocking(False)
    with pytest.raises(BlockingIOError):
        while True:
            server.send(bytes(1 << 16))
    _, other = connect()
    wait_until_silent(other)
    assert full.silent_s() == 0.0
