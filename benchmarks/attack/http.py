"""Sending hostile bodies over HTTP."""

import gzip
import http.client
import time

from benchmarks.attack.attack import Target

_LIMIT_S = 120.0


def post(
    target: Target,
    path: str,
    body: bytes,
    *,
    compressed: bool = False,
    content_type: str = "application/json",
    accept: str = "",
    limit_s: float = _LIMIT_S,
    **more: str,
) -> str:
    """Send a body, compressed if `compressed`, and return the status, the beginning of the response and the duration.

    `more` are further headers, with `_` for `-`.
    """
    headers = {"content-type": content_type} | ({"accept": accept} if accept else {})
    headers |= {name.replace("_", "-"): value for name, value in more.items()}
    if compressed:
        body, headers["content-encoding"] = gzip.compress(body, 6), "gzip"
    connection = http.client.HTTPConnection(target.host, target.http_port, timeout=limit_s)
    began_s = time.monotonic()
    try:
        connection.request("POST", path, body, headers)
        response = connection.getresponse()
        text = response.read(200)
        while response.read(1 << 20):
            pass
        size = f"{len(body):,} bytes, " if compressed else ""
        excerpt = text[:60].decode(errors="replace").replace("|", "/").replace("\n", " ")
        return f"{size}{response.status} `{excerpt}` after {time.monotonic() - began_s:.2f} s"
    except (OSError, http.client.HTTPException) as error:
        return f"{type(error).__name__} after {time.monotonic() - began_s:.2f} s"
    finally:
        connection.close()
