"""Settings of all tests: hypothesis profiles, tests that run alone, and reports that any terminal can print."""

import fcntl
import gc
import os
import sys
import tempfile
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest
from _pytest.assertion import rewrite
from hypothesis import HealthCheck, settings

# No deadline and no check of the time that draws take, since the machine may be busy, or an emulation. The same
# examples in each run, so that a run can be repeated: more of them find nothing new. `--hypothesis-profile=explore`
# draws others.
_BUSY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("default-run", _BUSY, derandomize=True, max_examples=50)
settings.register_profile("explore", _BUSY)
settings.load_profile("default-run")


# Threads of PyTorch and XGBoost sleep while they wait: by default they spin, at the cost of other test processes.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# So do those of OpenBLAS, which NumPy starts: 2^4 cycles of waiting instead of 2^26, a sixth of the time of an import.
os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")

# What starts many processes, computes much or waits: folders, files of more than four seconds of CPU time, and tests
# that alone import a large package.
# Tests of all sources, which find those of the features only where they are.
SCANS = ("tests/house/", "tests/core/test_documents.py", "tests/core/test_abandoned_folders.py")
SLOW = (
    "tests/console/",
    "tests/deploy/",
    "tests/docs/",
    "tests/e2e/",
    "tests/features/check/",
    "tests/features/cluster/",
    "tests/features/demo/",
    "tests/features/kserve/",
    "tests/features/mlserver/",
    "tests/features/simulators/",
    "tests/features/telemetry/",
    "tests/features/text/engines/",
    "tests/features/text/generation/",
    "tests/features/triton/",
    "tests/newest_clients/",
    "tests/openapi/",
    "tests/test_",
    "tests/workers/",
    "tests/access/test_owners.py",
    "tests/access/test_process_keys.py",
    "tests/engine/test_load_metrics.py",
    "tests/engine/test_placement.py",
    "tests/engine/test_trial.py",
    "tests/engine/test_warmup.py",
    "tests/features/text/apis/test_anthropic_threads.py::test_the_tool_loop_of_the_package",
    "tests/features/text/apis/test_anthropic_threads.py::test_threads_of_the_package",
    "tests/features/text/apis/test_lmi_control.py",
    "tests/features/text/apis/test_model_defaults.py",
    "tests/features/text/apis/test_ollama.py::test_the_facts_of_a_folder",
    "tests/features/text/apis/test_text_abuse.py",
    "tests/features/text/apis/test_text_engine.py",
    "tests/features/text/apis/test_text_replicas.py",
    "tests/features/text/apis/test_tool_calls.py",
    "tests/features/text/apis/test_vision.py",
    "tests/house/test_names_of_bases.py",
    "tests/rest/test_asgi.py",
    "tests/rest/test_http_hostile.py",
    "tests/rest/test_rest_garbage.py",
    "tests/rest/test_rest_properties.py",
    "tests/runtimes/test_hostile_tensorflow.py",
    "tests/runtimes/test_huggingface_tasks.py",
    "tests/runtimes/test_mlflow_scoring.py",
    "tests/runtimes/test_runtime_huggingface.py",
    "tests/runtimes/test_sentence_transformers.py",
)


# What a release consists of, and pages that take long to follow: run by `./scripts/test-release`.
RELEASE = (
    "tests/deploy/test_release.py",
    "tests/docs/test_docs_run.py::test_a_page_works_as_written[docs/scientific.md]",
    "tests/docs/test_notebook.py",
    "tests/docs/test_operate_page.py",
    "tests/docs/test_recipes.py::test_a_recipe_works_as_written[chat-with-tools]",
    "tests/docs/test_recipes.py::test_a_recipe_works_as_written[embeddings-for-rag]",
    "tests/docs/test_recipes.py::test_a_recipe_works_as_written[scikit-learn-in-production]",
    "tests/docs/test_recipes.py::test_a_recipe_works_as_written[score-a-parquet-file]",
    "tests/docs/test_recipes.py::test_a_recipe_works_as_written[smollm2-on-a-laptop]",
    "tests/docs/test_site.py::test_every_page_is_built",
    "tests/docs/test_site.py::test_every_public_name_is_documented",
    "tests/docs/test_site.py::test_pages_load_nothing_from_other_hosts_and_can_be_searched",
    "tests/features/demo/test_demo.py::test_the_first_chat_is_a_sentence",
    "tests/features/simulators/derivatives/test_sampling_examples.py",
    "tests/house/test_names_of_bases.py",
    "tests/openapi/test_generated_client.py",
    "tests/test_attack_suite.py::test_an_attack_is_measured_while_a_client_sends_requests",
)


# Tests outside of `tests/features` that combine features: folders, files, tests. They are left out if one is missing.
COMBINED = tuple((Path(__file__).parent / "tests" / "combined.txt").read_text().split())
FEATURES = (
    "audit", "batches", "check", "cluster", "demo", "kserve", "mlserver", "simulators", "telemetry", "text", "triton",
    "usage",
)  # fmt: skip
MISSING = [name for name in FEATURES if find_spec(f"dragoman_{name}") is None]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files that may not be importable without a feature, and in the quick part the slow ones."""
    path = collection_path.relative_to(config.rootpath).as_posix() + "/" * collection_path.is_dir()
    return True if _is_left_out(path, config) else None


def _is_left_out(path: str, config: pytest.Config) -> bool:
    quick = config.option.markexpr == "not slow"
    return bool(MISSING and path in COMBINED) or (quick and path.startswith(SLOW))


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("dragoman")
    group.addoption("--passed-to", type=Path, metavar="FILE", help="write the ids of the tests that passed")
    group.addoption("--passed-in", type=Path, metavar="FILE", help="leave out the tests whose ids are in FILE")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "alone: measures time or memory, so no other test runs at the same time")
    config.addinivalue_line("markers", "slow: left out of the quick run, `./scripts/test -m 'not slow'`")


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Keep the objects of imported modules and of tests out of the garbage collector."""
    gc.disable()
    try:
        if session.config.args == session.config.getini("testpaths"):
            _rewrite_own_share(session.config)
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def _rewrite_own_share(config: pytest.Config) -> None:
    """Rewrite the asserts of each n-th file in one of n processes of pytest-xdist: all will import all of them.

    Without this each process rewrites all that are new: it imports a file while the others do.
    """
    worker, count = os.environ.get("PYTEST_XDIST_WORKER"), int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if worker is None or sys.dont_write_bytecode:
        return
    root = config.rootpath
    files = sorted(root.glob("tests/**/test_*.py"))
    files = [path for path in files if not _is_left_out(path.relative_to(root).as_posix(), config)]
    for path in files[int(worker.removeprefix("gw")) :: count]:
        cached = rewrite.get_cache_dir(path) / (path.stem + rewrite.PYC_TAIL)
        if rewrite._read_pyc(path, cached) is None and rewrite.try_makedirs(cached.parent):
            source_hash, code = rewrite._rewrite_test(path, config)
            rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, source_hash, cached)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    passed = config.getoption("--passed-in")
    if passed is not None:
        done = {name for name in passed.read_text().split("\n") if not name.startswith(SCANS)}
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in done])
        items[:] = [item for item in items if item.nodeid not in done]
    for item in items:
        if item.nodeid.startswith(SLOW):
            item.add_marker("slow")
        if item.nodeid.startswith(RELEASE) and "DRAGOMAN_TEST_RELEASE" not in os.environ:
            item.add_marker(pytest.mark.skip("slow; run by ./scripts/test-release"))
        if MISSING and item.nodeid.partition("[")[0] in COMBINED:
            item.add_marker(pytest.mark.skip(f"needs {', '.join(MISSING)}"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    file = config.getoption("--passed-to")
    if file is not None:
        passed = [report.nodeid for report in terminalreporter.getreports("passed")]
        file.write_text("".join(f"{name}\n" for name in passed if "\n" not in name))


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
