"""Prometheus metrics in the text format: sums, changes between two scrapes, and quantiles of histograms."""

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from types import MappingProxyType

_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_ESCAPES = {"n": "\n", '"': '"', "\\": "\\"}

Labels = Mapping[str, str]
NO_LABELS: Labels = MappingProxyType({})


class Scrape:
    """The samples of one response, read at `at_s` of a monotonic clock."""

    def __init__(self, text: str, at_s: float) -> None:
        self.at_s = at_s
        self._samples: defaultdict[str, list[tuple[Labels, float]]] = defaultdict(list)
        for line in text.splitlines():
            if found := _SAMPLE.match(line):
                labels = {k: re.sub(r"\\(.)", _unescape, v) for k, v in _LABEL.findall(found[2] or "")}
                try:
                    self._samples[found[1]].append((labels, float(found[3])))
                except ValueError:
                    continue  # of a comment, or no metric

    def labels(self, name: str) -> list[Labels]:
        """Return the labels of each sample of a metric."""
        return [labels for labels, _ in self._samples.get(name, ())]

    def has(self, name: str, wanted: Labels = NO_LABELS) -> bool:
        return any(_matches(labels, wanted) for labels, _ in self._samples.get(name, ()))

    def sum(self, name: str, wanted: Labels = NO_LABELS, without: Labels = NO_LABELS) -> float:
        """Return the sum of the samples with these labels, but for those with all labels of `without`."""
        return math.fsum(
            value
            for labels, value in self._samples.get(name, ())
            if _matches(labels, wanted) and not (without and _matches(labels, without))
        )

    def buckets(self, name: str, wanted: Labels = NO_LABELS) -> dict[float, float]:
        """Return the counts of a histogram by upper bound, summed over its other labels."""
        found: defaultdict[float, float] = defaultdict(float)
        for labels, value in self._samples.get(f"{name}_bucket", ()):
            if _matches(labels, wanted) and "le" in labels:
                found[float(labels["le"])] += value
        return dict(sorted(found.items()))


def increase(
    before: Scrape, after: Scrape, name: str, wanted: Labels = NO_LABELS, without: Labels = NO_LABELS
) -> float:
    """Return the change of a counter; one that has started anew counts from 0."""
    now = after.sum(name, wanted, without)
    change = now - before.sum(name, wanted, without)
    return change if change >= 0 else now


def quantile(q: float, before: Scrape, after: Scrape, name: str, wanted: Labels = NO_LABELS) -> float | None:
    """Return a quantile of what a histogram has counted between two scrapes, None of nothing.

    It is linear within a bucket, as Prometheus computes it; in the last one it is the lower bound.
    """
    earlier = before.buckets(name, wanted)
    counts = [(bound, count - earlier.get(bound, 0.0)) for bound, count in after.buckets(name, wanted).items()]
    if any(count < 0 for _, count in counts):  # the server has started anew
        counts = list(after.buckets(name, wanted).items())
    total = counts[-1][1] if counts else 0.0
    if total <= 0:
        return None
    lower = below = 0.0
    for bound, count in counts:
        if count >= q * total:
            return (
                lower if math.isinf(bound) else lower + (bound - lower) * (q * total - below) / max(count - below, 1.0)
            )
        lower, below = bound, count
    return None


def _matches(labels: Labels, wanted: Labels) -> bool:
    return all(labels.get(name) == value for name, value in wanted.items())


def _unescape(found: re.Match[str]) -> str:
    return _ESCAPES.get(found[1], found[0])
