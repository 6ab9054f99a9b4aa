"""What a client has asked for on one connection and does not take: how much it is, and what waits until it is less."""

from collections import deque
from collections.abc import Callable

# Changes smaller than this are not told.
_GRAIN = 1 << 16


class Backlog:
    """Bytes of answers that wait for the client to make room.

    Beyond `most`, requests that are whole wait in here too, so that nobody is answered for who does not read. `keep`
    hears how much the server holds for this connection, as changes.
    """

    __slots__ = ("_going", "_keep", "_parked", "_told", "most", "size")

    def __init__(self, most: int, keep: Callable[[int], None]) -> None:
        self.size = 0
        self.most = most
        self._told = 0
        self._keep = keep
        self._parked: deque[Callable[[], None]] = deque()
        self._going = False

    def park(self, go_on: Callable[[], None]) -> None:
        """Call this once the client has taken enough."""
        self._parked.append(go_on)

    def changed(self) -> None:
        """Tell how much there is now, and let those go on that may."""
        change = self.size - self._told
        if abs(change) > _GRAIN or (change and not self.size):
            self._told = self.size
            self._keep(change)
        if self._parked and not self._going:
            self._going = True  # what goes on may answer at once, and come back to here
            try:
                while self._parked and self.size <= self.most:
                    self._parked.popleft()()
            finally:
                self._going = False

    def end(self) -> None:
        """Nobody is there any more."""
        self._parked.clear()
        self._going = True
