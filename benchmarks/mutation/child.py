"""Run pytest in a forked process, in which large libraries, but not Dragoman, are already imported."""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import signal
import sys
import sysconfig
import time
import traceback
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, settings

# pytest looks for plugins in the metadata of every installed package, which takes longer than most tests
_PLUGINS = ("pytest_asyncio.plugin", "_hypothesis_pytestplugin")
_PR_SET_CHILD_SUBREAPER = 36
# Time limit of a test in seconds, in addition to a multiple of its time on unchanged code.
_CPU_S = 2.0
_WALL_S = 40.0


@dataclass(frozen=True)
class Job:
    """Tests to be run with the sources of a tree.

    With `seconds`, the CPU time of test ids, only these are run, in that order, until one fails or takes far longer.
    """

    tree: Path
    folder: Path
    files: Sequence[str]
    seconds: Mapping[str, float] = field(default_factory=dict)
    options: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


def preload(modules: Iterable[str]) -> None:
    """Import libraries once, so that each forked process has them at once."""
    for name in (*_PLUGINS, *modules):
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # so that collections in a forked process neither visit nor copy what is here
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # so that no process outlives its test


def run(job: Job) -> int:
    """Return the exit status of pytest; negative if a signal ended it."""
    job.folder.mkdir(parents=True, exist_ok=True)
    pid = os.fork()
    if not pid:
        _be_pytest(job)
    _, status = os.waitpid(pid, 0)
    _end_children()
    return os.waitstatus_to_exitcode(status)


def timed_out(status: int) -> bool:
    return status in (-signal.SIGPROF, -signal.SIGALRM)


def _end_children() -> None:
    """Kill and reap every process below this one."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    while found := children.read_text().split():
        for child in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(child), signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, 0)


def _be_pytest(job: Job) -> None:
    status = 70
    try:
        os.setsid()
        output = os.open(job.folder / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ.update({"PYTHONPATH": str(job.tree), "PYTHONDONTWRITEBYTECODE": "1", **job.environment})
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        sys.dont_write_bytecode = True
        sys.path.insert(0, str(job.tree))
        options = ["-q", "-p", "no:cacheprovider", "--tb=short", "--assert=plain", "--hypothesis-seed=0", *job.options]
        options += [word for plugin in _PLUGINS for word in ("-p", plugin)]
        status = int(pytest.main([*options, *job.files], plugins=[_Plugin(job)]))
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(status)


class _Plugin:
    """Select and order tests; record failures and durations."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._seconds: dict[str, float] = {}
        self._waits: dict[str, float] = {}
        self._failed: list[str] = []
        self._skipped: set[str] = set()

    def pytest_configure(self) -> None:
        """Disable shrinking, because only failure matters, and the example database, which other mutants share."""
        settings.register_profile(
            "mutation", settings.get_profile("default-run"), phases=(Phase.explicit, Phase.generate), database=None
        )
        settings.load_profile("mutation")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        order = {test: place for place, test in enumerate(self._job.seconds)}
        if order:
            items[:] = sorted((i for i in items if i.nodeid in order), key=lambda i: order[i.nodeid])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Measure CPU time: other load of the machine does not affect it."""
        usual_s = self._job.seconds.get(item.nodeid)
        if usual_s is not None:  # the signals end the process
            signal.setitimer(signal.ITIMER_PROF, _CPU_S + 5 * usual_s)
            signal.setitimer(signal.ITIMER_REAL, _WALL_S + 50 * usual_s)
        before_s, began_s = time.process_time(), time.monotonic()
        result = yield
        self._seconds[item.nodeid] = time.process_time() - before_s
        self._waits[item.nodeid] = time.monotonic() - began_s - self._seconds[item.nodeid]
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped:
            self._skipped.add(report.nodeid)
        if report.failed and report.nodeid not in self._failed:
            self._failed.append(report.nodeid)
            self._leave_early(pytest.ExitCode.TESTS_FAILED)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self._leave_early(exitstatus)
        seconds = {test: s for test, s in self._seconds.items() if test not in self._skipped}
        outcome = {"seconds": seconds, "waits": self._waits, "failed": self._failed, "libraries": _libraries()}
        (self._job.folder / "outcome.json").write_text(json.dumps(outcome))

    def _leave_early(self, status: int) -> None:
        if self._job.seconds:
            print("failed:", *self._failed, flush=True)
            os._exit(status)


def _libraries() -> list[str]:
    """Return the imported modules of the standard library and of other packages."""
    folders = tuple(sysconfig.get_path(kind) for kind in ("stdlib", "platlib", "purelib"))
    found = {name: getattr(module, "__file__", None) or "" for name, module in list(sys.modules.items())}
    return [name for name, file in found.items() if file.startswith(folders) and not name.startswith("test")]
