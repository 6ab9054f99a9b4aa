"""Change the code in small ways and count how many of the changes the tests detect: ./scripts/mutation --help"""

import argparse
import compileall
import datetime
import py_compile
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.mutation import page
from benchmarks.mutation.baseline import Baseline, measure
from benchmarks.mutation.child import Job, preload, run, timed_out
from benchmarks.mutation.mutants import Mutant, Mutants
from benchmarks.mutation.results import RESULTS, Result, Results
from benchmarks.mutation.targets import ROOT, SOURCE, TARGETS, Target

WORK = ROOT / "build" / "mutation"
_TESTS_S = 60.0  # of CPU time, with coverage


def main() -> None:
    options = _parse()
    results = Results.load(options.results)
    for target in TARGETS:
        if not options.targets or target.name in options.targets:
            _run_target(target, options, results)
    if options.results == RESULTS:
        page.write(results)
    print(results.table())
    sys.exit(not results.good_enough())


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser("mutation", description=__doc__)
    parser.add_argument("targets", nargs="*", choices=[*(t.name for t in TARGETS), []], help="default: every target")
    parser.add_argument("--all", action="store_true", help="every mutant (hours), not a sample")
    parser.add_argument(
        "--share", type=float, default=0.1, help="fraction of the mutants of each file; default %(default)s"
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of the sample; default %(default)s")
    parser.add_argument("--files", default="", help="only files whose path contains this text")
    parser.add_argument("--results", type=Path, default=RESULTS, help="default %(default)s")
    return parser.parse_args()


def _commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def _run_target(target: Target, options: argparse.Namespace, results: Results) -> None:
    tree = _copy_sources(WORK / target.name / "src")
    folder = WORK / target.name
    began_s = time.monotonic()
    baseline = measure(target, tree, folder)
    preload(baseline.libraries)
    results.begin(
        target.name, whole=not options.files, date=f"{datetime.date.today()}", commit=_commit(), seed=options.seed
    )
    print(
        f"{target.name}: {len(baseline.seconds)} tests, {time.monotonic() - began_s:.0f} s on unchanged code",
        flush=True,
    )
    for path in target.paths():
        module = str(path.relative_to(SOURCE))
        if options.files in module:
            _run_file(target, Mutants(path, module), tree, baseline, options, results)


def _run_file(
    target: Target, mutants: Mutants, tree: Path, baseline: Baseline, options: argparse.Namespace, results: Results
) -> None:
    found: list[Result] = []
    for index in _sample(mutants, options):
        mutant = mutants.render(index)
        if mutant is not None:
            found.append(_judge(mutant, tree, baseline, WORK / target.name))
            if not found[-1].killed:
                print(f"  {found[-1]}", flush=True)
    results.record(target.name, mutants.module, len(mutants), found)
    killed = sum(result.killed for result in found)
    print(f"{mutants.module}: {killed} of {len(found)} killed, of {len(mutants)} mutants", flush=True)


def _sample(mutants: Mutants, options: argparse.Namespace) -> list[int]:
    total = len(mutants)
    count = total if options.all else min(total, max(1, round(options.share * total)))
    return sorted(random.Random(f"{options.seed} {mutants.module}").sample(range(total), count))


def _judge(mutant: Mutant, tree: Path, baseline: Baseline, folder: Path) -> Result:
    """Run the tests that reach the mutated line, in the order of the baseline, until one fails or for a minute."""
    tests: dict[str, float] = {}
    total_s = 0.0
    for test in baseline.tests(mutant):
        if tests and total_s + baseline.seconds[test] > _TESTS_S:
            break
        tests[test] = baseline.seconds[test]
        total_s += tests[test]
    if not tests:
        return Result.of(mutant, "no test")
    path = tree / mutant.module
    original = path.read_text()
    path.write_text(mutant.source)
    try:
        files = sorted({test.partition("::")[0] for test in tests})
        status = run(Job(tree, folder, files, tests))
    finally:
        path.write_text(original)
    return Result.of(mutant, "timeout" if timed_out(status) else "killed" if status not in (0, 5) else "survived")


def _copy_sources(tree: Path) -> Path:
    """Return a compiled copy of the sources. Mutants are written there, so that child processes of tests use them."""
    shutil.rmtree(tree, ignore_errors=True)
    shutil.copytree(SOURCE, tree, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    # checked by content: a mutant is written within the same second and may have the same length
    compileall.compile_dir(tree, quiet=1, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH)
    return tree


if __name__ == "__main__":
    main()
