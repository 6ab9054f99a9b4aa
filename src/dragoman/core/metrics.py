"""Metrics in the terms of Prometheus: families, samples and histograms."""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

Kind = Literal["counter", "gauge", "histogram", "summary", "untyped"]


@dataclass(frozen=True, slots=True)
class Sample:
    """One value. `name` is that of its family, with the suffix `_bucket`, `_sum` or `_count` if the kind has them."""

    name: str
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Family:
    """A metric and its samples, one per combination of labels."""

    name: str
    kind: Kind
    help: str
    samples: tuple[Sample, ...]


# Upper bounds of the buckets of durations, in seconds, and of tokens.
SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
TOKENS = tuple(float(1 << power) for power in range(18))


def sum_families(groups: Iterable[Iterable[Family]]) -> tuple[Family, ...]:
    """Return the families of all groups; samples of equal names and labels are added."""
    families: dict[str, Family] = {}
    sums: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], Sample]] = {}
    for family in (family for group in groups for family in group):
        families.setdefault(family.name, family)
        samples = sums.setdefault(family.name, {})
        for sample in family.samples:
            key = sample.name, tuple(sorted(sample.labels.items()))
            known = samples.get(key)
            samples[key] = sample if known is None else replace(known, value=known.value + sample.value)
    return tuple(replace(family, samples=(*sums[name].values(),)) for name, family in families.items())


class Histogram:
    """Counts of values in buckets, and their sum. One thread may observe while others read."""

    __slots__ = ("_bounds", "_buckets", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = [*map(float, bounds)]
        self._buckets = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, weight: int = 1) -> None:
        """Count a value `weight` times."""
        self._buckets[bisect_left(self._bounds, value)] += weight
        self._sum += value * weight

    def add(self, other: "Histogram") -> None:
        """Add the values of a histogram with the same buckets."""
        self._buckets = [mine + its for mine, its in zip(self._buckets, other._buckets, strict=True)]
        self._sum += other._sum

    @property
    def count(self) -> int:
        """Number of values."""
        return sum(self._buckets)

    @property
    def sum(self) -> float:
        """Sum of the values."""
        return self._sum

    def samples(self, name: str, labels: Mapping[str, str]) -> Iterable[Sample]:
        """Return the samples of a family with this name."""
        count = 0
        for bound, in_bucket in zip((*map(str, self._bounds), "+Inf"), self._buckets, strict=True):
            count += in_bucket
            yield Sample(f"{name}_bucket", {**labels, "le": bound}, count)
        yield Sample(f"{name}_sum", labels, self._sum)
        yield Sample(f"{name}_count", labels, count)
