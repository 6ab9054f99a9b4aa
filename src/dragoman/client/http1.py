"""HTTP/1.1 without a socket: a question as bytes, and an answer from bytes as they come."""

import zlib
from collections.abc import Iterator

import httptools

from dragoman.client.exchange import HttpAnswer, HttpQuestion
from dragoman.core.errors import ServerError
from dragoman.formats.policy import Buffer

# Buffers up to this many bytes are joined: a call of the system costs more than to copy them.
_SMALL = 1 << 15
# What is read at once; bodies above it, up to the largest, are read into one piece of memory.
_CHUNK = 1 << 16
_LARGEST = 1 << 32
_WINDOW_BITS = {"gzip": 31, "x-gzip": 31, "deflate": 15}


def packed(body: list[Buffer], encoding: str) -> list[Buffer]:
    """The body compressed, as fast as zlib can."""
    stream = zlib.compressobj(1, zlib.DEFLATED, _WINDOW_BITS[encoding])
    return [b"".join([*(stream.compress(part) for part in body), stream.flush()])]


def written(question: HttpQuestion, authority: str) -> Iterator[Buffer]:
    """A question as the buffers to send; large ones are the arrays' own."""
    size = sum(len(part) for part in question.body)
    lines = [f"{question.method} {question.path} HTTP/1.1", f"host: {authority}"]
    lines += [f"{name}: {value}" for name, value in question.headers]
    if question.method != "GET":
        lines.append(f"content-length: {size}")
    small: list[Buffer] = ["\r\n".join([*lines, "", ""]).encode("latin-1", "replace")]
    for part in question.body:
        if len(part) > _SMALL:
            yield b"".join(small)
            small = []
            yield part
        else:
            small.append(part)
    if small:
        yield b"".join(small)


class AnswerReader:
    """Reads one answer: what comes is written into `room()` and told by `wrote`.

    `begun`: its head is there; `done`: all of it; `keep_alive`: the connection may be used again after it. The body of
    one that `streams` is taken as it comes.
    """

    def __init__(self, *, streams: bool = False) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.begun = self.done = self.keep_alive = False
        self._whole = not streams
        self._chunks: list[Buffer] = []
        self._body: bytearray | None = None
        self._at = 0
        self._scratch = memoryview(bytearray(_CHUNK))
        self._parser = httptools.HttpResponseParser(self)

    def room(self) -> memoryview:
        """Where the next bytes go: those of a large body at once to where they stay."""
        return self._scratch if self._body is None or self.done else memoryview(self._body)[self._at :]

    def wrote(self, count: int) -> None:
        """So many bytes are there. Raises ServerError where this is no HTTP."""
        if self.done:  # more than an answer, for which nobody asked
            self.keep_alive = False
            return
        if self._body is not None:
            self._at += count
            self.done = self._at == len(self._body)
            return
        try:
            self._parser.feed_data(self._scratch[:count])
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as fault:
            raise ServerError(f"the answer is no HTTP/1.1: {fault}") from fault
        length = self.headers.get("content-length", "")
        if self.begun and not self.done and self._whole and length.isdecimal() and _CHUNK < int(length) <= _LARGEST:
            self._body = bytearray(int(length))
            found = self.taken()
            self._at = len(found)
            self._body[: self._at] = found

    def end(self) -> bool:
        """The connection is closed; whether that is the end of the answer, as it is for one without a length."""
        endless = not {"content-length", "transfer-encoding"} & set(self.headers)
        self.done = self.done or (self.begun and endless)
        return self.done

    def taken(self) -> Buffer:
        """What came of the body since the last time."""
        chunks, self._chunks = self._chunks, []
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def answer(self) -> HttpAnswer:
        body = self.taken() if self._body is None else self._body
        self._body = None  # a connection that is kept holds on to no answer
        encoding = self.headers.get("content-encoding", "identity").lower()
        if encoding != "identity":
            body = _unpacked(body, encoding)
        return HttpAnswer(self.status, self.headers, body)

    # --- what the parser calls ---------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self.done:  # a second answer, for which nobody asked
            self.keep_alive = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.done:
            self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        if self.done:
            return
        self.status = self._parser.get_status_code()
        self.begun = self.status >= 200
        self.keep_alive = self._parser.should_keep_alive()
        if not self.begun:  # 1xx: the answer itself is still to come
            self.headers = {}

    def on_body(self, data: bytes) -> None:
        if not self.done:
            self._chunks.append(data)

    def on_message_complete(self) -> None:
        if self.begun and not self.done:
            self.done = True


def _unpacked(body: Buffer, encoding: str) -> bytes:
    if encoding not in _WINDOW_BITS:
        raise ServerError(f"the answer has the content-encoding '{encoding}'; expected gzip or deflate")
    try:
        return zlib.decompress(body, _WINDOW_BITS[encoding])
    except zlib.error as fault:
        raise ServerError(f"the answer is not valid {encoding}: {fault}") from fault
