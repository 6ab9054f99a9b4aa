"""Comparison of two measurements: whether a difference exceeds the spread of their runs, or of the parts of one run."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dragoman.core.errors import InvalidInput
from dragoman_check.load_test.repeats import combine

# Compared values of a measurement and whether larger is better.
_VALUES = {"rate": True, "p50": False, "p99": False}


@dataclass(frozen=True, slots=True)
class Difference:
    """One value of a load, A and B, with its least and largest value in the runs, or the parts of the only run."""

    label: str
    name: str
    first: float
    second: float
    first_range: tuple[float, float]
    second_range: tuple[float, float]
    larger_is_better: bool

    @property
    def exceeds_spread(self) -> bool:
        """Return whether all values of one are above all values of the other."""
        return self.first_range[1] < self.second_range[0] or self.second_range[1] < self.first_range[0]

    @property
    def verdict(self) -> str:
        if not self.exceeds_spread:
            return "within the spread"
        return "better" if (self.second > self.first) == self.larger_is_better else "worse"

    @property
    def change(self) -> float:
        """Return the change of the second run relative to the first."""
        return self.second / self.first - 1 if self.first else 0.0


def compare_runs(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[Difference]:
    """Return the differences of the loads that both runs have. Raises InvalidInput if there are none."""
    try:
        loads = [{_key(m): m for m in combine(run["measurements"])} for run in (first, second)]
        shared = [key for key in loads[0] if key in loads[1]]
        if not shared:
            names = [", ".join(" ".join(key) for key in each) for each in loads]
            raise InvalidInput(f"the runs have no load in common: {names[0]}; {names[1]}")
        return [
            difference
            for key in shared
            for name, better in _VALUES.items()
            if (difference := _difference(name, better, loads[0][key], loads[1][key]))
        ]
    except (KeyError, TypeError, AttributeError) as error:
        raise InvalidInput("expected files that dragoman bench --json wrote") from error


def _key(measurement: Mapping[str, Any]) -> tuple[str, str]:
    return measurement["protocol"], measurement["label"]


def _difference(name: str, better: bool, first: Mapping[str, Any], second: Mapping[str, Any]) -> Difference | None:
    values = [_value(measurement, name) for measurement in (first, second)]
    ranges = [measurement["ranges"].get(name) for measurement in (first, second)]
    if values[0] is None or values[1] is None or ranges[0] is None or ranges[1] is None:
        return None
    return Difference(" ".join(_key(first)), name, values[0], values[1], ranges[0], ranges[1], better)


def _value(measurement: Mapping[str, Any], name: str) -> float | None:
    value: float | None = measurement["rate"] if name == "rate" else measurement["latency_ms"].get(name)
    return value
