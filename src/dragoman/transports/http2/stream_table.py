"""The streams of one connection: which are open, and which have been."""

from dragoman.transports.http2 import frames
from dragoman.transports.http2.frames import Http2ConnectionError
from dragoman.transports.http2.stream import Stream

# Streams that we reset; frames that were on their way then are no error.
_MAX_RESETS = 256


class StreamTable:
    """`open` streams by number; `last` is the highest number that the client has used."""

    __slots__ = ("_resets", "last", "open")

    def __init__(self) -> None:
        self.open: dict[int, Stream] = {}
        self.last = 0
        self._resets: dict[int, None] = {}

    def check_opened(self, number: int) -> None:
        """Raise Http2ConnectionError if the client has not opened this stream."""
        if number > self.last or not number & 1:
            raise Http2ConnectionError(frames.PROTOCOL_ERROR, f"stream {number} is not open")

    def add_reset(self, number: int) -> None:
        """Remember that we reset this stream."""
        self._resets[number] = None
        if len(self._resets) > _MAX_RESETS:
            del self._resets[next(iter(self._resets))]

    def was_reset(self, number: int) -> bool:
        """Return whether we reset this stream lately."""
        return number in self._resets
