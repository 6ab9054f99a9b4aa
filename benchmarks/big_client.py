"""Clients that send a tensor of any size and check the response, without holding more than a chunk of it."""

import json
import socket
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import numpy as np

from benchmarks.workloads import GRPC_PATH
from dragoman.formats.grpc_messages import ModelInferRequest
from dragoman.formats.http2 import frames
from dragoman.formats.http2.fields import encode_fields

_BLOCK = 1 << 20
# Its length is no multiple of a page or frame, so that a misplaced chunk is detected.
_PATTERN = np.random.default_rng(7).bytes(_BLOCK - 3)
_REPEATED = memoryview(_PATTERN * 3)  # does not compress: zlib looks back 32 KiB
_ZEROS = memoryview(bytes(len(_REPEATED)))
_TIMEOUT_S = 300
_FRAME = 1 << 18  # our server accepts frames four times as large


class PatternCheck:
    """Compare received bytes with the pattern. Raises ValueError at the first chunk that differs."""

    def __init__(self, size: int, repeated: memoryview = _REPEATED) -> None:
        self.size = size
        self.offset = 0
        self._repeated = repeated

    def feed(self, chunk: memoryview) -> None:
        begin = self.offset % len(_PATTERN)
        if self.offset + len(chunk) > self.size or self._repeated[begin : begin + len(chunk)] != chunk:
            raise ValueError(f"wrong response within {len(chunk)} bytes from byte {self.offset} on")
        self.offset += len(chunk)

    def finish(self) -> None:
        if self.offset != self.size:
            raise ValueError(f"expected {self.size} bytes, got {self.offset}")


def pattern_chunks(size: int, max_size: int = _BLOCK, repeated: memoryview = _REPEATED) -> Iterator[memoryview]:
    """Yield the tensor in chunks."""
    offset = 0
    while offset < size:
        count, begin = min(max_size, size - offset), offset % len(_PATTERN)
        yield repeated[begin : begin + count]
        offset += count


# --- REST ------------------------------------------------------------------------------------------------------


def rest(port: int, model: str, size: int) -> None:
    """Send and receive binary tensor data."""
    head = _rest_head(size)
    headers = {"content-length": len(head) + size, "inference-header-content-length": len(head)}
    _call_rest(port, model, headers, chain([head], pattern_chunks(size)), PatternCheck(size))


def rest_gzip(port: int, model: str, size: int, repeated: memoryview = _REPEATED, level: int = 0) -> None:
    """Send compressed binary tensor data, which is compressed twice: its length is sent first."""
    head = _rest_head(size)

    def compressed() -> Iterator[bytes]:
        stream = zlib.compressobj(level, wbits=31)
        yield stream.compress(head)
        yield from map(stream.compress, pattern_chunks(size, repeated=repeated))
        yield stream.flush()

    headers = {"content-length": sum(map(len, compressed())), "inference-header-content-length": len(head)}
    _call_rest(port, model, {**headers, "content-encoding": "gzip"}, compressed(), PatternCheck(size, repeated))


def rest_gzip_zeros(port: int, model: str, size: int) -> None:
    rest_gzip(port, model, size, _ZEROS, 1)


def _rest_head(size: int) -> bytes:
    tensor = {"name": "x", "datatype": "FP32", "shape": [size // 4], "parameters": {"binary_data_size": size}}
    return json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()


def _call_rest(
    port: int, model: str, headers: Mapping[str, Any], chunks: Iterable[bytes | memoryview], check: PatternCheck
) -> None:
    fields = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    with socket.create_connection(("127.0.0.1", port), _TIMEOUT_S) as connection:
        connection.sendall(f"POST /v2/models/{model}/infer HTTP/1.1\r\nhost: localhost\r\n{fields}\r\n".encode())
        for chunk in chunks:
            connection.sendall(chunk)
        _read_rest(connection, check)


def _read_rest(connection: socket.socket, check: PatternCheck) -> None:
    received: Any
    with connection.makefile("rb", 1 << 16) as received:
        status, headers = received.readline(), {}
        while line := received.readline().strip():
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.lower()] = value.strip()
        length = int(headers["content-length"])
        if b" 200 " not in status:
            raise ValueError(f"rejected with {status!r}: {received.read(min(length, 500))!r}")
        received.read(int(headers["inference-header-content-length"]))
        buffer = memoryview(bytearray(_BLOCK))
        while count := received.readinto(buffer[: min(_BLOCK, check.size - check.offset)]):
            check.feed(buffer[:count])
        check.finish()


# --- gRPC ------------------------------------------------------------------------------------------------------


def grpc(port: int, model: str, size: int) -> None:
    """Send and receive raw contents, with hand-written HTTP/2 frames."""
    tensor = {"name": "x", "datatype": "FP32", "shape": [size // 4]}
    message = ModelInferRequest(model_name=model, inputs=[tensor]).SerializeToString()
    message += b"\x3a" + _varint(size)  # raw_input_contents
    start = b"\0" + (len(message) + size).to_bytes(4) + message
    with socket.create_connection(("127.0.0.1", port), _TIMEOUT_S) as connection:
        call = _Call(connection, size)
        reading = threading.Thread(target=call.read)
        reading.start()
        call.send(start)
        reading.join()
        call.end()


class _Call:
    """One call: its frames are sent in one thread and received in another."""

    def __init__(self, connection: socket.socket, size: int) -> None:
        self._connection = connection
        self._size = size
        self._window_changed = threading.Condition()
        self._windows = {0: frames.DEFAULT_WINDOW, 1: frames.DEFAULT_WINDOW}
        self._first = frames.DEFAULT_WINDOW
        self._check = PatternCheck(size)
        self._head = bytearray()  # the message prefix and the bytes before the tensor
        self._skip = -1
        self._error: Exception | None = None

    def send(self, start: bytes) -> None:
        fields = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", GRPC_PATH.encode()), (b":authority", b"x")]
        fields += [(b"content-type", b"application/grpc"), (b"te", b"trailers")]
        preface = frames.PREFACE + frames.settings({frames.INITIAL_WINDOW_SIZE: frames.LARGEST_WINDOW})
        preface += frames.window_update(0, frames.LARGEST_WINDOW - frames.DEFAULT_WINDOW)
        preface += frames.frame(frames.HEADERS, frames.END_HEADERS, 1, encode_fields(fields))
        self._connection.sendall(preface + frames.frame(frames.DATA, 0, 1, start))
        self._spend(len(start))
        remaining = self._size
        for chunk in pattern_chunks(self._size, _FRAME):
            remaining -= len(chunk)
            self._spend(len(chunk))
            flags = 0 if remaining else frames.END_STREAM
            self._connection.sendall(frames.frame(frames.DATA, flags, 1, bytes(chunk)))

    def _spend(self, count: int) -> None:
        with self._window_changed:
            if not self._window_changed.wait_for(
                lambda: self._error or min(self._windows.values()) >= count, _TIMEOUT_S
            ):
                raise TimeoutError("the flow-control window stays closed")
            if self._error is not None:
                raise self._error
            for number in self._windows:
                self._windows[number] -= count

    def read(self) -> None:
        try:
            with self._connection.makefile("rb", 1 << 20) as received:
                while self._frame(received):
                    pass
        except Exception as error:
            self._error = error
        with self._window_changed:
            self._window_changed.notify()

    def _frame(self, received: Any) -> bool:
        high, low, kind, flags, number = frames.frame_header.unpack(received.read(9))
        payload = memoryview(received.read(high << 8 | low))
        match kind:
            case frames.DATA:
                self._data(payload)
            case frames.WINDOW_UPDATE:
                self._widen({number: int.from_bytes(payload)})
            case frames.SETTINGS if not flags & frames.ACK:
                window = dict(frames.read_settings(bytes(payload))).get(frames.INITIAL_WINDOW_SIZE, self._first)
                self._widen({1: window - self._first})
                self._first = window
            case frames.RST_STREAM | frames.GOAWAY:
                raise ValueError(f"the call failed: frame {kind}, {bytes(payload)!r}")
        return not (flags & frames.END_STREAM and kind in (frames.DATA, frames.HEADERS))

    def _widen(self, more: dict[int, int]) -> None:
        with self._window_changed:
            for number, size in more.items():
                self._windows[number] += size
            self._window_changed.notify()

    def _data(self, chunk: memoryview) -> None:
        if self._skip < 0:
            self._head += chunk[:5]
            chunk = chunk[5:]
            self._skip = int.from_bytes(self._head[1:5]) - self._size
        skipped = min(self._skip, len(chunk))
        self._skip -= skipped
        if len(chunk) > skipped:
            self._check.feed(chunk[skipped:])

    def end(self) -> None:
        if self._error is not None:
            raise self._error
        self._check.finish()


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 127:
        encoded.append(number & 127 | 128)
        number >>= 7
    return bytes([*encoded, number])


WIRES: dict[str, Callable[[int, str, int], None]] = {
    "rest": rest,
    "rest-gzip": rest_gzip,
    "rest-gzip-zeros": rest_gzip_zeros,
    "grpc": grpc,
}
