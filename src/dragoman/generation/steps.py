"""How often the engine has computed and how long that took, and what it has before it."""

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import cast

from dragoman.core.histogram import SECONDS, Histogram
from dragoman.core.metrics import Family, Sample
from dragoman.generation.job import Job
from dragoman.generation.scheduler import Scheduler, Work

_STEPS = "dragoman_text_steps_total"
_STEP = "dragoman_text_step_seconds"
_FORWARD = "dragoman_text_forward_seconds"
_QUEUE = "dragoman_text_queue_size"
_BATCH = "dragoman_text_batch_size"
_MOST = "dragoman_text_batch_max_tokens"
_METHODS = ("prefill", "decode")


class Steps:
    """The steps of one engine, by what they did: `prefill` where prompts were read, whatever texts went on beside
    them, else `decode`. With `waits` what computes a step is known to be done when it returns, as no GPU is."""

    def __init__(self, *, waits: bool) -> None:
        self._waits = waits
        self._method = "decode"
        self._failed = False
        # All there can be from the start: others read while the engine's thread counts.
        self._ends = {(method, end): 0 for method in _METHODS for end in ("ok", "failed")}
        self._whole = {method: Histogram(SECONDS) for method in _METHODS}
        self._forward = {method: Histogram(SECONDS) for method in _METHODS}

    @contextmanager
    def step(self, works: Sequence[Work]) -> Iterator[None]:
        """A step that does this."""
        self._method = "decode" if works and works[-1].sequence.decoding else "prefill"  # prompts come last
        self._failed = True
        began_s = time.monotonic()
        try:
            yield
        finally:
            if works:
                self._ends[self._method, "failed" if self._failed else "ok"] += 1
                self._whole[self._method].observe(time.monotonic() - began_s)

    def computed(self, began_s: float) -> None:
        """All that the step has to compute came out well; it was begun at that reading of the monotonic clock."""
        self._failed = False
        if self._waits:
            self._forward[self._method].observe(time.monotonic() - began_s)

    def families(self) -> Iterable[Family]:
        ends = self._ends.items()
        counts = tuple(Sample(_STEPS, {"method": method, "outcome": end}, n) for (method, end), n in ends)
        yield Family(_STEPS, "counter", "Steps of the text engine: reading prompts (prefill), or not (decode).", counts)
        yield Family(_STEP, "histogram", "Seconds of a step of the text engine.", _samples(_STEP, self._whole))
        if self._waits:
            line = "Seconds of a step of the text engine in the model itself."
            yield Family(_FORWARD, "histogram", line, _samples(_FORWARD, self._forward))


def ahead(scheduler: Scheduler, active: int) -> Iterable[Family]:
    """What lies before an engine that has so many prompts to answer. Another thread may change it meanwhile."""
    jobs = [cast("Job", task) for task in list(scheduler.running)]
    texts = [(job, len(job.sequences)) for job in jobs]
    most = sum((len(job.asked.tokens) + job.asked.length) * count for job, count in texts)
    for name, line, value in (
        (_QUEUE, "Prompts that wait for the text engine.", max(0, active - len(jobs))),
        (_BATCH, "Texts that the text engine writes now, or whose prompts it reads.", sum(n for _, n in texts)),
        (_MOST, "Tokens that these texts and their prompts may have at most.", most),
    ):
        yield Family(name, "gauge", line, (Sample(name, {}, value),))


def _samples(name: str, by_method: dict[str, Histogram]) -> tuple[Sample, ...]:
    return tuple(sample for method, each in by_method.items() for sample in each.samples(name, {"method": method}))
