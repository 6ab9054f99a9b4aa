"""Content-Encoding gzip and deflate, with a limit on the decompressed size."""

import io
import zlib
from functools import lru_cache, partial

from dragoman.protocols.wire import Buffer, HttpError
from dragoman.transports.executor import MessageExecutor

# Larger bodies are compressed and decompressed in a thread. A compressed one may grow a thousandfold.
_LARGE = 1 << 16
_LARGE_COMPRESSED = 1 << 12
_GZIP, _DEFLATE, _RAW_DEFLATE = 31, 15, -15
_WINDOW_BITS = {"gzip": _GZIP, "x-gzip": _GZIP, "deflate": _DEFLATE}
_CHUNK = 1 << 16
_MAX_STEP = 1 << 20  # bytes decompressed in one step: they are copied while no other thread runs
_MAX_RATIO = 1032  # of deflate: 258 bytes for 2 bits
_MIN_PRESIZED = 32 << 20  # malloc maps memory of this size, whose pages are taken as they are written
_MAX_MEMBERS = 1024
_MAX_ENCODINGS = 2


async def decompress(body: Buffer, encodings: str, max_bytes: int, executor: MessageExecutor) -> Buffer:
    """Return the decompressed body. Raises HttpError: 415 unknown encoding, 400 invalid data, 413 too large."""
    names = [n for n in (e.strip().lower() for e in encodings.split(",")) if n not in ("", "identity")]
    unknown = next((n for n in names if n not in _WINDOW_BITS), None)
    if unknown is not None or len(names) > _MAX_ENCODINGS:
        name = f"'{unknown[:64]}'" if unknown is not None else f"of {len(names)} layers"
        text = f"content-encoding {name} is not supported; expected gzip, deflate or identity"
        raise HttpError(415, text, (("accept-encoding", "gzip, deflate"),))
    for name in reversed(names):
        layer = partial(_decompress_layer, name=name, max_bytes=max_bytes)
        run = executor.run_in_thread if len(body) > _LARGE_COMPRESSED else executor.budget.call
        body = await run(layer, body)
    return body


def _decompress_layer(body: Buffer, name: str, max_bytes: int) -> bytes:
    try:
        return _decompress(body, _WINDOW_BITS[name], max_bytes)
    except zlib.error as error:
        if name == "deflate":  # some clients send deflate without the zlib wrapper that the name means
            try:
                return _decompress(body, _RAW_DEFLATE, max_bytes)
            except zlib.error:
                pass
        raise HttpError(400, f"the body is not valid {name}: {error}") from error


def _decompress(body: Buffer, window_bits: int, max_bytes: int) -> bytes:
    """Decompress one stream; a gzip body may have several."""
    compressed, remaining = memoryview(body), max_bytes
    largest = min(max_bytes, len(compressed) * _MAX_RATIO)
    # A buffer that grows would fragment the heap with blocks of all sizes.
    output = io.BytesIO(bytes(largest) if largest >= _MIN_PRESIZED else b"")
    stream, members, at = zlib.decompressobj(window_bits), 1, 0
    while at < len(compressed):
        if stream.eof:
            members += 1
            if window_bits != _GZIP or members > _MAX_MEMBERS:
                raise zlib.error("data after the end of the stream")
            stream = zlib.decompressobj(window_bits)
        chunk: Buffer = compressed[at : at + _CHUNK]
        at += len(chunk)
        while True:
            part = stream.decompress(chunk, _MAX_STEP)
            remaining -= output.write(part)
            if remaining < 0:
                raise HttpError(413, f"the decompressed body is larger than the limit of {max_bytes} bytes")
            chunk = stream.unconsumed_tail
            if stream.eof or (len(part) < _MAX_STEP and not chunk):
                break
        at -= len(stream.unused_data)
    if not stream.eof:
        raise zlib.error("incomplete or truncated stream")
    output.truncate()
    return output.getvalue()  # without a copy


@lru_cache(maxsize=256)
def preferred_encoding(header: str) -> str | None:
    """Return the encoding that an Accept-Encoding header prefers, "gzip" or "deflate"; None for identity."""
    qualities: dict[str, float] = {}
    for item in header.lower().split(","):
        name, _, parameters = item.partition(";")
        qualities[name.strip()] = _quality(parameters)
    default = qualities.get("*", 0.0)
    best = max(("gzip", "deflate"), key=lambda name: qualities.get(name, default))
    quality = qualities.get(best, default)
    return best if quality > 0 and quality >= qualities.get("identity", 0.0) else None


def _quality(parameters: str) -> float:
    key, _, value = parameters.strip().partition("=")
    if key.strip() != "q":
        return 1.0
    try:
        return float(value)
    except ValueError:
        return 0.0


async def compress(parts: list[Buffer], name: str, executor: MessageExecutor) -> bytes:
    """Compress the parts of a body, at the fastest level of zlib."""
    run = executor.run_in_thread if sum(map(len, parts)) > _LARGE else executor.budget.call
    return await run(partial(_compress, name=name), parts)


def _compress(parts: list[Buffer], name: str) -> bytes:
    stream = zlib.compressobj(1, zlib.DEFLATED, _WINDOW_BITS[name])
    return b"".join([*map(stream.compress, parts), stream.flush()])
