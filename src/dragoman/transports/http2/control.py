"""The frames that steer a connection, with bounds on those that bring nothing, and how streams and it end."""

import logging
from collections.abc import Callable, Sequence

from dragoman.transports.http2 import frames
from dragoman.transports.http2.backlog import Backlog
from dragoman.transports.http2.fields import TABLE_BYTES
from dragoman.transports.http2.frames import ConnectionFault, StreamFault
from dragoman.transports.http2.sending import Sending
from dragoman.transports.http2.stream import Buffer, Listener, Stream
from dragoman.transports.http2.terms import Allowance, Terms

log = logging.getLogger("dragoman.http2")

# Streams that a client may reset soon after their begin, or make us reset: at once, and a second; each frame of an
# answer earns one more. What it resets later, at a deadline say, is bounded by how many streams may be open.
_RESETS = 1000, 100.0
_SOON_S = 0.05
# Frames that bring nothing, as SETTINGS, small WINDOW_UPDATEs, empty DATA; requests and answers earn more.
_IDLE = 1000, 100.0
_EARNED_BY_REQUEST, _EARNED_BY_FRAME, _BYTES_TO_EARN = 8, 4, 1 << 12
# Early pings that answers may earn: clients measure the way by pings while they read.
_MAX_EARNED_PINGS = 100
_KEPT_RESETS = 256
_PING = b"dragoman"


class Control(Sending):
    """Connection-wide state. `settled` tells whether the client's SETTINGS came, `over` whether all is said.

    `now_s` is a coarse clock, set by whoever owns the connection, by which streams note when they last moved.
    """

    def __init__(
        self,
        terms: Terms,
        sink: Callable[[list[Buffer]], None],
        close: Callable[[], None],
        clock: Callable[[], float],
        keep: Callable[[int], None],
    ) -> None:
        super().__init__(sink, Backlog(terms.max_unsent, keep))
        self.terms = terms
        self.open: dict[int, Stream] = {}
        self.last = 0
        self.reset_lately: dict[int, None] = {}
        self.settled = self.over = self.draining = self.refusing = False
        self.address = ""
        self.reserved = False
        self.calls = None
        self.alive = 0
        self.now_s = clock()
        self._close = close
        self._clock = clock
        self._resets = Allowance(*_RESETS, clock)
        self._idle = Allowance(*_IDLE, clock)
        self._earned = self._resets_earned = 0
        self._ping_s = -terms.ping_interval_s
        self._pings_earned = 0
        self._strikes = 0
        self._sent_at_ping = 0

    def start(self) -> None:
        """Say our part of the greeting."""
        terms = self.terms
        said = {
            frames.MAX_CONCURRENT_STREAMS: terms.max_streams,
            frames.INITIAL_WINDOW_SIZE: terms.stream_window,
            frames.MAX_FRAME_SIZE: terms.max_frame,
            frames.MAX_HEADER_LIST_SIZE: terms.max_header_bytes,
        }
        more = terms.connection_window - frames.DEFAULT_WINDOW
        self.control(frames.settings(said) + (frames.window_update(0, more) if more else b""))

    # --- what the client says ------------------------------------------------------------------------------------

    def take(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        """A frame other than DATA, HEADERS and CONTINUATION. Raises ConnectionFault and StreamFault."""
        match kind:
            case frames.WINDOW_UPDATE:
                self._window_update(number, frames.word(payload))
            case frames.RST_STREAM:
                self._rst_stream(number, frames.word(payload))
            case frames.SETTINGS | frames.PING | frames.GOAWAY if number:
                raise ConnectionFault(frames.PROTOCOL_ERROR, f"frame type {kind} belongs to no stream")
            case frames.SETTINGS:
                self._settings(flags, payload)
            case frames.PING:
                self._ping(flags, payload)
            case frames.GOAWAY:
                self._goaway(payload)
            case frames.PUSH_PROMISE:
                raise ConnectionFault(frames.PROTOCOL_ERROR, "PUSH_PROMISE from a client")
            case frames.PRIORITY:
                self._priority(number, payload)
            case _:
                self.spend()  # unknown types are passed over

    def spend(self) -> None:
        """One frame that brought nothing. Raises ConnectionFault where there are too many."""
        if self._idle.spend():
            return
        earned = _EARNED_BY_REQUEST * (self.last >> 1) + _EARNED_BY_FRAME * self.heads_sent
        earned += self.bytes_sent // _BYTES_TO_EARN
        self._idle.earn(earned - self._earned)
        self._earned = earned
        if not self._idle.spend():
            raise ConnectionFault(frames.ENHANCE_YOUR_CALM, "too many frames that bring nothing")

    def _settings(self, flags: int, payload: bytes) -> None:
        if flags & frames.ACK:
            if payload:
                raise ConnectionFault(frames.FRAME_SIZE_ERROR, "an acknowledgement of SETTINGS says something")
            return
        self.spend()
        for name, value in frames.read_settings(payload):
            match name:
                case frames.INITIAL_WINDOW_SIZE:
                    self._resize_windows(value)
                case frames.MAX_FRAME_SIZE:
                    self.max_frame_out = value
                case frames.HEADER_TABLE_SIZE if value < TABLE_BYTES:
                    self.no_table()
        self.settled = True
        self.control(frames.frame(frames.SETTINGS, frames.ACK, 0))
        self.pump()

    def _resize_windows(self, size: int) -> None:
        change = size - self.stream_window_out
        self.stream_window_out = size
        for stream in self.open.values():
            stream.window_out += change
            if stream.window_out > frames.LARGEST_WINDOW:
                raise ConnectionFault(frames.FLOW_CONTROL_ERROR, "SETTINGS make the window of a stream too large")

    def _ping(self, flags: int, payload: bytes) -> None:
        if len(payload) != 8:
            raise ConnectionFault(frames.FRAME_SIZE_ERROR, f"PING: expected 8 bytes, got {len(payload)}")
        self.alive += 1
        if flags & frames.ACK:
            if payload == _PING and self.draining:
                self.last_call()
            return
        now_s = self._clock()
        earned = self._pings_earned + self.heads_sent - self._sent_at_ping
        self._sent_at_ping = self.heads_sent
        if now_s - self._ping_s < 0.9 * self.terms.ping_interval_s:  # clocks and ways differ
            earned -= 1
            self._strikes += earned < 0
        else:
            self._strikes = 0
        if self._strikes > self.terms.ping_strikes:
            raise ConnectionFault(frames.ENHANCE_YOUR_CALM, "too_many_pings")  # gRPC clients know the word
        self._pings_earned = max(0, min(earned, _MAX_EARNED_PINGS))
        self._ping_s = now_s
        self.control(frames.frame(frames.PING, frames.ACK, 0, payload))

    def _goaway(self, payload: bytes) -> None:
        if len(payload) < 8:
            raise ConnectionFault(frames.FRAME_SIZE_ERROR, f"GOAWAY: expected 8 bytes, got {len(payload)}")
        self.spend()
        self.draining = self.refusing = True
        self._close_if_done()

    def _priority(self, number: int, payload: bytes) -> None:
        if not number or len(payload) != 5:
            code = frames.FRAME_SIZE_ERROR if number else frames.PROTOCOL_ERROR
            raise ConnectionFault(code, "PRIORITY: expected a stream and 5 bytes")
        self.spend()

    def _window_update(self, number: int, increment: int) -> None:
        increment &= frames.LARGEST_WINDOW
        self.spend()
        if number == 0:
            self.window_out += increment
            if not increment or self.window_out > frames.LARGEST_WINDOW:
                code = frames.FLOW_CONTROL_ERROR if increment else frames.PROTOCOL_ERROR
                raise ConnectionFault(code, f"the connection's window cannot grow by {increment}")
        else:
            self.must_be_known(number)
            stream = self.open.get(number)
            if stream is None:
                return
            stream.window_out += increment
            if not increment or stream.window_out > frames.LARGEST_WINDOW:
                code = frames.FLOW_CONTROL_ERROR if increment else frames.PROTOCOL_ERROR
                raise StreamFault(code, f"a stream's window cannot grow by {increment}")
        self.pump()

    def _rst_stream(self, number: int, code: int) -> None:
        self.must_be_known(number)
        stream = self.open.get(number)
        if stream is None or self.now_s - stream.began_s < _SOON_S:
            self._spend_reset()
        if stream is not None:
            self._tell_broken(self._forget(stream), code)

    def must_be_known(self, number: int) -> None:
        """Raises ConnectionFault where a stream has not been opened."""
        if number > self.last or not number & 1:
            raise ConnectionFault(frames.PROTOCOL_ERROR, f"stream {number} is not open")

    # --- ends ----------------------------------------------------------------------------------------------------

    def ended(self, stream: Stream) -> None:
        stream.told_all = True
        if stream.heard_all:
            self._forget(stream)
        else:
            self.reset(stream, frames.NO_ERROR)  # 8.1: the rest of the request is not wanted

    def give_up(self, stream: Stream, code: int) -> None:
        """Reset a stream, and tell whoever answers it."""
        listener = stream.listener
        self.reset(stream, code)
        self._tell_broken(listener, code)

    def _tell_broken(self, listener: Listener | None, code: int) -> None:
        if listener is not None:
            try:
                listener.broken(code)
            except Exception:
                log.exception("a stream failed")

    def _forget(self, stream: Stream) -> Listener | None:
        """The stream is over; gives who answered it, who hears no more of it."""
        stream.told_all = stream.heard_all = True
        listener: Listener | None = stream.listener
        stream.listener = None  # they know each other; this lets both go at once
        self.open.pop(stream.number, None)
        if stream.pending:
            self.drop(stream)
            self.backlog.changed()
        if self.draining:
            self._close_if_done()
        return listener

    def reset(self, stream: Stream, code: int) -> None:
        """Give a stream up."""
        if stream.number in self.open:
            self._remember_reset(stream.number)
            self.control(frames.rst_stream(stream.number, code))
            self._forget(stream)

    def fail_stream(self, number: int, fault: StreamFault) -> None:
        """Refuse a stream for the client's fault. Raises ConnectionFault where there were too many of these."""
        self._remember_reset(number)
        self.control(frames.rst_stream(number, fault.code))
        stream = self.open.get(number)
        if stream is not None:
            self._tell_broken(self._forget(stream), fault.code)
        self._spend_reset()

    def _spend_reset(self) -> None:
        if self._resets.spend():
            return
        self._resets.earn(self.heads_sent - self._resets_earned)
        self._resets_earned = self.heads_sent
        if not self._resets.spend():
            raise ConnectionFault(frames.ENHANCE_YOUR_CALM, "too many streams were reset, or malformed")

    def _remember_reset(self, number: int) -> None:
        lately = self.reset_lately
        lately[number] = None
        if len(lately) > _KEPT_RESETS:
            del lately[next(iter(lately))]

    def fail(self, code: int, told: str) -> None:
        """End the connection for a fault."""
        if not self.over:
            self.control(frames.goaway(self.last, code, told))
            self._shut()

    def lost(self) -> None:
        """The client is gone."""
        if not self.over:
            self._shut()

    def _shut(self) -> None:
        self.flush()
        self.over = True
        self.backlog.end()
        for stream in list(self.open.values()):
            self._tell_broken(self._forget(stream), frames.CANCEL)
        self._out.clear()
        self._close()

    def ask(self) -> None:
        """Ask the client whether it is there; `alive` counts its answers."""
        self.control(frames.frame(frames.PING, 0, 0, _PING))

    def drain(self) -> None:
        """Let what is under way end and take nothing new, once the client has heard of it; then close."""
        if not self.draining and not self.over:
            self.draining = True
            self.control(frames.goaway(frames.NUMBER, frames.NO_ERROR))
            self.ask()

    def last_call(self) -> None:
        """Take nothing new any more."""
        if not self.refusing and not self.over:
            self.refusing = True
            self.control(frames.goaway(self.last, frames.NO_ERROR))
        self._close_if_done()

    def _close_if_done(self) -> None:
        if self.refusing and not self.open and not self.over:
            self.flush()
            self.over = True
            self._close()

    # --- for streams ---------------------------------------------------------------------------------------------

    def send_head(self, stream: Stream, block: bytes, ended: bool) -> None:
        if not stream.told_all:
            self.head(stream, block, ended)
            if ended:
                self.ended(stream)

    def send_data(self, stream: Stream, parts: Sequence[Buffer]) -> None:
        if not stream.told_all:
            self.queue(stream, parts)

    def send_trailers(self, stream: Stream, block: bytes) -> None:
        if not stream.told_all:
            self.finish(stream, block)

    def send_answer(self, stream: Stream, head: bytes, parts: Sequence[Buffer], size: int, trailers: bytes) -> None:
        if stream.told_all:
            return
        if self.whole(stream, head, parts, size, trailers):
            self.ended(stream)
            return
        held, self.holding = self.holding, True
        self.head(stream, head, False)
        self.queue(stream, parts)
        self.finish(stream, trailers)
        self.holding = held
        if not held:
            self.flush()

    def grant(self, stream: Stream, size: int) -> None:
        stream.untaken += size
        if stream.untaken >= self.terms.stream_window >> 1 and not stream.heard_all:
            self.widen(stream, stream.untaken)
            stream.untaken = 0

    def widen(self, stream: Stream, size: int) -> None:
        """Let the client send so many bytes more."""
        size = min(size, frames.LARGEST_WINDOW - stream.window_in)
        stream.window_in += size
        self.control(frames.window_update(stream.number, size))
