"""Performance targets, each relative to another server in the same run or as an absolute maximum."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.subjects import OURS

Row = Mapping[str, Any]
Rows = Sequence[Row]
INLINE = f"{OURS}, inline class"
FUNCTION = f"{OURS}, function in a process"
THEIRS = f"{OURS}, their class"


@dataclass(frozen=True, slots=True)
class MinRatio:
    """At least `minimum` times the server `base`, in the row of a workload that has the values of `at`."""

    bench: str
    workload: str
    base: str
    minimum: float
    at: Mapping[str, int] = field(default_factory=lambda: {"connections": 16})
    server: str = OURS

    def describe(self) -> str:
        return f"at least {self.minimum:g} times {self.base}"

    def subject(self) -> str:
        """Return what is measured, for a table."""
        return ", ".join(_subject(self.server, self.workload, self.at))

    def measured(self, rows: Rows) -> float | None:
        return self._find(rows, "ratios")

    def measured_by_cpu(self, rows: Rows) -> float | None:
        """Return the ratio of requests per CPU time of the server, which hardly depends on other load."""
        return self._find(rows, "cpu_ratios")

    def _find(self, rows: Rows, key: str) -> float | None:
        ratio: float | None = _row(rows, self.workload, self.server, self.at).get(key, {}).get(self.base)
        return ratio

    def is_met(self, measured: float) -> bool:
        return measured >= self.minimum


@dataclass(frozen=True, slots=True)
class Maximum:
    """A value of `key` of at most `maximum`, in the row of a workload that has the values of `at`."""

    bench: str
    workload: str
    key: str
    unit: str
    maximum: float
    server: str = OURS
    at: Mapping[str, int] = field(default_factory=dict)

    def describe(self) -> str:
        return f"at most {self.maximum:.3g} {self.unit}".rstrip()

    def subject(self) -> str:
        """Return what is measured, for a table."""
        return ", ".join([*_subject(self.server, self.workload, self.at), self.key])

    def measured(self, rows: Rows) -> float | None:
        value: float | None = _row(rows, self.workload, self.server, self.at).get(self.key)
        return value

    def measured_by_cpu(self, rows: Rows) -> None:
        """Return None: the value is not a ratio."""

    def is_met(self, measured: float) -> bool:
        return measured <= self.maximum


def _subject(server: str, workload: str, at: Mapping[str, int]) -> Sequence[str]:
    variant = [] if server == OURS else [server.removeprefix(f"{OURS}, ")]
    return [*variant, *([] if workload in at else [workload]), *(f"{value:,} {key}" for key, value in at.items())]


def _row(rows: Rows, workload: str, server: str, at: Mapping[str, int]) -> Row:
    values = {"workload": workload, "server": server, **at}
    return next((row for row in rows if all(row.get(key) == value for key, value in values.items())), {})


_MIB_IN_MB = 1.048576
_TAIL = "80% of capacity"
_STREAMS = "FastAPI in the style of vLLM"
_MLSERVER_CODECS = "mlserver, JSON"

AIMS: tuple[MinRatio | Maximum, ...] = (
    MinRatio("w1", "rest-json-small", "echo", 0.65),
    MinRatio("w1", "rest-json-small", "mlserver", 8),
    MinRatio("w2", "rest-json-large", "mlserver", 2.5),
    MinRatio("w2", "rest-json-large", "triton", 4),
    MinRatio("w2", "rest-json-large", "echo", 0.5),
    MinRatio("w3", "rest-binary-small", "echo", 0.65),
    MinRatio("w3", "rest-binary-large", "buffered echo", 0.9),
    MinRatio("w4", "grpc-raw-small", "echo grpc.aio", 7),
    MinRatio("w4", "grpc-typed-small", "echo grpc.aio", 5),
    MinRatio("w4", "grpc-raw-small", "mlserver", 8),
    MinRatio("w4", "grpc-raw-large", "echo grpc.aio", 1.2),
    MinRatio("w4", "grpc-raw-large", "kserve", 3),
    MinRatio("w5", "sklearn", "mlserver", 3, {"connections": 64}),
    MinRatio("w6", "evaluate-4", "umbridge", 4),
    MinRatio("w6", "evaluate-4", "umbridge", 3, server=THEIRS),
    MinRatio("w6", "gradient-4", "umbridge", 3),
    MinRatio("w6", "evaluate-10000", "umbridge", 20),
    MinRatio("w6", "evaluate-10000", "umbridge", 12, server=THEIRS),
    Maximum("w7", "startup", "ready_s", "s", 0.3, INLINE),
    Maximum("w7", "startup", "ready_s", "s", 0.3, FUNCTION),
    Maximum("w7", "startup", "pss_mib", "MiB", 80 / _MIB_IN_MB, INLINE),
    MinRatio("w8", "frame", _MLSERVER_CODECS, 3, {}, f"{OURS}, JSON"),
    MinRatio("w8", "array", _MLSERVER_CODECS, 3, {}, f"{OURS}, JSON"),
    MinRatio("w8", "strings", _MLSERVER_CODECS, 3, {}, f"{OURS}, JSON"),
    Maximum("w9", "models", "ready_s", "s", 10, at={"models": 1000}),
    Maximum("w9", "models", "pss_mib", "MiB", 200 / _MIB_IN_MB, at={"models": 1000}),
    Maximum("w10", "idle", "ratio", "times the median without idle connections", 1.1),
    Maximum("w11", _TAIL, "tail_ratio", "", 10),
    MinRatio("w12", "token streams", _STREAMS, 3, {"streams": 1000}),
    MinRatio("w12", "token streams", _STREAMS, 3, {"streams": 5000}),
)
