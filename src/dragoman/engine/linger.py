"""How long a batch waits for the callers who were just answered, most of whom ask again at once."""

# Below such a share of callers who came back in time, waiting for them is a loss; now and then it is tried again.
_ENOUGH = 0.7
_TRIED_AGAIN = 16
# How much the newest of the times and shares counts.
_NEW = 0.2


class Linger:
    """A wait of up to a `share` of the model's own time, for batches that follow upon one another; 0 is none.

    Callers who ask again as soon as they are answered would else fall into two halves, each of which waits while the
    other is computed. Whether they do ask again is seen: those who come when they like are not waited for.
    """

    __slots__ = ("_answered", "_expected", "_returned", "_share", "_skipped", "_took_s", "_until_s")

    def __init__(self, share: float) -> None:
        self._share = share
        self._took_s = 0.0
        self._returned = 1.0
        self._skipped = 0
        self._answered = self._expected = 0
        self._until_s: float | None = None

    def answered(self, calls: int, waiting: int, took_s: float, now_s: float) -> None:
        """A batch of some calls has been answered in a time, while others wait already."""
        self._took_s = took_s if not self._took_s else _smoothed(self._took_s, took_s)
        self._until_s = None
        if self._share > 0 and calls + waiting > 1 and self._pays():
            self._answered, self._expected = calls, calls + waiting
            self._until_s = now_s + self._share * self._took_s

    def left_s(self, waiting: int, now_s: float) -> float:
        """How much longer the calls that wait shall wait for others; 0 where they shall not."""
        if self._until_s is None:
            return 0.0
        left_s = self._until_s - now_s
        if waiting < self._expected and left_s > 0:
            return left_s
        missing = max(0, self._expected - waiting)
        self._returned = _smoothed(self._returned, max(0.0, 1 - missing / self._answered))
        self._until_s = None
        return 0.0

    def _pays(self) -> bool:
        if self._returned >= _ENOUGH:
            return True
        self._skipped = (self._skipped + 1) % _TRIED_AGAIN
        return self._skipped == 0


def _smoothed(old: float, new: float) -> float:
    return (1 - _NEW) * old + _NEW * new
