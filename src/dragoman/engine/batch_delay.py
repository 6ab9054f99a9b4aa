"""Adaptive batch delay: wait briefly for clients that send again as soon as they get a response."""

# The delay is used while at least this fraction of the clients returns within it; otherwise it is tried again for one
# batch of each `_RETRY_EVERY`.
_MIN_RETURNED = 0.7
_RETRY_EVERY = 16
# Longest delay: clients that resend immediately are back sooner, and a first call may take a minute, because its worker
# starts or the model compiles.
_MAX_S = 0.1
# Weight of the newest value in the moving averages.
_WEIGHT = 0.2


class BatchDelay:
    """Delay the next batch by up to `fraction` of the model's mean latency, at most 0.1 s; 0 disables the delay.

    Closed-loop clients send again immediately. Without a delay they split into two groups that alternate, so every
    batch is half full. The delay is used only while most of the clients that were just answered return within it, so
    that open-loop traffic is not delayed.
    """

    __slots__ = ("_answered", "_expected", "_fraction", "_latency_s", "_returned", "_skipped", "_until_s")

    def __init__(self, fraction: float) -> None:
        self._fraction = fraction
        self._latency_s = 0.0
        self._returned = 1.0
        self._skipped = 0
        self._answered = self._expected = 0
        self._until_s: float | None = None

    @property
    def is_active(self) -> bool:
        """Whether the next batch is to be delayed, or was until just now."""
        return self._until_s is not None

    def batch_finished(self, size: int, queued: int, duration_s: float, now_s: float) -> None:
        """Record a finished batch, and start the delay of the next one."""
        self._latency_s = duration_s if not self._latency_s else _average(self._latency_s, duration_s)
        self._until_s = None
        if self._fraction > 0 and size + queued > 1 and self._is_worthwhile():
            self._answered, self._expected = size, size + queued
            self._until_s = now_s + min(self._fraction * self._latency_s, _MAX_S)

    def remaining_s(self, queued: int, now_s: float) -> float:
        """Return how much longer to wait before the next batch; 0 to start it now."""
        if self._until_s is None:
            return 0.0
        remaining_s = self._until_s - now_s
        if queued < self._expected and remaining_s > 0:
            return remaining_s
        missing = max(0, self._expected - queued)
        self._returned = _average(self._returned, max(0.0, 1 - missing / self._answered))
        self._until_s = None
        return 0.0

    def _is_worthwhile(self) -> bool:
        if self._returned >= _MIN_RETURNED:
            return True
        self._skipped = (self._skipped + 1) % _RETRY_EVERY
        return self._skipped == 0


def _average(old: float, new: float) -> float:
    return (1 - _WEIGHT) * old + _WEIGHT * new
