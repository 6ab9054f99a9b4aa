"""What is special about processes: they die, come back, crash in a loop, and leave nothing behind."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from workers_harness import MODELS, ask, children, descriptors, first, forget_children, processes, spec_of, until  # noqa: F401 - a fixture

from dragoman.core.calls import Infer, Request
from dragoman.core.errors import ModelFailed, NotReady, WorkerLost
from dragoman.core.tensor import Tensor
from dragoman.workers.process import ProcessPool

DEATHS = {"os._exit": "exit code 7", "kill": "signal SIGKILL", "segfault": "signal SIGSEGV"}


@pytest.mark.parametrize("death", DEATHS)
async def test_a_death_costs_the_call_that_was_computed_alone(death: str, tmp_path: Path) -> None:
    readiness: list[bool] = []
    go = tmp_path / "go"
    async with processes("Acts", lambda: readiness.append(not readiness or pool.ready)) as pool:
        fatal = asyncio.create_task(pool.call(ask(do="hold", begun=tmp_path / "begun", go=go, then=death)))
        await until((tmp_path / "begun").exists)
        waiting = [asyncio.create_task(pool.call(ask(do="pid"))) for _ in range(5)]
        before = children()
        await asyncio.sleep(0)
        go.touch()
        with pytest.raises(WorkerLost) as caught:
            await fatal
        assert str(caught.value) == f"model 'm': the worker process died ({DEATHS[death]}) while it computed this call"
        pids = {first(await call) for call in waiting}
        assert len(pids) == 1
        assert not pids & before
        assert readiness == [True, False, True]


async def test_a_death_costs_all_that_an_async_model_held(tmp_path: Path) -> None:
    async with processes("AsyncActs") as pool:
        held = [
            asyncio.create_task(pool.call(ask(do="hold", begun=tmp_path / f"b{n}", go=tmp_path / "go")))
            for n in range(3)
        ]
        await until(lambda: len(list(tmp_path.glob("b*"))) == 3)
        with pytest.raises(WorkerLost):
            await pool.call(ask(do="segfault"))
        assert [type(r) for r in await asyncio.gather(*held, return_exceptions=True)] == [WorkerLost] * 3
        assert first(await pool.call(ask(do="pid"))) > 0


async def test_a_death_ends_a_stream() -> None:
    async with processes("Count") as pool:
        pieces = pool.stream(ask(1000))
        assert first(await anext(pieces)) == 0
        os.kill(children().pop(), signal.SIGKILL)
        with pytest.raises(WorkerLost, match="SIGKILL"):
            async for _ in pieces:
                pass
        assert [first(piece) async for piece in pool.stream(ask(2))] == [0, 1]


async def test_a_worker_killed_while_idle_comes_back() -> None:
    async with processes("Acts") as pool:
        old = first(await pool.call(ask(do="pid")))
        os.kill(old, signal.SIGKILL)
        await until(lambda: not pool.ready)
        assert first(await pool.call(ask(do="pid"))) != old


async def test_a_crash_loop_refuses_quickly_until_it_is_over() -> None:
    async with processes("Acts") as pool:
        calls = [asyncio.create_task(pool.call(ask(do="os._exit"))) for _ in range(8)]
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(r) for r in results] == [WorkerLost] * 3 + [NotReady] * 5
        began_s = time.monotonic()
        with pytest.raises(NotReady) as caught:
            await pool.call(ask(do="pid"))
        assert time.monotonic() - began_s < 0.05
        assert caught.value.retry_after_s
        await until(lambda: pool.ready)
        assert first(await pool.call(ask(do="pid"))) > 0


async def test_a_reload_that_fails_refuses_until_it_works(tmp_path: Path) -> None:
    mended = tmp_path / "mended"
    async with processes("LoadsOnce", parameters={"loaded": str(tmp_path / "l"), "mended": str(mended)}) as pool:
        with pytest.raises(WorkerLost):
            await pool.call(ask(do="kill"))
        with pytest.raises(NotReady):
            await pool.call(ask(do="pid"))
        mended.touch()
        await until(lambda: pool.ready)
        assert first(await pool.call(ask(do="pid"))) > 0


async def test_a_death_in_the_first_load_is_told() -> None:
    with pytest.raises(ModelFailed, match=r"failed to load 'm', the worker process died \(exit code 9\)"):
        async with processes("DiesInLoad", replicas=2):
            pass
    assert not children()


async def test_metadata_that_cannot_leave_the_process_are_told() -> None:
    with pytest.raises(ModelFailed, match=r"failed to load 'm', its description cannot be sent .* '_thread.lock'"):
        async with processes("TellsTooMuch"):
            pass
    assert not children()


async def test_a_load_that_hangs_ends_with_start(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    pool = ProcessPool(spec_of("HangsInLoad", parameters={"begun": str(begun)}), lambda: None)
    starting = asyncio.create_task(pool.start())
    await until(lambda: begun.exists() and begun.read_text())
    starting.cancel()
    await asyncio.wait({starting})
    assert starting.cancelled()
    await pool.close()
    assert not children()


async def test_two_replicas_run_at_the_same_time(tmp_path: Path) -> None:
    go = tmp_path / "go"
    async with processes("Acts", replicas=2) as pool:
        assert pool.capacity == 2
        calls = [asyncio.create_task(pool.call(ask(do="hold", begun=tmp_path / f"b{n}", go=go))) for n in range(2)]
        await until(lambda: len(list(tmp_path.glob("b*"))) == 2)
        go.touch()
        assert len({first(await call) for call in calls}) == 2


async def test_no_call_waits_behind_a_long_one_while_a_replica_is_free(tmp_path: Path) -> None:
    async with processes("Acts", replicas=2) as pool:
        long = asyncio.create_task(pool.call(ask(do="hold", begun=tmp_path / "b", go=tmp_path / "go")))
        await until((tmp_path / "b").exists)
        pids = [first(p) for p in await asyncio.gather(*(pool.call(ask(do="pid")) for _ in range(20)))]
        (tmp_path / "go").touch()
        assert first(await long) not in pids


async def test_one_of_two_replicas_dies(tmp_path: Path) -> None:
    async with processes("Acts", replicas=2) as pool:
        for _ in range(4):
            with pytest.raises(WorkerLost):
                await pool.call(ask(do="os._exit"))
            assert first(await pool.call(ask(do="pid"))) > 0
        await until(lambda: pool.capacity == 2)


@pytest.mark.parametrize("model", ["Acts", "AsyncActs"])
async def test_close_leaves_nothing_behind(model: str, tmp_path: Path) -> None:
    await asyncio.to_thread(int)  # the loop's own threads and files exist from here on
    before, tasks = descriptors(), asyncio.all_tasks()
    async with processes(model, replicas=2) as pool:
        with pytest.raises(WorkerLost):
            await pool.call(ask(do="kill"))
        held = asyncio.create_task(pool.call(ask(do="hold", begun=tmp_path / "b", go=tmp_path / "go")))
        await until((tmp_path / "b").exists)
    with pytest.raises(NotReady, match="unloading"):
        await held
    assert not children()
    assert descriptors() == before
    assert asyncio.all_tasks() == tasks


async def test_close_while_a_worker_is_restarted() -> None:
    for wait in (False, True):
        async with processes("Acts") as pool:
            with pytest.raises(WorkerLost):
                await pool.call(ask(do="kill"))
            if wait:
                await until(children)
            waits = asyncio.create_task(pool.call(ask(do="pid")))
            await asyncio.sleep(0)
        with pytest.raises(NotReady, match="unloading"):
            await waits
        assert not children()


async def test_large_frames_both_ways_at_once() -> None:
    async with processes("AsyncEcho") as pool:
        arrays = [np.full(500_000 + n, n, np.float32) for n in range(24)]
        answers = await asyncio.gather(*(pool.call(Request(Infer({"a": Tensor.of(a)}))) for a in arrays))
        assert all((a.outputs["a"].data == sent).all() for a, sent in zip(answers, arrays, strict=True))


def test_a_worker_needs_no_server() -> None:
    script = (
        "import sys, dragoman.workers.worker, dragoman.runtimes.python.model\n"
        "print([m for m in sys.modules if m.split('.')[:2] in"
        " [['dragoman', r] for r in ('transports', 'protocols', 'engine', 'server', 'cli', 'console')]])"
    )
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "[]"


def test_workers_end_with_a_server_that_is_killed(tmp_path: Path) -> None:
    script = f"""
import asyncio, sys
sys.path.insert(0, {str(MODELS.parent)!r})
from workers_harness import ask, first, processes
async def main():
    async with processes("Acts") as pool:
        print(first(await pool.call(ask(do="pid"))), flush=True)
        await pool.call(ask(do="hold", begun={str(tmp_path / "b")!r}, go={str(tmp_path / "go")!r}))
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        worker = int(server.stdout.readline())
        end_s = time.monotonic() + 10
        while not (tmp_path / "b").exists():
            assert time.monotonic() < end_s
            time.sleep(0.002)
        server.kill()
    while Path(f"/proc/{worker}").exists() and "State:\tZ" not in Path(f"/proc/{worker}/status").read_text():
        assert time.monotonic() < end_s
        time.sleep(0.002)


def test_the_same_on_uvloop(tmp_path: Path) -> None:
    uvloop = pytest.importorskip("uvloop")

    async def main() -> None:
        async with processes("Acts", replicas=2) as pool:
            with pytest.raises(WorkerLost, match="SIGSEGV"):
                await pool.call(ask(do="segfault"))
            answers = await asyncio.gather(*(pool.call(ask(do="pid")) for _ in range(50)))
            assert all(first(answer) > 0 for answer in answers)
            await until(lambda: pool.capacity == 2)
            held = asyncio.create_task(pool.call(ask(do="hold", begun=tmp_path / "b", go=tmp_path / "go")))
            await until((tmp_path / "b").exists)
        with pytest.raises(NotReady):
            await held

    uvloop.run(main())
    assert not children()
