"""Measurements as values: families of samples, in the terms of Prometheus, in no text format."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram", "summary", "untyped"]


@dataclass(frozen=True, slots=True)
class Sample:
    """One number. `name` is that of its family, with `_bucket`, `_sum` or `_count` where the kind has such."""

    name: str
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Family:
    """What is measured, and its samples: one for each combination of labels."""

    name: str
    kind: Kind
    help: str
    samples: tuple[Sample, ...]
