"""Content-Encoding both ways: gzip and deflate, with a bound on what a small body may grow to."""

import asyncio
import zlib
from functools import lru_cache

from dragoman.protocols.wire import Buffer, HttpFault

# Work on bodies above this many bytes goes to a thread; zlib releases the lock there.
_LARGE = 1 << 16
_GZIP, _DEFLATE = 31, 15
_WINDOW_BITS = {"gzip": _GZIP, "x-gzip": _GZIP, "deflate": _DEFLATE}


async def decoded(body: bytes, encodings: str, max_bytes: int) -> bytes:
    """The body with its encodings undone. Raises HttpFault: 415 unknown encoding, 400 broken data, 413 too large."""
    for name in reversed([e.strip().lower() for e in encodings.split(",")]):
        if name in ("", "identity"):
            continue
        if name not in _WINDOW_BITS:
            raise HttpFault(
                415,
                f"content-encoding '{name[:64]}' is not supported; expected gzip, deflate or identity",
                (("accept-encoding", "gzip, deflate"),),
            )
        if len(body) > _LARGE:
            body = await asyncio.to_thread(_inflated, body, name, max_bytes)
        else:
            body = _inflated(body, name, max_bytes)
    return body


def _inflated(body: bytes, name: str, max_bytes: int) -> bytes:
    try:
        return _unpacked(body, _WINDOW_BITS[name], max_bytes)
    except zlib.error as fault:
        if name == "deflate":  # some clients send deflate without the zlib wrapper that the name means
            try:
                return _unpacked(body, -15, max_bytes)
            except zlib.error:
                pass
        raise HttpFault(400, f"the body is not valid {name}: {fault}") from fault


def _unpacked(body: bytes, window_bits: int, max_bytes: int) -> bytes:
    parts: list[bytes] = []
    total = 0
    while body:  # gzip may have several members
        stream = zlib.decompressobj(window_bits)
        part = stream.decompress(body, max_bytes - total + 1)
        total += len(part)
        if total > max_bytes:
            raise HttpFault(413, f"the decompressed body is larger than the limit of {max_bytes} bytes")
        if not stream.eof:
            raise zlib.error("incomplete or truncated stream")
        parts.append(part)
        body = stream.unused_data
        if body and window_bits != _GZIP:
            raise zlib.error("data after the end of the stream")
    return parts[0] if len(parts) == 1 else b"".join(parts)


@lru_cache(maxsize=256)
def accepted(header: str) -> str | None:
    """The encoding that an Accept-Encoding header likes best of those that we speak; None for none."""
    best, best_q = None, 0.0
    for item in header.lower().split(","):
        name, _, rest = item.partition(";")
        quality = _quality(rest)
        name = name.strip()
        if name in ("gzip", "deflate", "*") and quality > best_q:
            best, best_q = "gzip" if name == "*" else name, quality
    return best


def _quality(parameters: str) -> float:
    key, _, value = parameters.strip().partition("=")
    if key.strip() != "q":
        return 1.0
    try:
        return float(value)
    except ValueError:
        return 0.0


async def encoded(parts: list[Buffer], name: str) -> bytes:
    """The parts in one body, compressed as fast as zlib can."""

    def deflate() -> bytes:
        stream = zlib.compressobj(1, zlib.DEFLATED, _WINDOW_BITS[name])
        return b"".join([*(stream.compress(p) for p in parts), stream.flush()])

    if sum(len(p) for p in parts) > _LARGE:
        return await asyncio.to_thread(deflate)
    return deflate()
