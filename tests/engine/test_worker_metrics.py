"""Metrics of saturation: workers by state, CPU and memory of their processes, delay of the event loop, GPUs."""

import asyncio
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import dragoman
from dragoman.core.calls import Infer, Request
from dragoman.core.spec import ModelSpec
from dragoman.core.tensor import Tensor
from dragoman.engine.gpus import Gpus
from dragoman.engine.loop_monitor import LoopMonitor
from dragoman.system.process import GroupUsage
from dragoman.workers.local import ThreadPool

RELEASE = threading.Event()


@dragoman.model
def waits(x: float) -> float:
    RELEASE.wait(20)
    return x


async def test_a_thread_is_busy_while_it_computes() -> None:
    RELEASE.clear()
    pool = ThreadPool(ModelSpec(name="m", uri="", runtime="python", target=waits, placement="thread"), lambda: None)
    await pool.start()
    assert pool.states() == {"busy": 0, "idle": 1}
    call: Any = pool.call(Request(Infer({"x": Tensor.of([1.0])}), "m"))
    answer = asyncio.ensure_future(call)
    async with asyncio.timeout(20):
        while pool.states() != {"busy": 1, "idle": 0}:
            await asyncio.sleep(0.001)
        RELEASE.set()
        await answer
        while pool.states() != {"busy": 0, "idle": 1}:
            await asyncio.sleep(0.001)
    await pool.close()


def test_usage_of_a_group_has_that_of_its_programs() -> None:
    code = "import subprocess, sys; print(1, flush=True); subprocess.run([sys.executable, '-c', 'input()'])"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        before = time.monotonic()
        while time.monotonic() < before + 20:
            cpu_s, memory = GroupUsage().read()[process.pid]
            alone = int(Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[21]) * 4096
            if cpu_s > 0 and memory > 1.3 * alone:
                break
        else:
            pytest.fail("the memory of the second process is not counted")
        process.communicate(b"\n")
    assert process.pid not in GroupUsage().read()


async def test_a_blocked_loop_counts_as_often_as_requests_would_have_waited() -> None:
    monitor = LoopMonitor()
    running = asyncio.create_task(monitor.run())
    await asyncio.sleep(0)
    time.sleep(1.3)
    await asyncio.sleep(0.01)
    (family,) = monitor.families()
    (delays,) = family.distributions
    running.cancel()
    assert sum(delays.counts) >= 4  # late by 1.05, 0.8, 0.55, 0.3 and perhaps 0.05 s
    assert delays.sum >= 2.6


class NoUtilization(Exception):
    pass


def test_gpus_are_those_that_the_driver_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver is a stand-in: this machine has no GPU."""

    def rates(device: int) -> Any:
        if device == 1:
            raise NoUtilization
        return SimpleNamespace(gpu=37, memory=5)

    driver = SimpleNamespace(
        __spec__=SimpleNamespace(),
        NVMLError=NoUtilization,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda number: number,
        nvmlDeviceGetMemoryInfo=lambda _: SimpleNamespace(used=3 << 30, total=80 << 30),
        nvmlDeviceGetUtilizationRates=rates,
        nvmlDeviceGetUUID=lambda number: f"GPU-{number}",
    )
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    values = {family.name: [(s.labels, s.value) for s in family.samples] for family in Gpus().families()}
    assert values == {
        "dragoman_gpu_memory_used_bytes": [({"gpu": "0", "uuid": "GPU-0"}, 3 << 30)],
        "dragoman_gpu_memory_total_bytes": [({"gpu": "0", "uuid": "GPU-0"}, 80 << 30)],
        "dragoman_gpu_utilization_ratio": [({"gpu": "0", "uuid": "GPU-0"}, 0.37)],
    }
