"""Pools whose number of workers follows the load, and the choice of the worker that is expected to answer first."""

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dragoman.core.calls import Index, Infer, Request
from dragoman.core.errors import DeadlineExceeded, InvalidInput, NotReady
from dragoman.core.spec import LaunchOptions
from dragoman.core.tensor import Tensor
from dragoman.engine.model_files import model_settings
from dragoman.engine_setup import open_engine
from dragoman.workers.process import ProcessPool
from workers.workers_harness import call, children, first_value, forget_children, processes, spec_of, wait_until  # noqa: F401 - a fixture

SOON_S = 0.2
NEVER_S = 3600.0


@asynccontextmanager
async def elastic(
    model: str, fewest: int, most: int, idle_s: float = SOON_S, cost: float = 0.0, **options: Any
) -> AsyncIterator[ProcessPool]:
    launch = LaunchOptions(
        replicas=most,
        min_replicas=fewest,
        min_ready=min(fewest, 1),
        idle_s=idle_s,
        cost=cost,
        **options.pop("launch", {}),
    )
    async with processes(model, launch=launch, replicas=most, **options) as pool:
        yield pool


def states(pool: ProcessPool) -> dict[str, float]:
    counts = pool.states()
    return {"loaded": sum(counts.values()) - counts["waiting"], "waiting": counts["waiting"]}


async def test_calls_that_arrive_at_no_worker_wait_for_one() -> None:
    async with elastic("Echo", 0, 2, cost=NEVER_S) as pool:
        for n in range(2):
            await wait_until(lambda: states(pool) == {"loaded": 0, "waiting": 0})
            await wait_until(lambda: not children())
            assert (pool.ready, pool.unavailable, pool.waiting) == (True, "", "")
            calls = [asyncio.create_task(call(pool, n)) for n in range(9)]
            await asyncio.sleep(0)
            assert pool.waiting == "waiting for worker processes: 0 of 1 are loaded"
            assert states(pool) == {"loaded": 0, "waiting": 1}
            assert [first_value(response) for response in await asyncio.gather(*calls)] == list(range(9)), n
            assert len(children()) == 1


async def test_workers_are_added_while_calls_wait_and_end_when_idle(tmp_path: Path) -> None:
    async with elastic("Actions", 1, 3) as pool:
        go = tmp_path / "go"
        calls = [asyncio.create_task(call(pool, do="hold", begun=tmp_path / f"begun{n}", go=go)) for n in range(5)]
        await wait_until(lambda: len(list(tmp_path.glob("begun*"))) == 3)  # as many as there may be
        assert len(children()) == 3
        go.touch()
        pids = [first_value(response) for response in await asyncio.gather(*calls)]
        assert len(set(pids)) == 3
        await wait_until(lambda: states(pool) == {"loaded": 1, "waiting": 0})
        await wait_until(lambda: len(children()) == 1)
        assert first_value(await call(pool, do="pid")) in pids
        assert pool.ready


async def test_a_worker_that_costs_more_than_the_wait_is_not_started(tmp_path: Path) -> None:
    async with elastic("Actions", 1, 3, cost=NEVER_S) as pool:
        go = tmp_path / "go"
        calls = [asyncio.create_task(call(pool, do="hold", begun=tmp_path / f"begun{n}", go=go)) for n in range(5)]
        await wait_until((tmp_path / "begun0").exists)
        await asyncio.sleep(0.3)  # checks of the load are 0.1 s apart
        assert states(pool) == {"loaded": 1, "waiting": 0}
        go.touch()
        (pid,) = {first_value(response) for response in await asyncio.gather(*calls)}
        os.kill(pid, signal.SIGKILL)  # a lost one is replaced, whatever it costs
        await wait_until(lambda: not pool.ready)
        assert first_value(await call(pool, do="pid")) != pid
        assert states(pool) == {"loaded": 1, "waiting": 0}


async def test_calls_do_not_wait_for_a_worker_that_cannot_be_started(tmp_path: Path) -> None:
    repaired, loaded = tmp_path / "repaired", tmp_path / "loaded"
    parameters = {"loaded": str(loaded), "repaired": str(repaired), "not_ready": "1"}
    async with elastic("LoadsOnce", 0, 2, parameters=parameters) as pool:
        await wait_until(lambda: states(pool)["loaded"] == 0)
        calls = [asyncio.create_task(call(pool, do="pid")) for _ in range(3)]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [NotReady] * 3
        assert str(outcomes[0]).startswith("model 'm' is not ready: UNAVAILABLE; the reason is in the log")
        assert "cannot be started again: failed to load 'm', the weights are gone" in pool.unavailable
        assert not pool.ready
        with pytest.raises(NotReady, match="is not ready: UNAVAILABLE; the reason is in the log"):
            await call(pool, do="pid")
        await wait_until(lambda: pool.ready)  # nothing waits any more, and nothing is tried
        repaired.touch()
        assert first_value(await call(pool, do="pid")) > 0


async def test_each_worker_has_a_gpu_of_its_own_and_no_call_waits_behind_another_while_one_is_idle() -> None:
    launch = LaunchOptions(replicas=2, min_ready=2, devices=("4", "7"))
    async with processes("OnDevice", launch=launch, replicas=2) as pool:

        async def devices() -> Counter[int]:
            slow: dict[str, Any] = {"4": 0.05, "7": 0.05}
            responses = await asyncio.gather(call(pool, **slow), call(pool, **slow))
            return Counter(map(first_value, responses))

        assert await devices() == {4: 1, 7: 1}
        os.kill(children().pop(), signal.SIGKILL)
        await wait_until(lambda: not pool.ready)
        await wait_until(lambda: pool.ready)
        assert await devices() == {4: 1, 7: 1}

        slower: dict[str, Any] = {"4": 0.09}
        longer: dict[str, Any] = {"7": 0.5}
        for _ in range(20):
            last = first_value(await call(pool, **slower))
        assert last == 7
        long = asyncio.create_task(call(pool, **longer))
        await asyncio.sleep(0)
        assert first_value(await call(pool)) == 4  # not behind the long call, of which nothing is known before
        assert first_value(await long) == 7


async def test_calls_go_to_the_worker_that_is_expected_to_answer_first() -> None:
    """Worker 0 is slow. Each is tried with two calls, of which the first is a warm-up."""
    launch = LaunchOptions(replicas=2, min_ready=2, devices=("0", "1"))
    async with processes("OnDevice", launch=launch, replicas=2) as pool:

        async def device() -> int:
            times_s: dict[str, Any] = {"0": 0.6, "1": 0.03}
            return first_value(await call(pool, **times_s))

        found = [await device() for _ in range(8)]
        assert sorted(found) == [0, 0, 1, 1, 1, 1, 1, 1]
        assert found[4:] == [1, 1, 1, 1]
        pairs = [await asyncio.gather(device(), device()) for _ in range(3)]  # both are sooner done one by one
        assert [*chain(*pairs)].count(0) <= 1  # 3 with the one that has fewest calls
        many = await asyncio.gather(*(device() for _ in range(60)))
        assert 0 < Counter(many)[0] < 20  # now the slow one helps


async def test_a_slow_worker_that_is_idle_is_tried_again() -> None:
    """Its estimated time per call shrinks until it is below that of the other one."""
    launch = LaunchOptions(replicas=2, min_ready=2, devices=("0", "1"))
    async with processes("OnDevice", launch=launch, replicas=2, heartbeat_s=0.05) as pool:

        async def device(times_s: dict[str, Any]) -> int:
            return first_value(await call(pool, **times_s))

        slow = {"0": 0.3, "1": 0.02}
        while any(not worker.mean_s for worker in pool.workers()):
            await device(slow)
        assert max(worker.mean_s for worker in pool.workers()) > 0.25
        end_s = time.monotonic() + 60
        while await device({"1": 0.02}) != 0:  # it would be quick now
            assert time.monotonic() < end_s


async def test_batches_start_workers(tmp_path: Path) -> None:
    """A batch that waits for a worker makes the pool grow, and a worker that has started gets one at once."""
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "model.py").write_text(BATCHED)
    (tmp_path / "m" / "dragoman.toml").write_text(CONFIG.format(folder=tmp_path / "m"))
    async with open_engine(str(tmp_path), max_batch_size=4, batch_linger=0.0) as engine:
        (deployment,) = engine.deployments()
        (pool,) = deployment.pools
        block = tmp_path / "m" / "block"

        async def client(n: int) -> tuple[float, int, int]:
            call = Infer({"x": Tensor.of(np.array([[float(n)]]))})
            answer = (await engine.call(Request(call, "m"))).answer.outputs["y"].data
            assert answer.shape == (1, 3)
            return tuple(answer[0])

        await wait_until(lambda: not children())
        block.touch()
        clients = [asyncio.create_task(client(n)) for n in range(12)]
        await wait_until(lambda: [worker.state for worker in pool.workers()] == ["busy", "busy"])
        block.unlink()
        found = await asyncio.gather(*clients)
        assert [value for value, _, _ in found] == [2.0 * n for n in range(12)]
        assert max(rows for _, rows, _ in found) > 1
        assert len({pid for _, _, pid in found}) == 2
        assert pool.ready


async def test_a_call_waits_until_its_deadline_and_the_index_says_for_what(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "model.py").write_text(MODEL)
    (tmp_path / "m" / "dragoman.toml").write_text(CONFIG.format(folder=tmp_path / "m"))
    async with open_engine(str(tmp_path), control_open=True) as engine:
        (deployment,) = engine.deployments()
        await wait_until(lambda: not children())
        block = tmp_path / "m" / "block"
        block.touch()
        call = Infer({"x": Tensor.of(np.array([3.0]))})
        reason = "Request timeout expired: waiting for workers"
        with pytest.raises(DeadlineExceeded, match=f"^{reason}$"):
            await engine.call(Request(call, "m", deadline_s=time.monotonic() + 0.3))
        stream = engine.stream(Request(call, "m", deadline_s=time.monotonic() + 0.3))
        with pytest.raises(DeadlineExceeded, match=f"^{reason}$"):
            await anext(stream)
        assert engine.ready()
        (entry,) = (await engine.call(Request(Index("")))).answer
        assert (entry.state, entry.reason) == ("READY", "waiting for worker processes: 0 of 1 are loaded")
        waiting = asyncio.create_task(engine.call(Request(call, "m")))
        await asyncio.sleep(0)
        block.unlink()
        assert first_value((await waiting).answer) == 6
        assert deployment.reported_reason == ""


MODEL = """
import pathlib, time
import dragoman
import numpy as np

class Double(dragoman.Model):
    def load(self) -> None:
        while pathlib.Path(__file__).with_name("block").exists():
            time.sleep(0.01)

    def predict(self, x: np.ndarray) -> np.ndarray:
        return 2 * x
"""
BATCHED = """
import os, pathlib, time
import dragoman
import numpy as np

class Double(dragoman.Model):
    batched = True

    def predict(self, x: np.ndarray) -> dict[str, np.ndarray]:
        while pathlib.Path(__file__).with_name("block").exists():
            time.sleep(0.01)
        return {"y": np.array([[2 * n, len(x), os.getpid()] for n in x[:, 0]])}
"""
CONFIG = """
[model]
runtime = "python"
uri = "{folder}/model.py:Double"
[model.placement]
replicas = "0..2"
idle_s = 0.2
"""


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ('replicas = "0..16"', (0, 16, 0)),
        ('replicas = "2..4"', (2, 4, 1)),
        ("replicas = 3", (3, 3, 1)),
        ('replicas = "3"\nmin_ready = 2', (3, 3, 2)),
        ('replicas = "2..4"\nmin_ready = 2\ndevices = ["0", "1", "0", "1"]', (2, 4, 2)),
    ],
)
def test_ranges_of_replicas(table: str, expected: tuple[int, int, int], tmp_path: Path) -> None:
    (tmp_path / "dragoman.toml").write_text(f"[model.placement]\n{table}\n")
    settings = model_settings(tmp_path)
    assert settings is not None
    launch = settings["launch"]
    assert (launch.min_replicas, launch.replicas, launch.min_ready) == expected
    assert launch.is_elastic == (expected[0] < expected[1])


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            'replicas = "4..2"',
            r"\[placement\] setting 'replicas': expected a number or a range such as 0..16, got '4..2'",
        ),
        ('replicas = "0..0"', "expected a number or a range such as 0..16, got '0..0'"),
        ('replicas = "..4"', "expected a number or a range such as 0..16, got '..4'"),
        ("replicas = 0", "setting 'replicas': expected at least 1, got 0"),
        ('replicas = "0..4"\nmin_ready = 1', "'placement.min_ready': expected at most the fewest replicas, 0, got 1"),
        ("idle_s = -1", "setting 'idle_s': expected at least 0, got -1"),
        ('replicas = 2\ndevices = ["0"]', "'placement.devices': expected a device for each of 2 replicas, got 1"),
        ('launcher = "join"\ndevices = ["0"]', "'placement.devices': expected launcher 'local', got 'join'"),
    ],
)
def test_invalid_ranges(table: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "dragoman.toml").write_text(f"[model.placement]\n{table}\n")
    with pytest.raises(InvalidInput, match=message):
        model_settings(tmp_path)
