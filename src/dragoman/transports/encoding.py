"""Content-Encoding gzip and deflate, with a limit on the decompressed size."""

import io
import zlib
from functools import lru_cache, partial

from dragoman.core.sizes import INLINE
from dragoman.protocols.wire import Buffer, HttpError
from dragoman.system import shared_memory
from dragoman.transports.executor import MessageExecutor

# Larger compressed bodies are decompressed in a thread, because they may grow a thousandfold.
_LARGE_COMPRESSED = 1 << 12
_GZIP, _DEFLATE, _RAW_DEFLATE = 31, 15, -15
_WINDOW_BITS = {"gzip": _GZIP, "x-gzip": _GZIP, "deflate": _DEFLATE}
_CHUNK = 1 << 16
_MAX_STEP = 1 << 20  # bytes decompressed in one step: they are copied while no other thread runs
_MAX_RATIO = 1032  # of deflate: 258 bytes for 2 bits
_DISCARDED = 4 << 20  # bytes of a compressed body after which their memory is freed
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


def _decompress_layer(body: Buffer, name: str, max_bytes: int) -> Buffer:
    # Some clients send deflate without the zlib wrapper (RFC 1950) that the name means. Its first two bytes begin a
    # deflate stream only if this has padding that is not zero.
    first = int.from_bytes(body[:2])
    bare = name == "deflate" and (first >> 8 & 15 != 8 or first % 31 != 0)
    try:
        return _decompress(body, _RAW_DEFLATE if bare else _WINDOW_BITS[name], max_bytes)
    except zlib.error as error:
        raise HttpError(400, f"the body is not valid {name}: {error}") from error


def _decompress(body: Buffer, window_bits: int, max_bytes: int) -> Buffer:
    """Decompress one stream; a gzip body may have several. The memory of a large body is freed on the way."""
    compressed, remaining = memoryview(body), max_bytes
    largest = min(max_bytes, len(compressed) * _MAX_RATIO)
    # A buffer that grows would fragment the heap with blocks of all sizes.
    output: _LargeOutput | io.BytesIO = _LargeOutput(largest) if largest >= shared_memory.LARGE else io.BytesIO()
    stream, members, at, discarded = zlib.decompressobj(window_bits), 1, 0, 0
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
            remaining -= len(part)
            if remaining < 0:
                raise HttpError(413, f"the decompressed body is larger than the limit of {max_bytes} bytes")
            output.write(part)
            chunk = stream.unconsumed_tail
            if stream.eof or (len(part) < _MAX_STEP and not chunk):
                break
        at -= len(stream.unused_data)
        if at - discarded >= _DISCARDED:
            shared_memory.discard(compressed[discarded:at])
            discarded = at
    if not stream.eof:
        raise zlib.error("incomplete or truncated stream")
    return output.getvalue()  # without a copy


class _LargeOutput:
    """Memory for a large body of unknown size, with the methods of BytesIO. Pages that are not written take none."""

    def __init__(self, largest: int) -> None:
        self._memory = shared_memory.allocate(largest + shared_memory.ALIGNMENT)
        self._end = shared_memory.ALIGNMENT

    def write(self, part: bytes) -> int:
        self._memory[self._end : self._end + len(part)] = part
        self._end += len(part)
        return len(part)

    def getvalue(self) -> Buffer:
        """Return the bytes, moved so that their end is aligned: arrays at the end of a message then need no copy."""
        memory, start = self._memory, shared_memory.ALIGNMENT
        if self._end < start + _MAX_STEP:
            return bytes(memory[start : self._end])
        shift = (self._end - len(memory)) % shared_memory.ALIGNMENT
        for at in range(start, self._end if shift else start, _MAX_STEP):
            end = min(at + _MAX_STEP, self._end)
            memory[at - shift : end - shift] = memory[at:end]
        return memory[start - shift : self._end - shift].toreadonly()


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


async def compress(parts: list[Buffer], name: str, executor: MessageExecutor) -> list[bytes]:
    """Compress the parts of a body, at the fastest level of zlib. A large result is in chunks, not copied into one."""
    run = executor.run_in_thread if sum(map(len, parts)) > INLINE else executor.budget.call
    return await run(partial(_compress, name=name), parts)


def _compress(parts: list[Buffer], name: str) -> list[bytes]:
    stream = zlib.compressobj(1, zlib.DEFLATED, _WINDOW_BITS[name])
    steps = (memoryview(part)[at : at + _MAX_STEP] for part in parts for at in range(0, len(part), _MAX_STEP))
    chunks = [*filter(None, map(stream.compress, steps)), stream.flush()]
    return chunks if sum(map(len, chunks)) > _MAX_STEP else [b"".join(chunks)]
