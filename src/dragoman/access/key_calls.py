"""Calls of models by the name of their key and by outcome, as clients see it: also those that a limit rejects."""

from collections.abc import Iterable
from typing import Any, Final

from dragoman.core.calls import ConcurrentCalls, ModelCall
from dragoman.core.metrics import Family, Sample
from dragoman.engine.counters import OK, TEXT_OUTCOMES, outcome

# Names that are distinguished. Key files may have thousands, and issuers of tokens name any number of subjects.
MAX_NAMES: Final = 100
OTHER: Final = "other"
OUTCOMES: Final = (*TEXT_OUTCOMES, "Forbidden", "ModelNotFound", "RateLimited")
_NAME: Final = "dragoman_key_calls_total"
_HELP: Final = "Calls of models by the name of their key and by outcome."


class KeyCalls:
    """The calls of one process, which its event loop counts. Each outcome exists, as 0, before the first call."""

    def __init__(self) -> None:
        self._counts: dict[str, OutcomeCounts] = {}
        self._is_exported = False  # also without a call

    def expect(self, names: Iterable[str]) -> None:
        """Export these names from now on, as far as there is room, and the others beside them."""
        for name in (*names, OTHER):
            self.of(name)
        self._is_exported = self._is_exported or len(self._counts) > 1

    def of(self, name: str) -> "OutcomeCounts":
        """Return the counts of a key; beyond `MAX_NAMES`, and for tokens without a subject, those of all others."""
        if name not in self._counts and (not name or len(self._counts) >= MAX_NAMES):
            name = OTHER
        return self._counts.setdefault(name, OutcomeCounts())

    def families(self) -> tuple[Family, ...]:
        samples = tuple(
            Sample(_NAME, {"key": name, "outcome": each}, counts[each])
            for name, counts in self._counts.items()
            if self._is_exported or any(counts.values())
            for each in OUTCOMES
        )
        return (Family(_NAME, "counter", _HELP, samples),)


class OutcomeCounts(dict[str, int]):
    """Numbers of calls by outcome."""

    def __init__(self) -> None:
        super().__init__(dict.fromkeys(OUTCOMES, 0))

    def add(self, number: int, error: BaseException | None = None) -> None:
        """Count calls that have ended together."""
        self[OK if error is None else outcome(error, OUTCOMES)] += number


def calls_of(call: Any) -> int:
    """Return how many calls of models a call is."""
    if isinstance(call, ConcurrentCalls):
        return sum(calls_of(request.call) for request in call.requests)
    return 1 if isinstance(call, ModelCall) else 0
