"""Memory for bytes whose number was announced, which grows as they arrive."""

from dragoman.protocols.wire import Buffer
from dragoman.system.shared_memory import allocate

# What is set aside at first: a length is easily claimed. Memory that no byte has come into is not used.
_FIRST = 1 << 20
_GROWTH = 4


class ReceiveBuffer:
    """Receives `length` bytes into one piece of memory. A claimed length alone takes little of it, and no file."""

    __slots__ = ("_space", "length", "size")

    def __init__(self, length: int) -> None:
        self.length = length
        self.size = 0  # bytes received
        self._space = allocate(min(length, _FIRST))

    def room(self) -> memoryview:
        """Return where the next bytes go; empty once all have been received."""
        if self.size == len(self._space) < self.length:
            size = self.size * _GROWTH
            larger = allocate(self.length if size + size // 2 > self.length else size)
            larger[: self.size] = self._space
            self._space = larger
        return self._space[self.size :]

    def advance(self, count: int) -> None:
        """Count so many bytes that were written to `room()`."""
        self.size += count

    def put(self, data: bytes | memoryview) -> None:
        """Append bytes that were read elsewhere; at most those that are missing."""
        view = memoryview(data)
        while len(view):
            room = self.room()
            count = min(len(room), len(view))
            room[:count] = view[:count]
            self.advance(count)
            view = view[count:]

    def whole(self) -> Buffer:
        """Return the bytes, once all have been received. The caller alone has them then, so that it can free them."""
        whole, self._space = self._space, memoryview(b"")
        return whole.toreadonly()
