"""Response bytes that the client has not made room for, and requests that wait because of them."""

from collections import deque
from collections.abc import Callable

# Smaller changes are not reported.
_REPORT_BYTES = 1 << 16


class Backlog:
    """`size` bytes of responses wait for the client to make room.

    Beyond `limit` complete requests wait here too, so that a client that does not read costs no further work. `report`
    is called with changes of how much the server holds for this connection.
    """

    __slots__ = ("_is_resuming", "_report", "_reported", "_waiting", "limit", "size")

    def __init__(self, limit: int, report: Callable[[int], None]) -> None:
        self.size = 0
        self.limit = limit
        self._report = report
        self._reported = 0
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_resuming = False

    @property
    def is_full(self) -> bool:
        return self.size > self.limit

    def wait(self, resume: Callable[[], None]) -> None:
        """Call `resume` once the client has read enough."""
        self._waiting.append(resume)

    def changed(self) -> None:
        """Report the size, and resume the requests that may go on."""
        change = self.size - self._reported
        if abs(change) > _REPORT_BYTES or (change and not self.size):
            self._reported = self.size
            self._report(change)
        if self._waiting and not self._is_resuming:
            self._is_resuming = True  # a resumed request may respond at once, and call this again
            try:
                while self._waiting and self.size <= self.limit:
                    self._waiting.popleft()()
            finally:
                self._is_resuming = False

    def close(self) -> None:
        """The client is gone."""
        self._waiting.clear()
        self._is_resuming = True
