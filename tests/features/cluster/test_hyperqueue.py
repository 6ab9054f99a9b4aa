"""Workers in tasks of a HyperQueue server of this machine; skipped where its package is not installed."""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dragoman.core.errors import ModelFailed, NotReady, WorkerLost
from dragoman.core.spec import LaunchOptions
from dragoman.workers.process import ProcessPool
from dragoman_cluster.launchers.hyperqueue import HyperQueueLauncher
from dragoman_cluster.launchers.jobs import JobState
from dragoman_cluster.worker_port import KeptJob, WorkerPort
from features.cluster.test_jobs_after_restart import stop, with_store
from features.cluster.test_join import open_port, outcomes_of_pids
from workers.workers_harness import call, first_value, print_outcomes, spec_of, wait_until

pytest.importorskip("hyperqueue")
LONG_S = 30.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    from hyperqueue.cluster import LocalCluster, WorkerConfig

    folder = str(tmp_path_factory.mktemp("hyperqueue"))
    with LocalCluster(folder, WorkerConfig(cores=1)):
        yield folder


@pytest.fixture(autouse=True)
def cluster(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HQ_SERVER_DIR", folder)
    monkeypatch.chdir(tmp_path)


def new_pool(port: WorkerPort, **launch: Any) -> ProcessPool:
    options = LaunchOptions(launcher="hyperqueue", **launch)
    return ProcessPool(spec_of("Actions", launch=options, replicas=options.replicas, worker_port=port), lambda: None)


async def test_tasks_compute_and_are_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The only core is free for the second task when the first one has ended."""
    caplog.set_level(logging.INFO)
    async with open_port() as port:
        pool = new_pool(port)
        try:
            await pool.start()
            first = first_value(await call(pool, do="pid"))
            arguments = Path(f"/proc/{first}/cmdline").read_bytes()
            assert port.secret.encode() not in arguments
            held = asyncio.create_task(call(pool, do="hold", begun=tmp_path / "begun", go=tmp_path / "go"))
            await wait_until((tmp_path / "begun").exists)
            queued = asyncio.create_task(outcomes_of_pids(pool, 50))
            os.kill(first, signal.SIGKILL)
            with pytest.raises(
                WorkerLost, match=r"connection was closed; HyperQueue job 1 ended with Program .* signal"
            ):
                await held
            (second,) = set(await queued)
            assert second != first
            counts = print_outcomes("HyperQueue task killed", [held.exception(), *await queued])
            assert counts == {"right": 50, "WorkerLost": 1}
        finally:
            await pool.close()
        await wait_until(lambda: not Path(f"/proc/{second}").exists())
        submitted = [(each.name, each.getMessage()) for each in caplog.records if "ubmitted" in each.getMessage()]
        text = "model 'm': HyperQueue job {} is submitted as 'dragoman-m'"
        assert submitted == [("dragoman.worker", text.format(number)) for number in (1, 2)]


async def test_the_next_server_adopts_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the server of HyperQueue whose task it is: another one has other jobs with the same numbers."""
    async with with_store(tmp_path) as port:
        number, pool = port.port, new_pool(port)
        await pool.start()
        pid = first_value(await call(pool, do="pid"))
        await stop(pool, port, is_killed=True)
    async with with_store(tmp_path, number) as port:
        pool = new_pool(port)
        await pool.start()
        assert first_value(await call(pool, do="pid")) == pid
        (job,) = [kept.job for kept in port._jobs.read(KeptJob).values()]  # type: ignore[union-attr]
        launcher = HyperQueueLauncher(pool._spec)
        await stop(pool, port)  # not kept this time: its worker leaves with status 0

        async def has_ended() -> bool:
            return (await launcher.states([job]))[job] == JobState("ended", "success")

        async with asyncio.timeout(LONG_S):
            while not await has_ended():
                await asyncio.sleep(0.05)
        assert await launcher.states([f"{job}of another server"]) == {}
        assert await launcher.states([f"1000000@{job.partition('@')[2]}"]) == {}


async def test_a_task_that_never_starts() -> None:
    """Its job is cancelled with the program `hq` where there is one."""
    async with open_port() as port:
        pool = new_pool(port, resources={"cpus": 1, "gpus/nvidia": 1})
        starting = asyncio.create_task(pool.start())
        await wait_until(lambda: "resources: HyperQueue job" in pool.waiting, LONG_S)
        assert (
            pool.waiting.endswith(" is queued, or has just started: 0 of 1 are loaded") or "submitted" in pool.waiting
        )
        Path("hq").write_text('#!/bin/sh\necho "$@" > cancelled\n')
        Path("hq").chmod(0o700)
        os.environ["PATH"], path = f"{os.getcwd()}:{os.environ['PATH']}", os.environ["PATH"]
        try:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            await pool.close()
        finally:
            os.environ["PATH"] = path
        assert Path("cancelled").read_text().startswith(f"--server-dir={os.environ['HQ_SERVER_DIR']} job cancel ")


@pytest.mark.parametrize(
    ("launch", "error", "message"),
    [
        ({"resources": {"cpus": [1]}}, ModelFailed, r"'placement.resources.cpus': expected an amount, got \[1\]"),
        (
            {"command": f"{sys.executable} -m dragoman worker --join 127.0.0.1:1 --connect-timeout-s 0"},
            NotReady,
            r"HyperQueue job \d+ ended with Program terminated with exit code 2. before its worker joined",
        ),
    ],
)
async def test_tasks_that_cannot_work(launch: Any, error: type[Exception], message: str) -> None:
    async with open_port() as port:
        with pytest.raises(error, match=message):
            pool = new_pool(port, **launch)
            await asyncio.wait_for(pool.start(), LONG_S)


async def test_without_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HQ_SERVER_DIR", str(tmp_path / "none"))
    async with open_port() as port:
        with pytest.raises(NotReady, match="failed to load 'm', HyperQueue: "):
            await new_pool(port).start()
