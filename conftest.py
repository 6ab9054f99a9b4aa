"""Settings of all tests: hypothesis profiles, tests that run alone, and reports that any terminal can print."""

import fcntl
import gc
import os
import tempfile
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import settings

# No deadline, since the machine may be busy. The same examples in each run, so that a run can be repeated: more of them
# find nothing new. `--hypothesis-profile=explore` draws others.
settings.register_profile("default-run", deadline=None, derandomize=True, max_examples=50)
settings.register_profile("explore", deadline=None)
settings.load_profile("default-run")


# Threads of PyTorch and XGBoost sleep while they wait: by default they spin, at the cost of other test processes.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Start many processes, compute much, or wait for timeouts.
SLOW = (
    "tests/docs/test_docs_run.py",
    "tests/e2e/",
    "tests/features/simulators/test_umbridge_client.py",
    "tests/features/simulators/test_umbridge_readiness.py",
    "tests/features/simulators/test_umbridge_start.py",
    "tests/features/text/generation/",
    "tests/test_attack_suite.py",
    "tests/test_benchmarks.py",
    "tests/test_performance.py",
    "tests/workers/",
)


# Tests outside of `tests/features` that combine features: folders, files, tests. They are left out if one is missing.
COMBINED = tuple((Path(__file__).parent / "tests" / "combined.txt").read_text().split())
MISSING = [
    name
    for name in ("check", "cluster", "kserve", "mlserver", "simulators", "text", "triton")
    if find_spec(f"dragoman_{name}") is None
]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files that may not be importable without a feature."""
    path = collection_path.relative_to(config.rootpath).as_posix() + "/" * collection_path.is_dir()
    return True if MISSING and path in COMBINED else None


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "alone: measures time or memory, so no other test runs at the same time")
    config.addinivalue_line("markers", "slow: left out of the quick run, `./scripts/test -m 'not slow'`")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the objects of imported modules and of tests out of the garbage collector."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.startswith(SLOW):
            item.add_marker("slow")
        if MISSING and item.nodeid.partition("[")[0] in COMBINED:
            item.add_marker(pytest.mark.skip(f"needs {', '.join(MISSING)}"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Hold back the other test processes of pytest-xdist while a test with the marker `alone` runs."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if run is None:
        return (yield)
    base = Path(tempfile.gettempdir()) / f"dragoman-tests-{run}"
    alone = item.get_closest_marker("alone") is not None
    with _locked(base.with_suffix(".turn"), fcntl.LOCK_EX):  # first come, first served: readers cannot starve a writer
        lock = _locked(base.with_suffix(".run"), fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        lock.__enter__()
    try:
        return (yield)
    finally:
        lock.__exit__(None, None, None)


@contextmanager
def _locked(path: Path, kind: int) -> Iterator[None]:
    with path.open("wb") as file:
        fcntl.flock(file, kind)
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_report_to_serializable(report: pytest.CollectReport | pytest.TestReport) -> None:
    """Escape lone surrogates in captured logs: pytest-xdist sends reports as UTF-8 and ends where it cannot."""
    report.sections = [(name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections]
