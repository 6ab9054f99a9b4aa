"""Content-Encoding both ways: gzip and deflate, with a bound on what a small body may grow to."""

import asyncio
import io
import zlib
from functools import lru_cache

from dragoman.protocols.wire import Buffer, HttpError

# Work on bodies above this many bytes goes to a thread; zlib releases the lock there. A packed body grows up to a
# thousandfold.
_LARGE = 1 << 16
_LARGE_PACKED = 1 << 12
_GZIP, _DEFLATE, _BARE_DEFLATE = 31, 15, -15
_WINDOW_BITS = {"gzip": _GZIP, "x-gzip": _GZIP, "deflate": _DEFLATE}
_CHUNK = 1 << 16
_MOST_AT_ONCE = 1 << 20  # bytes that are decompressed in one step: they are copied while no other thread runs
_MAX_EXPANSION = 1032  # of deflate: 258 bytes for 2 bits
_FRESH = 32 << 20  # bytes from which on malloc takes memory from the system, page by page as it is written
_MAX_MEMBERS = 1024
_MAX_ENCODINGS = 2


async def decoded(body: Buffer, encodings: str, max_bytes: int) -> Buffer:
    """The body with its encodings undone. Raises HttpError: 415 unknown encoding, 400 broken data, 413 too large."""
    names = [n for n in (e.strip().lower() for e in encodings.split(",")) if n not in ("", "identity")]
    unknown = next((n for n in names if n not in _WINDOW_BITS), None)
    if unknown is not None or len(names) > _MAX_ENCODINGS:
        told = f"'{unknown[:64]}'" if unknown is not None else f"of {len(names)} layers"
        text = f"content-encoding {told} is not supported; expected gzip, deflate or identity"
        raise HttpError(415, text, (("accept-encoding", "gzip, deflate"),))
    for name in reversed(names):
        if len(body) > _LARGE_PACKED:
            body = await asyncio.to_thread(_inflated, body, name, max_bytes)
        else:
            body = _inflated(body, name, max_bytes)
    return body


def _inflated(body: Buffer, name: str, max_bytes: int) -> bytes:
    try:
        return _unpacked(body, _WINDOW_BITS[name], max_bytes)
    except zlib.error as fault:
        if name == "deflate":  # some clients send deflate without the zlib wrapper that the name means
            try:
                return _unpacked(body, _BARE_DEFLATE, max_bytes)
            except zlib.error:
                pass
        raise HttpError(400, f"the body is not valid {name}: {fault}") from fault


def _unpacked(body: Buffer, window_bits: int, max_bytes: int) -> bytes:
    """The body's one stream unpacked; of gzip there may be several, one after the other."""
    packed, room = memoryview(body), max_bytes
    largest = min(max_bytes, len(packed) * _MAX_EXPANSION)
    # A buffer that grows would leave blocks of all sizes up to that of the body in the heap.
    found = io.BytesIO(bytes(largest) if largest >= _FRESH else b"")
    stream, members, at = zlib.decompressobj(window_bits), 1, 0
    while at < len(packed):
        if stream.eof:
            members += 1
            if window_bits != _GZIP or members > _MAX_MEMBERS:
                raise zlib.error("data after the end of the stream")
            stream = zlib.decompressobj(window_bits)
        chunk: Buffer = packed[at : at + _CHUNK]
        at += len(chunk)
        while True:
            part = stream.decompress(chunk, _MOST_AT_ONCE)
            room -= found.write(part)
            if room < 0:
                raise HttpError(413, f"the decompressed body is larger than the limit of {max_bytes} bytes")
            chunk = stream.unconsumed_tail
            if stream.eof or (len(part) < _MOST_AT_ONCE and not chunk):
                break
        at -= len(stream.unused_data)
    if not stream.eof:
        raise zlib.error("incomplete or truncated stream")
    found.truncate()
    return found.getvalue()  # without a copy


@lru_cache(maxsize=256)
def accepted(header: str) -> str | None:
    """The encoding that an Accept-Encoding header likes best of those that we speak; None for none."""
    likes: dict[str, float] = {}
    for item in header.lower().split(","):
        name, _, parameters = item.partition(";")
        likes[name.strip()] = _quality(parameters)
    any_other = likes.get("*", 0.0)
    best = max(("gzip", "deflate"), key=lambda name: likes.get(name, any_other))
    quality = likes.get(best, any_other)
    return best if quality > 0 and quality >= likes.get("identity", 0.0) else None


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
