"""Results of mutants, kept in a file, and the score with its confidence interval."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.mutation.mutants import Mutant
from benchmarks.mutation.targets import ROOT

RESULTS = ROOT / "benchmarks" / "results" / "mutation.json"
LEAST = 0.9
_Z = 1.96  # for 95 %


@dataclass(frozen=True)
class Result:
    """The verdict of one mutant: killed, timeout, survived, or "no test" if no test runs its line."""

    module: str
    line: int
    before: str
    after: str
    verdict: str

    @classmethod
    def of(cls, mutant: Mutant, verdict: str) -> "Result":
        return cls(mutant.module, mutant.line, mutant.before, mutant.after, verdict)

    @property
    def killed(self) -> bool:
        return self.verdict in ("killed", "timeout")

    def __str__(self) -> str:
        return f"{self.verdict} {self.module}:{self.line}\n    - {self.before}\n    + {self.after}"


@dataclass
class Results:
    """By target: commit, date and seed of its last run, and the verdicts by file."""

    path: Path
    targets: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path) -> "Results":
        return cls(path, json.loads(path.read_text()) if path.exists() else {})

    def begin(self, target: str, *, whole: bool, **about: Any) -> None:
        """Record date and commit of the run of a target; one of the `whole` target replaces the earlier results."""
        if whole:
            self.targets.setdefault(target, {})["files"] = {}
        self.targets.setdefault(target, {"files": {}}).update(about)

    def record(self, target: str, module: str, mutants: int, found: Sequence[Result]) -> None:
        """Replace the results of a file, and write everything to disk."""
        survivors = [asdict(result) for result in found if not result.killed]
        for survivor in survivors:
            del survivor["module"]
        self.targets[target]["files"][module] = {
            "mutants": mutants,
            "tried": len(found),
            "killed": sum(result.killed for result in found),
            "timeouts": sum(result.verdict == "timeout" for result in found),
            "survivors": survivors,
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.targets, indent=1) + "\n")

    def _sums(self, target: str) -> tuple[int, int, int]:
        files = self.targets[target]["files"].values()
        mutants, tried, killed = (sum(file[key] for file in files) for key in ("mutants", "tried", "killed"))
        return mutants, tried, killed

    def table(self) -> str:
        """Return the score of each target as a Markdown table."""
        rows = [
            "| part | mutants | tried | killed | score | 95 % interval | date, commit |",
            "|---|---|---|---|---|---|---|",
        ]
        for target in self.targets:
            mutants, tried, killed = self._sums(target)
            low, high = interval(killed, tried, mutants)
            score = killed / max(1, tried)
            about = self.targets[target]
            cells = (f"{mutants:,}", f"{tried:,}", f"{killed:,}", f"{score:.1%}", f"{low:.1%} to {high:.1%}")
            rows.append(f"| {' | '.join((target, *cells))} | {about['date']}, {about['commit']} |")
        return "\n".join(rows)

    def survivors(self) -> Iterator[Result]:
        """Yield the mutants that no test detected."""
        for target in self.targets.values():
            for module, file in target["files"].items():
                yield from (Result(module, **survivor) for survivor in file["survivors"])

    def good_enough(self) -> bool:
        return all(killed >= LEAST * tried for _, tried, killed in map(self._sums, self.targets))


def interval(killed: int, tried: int, mutants: int) -> tuple[float, float]:
    """Wilson's interval for the share killed among all, with the finite population correction."""
    if not tried:
        return 0.0, 1.0
    z2 = _Z * _Z * max(0, mutants - tried) / max(1, mutants - 1)
    share = killed / tried
    middle = (share + z2 / (2 * tried)) / (1 + z2 / tried)
    half = (z2 * (share * (1 - share) / tried + z2 / (4 * tried * tried))) ** 0.5 / (1 + z2 / tried)
    return middle - half, middle + half
