"""Times between the tokens of completions, as text engines measure them for every protocol, streamed or not."""

import time
from collections.abc import Iterable
from typing import Final

from dragoman.core.metrics import Family, Histogram
from dragoman_text.generation.completion_writer import CompletionWriter

_NAME: Final = "dragoman_text_inter_token_seconds"
_HELP: Final = "Seconds between two tokens of a completion."
_BOUNDS: Final = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5,
    5.0, 10.0,
)  # fmt: skip


class TokenGaps:
    """Counts the time since the last token of a completion; one thread counts, others read."""

    def __init__(self) -> None:
        self._gaps = Histogram(_BOUNDS)

    def count(self, writer: CompletionWriter, tokens: int = 1) -> None:
        """Count that a completion has now got this many further tokens; the first ones have no time before them."""
        now_s = time.monotonic()
        if writer.last_s and tokens:
            self._gaps.observe((now_s - writer.last_s) / tokens, tokens)
        writer.last_s = now_s

    def families(self) -> Iterable[Family]:
        """Return the metric."""
        yield Family(_NAME, "histogram", _HELP, tuple(self._gaps.samples(_NAME, {})))
