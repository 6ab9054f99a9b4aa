"""Metrics as values, in the terms of Prometheus."""

from collections.abc import Mapping
from dataclasses import dataclass
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
