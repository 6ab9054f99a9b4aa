"""Performance targets, each relative to another server in the same run or as an absolute maximum."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.subjects import OURS

Rows = Sequence[Mapping[str, Any]]
INLINE = f"{OURS}, inline class"


@dataclass(frozen=True, slots=True)
class MinRatio:
    """Throughput of at least `least` times that of the server `base`."""

    bench: str
    workload: str
    base: str
    minimum: float
    connections: int = 16

    def describe(self) -> str:
        return f"at least {self.minimum:g} times {self.base}"

    def measured(self, rows: Rows) -> float | None:
        return self._find(rows, "ratios")

    def measured_by_cpu(self, rows: Rows) -> float | None:
        """Return the ratio of requests per CPU time of the server, which hardly depends on other load."""
        return self._find(rows, "cpu_ratios")

    def _find(self, rows: Rows, key: str) -> float | None:
        row_key = (self.workload, self.connections, OURS)
        for row in rows:
            if (row["workload"], row["connections"], row["server"]) == row_key:
                ratio: float | None = row[key].get(self.base)
                return ratio
        return None

    def is_met(self, measured: float) -> bool:
        return measured >= self.minimum


@dataclass(frozen=True, slots=True)
class Maximum:
    """A value of `key` of at most `most`."""

    bench: str
    workload: str
    key: str
    unit: str
    maximum: float
    server: str = OURS

    def describe(self) -> str:
        return f"at most {self.maximum:.3g} {self.unit}"

    def measured(self, rows: Rows) -> float | None:
        values = [row[self.key] for row in rows if row["server"] == self.server and self.key in row]
        return values[0] if values else None

    def measured_by_cpu(self, rows: Rows) -> None:
        """Return None: the value is not a ratio."""

    def is_met(self, measured: float) -> bool:
        return measured <= self.maximum


_MIB_IN_MB = 1.048576

AIMS: tuple[MinRatio | Maximum, ...] = (
    MinRatio("w1", "rest-json-small", "echo", 0.5),
    MinRatio("w1", "rest-json-small", "mlserver", 8),
    MinRatio("w2", "rest-json-large", "mlserver", 2.5),
    MinRatio("w2", "rest-json-large", "triton", 4),
    MinRatio("w2", "rest-json-large", "echo", 0.5),
    MinRatio("w3", "rest-binary-small", "echo", 0.5),
    MinRatio("w3", "rest-binary-large", "buffered echo", 0.8),
    MinRatio("w4", "grpc-raw-small", "echo grpc.aio", 4),
    MinRatio("w4", "grpc-raw-small", "mlserver", 8),
    MinRatio("w4", "grpc-raw-large", "echo grpc.aio", 1.2),
    MinRatio("w4", "grpc-raw-large", "kserve", 3),
    MinRatio("w5", "sklearn", "mlserver", 3, connections=64),
    Maximum("w7", "startup", "ready_s", "s", 1.0, INLINE),
    Maximum("w7", "startup", "pss_mib", "MiB", 80 / _MIB_IN_MB, INLINE),
    Maximum("w10", "idle", "ratio", "times the median without idle connections", 1.1),
)
