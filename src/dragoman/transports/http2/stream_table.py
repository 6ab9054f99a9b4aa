"""The streams of one connection: which are open, and how they end."""

import logging
from collections.abc import Callable
from typing import Any

from dragoman.transports.http2 import frames
from dragoman.transports.http2.frame_writer import FrameWriter
from dragoman.transports.http2.frames import Http2ConnectionError
from dragoman.transports.http2.stream import Http2Stream

log = logging.getLogger("dragoman.http2")

# Streams that we reset; frames that were on their way then are no error.
_MAX_RESETS = 256


class StreamTable:
    """`open` streams by number; `last` is the highest number that the client has used.

    `on_removed(stream)` is called whenever a stream is no longer open.
    """

    __slots__ = ("_on_removed", "_resets", "_writer", "last", "open")

    def __init__(self, writer: FrameWriter, on_removed: Callable[[Http2Stream], None]) -> None:
        self._writer = writer
        self._on_removed = on_removed
        self._resets: dict[int, None] = {}
        self.open: dict[int, Http2Stream] = {}
        self.last = 0

    def check_opened(self, number: int) -> None:
        """Raise Http2ConnectionError if the client has not opened this stream."""
        if number > self.last or not number & 1:
            raise Http2ConnectionError(frames.PROTOCOL_ERROR, f"stream {number} is not open")

    def was_reset(self, number: int) -> bool:
        """Return whether we reset this stream lately."""
        return number in self._resets

    def response_sent(self, stream: Http2Stream) -> None:
        """The response is complete, so the stream ends, whether the request is or not."""
        stream.local_ended = True
        if stream.remote_ended:
            self._remove(stream)
        else:
            self.reset(stream, frames.NO_ERROR)  # 8.1: the rest of the request is not needed

    def reset(self, stream: Http2Stream, code: int) -> None:
        """Reset a stream; its handler is not notified."""
        if stream.number in self.open:
            self._send_reset(stream.number, code)
            self._remove(stream)

    def abort(self, stream: Http2Stream, code: int) -> None:
        """Reset a stream and notify its handler."""
        handler = stream.handler
        self.reset(stream, code)
        _notify(handler, code)

    def reject(self, number: int, code: int) -> None:
        """Reset a stream, open or not, because of an error of the client; its handler is notified."""
        self._send_reset(number, code)
        stream = self.open.get(number)
        if stream is not None:
            self.drop(stream, code)

    def drop(self, stream: Http2Stream, code: int) -> None:
        """Remove a stream that the client has reset or left, and notify its handler."""
        handler = stream.handler
        self._remove(stream)
        _notify(handler, code)

    def _send_reset(self, number: int, code: int) -> None:
        self._resets[number] = None
        if len(self._resets) > _MAX_RESETS:
            del self._resets[next(iter(self._resets))]
        self._writer.send(frames.rst_stream(number, code))

    def _remove(self, stream: Http2Stream) -> None:
        stream.local_ended = stream.remote_ended = True
        stream.handler = None  # they refer to each other; this frees both at once
        self.open.pop(stream.number, None)
        self._on_removed(stream)


def _notify(handler: Any, code: int) -> None:
    """Tell a handler that its stream has been reset."""
    if handler is not None:
        try:
            handler.closed(code)
        except Exception:
            log.exception("a stream failed")
