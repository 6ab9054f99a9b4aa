"""What the server is to reach, each beside another subject in the same run, and what results say of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.subjects import OURS

Rows = Sequence[Mapping[str, Any]]
INLINE = f"{OURS}, inline class"


@dataclass(frozen=True, slots=True)
class Ratio:
    """So many times the answers of another subject, over so many connections."""

    bench: str
    workload: str
    base: str
    least: float
    connections: int = 16

    def told(self) -> str:
        return f"{self.least:g} of {self.base}"

    def reached(self, rows: Rows) -> float | None:
        return self._of(rows, "ratios")

    def reached_by_cpu(self, rows: Rows) -> float | None:
        """Answers by CPU time of the server, which hardly depends on what else runs."""
        return self._of(rows, "cpu_ratios")

    def _of(self, rows: Rows, key: str) -> float | None:
        wanted = (self.workload, self.connections, OURS)
        for row in rows:
            if (row["workload"], row["connections"], row["server"]) == wanted:
                found: float | None = row[key].get(self.base)
                return found
        return None

    def met(self, reached: float) -> bool:
        return reached >= self.least


@dataclass(frozen=True, slots=True)
class Most:
    """A figure of our own that may be no more than this."""

    bench: str
    workload: str
    key: str
    unit: str
    most: float
    server: str = OURS

    def told(self) -> str:
        return f"at most {self.most:.3g} {self.unit}"

    def reached_by_cpu(self, rows: Rows) -> None:
        """It is no ratio."""

    def reached(self, rows: Rows) -> float | None:
        found = [row[self.key] for row in rows if row["server"] == self.server and self.key in row]
        return found[0] if found else None

    def met(self, reached: float) -> bool:
        return reached <= self.most


_MIB_IN_MB = 1.048576

AIMS: tuple[Ratio | Most, ...] = (
    Ratio("w1", "rest-json-small", "echo", 0.5),
    Ratio("w1", "rest-json-small", "mlserver", 8),
    Ratio("w2", "rest-json-large", "mlserver", 2.5),
    Ratio("w2", "rest-json-large", "triton", 4),
    Ratio("w2", "rest-json-large", "echo", 0.5),
    Ratio("w3", "rest-binary-small", "echo", 0.5),
    Ratio("w3", "rest-binary-large", "buffered echo", 0.8),
    Ratio("w4", "grpc-raw-small", "echo grpc.aio", 4),
    Ratio("w4", "grpc-raw-small", "mlserver", 8),
    Ratio("w4", "grpc-raw-large", "echo grpc.aio", 1.2),
    Ratio("w4", "grpc-raw-large", "kserve", 3),
    Ratio("w5", "sklearn", "mlserver", 3, connections=64),
    Most("w7", "startup", "ready_s", "s", 1.0, INLINE),
    Most("w7", "startup", "pss_mib", "MiB", 80 / _MIB_IN_MB, INLINE),
    Most("w10", "idle", "ratio", "times the median", 1.1),
)
