"""The body of a request while it comes in, within the limits and counted against what all bodies may take."""

from dragoman.core.room import space
from dragoman.protocols.wire import Buffer, HttpFault
from dragoman.transports.bodies import Bodies

# What is set aside for a body at first: a length is easily claimed. Memory that no byte has come into is not used.
_FIRST = 1 << 20
_GROWTH = 4


class Body:
    """A body of known length, received into its final place."""

    __slots__ = ("_bodies", "_space", "held", "length")

    def __init__(self, length: int, bodies: Bodies) -> None:
        self.length = length
        self.held = 0
        self._bodies = bodies
        self._space = space(min(length, _FIRST))

    def room(self) -> memoryview:
        """Where the next bytes go."""
        if self.held == len(self._space):
            size = self.held * _GROWTH
            larger = space(self.length if size + size // 2 > self.length else size)
            larger[: self.held] = self._space
            self._space = larger
        return self._space[self.held :]

    def came(self, count: int) -> None:
        """So many bytes were put there. Raises HttpFault 503 where bodies take too much already."""
        self._bodies.take(count)
        self.held += count

    def put(self, data: bytes) -> None:
        """Bytes that were read elsewhere."""
        view = memoryview(data)
        while len(view):
            room = self.room()
            count = min(len(room), len(view))
            room[:count] = view[:count]
            self.came(count)
            view = view[count:]

    def whole(self) -> Buffer:
        return self._space.toreadonly()


class GrowingBody:
    """A body whose length shows at its end."""

    __slots__ = ("_bodies", "_data", "_max_bytes", "held")

    def __init__(self, max_bytes: int, bodies: Bodies) -> None:
        self.held = 0
        self._max_bytes = max_bytes
        self._bodies = bodies
        self._data = bytearray()

    def put(self, data: bytes) -> None:
        """Raises HttpFault 413 where it is too large, 503 where bodies take too much already."""
        if self.held + len(data) > self._max_bytes:
            raise too_large(self._max_bytes)
        self._bodies.take(len(data))
        self.held += len(data)
        self._data += data

    def whole(self) -> Buffer:
        return memoryview(self._data).toreadonly()


def too_large(max_bytes: int) -> HttpFault:
    return HttpFault(413, f"the body is larger than the limit of {max_bytes} bytes", (("connection", "close"),))
