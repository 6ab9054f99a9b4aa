"""When a call of a model was accepted, computed and answered: one record for metrics, logs, traces and the console."""

from collections.abc import Iterable
from contextvars import ContextVar
from typing import Final

import msgspec

# The stamps of one call, in their order: `arrived_s`, `started_s`, `computed_s`, `ended_s`.
Stamps = tuple[float, float, float, float]
NO_STAMPS: Final[Stamps] = (0.0, 0.0, 0.0, 0.0)


class TokenUsage(msgspec.Struct, frozen=True):
    """The tokens of one call of a text model, with the parameters that its engine used.

    operation: chat, completion or embedding.
    input, cached: tokens of the prompts, and how many of them were in the prefix cache.
    output: tokens of all completions.
    longest: tokens of the longest completion.
    finish_reasons: of the completions in their order, "" for one that was not finished.
    max_tokens: limit of new tokens of each completion.
    first_token_s: seconds from the arrival until the first token, of a stream until its first chunk; None if unknown.
    """

    operation: str
    input: int = 0
    cached: int = 0
    output: int = 0
    longest: int = 0
    finish_reasons: tuple[str, ...] = ()
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool = False
    first_token_s: float | None = None


class CallTimes(msgspec.Struct, gc=False):
    """Moments of one call of a model on the monotonic clock of this process, 0 if they are unknown.

    Each is stamped where it happens: the engine stamps `arrived_s` and `ended_s`, the code around the model, in
    whichever thread, process or machine, `started_s` and `computed_s`. All channels report these.

    served_by: name and version of the model that the engine chose.
    arrived_s: the call was accepted.
    started_s: the model began to compute it, or the batch that it is part of.
    computed_s: the model had computed it; for a stream, its last chunk.
    ended_s: the response or the error was there.
    first_chunk_s: the first chunk of a stream was there.
    batch: reason, calls and rows of its batch.
    is_cached: its answer was computed for an earlier call.
    nested: calls of other models by this one.
    tokens: those of a call of a text model.
    computed_tokens: of prompts and completions, as the model has counted them, also of a call that was cancelled: see
        `note_tokens`.
    """

    served_by: tuple[str, str] = ("", "")
    arrived_s: float = 0.0
    started_s: float = 0.0
    computed_s: float = 0.0
    ended_s: float = 0.0
    first_chunk_s: float = 0.0
    batch: tuple[str, int, int] | None = None
    is_cached: bool = False
    nested: list["CallTimes"] | None = None
    tokens: TokenUsage | None = None
    computed_tokens: tuple[int, int] = (0, 0)

    @property
    def queue_s(self) -> float:
        """Seconds from the arrival until the model began, 0 for an answer from a cache."""
        return max(0.0, min(self.started_s, self.ended_s or self.started_s) - self.arrived_s) if self.arrived_s else 0.0

    @property
    def compute_s(self) -> float:
        """Seconds that the model computed, up to the end of the call: a thread may go on for nobody."""
        return max(0.0, min(self.computed_s, self.ended_s or self.computed_s) - self.started_s)

    def fail(self) -> None:
        """Record that the call has failed. If that was before the model began, all of its time was in the queue."""
        if not self.started_s:
            self.started_s = self.computed_s = self.ended_s
        elif not self.computed_s:
            self.computed_s = self.ended_s

    def share(self, other: "CallTimes") -> None:
        """Take over when the computation of another call, whose answer this one shares, began and ended.

        If it arrived when that was already being computed, it has waited for none of it.
        """
        if other.started_s:
            self.started_s, self.computed_s = max(other.started_s, self.arrived_s), other.computed_s
            self.nested = other.nested

    def cover(self, calls: Iterable["CallTimes"]) -> None:
        """Record concurrent calls as one: from the first arrival and start to the last end."""
        accepted = [each for each in calls if each.arrived_s]
        if accepted:
            last = max(accepted, key=lambda each: each.ended_s)
            self.served_by, self.ended_s = last.served_by, last.ended_s
            self.arrived_s = min(each.arrived_s for each in accepted)
            self.started_s = min((each.started_s for each in accepted if each.started_s), default=0.0)
            self.computed_s = max(each.computed_s for each in accepted)

    @property
    def stamps(self) -> Stamps:
        return self.arrived_s, self.started_s, self.computed_s, self.ended_s


# The call that the running code of a model computes, from which calls of other models are nested.
current_call: Final[ContextVar[CallTimes | None]] = ContextVar("dragoman_call", default=None)


def count_wait(seconds: float, times: CallTimes | None) -> None:
    """Count seconds of a call, `current_call` of the model's code, as time in a queue that the model has of its own."""
    if times is not None and times.started_s:
        times.started_s += seconds


def note_tokens(prompts: int, completions: int, times: CallTimes | None = None) -> None:
    """Report the tokens that a call has used so far, also one that is cancelled; by default the running one.

    A callback, which runs outside of the context of the call, gives its `current_call`.
    """
    times = times or current_call.get()
    if times is not None:
        before = times.computed_tokens
        times.computed_tokens = max(before[0], prompts), max(before[1], completions)


class ClockOffset:
    """The difference between the clocks of two machines, estimated from calls that one sends to the other.

    A call is sent at `sent_s` and answered at `arrived_s` by our clock, received and answered by theirs. The offset is
    within half of the time on the way, so the estimate with the shortest way counts, as in the Network Time Protocol
    (RFC 5905, 8). Older ones become less exact, by the drift of two clocks.
    """

    _DRIFT = 1e-4  # seconds a second

    def __init__(self) -> None:
        self.offset_s = 0.0  # their clock minus ours
        self._way_s = float("inf")
        self._measured_s = 0.0
        self._last_s = float("-inf"), float("-inf")  # the end of the last computation, by their clock and by ours

    def convert(self, started_s: float, computed_s: float, sent_s: float, now_s: float) -> tuple[float, float]:
        """Return when the other machine began and ended to compute a call, by our clock; `computed_s` 0 stays 0.

        It took as long as it says, after it was sent and before now. A better estimate of the offset moves later calls
        only: what began there after the end of another computation is not reported to have begun before it.
        """
        compute_s = max(0.0, min(computed_s - started_s, now_s - sent_s)) if computed_s else 0.0
        started = min(max(sent_s, started_s - self.offset_s), now_s - compute_s)
        if started_s >= self._last_s[0]:
            started = max(started, self._last_s[1])
        if not computed_s:
            return started, 0.0
        computed = min(started + compute_s, now_s)
        self._last_s = max(self._last_s, (computed_s, computed))
        return started, computed

    def measure(self, sent_s: float, theirs: Stamps, arrived_s: float) -> None:
        """Improve the estimate by a call."""
        received_s, *_, answered_s = theirs
        way_s = max(0.0, (arrived_s - sent_s) - (answered_s - received_s))
        if way_s <= self._way_s + self._DRIFT * (arrived_s - self._measured_s):
            self._way_s, self._measured_s = way_s, arrived_s
            self.offset_s = ((received_s - sent_s) + (answered_s - arrived_s)) / 2
