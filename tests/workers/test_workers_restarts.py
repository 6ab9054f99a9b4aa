"""When processes are killed, restarted and given up, and what that costs those who wait."""

import asyncio
import logging
import os
import signal
from pathlib import Path

import pytest
from workers_harness import ask, children, first, forget_children, processes, until  # noqa: F401 - a fixture

from dragoman.core.errors import NotReady, WorkerLost


@pytest.mark.parametrize("way", ["call", "stream"])
async def test_a_process_that_goes_on_with_a_cancelled_call_is_killed(
    way: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with processes("Acts", cancel_grace_s=0.1) as pool:
        pids = set()
        for n in range(5):  # oftener than a model may crash in a row
            asked = ask(do="hold", begun=tmp_path / f"begun{n}", go=tmp_path / "never")
            stuck = asyncio.ensure_future(pool.call(asked) if way == "call" else anext(pool.stream(asked)))
            await until((tmp_path / f"begun{n}").exists)
            waiting = [asyncio.create_task(pool.call(ask(do="pid"))) for _ in range(3)]
            await asyncio.sleep(0)
            stuck.cancel()
            pids |= {first(answer) for answer in await asyncio.wait_for(asyncio.gather(*waiting), 20)}
        assert len(pids) == 5
    assert [r.levelno for r in caplog.records if "'m': killed a worker process" in r.message] == [logging.WARNING] * 5
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR]


async def test_a_cancelled_call_that_ends_in_time_costs_nothing(tmp_path: Path) -> None:
    async with processes("Acts", cancel_grace_s=0.2) as pool:
        old = first(await pool.call(ask(do="pid")))
        running = asyncio.create_task(pool.call(ask(do="hold", begun=tmp_path / "b", go=tmp_path / "go")))
        await until((tmp_path / "b").exists)
        skipped = asyncio.create_task(pool.call(ask(do="pid")))
        await asyncio.sleep(0)
        skipped.cancel()
        await asyncio.sleep(0.5)  # the one that is wanted may take as long as it likes
        (tmp_path / "go").touch()
        assert first(await running) == old
        assert first(await pool.call(ask(do="pid"))) == old


async def test_without_a_limit_a_cancelled_call_goes_on(tmp_path: Path) -> None:
    async with processes("Acts", cancel_grace_s=0.0) as pool:
        stuck = asyncio.create_task(pool.call(ask(do="hold", begun=tmp_path / "b", go=tmp_path / "go")))
        await until((tmp_path / "b").exists)
        before = children()
        stuck.cancel()
        await asyncio.sleep(0.3)
        (tmp_path / "go").touch()
        assert first(await pool.call(ask(do="pid"))) in before


async def test_replicas_that_die_together_fail_what_they_held_alone(tmp_path: Path) -> None:
    async with processes("Acts", replicas=3) as pool:
        held = [
            asyncio.create_task(pool.call(ask(do="hold", begun=tmp_path / f"b{n}", go=tmp_path / "go")))
            for n in range(3)
        ]
        await until(lambda: len(list(tmp_path.glob("b*"))) == 3)
        waiting = [asyncio.create_task(pool.call(ask(do="pid"))) for _ in range(100)]
        await asyncio.sleep(0)
        before = children()
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        assert [type(r) for r in await asyncio.gather(*held, return_exceptions=True)] == [WorkerLost] * 3
        late = [asyncio.create_task(pool.call(ask(do="pid"))) for _ in range(20)]
        assert not {first(answer) for answer in await asyncio.gather(*waiting, *late)} & before


async def test_replicas_that_cannot_be_loaded_again_refuse(tmp_path: Path) -> None:
    mended = tmp_path / "mended"
    mended.touch()
    parameters = {"loaded": str(tmp_path / "l"), "mended": str(mended)}
    async with processes("LoadsOnce", replicas=2, parameters=parameters) as pool:
        mended.unlink()
        for pid in children():
            os.kill(pid, signal.SIGKILL)
        await until(lambda: not pool.ready)
        with pytest.raises(NotReady):
            await pool.call(ask(do="pid"))
        mended.touch()
        await until(lambda: pool.ready)
        assert first(await pool.call(ask(do="pid"))) > 0
