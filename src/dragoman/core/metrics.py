"""Metrics in the terms of Prometheus: families, samples and histograms."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Literal

import msgspec
from msgspec import structs

Kind = Literal["counter", "gauge", "histogram", "summary", "untyped"]
Labels = Mapping[str, str]


# Without cycles, and tens of thousands in each scrape: the garbage collector need not look at them.
class Sample(msgspec.Struct, frozen=True, gc=False):
    """One value. `name` is that of its family, with the suffix `_bucket`, `_sum` or `_count` if the kind has them."""

    name: str
    labels: Labels
    value: float


class Distribution(msgspec.Struct, frozen=True, gc=False):
    """The values that a histogram has counted, in one value: an exported one has some twenty samples.

    counts: values in each bucket and beyond the last of the `bounds`, not cumulated.
    """

    name: str
    labels: Labels
    bounds: Sequence[float]
    counts: Sequence[int]
    sum: float

    def plus(self, other: "Distribution") -> "Distribution":
        """Return the values of both, which have the same bounds."""
        counts = tuple(mine + its for mine, its in zip(self.counts, other.counts, strict=True))
        return structs.replace(self, counts=counts, sum=self.sum + other.sum)

    def samples(self) -> Iterator[Sample]:
        """Yield the buckets, the sum and the count."""
        count = 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), accumulate(self.counts), strict=True):
            yield Sample(f"{self.name}_bucket", {**self.labels, "le": bound}, count)
        yield Sample(f"{self.name}_sum", self.labels, self.sum)
        yield Sample(f"{self.name}_count", self.labels, count)


class Family(msgspec.Struct, frozen=True, gc=False):
    """A metric and its samples, one per combination of labels. `distributions` are further samples of a histogram."""

    name: str
    kind: Kind
    help: str
    samples: tuple[Sample, ...] = ()
    distributions: tuple[Distribution, ...] = ()

    @property
    def flat(self) -> Iterator[Sample]:
        """All samples, one by one."""
        yield from self.samples
        for distribution in self.distributions:
            yield from distribution.samples()


# Upper bounds of the buckets of durations, in seconds, and of tokens.
SECONDS = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0,
    600.0, 3600.0, 14400.0, 43200.0,  # simulators compute for hours
)  # fmt: skip
TOKENS = tuple(float(1 << power) for power in range(18))


def with_labels(families: Iterable[Family], labels: Labels) -> Iterator[Family]:
    """Yield the families; their samples have these labels too."""
    for family in families:
        samples = tuple(structs.replace(s, labels={**labels, **s.labels, **labels}) for s in family.samples)
        own = tuple(structs.replace(d, labels={**labels, **d.labels, **labels}) for d in family.distributions)
        yield Family(family.name, family.kind, family.help, samples, own)


_Key = tuple[str, frozenset[tuple[str, str]]]  # name and labels


class FamilyCollector:
    """Merges families of many sources: one of each name, and samples of equal names and labels are added."""

    def __init__(self) -> None:
        self._families: dict[str, Family] = {}
        self._samples: dict[str, dict[_Key, Sample]] = {}
        self._distributions: dict[str, dict[_Key, Distribution]] = {}

    def add(self, families: Iterable[Family]) -> None:
        """Add families."""
        for family in families:
            name = family.name
            if name not in self._families:
                self._families[name], self._samples[name], self._distributions[name] = family, {}, {}
            samples, distributions = self._samples[name], self._distributions[name]
            for sample in family.samples:
                key = sample.name, frozenset(sample.labels.items())
                known = samples.get(key)
                samples[key] = sample if known is None else structs.replace(known, value=known.value + sample.value)
            for each in family.distributions:
                key = each.name, frozenset(each.labels.items())
                distributions[key] = each if key not in distributions else distributions[key].plus(each)

    def families(self) -> tuple[Family, ...]:
        """Return the families that have samples, in the order in which they came."""
        merged = (
            structs.replace(
                family, samples=(*self._samples[name].values(),), distributions=(*self._distributions[name].values(),)
            )
            for name, family in self._families.items()
        )
        return tuple(family for family in merged if family.samples or family.distributions)

    def forget(self, count: int) -> Iterator[None]:
        """Forget the samples, in any order; yield after each `count` of them.

        What `families` has returned is not changed.
        """
        groups: list[dict[_Key, Any]] = [*self._samples.values(), *self._distributions.values()]
        for group in groups:
            while group:
                for _ in range(min(count, len(group))):
                    group.popitem()
                yield


def sum_families(groups: Iterable[Iterable[Family]]) -> tuple[Family, ...]:
    """Return the families of all groups; samples of equal names and labels are added."""
    collector = FamilyCollector()
    for group in groups:
        collector.add(group)
    return collector.families()


class Histogram:
    """Counts of values in buckets, and their sum. One thread may observe while others read.

    buckets: counts of values up to each bound and above the one before, and at last of those beyond all.
    sum: of the values.
    """

    __slots__ = ("_bounds", "buckets", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(map(float, bounds))
        self.buckets = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, weight: int = 1) -> None:
        """Count a value `weight` times."""
        self.buckets[bisect_left(self._bounds, value)] += weight
        self.sum += value * weight

    def add(self, other: "Histogram") -> None:
        """Add the values of a histogram with the same buckets."""
        self.buckets = [mine + its for mine, its in zip(self.buckets, other.buckets, strict=True)]
        self.sum += other.sum

    @property
    def count(self) -> int:
        """Number of values."""
        return sum(self.buckets)

    def distribution(self, name: str, labels: Labels) -> Distribution:
        """Return the values so far, as those of a family with this name."""
        return Distribution(name, labels, self._bounds, tuple(self.buckets), self.sum)

    def samples(self, name: str, labels: Labels) -> Iterator[Sample]:
        """Return the same as single samples, as models report them."""
        return self.distribution(name, labels).samples()
