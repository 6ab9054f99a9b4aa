"""Attacks on the pages of a server, the console and the documents of the API, and on its ASGI application."""

import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from http.client import HTTPConnection, HTTPException

from benchmarks.attack.attack import AimMissedError, Attack, Target
from benchmarks.attack.attacks.json_bodies import flat, nested
from benchmarks.attack.attacks.slow_clients import unread
from benchmarks.attack.http import post

_MIB = 1 << 20
_FLOOD_S = 5.0
_THREADS = 16
_PAGES = (
    "/",
    "/console",
    "/console/v2/repository/status",
    "/console/v2/models/doubled/openapi.json",
    "/console/metrics",
    "/console/requests",
    "/console/requests/" + "x" * 5000,
    "/console/assets/..%2f..%2fconsole.py",
    "/docs",
    "/v2/docs",
    "/openapi.json",
    "/v2/models/doubled/openapi.json",
    "/v2/models/doubled/versions/99999999999999999999/openapi.json",
    "/metrics",
)
_STATUSES = frozenset((200, 400, 404))


def _pages(target: Target) -> str:
    """Ask for every page on many connections for some seconds, and read some of them only in part."""
    answers: Counter[int | str] = Counter()
    end_s = time.monotonic() + _FLOOD_S
    threads = [threading.Thread(target=_ask, args=(target, end_s, number, answers)) for number in range(_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if wrong := {status: count for status, count in answers.items() if status not in _STATUSES}:
        raise AimMissedError(f"expected statuses {sorted(_STATUSES)}, got {wrong}")
    return f"{answers.total():,} requests: {dict(answers)}"


def _ask(target: Target, end_s: float, number: int, answers: Counter[int | str]) -> None:
    connection = HTTPConnection(target.host, target.http_port, timeout=60)
    while time.monotonic() < end_s:
        number += 1
        headers = {"accept": "text/html", "x-request-id": "i" * (number % 3 * 1000), "accept-encoding": "gzip"}
        try:
            connection.request("GET", _PAGES[number % len(_PAGES)], headers=headers)
            response = connection.getresponse()
            answers[response.status] += 1
            if number % 7:
                response.read()
            else:
                connection.close()  # in the middle of the response
        except (OSError, HTTPException) as error:
            answers[type(error).__name__] += 1
            connection.close()
    connection.close()


def _bodies(target: Target) -> str:
    """Send JSON that is large once it is parsed, compressed and not."""
    rows, size = "/v2/models/Rows/infer", 16 * _MIB
    notes = [post(target, rows, nested(size, "[9,1]"), compressed=packed) for packed in (False, True)]
    notes.append(post(target, rows, flat(size, b"1", "FP32")[:-2], compressed=True))
    notes.append(post(target, rows, b"[" * (4 * _MIB)))
    if wrong := [note for note in notes if "400 `{" not in note]:
        raise AimMissedError(f"expected 400, got {wrong[0]}")
    return notes[0]


def _asgi(name: str, about: str, run: Callable[[Target], str], size: int) -> Attack:
    return Attack(
        name=f"asgi-{name}",
        about=f"{about}, to the ASGI application in uvicorn",
        run=run,
        models=("doubled", "Rows"),
        front="asgi",
        body_bytes=size,
    )


ATTACKS = (
    Attack(
        name="pages",
        about=f"the console, /docs, /openapi.json and the like on {_THREADS} connections",
        run=_pages,
        options=("--recent-requests", "1000"),
        body_bytes=_MIB,
    ),
    _asgi("bodies", "16 MiB of JSON in rows, cut off and nested", _bodies, 16 * _MIB),
    # One request each: uvicorn writes the responses of further ones to connections that are closed.
    _asgi(
        "unread", "30 connections ask for a JSON response each and read none", partial(unread, requests=1), 32 * _MIB
    ),
)
