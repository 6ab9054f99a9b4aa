"""The tests on unchanged code: which lines each test runs, and how long it takes."""

import hashlib
import json
import pickle
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import coverage

from benchmarks.mutation.child import Job, run
from benchmarks.mutation.mutants import Mutant
from benchmarks.mutation.targets import ROOT, Target

_OF_PROCESSES = 5  # tests for a line that none has run
_START_S = 0.05  # what any test costs
_OF_VARIANT = 0.8


@dataclass(frozen=True)
class Baseline:
    """CPU seconds by test, and those that it waited; tests by file below `src` and line: "" is import, or a process."""

    seconds: dict[str, float]
    waits: dict[str, float]
    lines: dict[str, dict[int, set[str]]]
    libraries: list[str]

    def tests(self, mutant: Mutant) -> list[str]:
        """Return the tests that run the line of a mutant, the most promising first.

        A line that is imported may matter to every test: those of files that import the module by its name come first,
        then those that run others of its lines. A line that no test has run may be one of processes that are killed
        before they report theirs: it has the tests that wait longest for others.
        """
        lines = self.lines.get(mutant.module, {})
        found = lines.get(mutant.line, set()) | lines.get(mutant.statement, set())
        if not found:
            return sorted(self.waits, key=self.waits.__getitem__, reverse=True)[:_OF_PROCESSES]
        if not mutant.is_imported and "" not in found:
            return self._in_order(found, lines)
        tests = self._in_order({test for test in self.seconds if _imports(_file_of(test), mutant.module)}, lines)
        for others in (found, set().union(*lines.values()), self.seconds.keys()):
            tests += self._in_order(others - set(tests), lines)
        return tests

    def _in_order(self, tests: AbstractSet[str], lines: Mapping[int, AbstractSet[str]]) -> list[str]:
        """Return first those that run lines of the module which few others run, and take little time.

        Variants of one test function hardly differ in what they run: each further one counts less. Tests that run none
        of these lines come last, the shortest first, so that most of them are tried.
        """
        values: Counter[str] = Counter()
        for runs in lines.values():
            values.update(dict.fromkeys(runs & tests, 1 / len(runs)))
        known = tests & self.seconds.keys()
        worth = {test: values[test] / (_START_S + self.seconds[test]) for test in known}
        variants: Counter[str] = Counter()
        for test in sorted(known, key=lambda test: (-worth[test], test)):
            function = test.partition("[")[0]
            worth[test] *= _OF_VARIANT ** variants[function]
            variants[function] += 1
        return sorted(known, key=lambda test: (-worth[test], self.seconds[test], test))


def measure(target: Target, tree: Path, folder: Path) -> Baseline:
    """Run the target's tests once under coverage; tests that fail on unchanged code are left out, with a message.

    The result is kept in the folder until the sources or the tests change.
    """
    folder.mkdir(parents=True, exist_ok=True)
    cache_file = folder / f"baseline-{_digest(target, tree)}.pickle"
    if not cache_file.exists():
        cache_file.write_bytes(pickle.dumps(_measure(target, tree, folder)))
    found: Baseline = pickle.loads(cache_file.read_bytes())
    return found


def _digest(target: Target, tree: Path) -> str:
    files = [path for name in target.tests for path in sorted((ROOT / name).rglob("*.py")) or [ROOT / name]]
    digest = hashlib.sha256()
    for path in [*files, *sorted(tree.rglob("*.py"))]:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _measure(target: Target, tree: Path, folder: Path) -> Baseline:
    data = folder / ".coverage"
    for earlier in (data, folder / "outcome.json"):  # a run that breaks off must not leave those of another
        earlier.unlink(missing_ok=True)
    options = ("-p", "pytest_cov", "--cov", "--cov-context=test", "--cov-report=")
    job = Job(tree, folder, target.tests, {}, options, {"COVERAGE_FILE": str(data)})
    status = run(job)
    if not (folder / "outcome.json").exists():
        raise SystemExit(f"{target.name}: the tests did not run (exit status {status}), see {folder / 'output.txt'}")
    report = json.loads((folder / "outcome.json").read_text())
    if report["failed"]:
        print(f"{target.name}: left out, because they fail on unchanged code: {report['failed']}", file=sys.stderr)
    seconds = {t: s for t, s in report["seconds"].items() if t not in report["failed"]}
    if not seconds:
        raise SystemExit(f"{target.name}: no test passed (exit status {status}), see {folder / 'output.txt'}")
    waits = {test: report["waits"][test] for test in seconds}
    return Baseline(seconds, waits, runners_by_line(data, tree, seconds), report["libraries"])


def runners_by_line(data: Path, tree: Path, tests: Iterable[str]) -> dict[str, dict[int, set[str]]]:
    """Return the tests by file and line. What the setup of a test runs may be a fixture that the tests of its file
    share."""
    by_file: dict[str, set[str]] = {}
    for test in tests:
        by_file.setdefault(_file_of(test), set()).add(test)
    measured = coverage.CoverageData(str(data))
    measured.read()
    found: dict[str, dict[int, set[str]]] = {}
    for file in measured.measured_files():
        path = Path(file)
        if path.is_relative_to(tree):
            found[str(path.relative_to(tree))] = {
                line: set().union(*(_tests_of(context, by_file) for context in contexts))
                for line, contexts in measured.contexts_by_lineno(file).items()
            }
    return found


def _tests_of(context: str, by_file: Mapping[str, AbstractSet[str]]) -> AbstractSet[str]:
    test, _, phase = context.rpartition("|")
    return by_file.get(_file_of(test), {test}) if phase == "setup" else {test}


@cache
def _imports(file: str, module: str) -> bool:
    """Return whether a test file imports a module, named by its path, by its own name."""
    package, _, name = module.removesuffix(".py").removesuffix("/__init__").replace("/", ".").rpartition(".")
    package, name = re.escape(package), re.escape(name)
    pattern = rf"^from {package}(?:\.{name} import| import [^)]{{0,400}}\b{name}\b)"
    return re.search(pattern, (ROOT / file).read_text(), re.M) is not None


def _file_of(test: str) -> str:
    return test.partition("::")[0]
