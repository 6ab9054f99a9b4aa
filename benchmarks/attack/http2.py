"""HTTP/2 client that ignores limits: it sends what an attack defines and reads only on request."""

import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from hpack import Decoder, Encoder

from dragoman.formats.http2 import frames

SERVICE = "/inference.GRPCInferenceService/"
# Source address of attacks: a loopback address that differs from that of the well-behaved client.
OTHER_ADDRESS = "127.0.0.2"
_LIMIT_S = 30.0


def message(body: bytes) -> bytes:
    """Return a gRPC message with its prefix."""
    return b"\0" + len(body).to_bytes(4) + body


class RawHttp2:
    """One connection. `last`: number of its last stream. `window`: the flow-control window of each stream and, above
    64 KiB, of the connection."""

    def __init__(self, port: int, source: str = "127.0.0.1", window: int = 0) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), _LIMIT_S, (source, 0))
        self._encoder = Encoder()
        self.last = 0
        self._rest = b""
        greeting = frames.PREFACE + frames.settings({frames.INITIAL_WINDOW_SIZE: window})
        if window > frames.DEFAULT_WINDOW:
            greeting += frames.window_update(0, window - frames.DEFAULT_WINDOW)
        self.socket.sendall(greeting)

    def request(
        self, path: str, body: bytes = b"", *, ended: bool = True, content_type: str = "application/grpc"
    ) -> bytes:
        """Return the frames of a request."""
        self.last = number = self.last + 2 if self.last else 1
        fields = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "attack")]
        block = self._encoder.encode([*fields, ("content-type", content_type), ("te", "trailers")])
        parts = [frames.frame(frames.HEADERS, frames.END_HEADERS | (ended and not body), number, block)]
        for at in range(0, len(body), frames.SMALLEST_FRAME):
            last = ended and at + frames.SMALLEST_FRAME >= len(body)
            parts.append(frames.frame(frames.DATA, int(last), number, body[at : at + frames.SMALLEST_FRAME]))
        return b"".join(parts)

    def send(self, data: bytes) -> None:
        """Send, waiting until the server reads it. Raises OSError if it does not within 30 s."""
        self.socket.sendall(data)

    def statuses(self, count: int) -> list[str]:
        """Return the gRPC statuses, else HTTP statuses, of `count` responses; fewer if the connection ends."""
        found: list[str] = []
        decoder = Decoder()
        end_s = time.monotonic() + _LIMIT_S
        while len(found) < count and time.monotonic() < end_s:
            for kind, _, payload in self._frames():
                if kind == frames.HEADERS:
                    fields = dict(decoder.decode(payload))
                    status = fields.get("grpc-status") or fields.get(":status", "")
                    if "grpc-status" in fields or fields.get(":status") != "200":
                        found.append(status)
                elif kind == frames.RST_STREAM:
                    found.append("reset")
                elif kind == frames.GOAWAY:
                    return found
        return found

    def _frames(self) -> Iterator[tuple[int, int, bytes]]:
        try:
            data = self.socket.recv(1 << 16)
        except TimeoutError:
            return
        self._rest += data
        while len(self._rest) >= frames.FRAME_HEADER_BYTES:
            high, low, kind, _, number = frames.frame_header.unpack_from(self._rest)
            end = frames.FRAME_HEADER_BYTES + (high << 8 | low)
            if len(self._rest) < end:
                return
            payload, self._rest = self._rest[frames.FRAME_HEADER_BYTES : end], self._rest[end:]
            yield kind, number, payload

    def close(self) -> None:
        self.socket.close()


@contextmanager
def connections(count: int, port: int, source: str = "127.0.0.1", window: int = 0) -> Iterator[Sequence[RawHttp2]]:
    """Open connections, and close them at the end."""
    found: list[RawHttp2] = []
    try:
        found.extend(RawHttp2(port, source, window) for _ in range(count))
        yield found
    finally:
        for item in found:
            item.close()
