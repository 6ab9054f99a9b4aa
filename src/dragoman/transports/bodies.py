"""Counts the bytes of all bodies that the server holds, with a limit."""

from dragoman.core.errors import Overloaded
from dragoman.protocols.wire import HttpError


class Bodies:
    """What all bodies that are being received or answered take together, and answers that nobody takes.

    `limit` 0 allows any number of bytes. `over` tells that unread answers hold more than there is room for: further
    large ones are not kept.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held = 0
        self.over = False

    def take(self, size: int) -> None:
        """Count `size` bytes more. Raises HttpError 503 where they do not fit, and counts none of them then."""
        if self._limit and self._held + size > self._limit:
            text = f"the requests under way hold all of the {self._limit} bytes that bodies may take together"
            raise HttpError(503, text, (("retry-after", "1"), ("connection", "close")))
        self._held += size

    def give_back(self, size: int) -> None:
        self._held -= size
        if self.over:
            self.keep(0)

    def keep(self, size: int) -> None:
        """Count so many bytes more, or fewer, of an answer that is there and cannot be sent."""
        self._held += size
        self.over = 0 < self._limit < self._held

    @property
    def unread(self) -> Overloaded:
        """Why an answer is not kept."""
        text = f"answers that clients do not read hold all of the {self._limit} bytes that bodies may take together"
        return Overloaded(text)
