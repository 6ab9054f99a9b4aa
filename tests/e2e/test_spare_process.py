"""The first model in a process runs in a fork of `dragoman serve`, which has imported what a worker needs."""

import os
import signal
import sys
from pathlib import Path

import pytest

from e2e.server_process import running_server, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere every worker is a new interpreter")

MODELS = """
import os, random, sys, threading
import numpy as np
import dragoman

def report(x: np.ndarray) -> list[str]:
    main = sys.modules["__main__"]
    return [*sys.argv, str("__file__" in vars(main)), os.readlink("/proc/self/fd/0"), str(random.random()),
            str(np.random.random()), str(threading.active_count())]

def other(x: np.ndarray) -> list[str]:
    return report(x)

class Inline(dragoman.Model):
    inputs = (dragoman.TensorSpec("x", dragoman.FP32, (1,)),)
    placement = "inline"

    def infer(self, call):
        return {"y": call.inputs["x"]}
"""


def is_fork(pid: int) -> bool:
    return b"dragoman.workers.process_group" not in Path(f"/proc/{pid}/cmdline").read_bytes()


def test_a_fork_is_like_a_new_interpreter(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(MODELS)
    with running_server(f"{tmp_path}/m.py:report", f"{tmp_path}/m.py:other") as process:
        assert sorted(map(is_fork, process.workers())) == [False, True]
        reports = [process.infer(name, [1.0])[1]["outputs"][0]["data"] for name in ("report", "other")]
        assert {tuple(each[:3]) for each in reports} == {("-c", "False", "/dev/null")}
        assert len({each[3] for each in reports}) == len({each[4] for each in reports}) == 2  # random numbers
        assert {each[5] for each in reports} == {"1"}  # thread


def test_a_worker_that_was_killed_comes_again_as_a_new_interpreter(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(MODELS)
    with running_server(f"{tmp_path}/m.py:report") as process:
        (worker,) = process.workers()
        assert is_fork(worker)
        os.kill(worker, signal.SIGKILL)
        wait_until(lambda: not Path(f"/proc/{worker}").exists(), "the worker is reaped")
        process.wait_until_ready()
        assert process.infer("report", [1.0])[0] == 200
        assert [*map(is_fork, process.workers())] == [False]
        assert f"worker process {worker}" in process.log()
        assert "signal SIGKILL" in process.log()


def test_a_server_without_models_in_processes_keeps_no_process(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(MODELS)
    with running_server(f"{tmp_path}/m.py:Inline", "--placement", "inline") as process:
        process.wait_for_log("ready in")
        assert process.workers() == []


def test_a_fork_ends_with_its_server(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(MODELS)
    with running_server(f"{tmp_path}/m.py:report") as process:
        workers = process.workers()
        os.kill(process.popen.pid, signal.SIGKILL)
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers), "the worker ends")
