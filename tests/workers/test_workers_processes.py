"""Worker processes: exits, restarts, crash loops, and cleanup after closing."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from dragoman.core.calls import Infer, Request
from dragoman.core.errors import ModelFailed, NotReady, WorkerLost
from dragoman.core.tensor import Tensor
from dragoman.workers.process import ProcessPool
from workers.workers_harness import (  # noqa: F401 - a fixture
    MODELS,
    call,
    children,
    descriptors,
    first_value,
    forget_children,
    make_request,
    processes,
    spec_of,
    wait_until,
)

DEATHS = {"os._exit": "exit code 7", "kill": "signal SIGKILL", "segfault": "signal SIGSEGV"}


@pytest.mark.parametrize("death", DEATHS)
async def test_a_dead_worker_fails_only_the_call_it_computed(death: str, tmp_path: Path) -> None:
    readiness: list[bool] = []
    reasons: list[str] = []
    go = tmp_path / "go"

    def note() -> None:
        readiness.append(not readiness or pool.ready)
        reasons.append("" if len(readiness) == 1 else pool.unavailable)

    async with processes("Actions", note) as pool:
        fatal = asyncio.create_task(call(pool, do="hold", begun=tmp_path / "begun", go=go, then=death))
        await wait_until((tmp_path / "begun").exists)
        waiting = [asyncio.create_task(call(pool, do="pid")) for _ in range(5)]
        before = children()
        await asyncio.sleep(0)
        go.touch()
        with pytest.raises(WorkerLost) as caught:
            await fatal
        assert str(caught.value) == f"model 'm': the worker process died ({DEATHS[death]}) while it computed this call"
        pids = {first_value(await call) for call in waiting}
        assert len(pids) == 1
        assert not pids & before
        assert readiness == [True, False, True]
        assert reasons == ["", "a worker is starting again", ""]


@pytest.mark.parametrize("child", ["return", "raise"])
@pytest.mark.parametrize("model", ["Actions", "AsyncActions"])
async def test_a_forked_process_that_returns_is_ended(model: str, child: str) -> None:
    async with processes(model) as pool:
        response = await call(pool, do="fork", child=child)
        assert first_value(response) == os.EX_SOFTWARE
        pid = first_value(await call(pool, do="pid"))
        assert [first_value(await call(pool, do="pid")) for _ in range(20)] == [pid] * 20


async def test_a_forked_process_does_not_write_to_shared_memory(tmp_path: Path) -> None:
    async with processes("Actions") as pool:
        response = await call(pool, do="fork", child="return later", go=tmp_path / "go")
        (tmp_path / "go").touch()
        status = Path(f"/proc/{first_value(response)}/stat")
        await wait_until(lambda: status.read_text().rpartition(")")[2].split()[0] == "Z")
        assert not response.outputs["array"].data.any()


async def test_a_process_that_is_forked_at_load_is_ended() -> None:
    async with processes("ForksAtLoad") as pool:
        assert first_value(await call(pool)) == os.EX_SOFTWARE


async def test_a_forked_process_does_not_have_the_socket_of_the_worker() -> None:
    async with processes("Actions") as pool:
        response = await call(pool, do="fork", child="count")
        assert first_value(response) == int(response.outputs["sockets"].data[0]) - 1


async def test_a_dead_worker_of_an_async_model_fails_all_its_calls(tmp_path: Path) -> None:
    async with processes("AsyncActions") as pool:
        running = [
            asyncio.create_task(call(pool, do="hold", begun=tmp_path / f"b{n}", go=tmp_path / "go")) for n in range(3)
        ]
        await wait_until(lambda: len(list(tmp_path.glob("b*"))) == 3)
        with pytest.raises(WorkerLost):
            await call(pool, do="segfault")
        assert [type(r) for r in await asyncio.gather(*running, return_exceptions=True)] == [WorkerLost] * 3
        assert first_value(await call(pool, do="pid")) > 0


async def test_a_dead_worker_ends_its_stream() -> None:
    async with processes("Count") as pool:
        chunks = pool.stream(make_request(1000))
        assert first_value(await anext(chunks)) == 0
        os.kill(children().pop(), signal.SIGKILL)
        with pytest.raises(WorkerLost, match="SIGKILL"):
            async for _ in chunks:
                pass
        assert [first_value(chunk) async for chunk in pool.stream(make_request(2))] == [0, 1]


async def test_a_worker_killed_while_idle_is_restarted() -> None:
    async with processes("Actions") as pool:
        old = first_value(await call(pool, do="pid"))
        os.kill(old, signal.SIGKILL)
        await wait_until(lambda: not pool.ready)
        assert first_value(await call(pool, do="pid")) != old


async def test_calls_fail_fast_in_a_crash_loop() -> None:
    async with processes("Actions") as pool:
        calls = [asyncio.create_task(call(pool, do="os._exit")) for _ in range(8)]
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(r) for r in results] == [WorkerLost] * 3 + [NotReady] * 5
        with pytest.raises(NotReady) as caught:  # in its first step, without waiting for anything
            call(pool, do="pid").send(None)
        assert caught.value.retry_after_s
        await wait_until(lambda: pool.ready)
        assert first_value(await call(pool, do="pid")) > 0


async def test_calls_are_rejected_while_a_restart_fails(tmp_path: Path) -> None:
    repaired = tmp_path / "repaired"
    async with processes("LoadsOnce", parameters={"loaded": str(tmp_path / "l"), "repaired": str(repaired)}) as pool:
        with pytest.raises(WorkerLost):
            await call(pool, do="kill")
        with pytest.raises(NotReady):
            await call(pool, do="pid")
        repaired.touch()
        await wait_until(lambda: pool.ready)
        assert first_value(await call(pool, do="pid")) > 0


async def test_death_while_loading_is_reported() -> None:
    with pytest.raises(ModelFailed, match=r"failed to load 'm', the worker process died \(exit code 9\)"):
        async with processes("DiesInLoad", replicas=2):
            pass
    assert not children()


async def test_unpicklable_metadata_is_reported() -> None:
    with pytest.raises(ModelFailed, match=r"failed to load 'm', its description cannot be sent .* '_thread.lock'"):
        async with processes("UnpicklableDetails"):
            pass
    assert not children()


async def test_cancelling_start_ends_a_load_that_hangs(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    pool = ProcessPool(spec_of("HangsInLoad", parameters={"begun": str(begun)}), lambda: None)
    starting = asyncio.create_task(pool.start())
    await wait_until(lambda: begun.exists() and begun.read_text())
    starting.cancel()
    await asyncio.wait({starting})
    assert starting.cancelled()
    await pool.close()
    assert not children()


async def test_two_replicas_run_concurrently(tmp_path: Path) -> None:
    go = tmp_path / "go"
    async with processes("Actions", replicas=2) as pool:
        assert pool.capacity == 2
        calls = [asyncio.create_task(call(pool, do="hold", begun=tmp_path / f"b{n}", go=go)) for n in range(2)]
        await wait_until(lambda: len(list(tmp_path.glob("b*"))) == 2)
        go.touch()
        assert len({first_value(await call) for call in calls}) == 2


async def test_short_calls_do_not_wait_behind_a_long_one(tmp_path: Path) -> None:
    async with processes("Actions", replicas=2) as pool:
        long = asyncio.create_task(call(pool, do="hold", begun=tmp_path / "b", go=tmp_path / "go"))
        await wait_until((tmp_path / "b").exists)
        pids = [first_value(p) for p in await asyncio.gather(*(call(pool, do="pid") for _ in range(20)))]
        (tmp_path / "go").touch()
        assert first_value(await long) not in pids


async def _until_calls_are_short(pool: ProcessPool) -> None:
    """Send calls until the time per call is known to be below a millisecond."""
    end_s = time.monotonic() + 60
    while not all(0 < worker.mean_s < 0.001 for worker in pool.workers()):
        assert time.monotonic() < end_s, "calls take too long"
        await asyncio.gather(*(call(pool, do="pid") for _ in pool.workers()))


@pytest.mark.parametrize(("replicas", "held"), [(1, 8), (2, 2)])
async def test_very_short_calls_wait_in_the_only_process(replicas: int, held: int, tmp_path: Path) -> None:
    """If it dies, only the one that it computed fails."""
    go = tmp_path / "go"
    async with processes("Actions", replicas=replicas) as pool:
        await _until_calls_are_short(pool)
        fatal = []
        for n in range(replicas):
            begun = tmp_path / f"begun{n}"
            fatal.append(asyncio.create_task(call(pool, do="hold", begun=begun, go=go, then="kill")))
            await wait_until(begun.exists)
        waiting = [asyncio.create_task(call(pool, do="pid")) for _ in range(20)]
        await asyncio.sleep(0)
        assert [worker.calls for worker in pool.workers()] == [held] * replicas
        go.touch()
        results = await asyncio.gather(*fatal, return_exceptions=True)
        assert [type(each) for each in results] == [WorkerLost] * replicas
        assert len({first_value(each) for each in await asyncio.gather(*waiting)}) <= replicas


async def test_calls_succeed_after_one_of_two_replicas_died(tmp_path: Path) -> None:
    async with processes("Actions", replicas=2) as pool:
        for _ in range(4):
            with pytest.raises(WorkerLost):
                await call(pool, do="os._exit")
            assert first_value(await call(pool, do="pid")) > 0
        await wait_until(lambda: pool.capacity == 2)


@pytest.mark.parametrize("model", ["Actions", "AsyncActions"])
async def test_close_leaves_no_process_file_or_task(model: str, tmp_path: Path) -> None:
    await asyncio.to_thread(int)  # the loop's own threads and files exist from here on
    before, tasks = descriptors(), asyncio.all_tasks()
    async with processes(model, replicas=2) as pool:
        with pytest.raises(WorkerLost):
            await call(pool, do="kill")
        running = asyncio.create_task(call(pool, do="hold", begun=tmp_path / "b", go=tmp_path / "go"))
        await wait_until((tmp_path / "b").exists)
    with pytest.raises(NotReady, match="unloading"):
        await running
    assert not children()
    assert descriptors() == before
    assert asyncio.all_tasks() == tasks


async def test_close_while_a_worker_is_restarted() -> None:
    for wait in (False, True):
        async with processes("Actions") as pool:
            with pytest.raises(WorkerLost):
                await call(pool, do="kill")
            if wait:
                await wait_until(children)
            waiting = asyncio.create_task(call(pool, do="pid"))
            await asyncio.sleep(0)
        with pytest.raises(NotReady, match="unloading"):
            await waiting
        assert not children()


async def test_large_frames_in_both_directions() -> None:
    async with processes("AsyncEcho") as pool:
        arrays = [np.full(500_000 + n, n, np.float32) for n in range(24)]
        responses = await asyncio.gather(*(pool.call(Request(Infer({"a": Tensor.of(a)}))) for a in arrays))
        assert all((a.outputs["a"].data == sent).all() for a, sent in zip(responses, arrays, strict=True))


def test_a_worker_imports_no_server_code() -> None:
    script = (
        "import sys, dragoman.workers.worker, dragoman.runtimes.python.model\n"
        "print([m for m in sys.modules if m.split('.')[:2] in"
        " [['dragoman', r] for r in ('transports', 'protocols', 'engine', 'server', 'cli', 'console')]])"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_workers_end_when_the_server_is_killed(tmp_path: Path) -> None:
    script = f"""
import asyncio, sys
sys.path.insert(0, {str(MODELS.parents[1])!r})
from workers.workers_harness import call, first_value, processes
async def main():
    async with processes("Actions") as pool:
        print(first_value(await call(pool, do="pid")), flush=True)
        await call(pool, do="hold", begun={str(tmp_path / "b")!r}, go={str(tmp_path / "go")!r})
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        worker = int(server.stdout.readline())
        end_s = time.monotonic() + 60
        while not (tmp_path / "b").exists():
            assert time.monotonic() < end_s
            time.sleep(0.002)
        server.kill()
    while Path(f"/proc/{worker}").exists() and "State:\tZ" not in Path(f"/proc/{worker}/status").read_text():
        assert time.monotonic() < end_s
        time.sleep(0.002)


def test_worker_processes_on_uvloop(tmp_path: Path) -> None:
    uvloop = pytest.importorskip("uvloop")

    async def main() -> None:
        async with processes("Actions", replicas=2) as pool:
            with pytest.raises(WorkerLost, match="SIGSEGV"):
                await call(pool, do="segfault")
            responses = await asyncio.gather(*(call(pool, do="pid") for _ in range(50)))
            assert all(first_value(response) > 0 for response in responses)
            await wait_until(lambda: pool.capacity == 2)
            running = asyncio.create_task(call(pool, do="hold", begun=tmp_path / "b", go=tmp_path / "go"))
            await wait_until((tmp_path / "b").exists)
        with pytest.raises(NotReady):
            await running

    uvloop.run(main())
    assert not children()


@pytest.mark.parametrize(
    ("samples", "reason"), [(0, "Expected `str` matching regex"), (10_001, "at most 10000 samples, got 10001")]
)
async def test_invalid_metrics_of_a_worker_are_removed_and_logged(
    samples: int, reason: str, capfd: pytest.CaptureFixture[str]
) -> None:
    async with processes("ReportsMetrics") as pool:

        def gauges() -> list[tuple[dict[str, str], float]]:
            found = (family for family in pool.measurements() if family.name == "gauge")
            return [(dict(sample.labels), sample.value) for family in found for sample in family.samples]

        await wait_until(gauges)
        assert gauges() == [({"i": "0", "replica": "0"}, 0.5)]
        await call(pool, samples)
        await wait_until(lambda: not gauges())
        logged = ""

        def is_logged() -> bool:
            nonlocal logged
            logged += capfd.readouterr().err
            return "model 'm': its metrics are no longer exported: " in logged and reason in logged

        await wait_until(is_logged)
