"""Many legal JSON bodies at once, each a little shorter than those that are parsed in a thread."""

import gzip
import http.client
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial

from benchmarks.attack.attack import Attack, Target
from benchmarks.attack.attacks.json_bodies import fill, flat, nested

_SIZE = (1 << 20) - 1  # bytes; from 1 MiB on a body is parsed in a thread
_CONNECTIONS = 64
_SECONDS = 5.0
_LIMIT_S = 60.0
_ROWS = "/v2/models/Rows/infer"


def _many(path: str, body: Callable[[], bytes], compressed: bool, target: Target) -> str:
    text = body()
    assert len(text) <= _SIZE, "a larger one is parsed in a thread"
    headers = {"content-type": "application/json"} | ({"content-encoding": "gzip"} if compressed else {})
    if compressed:
        text = gzip.compress(text)
    statuses: Counter[str] = Counter()
    end_s = time.monotonic() + _SECONDS
    threads = [
        threading.Thread(target=_send, args=(target, path, text, headers, end_s, statuses)) for _ in range(_CONNECTIONS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counts = ", ".join(f"{count} x {status}" for status, count in statuses.items())
    return f"{_CONNECTIONS} connections, {len(text):,} bytes each: {counts}"


def _send(
    target: Target, path: str, body: bytes, headers: dict[str, str], end_s: float, statuses: Counter[str]
) -> None:
    """Send the body repeatedly over one connection."""
    connection = http.client.HTTPConnection(target.host, target.http_port, timeout=_LIMIT_S)
    try:
        while time.monotonic() < end_s:
            connection.request("POST", path, body, headers)
            response = connection.getresponse()
            response.read()
            statuses[str(response.status)] += 1
    except (OSError, http.client.HTTPException) as error:
        statuses[type(error).__name__] += 1
    finally:
        connection.close()


def _attack(name: str, about: str, path: str, body: Callable[[], bytes], compressed: bool = False) -> Attack:
    return Attack(
        name=f"many-{name}",
        about=about,
        run=partial(_many, path, body, compressed),
        models=("doubled", "Rows", "Texts"),
    )


_INVOCATIONS = "/models/doubled/invoke"
ATTACKS = (
    _attack("flat", "one-digit numbers, FP32", _ROWS, partial(flat, _SIZE, b"1", "FP32")),
    _attack("nested", "`[1],[1],...` under its own shape", _ROWS, partial(nested, _SIZE)),
    _attack("nested-gzip", "the same, compressed", _ROWS, partial(nested, _SIZE), compressed=True),
    _attack(
        "texts",
        "texts of one letter, BYTES",
        "/v2/models/Texts/infer",
        partial(flat, _SIZE, b'"a"', "BYTES"),
    ),
    _attack(
        "values",
        "`{},{},...` under an unknown key",
        _ROWS,
        partial(fill, b'{"inputs":[],"x":', b"{}", b"}", _SIZE),
    ),
    _attack("instances", "numbers as instances", _INVOCATIONS, partial(fill, b'{"instances":', b"1", b"}", _SIZE)),
    _attack(
        "records",
        "records of one number as instances",
        _INVOCATIONS,
        partial(fill, b'{"instances":', b'{"x":1}', b"}", _SIZE),
    ),
)
