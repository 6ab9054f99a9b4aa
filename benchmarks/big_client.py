"""Clients that send a tensor of any size and check what comes back, and hold no more than a piece of it."""

import json
import socket
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.workloads import GRPC_PATH
from dragoman.formats.oip_messages import ModelInferRequest
from dragoman.transports.http2 import frames
from dragoman.transports.http2.fields import encode_fields

_BLOCK = 1 << 20
# Of a length that no page or frame has, so that a piece at a wrong place shows.
_PATTERN = np.random.default_rng(7).bytes(_BLOCK - 3)
_REPEATED = memoryview(_PATTERN * 3)
_PATIENCE_S = 300
_FRAME = 1 << 18  # our server takes them four times as large; the first waits for it to say so


class Checked:
    """Compares what comes with the pattern. Raises ValueError at the first byte that is wrong."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.at = 0

    def take(self, piece: memoryview) -> None:
        begin = self.at % len(_PATTERN)
        if self.at + len(piece) > self.size or _REPEATED[begin : begin + len(piece)] != piece:
            raise ValueError(f"the answer is not right within {len(piece)} bytes from byte {self.at} on")
        self.at += len(piece)

    def done(self) -> None:
        if self.at != self.size:
            raise ValueError(f"expected {self.size} bytes, got {self.at}")


def pieces(size: int, most: int = _BLOCK) -> Any:
    """The tensor, piece by piece."""
    at = 0
    while at < size:
        count, begin = min(most, size - at), at % len(_PATTERN)
        yield _REPEATED[begin : begin + count]
        at += count


# --- REST ------------------------------------------------------------------------------------------------------


def rest(port: int, model: str, size: int) -> None:
    """Binary tensor data there and back."""
    tensor = {"name": "x", "datatype": "FP32", "shape": [size // 4], "parameters": {"binary_data_size": size}}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    request_headers = (
        f"POST /v2/models/{model}/infer HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(head) + size}\r\n"
        f"inference-header-content-length: {len(head)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", port), _PATIENCE_S) as connection:
        connection.sendall(request_headers.encode() + head)
        for piece in pieces(size):
            connection.sendall(piece)
        _read_rest(connection, size)


def _read_rest(connection: socket.socket, size: int) -> None:
    came: Any  # a reader with a buffer
    with connection.makefile("rb", 1 << 16) as came:
        status, headers = came.readline(), {}
        while line := came.readline().strip():
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.lower()] = value.strip()
        length = int(headers["content-length"])
        if b" 200 " not in status:
            raise ValueError(f"refused with {status!r}: {came.read(min(length, 500))!r}")
        came.read(int(headers["inference-header-content-length"]))
        checked, room = Checked(size), memoryview(bytearray(_BLOCK))
        while count := came.readinto(room[: min(_BLOCK, size - checked.at)]):
            checked.take(room[:count])
        checked.done()


# --- gRPC ------------------------------------------------------------------------------------------------------


def grpc(port: int, model: str, size: int) -> None:
    """Raw contents there and back, in frames of HTTP/2 made by hand."""
    tensor = {"name": "x", "datatype": "FP32", "shape": [size // 4]}
    message = ModelInferRequest(model_name=model, inputs=[tensor]).SerializeToString()
    message += b"\x3a" + _varint(size)  # raw_input_contents
    start = b"\0" + (len(message) + size).to_bytes(4) + message
    with socket.create_connection(("127.0.0.1", port), _PATIENCE_S) as connection:
        call = _Call(connection, size)
        reading = threading.Thread(target=call.read)
        reading.start()
        call.send(start)
        reading.join()
        call.end()


class _Call:
    """One call: its frames are sent in one thread, and read in another."""

    def __init__(self, connection: socket.socket, size: int) -> None:
        self._connection = connection
        self._size = size
        self._room = threading.Condition()
        self._windows = {0: frames.DEFAULT_WINDOW, 1: frames.DEFAULT_WINDOW}
        self._first = frames.DEFAULT_WINDOW
        self._checked = Checked(size)
        self._head = bytearray()  # of the message: its prefix, and what comes before the tensor
        self._skip = -1
        self._fault: Exception | None = None

    def send(self, start: bytes) -> None:
        fields = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", GRPC_PATH.encode()), (b":authority", b"x")]
        fields += [(b"content-type", b"application/grpc"), (b"te", b"trailers")]
        said = frames.PREFACE + frames.settings({frames.INITIAL_WINDOW_SIZE: frames.LARGEST_WINDOW})
        said += frames.window_update(0, frames.LARGEST_WINDOW - frames.DEFAULT_WINDOW)
        said += frames.frame(frames.HEADERS, frames.END_HEADERS, 1, encode_fields(fields))
        self._connection.sendall(said + frames.frame(frames.DATA, 0, 1, start))
        self._spend(len(start))
        left = self._size
        for piece in pieces(self._size, _FRAME):
            left -= len(piece)
            self._spend(len(piece))
            flags = 0 if left else frames.END_STREAM
            self._connection.sendall(frames.frame(frames.DATA, flags, 1, bytes(piece)))

    def _spend(self, count: int) -> None:
        with self._room:
            if not self._room.wait_for(lambda: self._fault or min(self._windows.values()) >= count, _PATIENCE_S):
                raise TimeoutError("the server makes no room")
            if self._fault is not None:
                raise self._fault
            for number in self._windows:
                self._windows[number] -= count

    def read(self) -> None:
        try:
            with self._connection.makefile("rb", 1 << 20) as came:
                while self._frame(came):
                    pass
        except Exception as fault:
            self._fault = fault
        with self._room:
            self._room.notify()

    def _frame(self, came: Any) -> bool:
        high, low, kind, flags, number = frames.frame_header.unpack(came.read(9))
        payload = memoryview(came.read(high << 8 | low))
        match kind:
            case frames.DATA:
                self._data(payload)
            case frames.WINDOW_UPDATE:
                self._widen({number: frames.word(bytes(payload))})
            case frames.SETTINGS if not flags & frames.ACK:
                window = dict(frames.read_settings(bytes(payload))).get(frames.INITIAL_WINDOW_SIZE, self._first)
                self._widen({1: window - self._first})
                self._first = window
            case frames.RST_STREAM | frames.GOAWAY:
                raise ValueError(f"the server gave up: frame {kind}, {bytes(payload)!r}")
        return not (flags & frames.END_STREAM and kind in (frames.DATA, frames.HEADERS))

    def _widen(self, more: dict[int, int]) -> None:
        with self._room:
            for number, size in more.items():
                self._windows[number] += size
            self._room.notify()

    def _data(self, piece: memoryview) -> None:
        if self._skip < 0:
            self._head += piece[:5]
            piece = piece[5:]
            self._skip = int.from_bytes(self._head[1:5]) - self._size
        skipped = min(self._skip, len(piece))
        self._skip -= skipped
        if len(piece) > skipped:
            self._checked.take(piece[skipped:])

    def end(self) -> None:
        if self._fault is not None:
            raise self._fault
        self._checked.done()


def _varint(number: int) -> bytes:
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    return bytes([*found, number])


WIRES: dict[str, Callable[[int, str, int], None]] = {"rest": rest, "grpc": grpc}
