"""How many bytes of bodies the server holds at a time, with a bound."""

from dragoman.protocols.wire import HttpFault


class Bodies:
    """What all bodies that are being received or answered take together; `limit` 0 allows any number of bytes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held = 0

    def take(self, size: int) -> None:
        """Count `size` bytes more. Raises HttpFault 503 where they do not fit, and counts none of them then."""
        if self._limit and self._held + size > self._limit:
            text = f"the requests under way hold all of the {self._limit} bytes that bodies may take together"
            raise HttpFault(503, text, (("retry-after", "1"), ("connection", "close")))
        self._held += size

    def give_back(self, size: int) -> None:
        self._held -= size
