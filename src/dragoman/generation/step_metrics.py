"""Metrics of the steps and the queue of a text engine."""

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import cast

from dragoman.core.metrics import SECONDS, Family, Histogram, Sample
from dragoman.generation.job import GenerationJob
from dragoman.generation.scheduler import Scheduler, StepWork

_STEPS = "dragoman_text_steps_total"
_STEP = "dragoman_text_step_seconds"
_FORWARD = "dragoman_text_forward_seconds"
_QUEUE = "dragoman_text_queue_size"
_BATCH = "dragoman_text_batch_size"
_MOST = "dragoman_text_batch_max_tokens"
_METHODS = ("prefill", "decode")


class StepMetrics:
    """Counts and durations of steps: `prefill` if a step computes prompts, else `decode`.

    waits: whether a step is complete when its function returns, which is not so on a GPU.
    """

    def __init__(self, *, waits: bool) -> None:
        self._waits = waits
        self._method = "decode"
        self._failed = False
        # All keys exist from the start: other threads read while the engine's thread counts.
        self._ends = {(method, end): 0 for method in _METHODS for end in ("ok", "failed")}
        self._whole = {method: Histogram(SECONDS) for method in _METHODS}
        self._forward = {method: Histogram(SECONDS) for method in _METHODS}

    @contextmanager
    def step(self, works: Sequence[StepWork]) -> Iterator[None]:
        """Measure one step."""
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
        """Record that the model computed the whole step, which began at `began_s` on the monotonic clock."""
        self._failed = False
        if self._waits:
            self._forward[self._method].observe(time.monotonic() - began_s)

    def families(self) -> Iterable[Family]:
        ends = self._ends.items()
        counts = tuple(Sample(_STEPS, {"method": method, "outcome": end}, n) for (method, end), n in ends)
        yield Family(_STEPS, "counter", "Steps of the text engine, with prompts (prefill) or without (decode).", counts)
        yield Family(_STEP, "histogram", "Seconds of a step of the text engine.", _samples(_STEP, self._whole))
        if self._waits:
            line = "Seconds of the forward pass in a step of the text engine."
            yield Family(_FORWARD, "histogram", line, _samples(_FORWARD, self._forward))


def queue_metrics(scheduler: Scheduler, active: int) -> Iterable[Family]:
    """Return metrics of the queue and the batch; the scheduler may change meanwhile in its own thread."""
    jobs = [cast("GenerationJob", task) for task in list(scheduler.running)]
    texts = [(job, len(job.sequences)) for job in jobs]
    most = sum((len(job.request.tokens) + job.request.length) * count for job, count in texts)
    for name, line, value in (
        (_QUEUE, "Prompts in the queue of the text engine.", max(0, active - len(jobs))),
        (_BATCH, "Sequences in the batch of the text engine.", sum(n for _, n in texts)),
        (_MOST, "Maximum number of tokens of these sequences.", most),
    ):
        yield Family(name, "gauge", line, (Sample(name, {}, value),))


def _samples(name: str, by_method: dict[str, Histogram]) -> tuple[Sample, ...]:
    return tuple(sample for method, each in by_method.items() for sample in each.samples(name, {"method": method}))
