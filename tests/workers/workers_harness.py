"""Helpers for tests of worker pools: pools, requests, conditions, child processes."""

import asyncio
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dragoman import plugins
from dragoman.core.calls import Infer, Inference, Request
from dragoman.core.spec import ModelSpec
from dragoman.core.tensor import Tensor
from dragoman.system.coroutines import complete
from dragoman.workers.pool import Pool
from dragoman.workers.process import ProcessPool

MODELS = Path(__file__).with_name("worker_models.py")
PLACEMENTS = ("inline", "thread", "process")


def spec_of(model: str, **options: Any) -> ModelSpec:
    return ModelSpec(name="m", runtime=f"{MODELS}:{model}", **options)


@asynccontextmanager
async def pool_of(placement: str, model: str, **options: Any) -> AsyncIterator[Pool]:
    pool: Pool = plugins.find("pools", placement)(spec_of(model, **options), lambda: None)
    try:
        await pool.start()
        yield pool
    finally:
        await pool.close()


@asynccontextmanager
async def processes(
    model: str, on_change: Callable[[], None] = lambda: None, **options: Any
) -> AsyncIterator[ProcessPool]:
    pool = ProcessPool(spec_of(model, **options), on_change)
    try:
        await pool.start()
        yield pool
    finally:
        await pool.close()


def make_request(n: int = 0, deadline_s: float | None = None, **parameters: Any) -> Request[Inference]:
    values = {k: str(v) for k, v in parameters.items()}
    return Request(Infer({"n": Tensor.of(np.array([n]))}, (), values), "m", "", "id-1", deadline_s)


async def call(pool: Pool, n: int = 0, deadline_s: float | None = None, **parameters: Any) -> Inference:
    """Return the response of a pool to `make_request` with these arguments."""
    return await complete(pool.call(make_request(n, deadline_s, **parameters)))


def print_outcomes(fault: str, results: Iterable[object]) -> Counter[str]:
    """Print how many calls were answered right, and with which errors; return the counts. `pytest -s` shows them."""
    counts = Counter(type(each).__name__ if isinstance(each, BaseException) else "right" for each in results)
    text = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
    print(f"\n{fault}: {counts.total()} calls, {text}")
    return counts


def first_value(response: Inference) -> int:
    return int(next(iter(response.outputs.values())).data.flat[0])


async def wait_until(condition: Callable[[], Any], limit_s: float = 60.0) -> None:
    """Wait until `condition()` is true; fail after `limit_s`."""
    end_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end_s, "waited too long"
        await asyncio.sleep(0.002)


def children() -> set[int]:
    """Return the worker processes that this test has started and not yet reaped; see `forget_children`."""
    return {pid for pid in _all_children() - EARLIER if _is_worker(pid)}


EARLIER: set[int] = set()
"""Child processes of earlier tests: one that has ended but is not reaped looks like a worker."""


@pytest.fixture(autouse=True)
def forget_children() -> None:
    """Exclude the child processes of earlier tests from `children`; importing this applies it to each test."""
    EARLIER.clear()
    EARLIER.update(_all_children())


def _all_children() -> set[int]:
    pids: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # a thread that has exited meanwhile
            pids |= {int(pid) for pid in (task / "children").read_text().split()}
    return pids


def _is_worker(pid: int) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return b"dragoman.workers.process_group" in command or not command  # empty for a process that exits or starts


def descriptors() -> set[str]:
    return {f"{fd}" for fd in os.listdir("/proc/self/fd")}
