"""The body of a request while it comes in, within the limits and counted against what all bodies may take."""

from dragoman.protocols.wire import Buffer, HttpError
from dragoman.transports.bodies import Bodies
from dragoman.transports.receive_buffer import ReceiveBuffer


class Body:
    """A body of known length, received into its final place."""

    __slots__ = ("_bodies", "_buffer", "length", "room", "whole")

    def __init__(self, length: int, bodies: Bodies) -> None:
        self.length = length
        self._bodies = bodies
        self._buffer = ReceiveBuffer(length)
        self.room = self._buffer.room
        self.whole = self._buffer.whole

    @property
    def held(self) -> int:
        """How many bytes have come, which count as taken."""
        return self._buffer.size

    def came(self, count: int) -> None:
        """So many bytes were put in `room()`. Raises HttpError 503 where bodies take too much already."""
        self._bodies.take(count)
        self._buffer.advance(count)

    def put(self, data: bytes) -> None:
        """Bytes that were read elsewhere. Raises HttpError 503 where bodies take too much already."""
        self._bodies.take(len(data))
        self._buffer.put(data)


class GrowingBody:
    """A body whose length shows at its end."""

    __slots__ = ("_bodies", "_data", "_max_bytes", "held")

    def __init__(self, max_bytes: int, bodies: Bodies) -> None:
        self.held = 0
        self._max_bytes = max_bytes
        self._bodies = bodies
        self._data = bytearray()

    def put(self, data: bytes) -> None:
        """Raises HttpError 413 where it is too large, 503 where bodies take too much already."""
        if self.held + len(data) > self._max_bytes:
            raise too_large(self._max_bytes)
        self._bodies.take(len(data))
        self.held += len(data)
        self._data += data

    def whole(self) -> Buffer:
        whole, self._data = self._data, bytearray()
        return memoryview(whole).toreadonly()


def too_large(max_bytes: int) -> HttpError:
    return HttpError(413, f"the body is larger than the limit of {max_bytes} bytes", (("connection", "close"),))
