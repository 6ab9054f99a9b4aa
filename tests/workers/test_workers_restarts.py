"""Worker processes that are killed and restarted, and the calls sent to them."""

import asyncio
import logging
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from dragoman.core.calls import Index, Load, Request
from dragoman.core.errors import ModelFailed, NotReady, WorkerLost
from dragoman.engine_setup import open_engine
from dragoman.workers.launcher import LocalLauncher
from dragoman.workers.process import ProcessPool
from e2e.foreign_errors import ERRORS
from workers.workers_harness import (
    MODELS,
    call,
    children,
    first_value,
    forget_children,  # noqa: F401 - a fixture
    make_request,
    processes,
    spec_of,
    wait_until,
)


@pytest.mark.parametrize("way", ["call", "stream"])
async def test_a_worker_that_continues_a_cancelled_call_is_killed(
    way: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with processes("Actions", cancel_grace_s=0.1) as pool:
        pids = set()
        for n in range(5):  # more often than a model may crash in a row
            request = make_request(do="hold", begun=tmp_path / f"begun{n}", go=tmp_path / "never")
            stuck = asyncio.ensure_future(pool.call(request) if way == "call" else anext(pool.stream(request)))
            await wait_until((tmp_path / f"begun{n}").exists)
            waiting = [asyncio.create_task(call(pool, do="pid")) for _ in range(3)]
            await asyncio.sleep(0)
            stuck.cancel()
            pids |= {first_value(response) for response in await asyncio.wait_for(asyncio.gather(*waiting), 60)}
        assert len(pids) == 5
    assert [r.levelno for r in caplog.records if "'m': killed a worker process" in r.message] == [logging.WARNING] * 5
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR]


async def test_a_worker_that_ends_a_cancelled_call_in_time_is_not_killed(tmp_path: Path) -> None:
    async with processes("Actions", cancel_grace_s=0.2) as pool:
        old = first_value(await call(pool, do="pid"))
        running = asyncio.create_task(call(pool, do="hold", begun=tmp_path / "b", go=tmp_path / "go"))
        await wait_until((tmp_path / "b").exists)
        skipped = asyncio.create_task(call(pool, do="pid"))
        await asyncio.sleep(0)
        skipped.cancel()
        await asyncio.sleep(0.5)  # the running call has no time limit
        (tmp_path / "go").touch()
        assert first_value(await running) == old
        assert first_value(await call(pool, do="pid")) == old


async def test_without_cancel_grace_cancelled_calls_continue(tmp_path: Path) -> None:
    async with processes("Actions", cancel_grace_s=0.0) as pool:
        stuck = asyncio.create_task(call(pool, do="hold", begun=tmp_path / "b", go=tmp_path / "go"))
        await wait_until((tmp_path / "b").exists)
        before = children()
        stuck.cancel()
        await asyncio.sleep(0.3)
        (tmp_path / "go").touch()
        assert first_value(await call(pool, do="pid")) in before


async def test_replicas_killed_together_fail_only_their_running_calls(tmp_path: Path) -> None:
    async with processes("Actions", replicas=3) as pool:
        running = [
            asyncio.create_task(call(pool, do="hold", begun=tmp_path / f"b{n}", go=tmp_path / "go")) for n in range(3)
        ]
        await wait_until(lambda: len(list(tmp_path.glob("b*"))) == 3)
        waiting = [asyncio.create_task(call(pool, do="pid")) for _ in range(100)]
        await asyncio.sleep(0)
        before = children()
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        assert [type(r) for r in await asyncio.gather(*running, return_exceptions=True)] == [WorkerLost] * 3
        late = [asyncio.create_task(call(pool, do="pid")) for _ in range(20)]
        assert not {first_value(response) for response in await asyncio.gather(*waiting, *late)} & before


async def test_calls_are_rejected_while_replicas_cannot_be_reloaded(tmp_path: Path) -> None:
    repaired = tmp_path / "repaired"
    repaired.touch()
    parameters = {"loaded": str(tmp_path / "l"), "repaired": str(repaired)}
    async with processes("LoadsOnce", replicas=2, parameters=parameters) as pool:
        repaired.unlink()
        for pid in children():
            os.kill(pid, signal.SIGKILL)
        await wait_until(lambda: not pool.ready)
        with pytest.raises(NotReady):
            await call(pool, do="pid")
        repaired.touch()
        await wait_until(lambda: pool.ready)
        assert first_value(await call(pool, do="pid")) > 0


async def wait_for_crash_loop(pool: ProcessPool) -> str:
    await wait_until(lambda: "is not restarted" in pool.unavailable)
    return pool.unavailable


async def test_a_worker_that_crashes_too_often_is_not_restarted() -> None:
    async with processes("Actions", max_crashes=2, crash_window_s=60) as pool:
        assert first_value(await call(pool, do="pid")) > 0
        for _ in range(2):
            await wait_until(lambda: pool.ready)
            with pytest.raises(WorkerLost):
                await call(pool, do="os._exit")
        reason = await wait_for_crash_loop(pool)
        assert reason.startswith("its worker process crashed 2 times within 60 s and is not restarted")
        assert reason.endswith("last reason: exit code 7")
        with pytest.raises(NotReady, match="is not ready: UNAVAILABLE; the reason is in the log"):
            await call(pool, do="pid")
        await asyncio.sleep(0.5)  # longer than the delays before the first restarts
        assert not pool.ready
        assert not children()


async def test_failed_restarts_count_as_crashes(tmp_path: Path) -> None:
    repaired = tmp_path / "repaired"
    repaired.touch()
    parameters = {"loaded": str(tmp_path / "l"), "repaired": str(repaired)}
    async with processes("LoadsOnce", parameters=parameters, max_crashes=3) as pool:
        repaired.unlink()
        os.kill(children().pop(), signal.SIGKILL)
        assert "the weights are gone" in await wait_for_crash_loop(pool)
        repaired.touch()
        await asyncio.sleep(1.0)  # longer than the next delay
        assert not pool.ready


async def test_restarts_of_a_model_that_is_not_ready_yet_are_no_crashes(tmp_path: Path) -> None:
    repaired = tmp_path / "repaired"
    repaired.touch()
    parameters = {"loaded": str(tmp_path / "l"), "repaired": str(repaired), "not_ready": "1"}
    async with processes("LoadsOnce", parameters=parameters, max_crashes=2) as pool:
        repaired.unlink()
        os.kill(children().pop(), signal.SIGKILL)
        await wait_until(lambda: pool.unavailable.endswith("the weights are gone"))  # a restart failed
        await asyncio.sleep(0.5)
        repaired.touch()
        await wait_until(lambda: pool.ready)


async def test_one_replica_in_a_crash_loop_leaves_the_others() -> None:
    async with processes("Actions", replicas=2, max_crashes=1) as pool:
        await wait_until(lambda: len(children()) == 2)
        with pytest.raises(WorkerLost):
            await call(pool, do="os._exit")
        assert pool.ready
        assert pool.unavailable == ""
        assert first_value(await call(pool, do="pid")) in children()


@pytest.mark.parametrize("options", [{"max_crashes": 0}, {"max_crashes": 2, "crash_window_s": 0.001}])
async def test_crashes_without_limit_or_far_apart_are_followed_by_restarts(options: dict[str, Any]) -> None:
    async with processes("Actions", **options) as pool:
        for _ in range(3):
            await wait_until(lambda: pool.ready)
            with pytest.raises(WorkerLost):
                await call(pool, do="os._exit")
        await wait_until(lambda: pool.ready)


async def test_killed_workers_are_no_crash_loop(tmp_path: Path) -> None:
    async with processes("Actions", cancel_grace_s=0.05, max_crashes=1) as pool:
        stuck = asyncio.ensure_future(call(pool, do="hold", begun=tmp_path / "begun", go=tmp_path / "never"))
        await wait_until((tmp_path / "begun").exists)
        stuck.cancel()
        await wait_until(lambda: not pool.ready)
        await wait_until(lambda: pool.ready)


async def test_the_index_names_the_reason_of_a_crash_loop() -> None:
    async with open_engine(f"{MODELS}:Actions", placement="process", max_crashes=1, control_open=True) as engine:
        with pytest.raises(WorkerLost):
            await engine.call(Request(make_request(do="os._exit").call, "Actions"))
        (entry,) = (await engine.call(Request(Index("")))).answer
        assert entry.state == "UNAVAILABLE"
        assert "crashed 1 times within 600 s and is not restarted" in entry.reason
        assert not engine.ready()
        await engine.call(Request(Load(""), "Actions"))
        assert engine.ready()


async def test_errors_of_a_launcher_fail_the_start_and_not_the_supervisor(monkeypatch: pytest.MonkeyPatch) -> None:
    launch, errors = LocalLauncher.launch, list(ERRORS)

    async def fail(launcher: LocalLauncher) -> Any:
        if errors:
            raise errors.pop()()
        return await launch(launcher)

    monkeypatch.setattr(LocalLauncher, "launch", fail)
    names = [type(make()).__name__ for make in errors]
    for name in reversed(names):
        pool = ProcessPool(spec_of("Actions"), lambda: None)
        with pytest.raises(ModelFailed, match=f"^failed to load 'm', the launcher failed: .*{name}|StopIteration"):
            await pool.start()
        await pool.close()
    async with processes("Actions") as pool:
        errors += [KeyboardInterrupt, asyncio.CancelledError]  # when the worker is started again
        os.kill(first_value(await call(pool, do="pid")), signal.SIGKILL)
        async with asyncio.timeout(60):
            while True:
                try:
                    assert first_value(await call(pool, do="pid")) > 0
                    break
                except (WorkerLost, NotReady):
                    await asyncio.sleep(0.01)
        assert pool.ready
