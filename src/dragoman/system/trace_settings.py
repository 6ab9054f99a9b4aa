"""Which requests are traced, as it changes while the server runs: for all models, and for single ones."""

import random
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from dragoman.system.trace_context import Sampler, Trace

# Seeded by the system: a model that seeds the module `random` must not choose which requests are traced.
_random: Final = random.Random()  # noqa: S311 - samples, no secrets


class TraceOptions(msgspec.Struct):
    """Trace options of a model or of the server; None stands for the option of the server, or for the one at its start.

    rate: one of this many requests is traced, none for 0.
    count: number of requests that are still to be traced, -1 for no limit.
    """

    is_on: bool | None = None
    rate: int | None = None
    count: int | None = None


class TraceSettings:
    """Which requests are traced. The sampler draws candidates for the model with the most traces; `keeps` thins them.

    A request with a sampled `traceparent` is traced unless tracing is off for its model.
    """

    def __init__(self) -> None:
        self._sampler: Sampler | None = None
        self._start_ratio = 0.0
        self._server = TraceOptions()
        self._models: dict[str, TraceOptions] = {}

    @property
    def has_tracer(self) -> bool:
        """Whether traces are exported at all."""
        return self._sampler is not None

    def attach(self, sampler: Sampler) -> None:
        """Set the sampler of the tracer; its ratio is that of the start."""
        self._sampler, self._start_ratio = sampler, sampler.ratio

    def read(self, model: str = "") -> tuple[bool, int, int]:
        """Return whether requests to a model are traced, one of how many, and how many more."""
        chain = self._chain(model)
        is_on = next((each.is_on for each in chain if each.is_on is not None), self.has_tracer)
        rate = next((each.rate for each in chain if each.rate is not None), None)
        start_rate = round(1 / self._start_ratio) if self._start_ratio else 0
        return is_on, start_rate if rate is None else rate, self._counting(model).count or 0

    def update(self, model: str, changes: Mapping[str, Any]) -> None:
        """Change the options of a model, or of the server if `model` is empty; None resets one."""
        options = self._models.setdefault(model, TraceOptions()) if model else self._server
        for name, value in changes.items():
            setattr(options, name, value)
        if self._sampler is not None:
            names = ("", *self._models)
            self._sampler.is_on = any(self.read(name)[0] for name in names)
            self._sampler.set_ratio(max(self._ratio(name) for name in names))

    def keeps(self, model: str, trace: Trace) -> bool:
        """Return whether a sampled request is traced by the options of its model; count it if so."""
        assert self._sampler is not None, "only a sampler makes traces"
        if not self.read(model)[0]:
            return False
        if trace.parent_id and self._sampler.is_parent_based:
            return True
        counting = self._counting(model)
        if counting.count == 0 or _random.random() * self._sampler.ratio >= self._ratio(model):
            return False
        if counting.count is not None and counting.count > 0:
            counting.count -= 1
        return True

    def _chain(self, model: str) -> tuple[TraceOptions, ...]:
        own = self._models.get(model)
        return (self._server,) if own is None else (own, self._server)

    def _counting(self, model: str) -> TraceOptions:
        """Return the options whose `count` holds for a model."""
        unlimited = TraceOptions(count=-1)
        return next((each for each in self._chain(model) if each.count is not None), unlimited)

    def _ratio(self, model: str) -> float:
        is_on, _, _ = self.read(model)
        if not is_on:
            return 0.0
        rate = next((each.rate for each in self._chain(model) if each.rate is not None), None)
        if rate is None:
            return self._start_ratio
        return 1 / rate if rate else 0.0
