"""Jobs of a scheduler outlive the server that has submitted them, and calls outlive a scheduler that does not answer.

The programs of SLURM are scripts here that run jobs on this machine; `test_slurm.py` has the real ones.
"""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from dragoman.core.spec import LaunchOptions, ModelSpec
from dragoman.core.state_store import StateStore
from dragoman.workers.process import ProcessPool
from dragoman_cluster import worker_port
from dragoman_cluster.worker_port import WorkerPort
from features.cluster.test_rejoin import MODEL, SECRET, ask, loads, server
from workers.workers_harness import wait_until

PROGRAMS = {
    "sbatch": """
if [ -e down ]; then echo "sbatch: error: Batch job submission failed: Socket timed out on send/recv" >&2; exit 1; fi
cat > script
setsid sh script > /dev/null 2>&1 & echo $! | tee -a jobs
""",
    "squeue": """
for argument; do case $argument in --jobs=*) jobs=${argument#--jobs=};; esac; done
for job in $(echo $jobs | tr , " "); do
    if grep -q "^State:.Z" /proc/$job/status 2> /dev/null || ! kill -0 $job 2> /dev/null; then state=COMPLETED
    else state=RUNNING; fi
    echo "$job|$state|None"
done
""",
    "scancel": 'kill -KILL -- "-$1" 2> /dev/null; exit 0',
    "scontrol": "exit 1",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "bin").mkdir()
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "model.py").write_text(MODEL)
    for name, script in PROGRAMS.items():
        program = tmp_path / "bin" / name
        program.write_text(f"#!/bin/sh\ncd {tmp_path}\n{script}")
        program.chmod(0o700)
    monkeypatch.setenv("DRAGOMAN_WORKER_SECRET", SECRET)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    yield tmp_path
    for job in jobs(tmp_path):
        with suppress(ProcessLookupError):
            os.killpg(job, signal.SIGKILL)


def jobs(folder: Path) -> list[int]:
    """Return the ids of all jobs: process groups."""
    return [*map(int, (folder / "jobs").read_text().split())] if (folder / "jobs").exists() else []


def runs(job: int) -> bool:
    with suppress(OSError):
        return ") Z " not in Path(f"/proc/{job}/stat").read_text()
    return False


@asynccontextmanager
async def with_store(folder: Path, number: int = 0) -> AsyncIterator[WorkerPort]:
    """The worker port of a server with a store."""
    store = StateStore(str(folder))
    try:
        async with server(number, store=store) as port:
            yield port
    finally:
        store.close()


def new_pool(port: WorkerPort, folder: Path, *, keep: bool = False) -> ProcessPool:
    command = f"exec {sys.executable} -m dragoman worker --join {{address}}"
    launch = LaunchOptions(launcher="slurm", command=command, keep=keep)
    spec = ModelSpec(name="m", runtime=f"{folder / 'm' / 'model.py'}:Model", launch=launch, worker_port=port)
    return ProcessPool(spec, lambda: None)


async def stop(pool: ProcessPool, port: WorkerPort, *, is_killed: bool = False) -> None:
    """End a server: regularly, or as SIGKILL does, which cancels no job."""
    for replica in pool.supervisor.running if is_killed else ():
        replica._process.end_starter = None  # type: ignore[attr-defined]
    port.begin_stop()
    await pool.close()


@pytest.mark.parametrize("is_killed", [True, False])
async def test_the_next_server_adopts_jobs(folder: Path, is_killed: bool) -> None:
    model = folder / "m" / "model.py"
    async with with_store(folder) as port:
        number, pool = port.port, new_pool(port, folder, keep=not is_killed)
        await pool.start()
        pid = await ask(pool, 1)
        await stop(pool, port, is_killed=is_killed)
    assert [runs(job) for job in jobs(folder)] == [True]
    async with with_store(folder, number) as port:
        pool = new_pool(port, folder)
        await pool.start()
        assert await ask(pool, 2) == pid
        assert loads(model) == {pid: 1}
        await stop(pool, port)  # not kept this time
        assert [runs(job) for job in jobs(folder)] == [False]
    async with with_store(folder, number) as port:
        assert port.adopt("m", "SLURM job") is None


async def test_a_job_that_has_ended_meanwhile_is_replaced(folder: Path) -> None:
    async with with_store(folder) as port:
        number, pool = port.port, new_pool(port, folder)
        await pool.start()
        await stop(pool, port, is_killed=True)
    (job,) = jobs(folder)
    os.killpg(job, signal.SIGKILL)
    await wait_until(lambda: not runs(job))
    async with with_store(folder, number) as port:
        pool = new_pool(port, folder)
        await pool.start()
        assert await ask(pool, 1)
        assert len(jobs(folder)) == 2
        await stop(pool, port)


async def test_a_job_that_no_model_wants_ends(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with with_store(folder) as port:
        number, pool = port.port, new_pool(port, folder)
        await pool.start()
        await stop(pool, port, is_killed=True)
    (job,) = jobs(folder)
    monkeypatch.setattr(worker_port, "_UNCLAIMED_S", 0.1)
    async with with_store(folder, number):
        await wait_until(lambda: not runs(job))


async def test_calls_wait_while_the_scheduler_does_not_answer(folder: Path) -> None:
    """Queued and new calls alike, and the reason is shown; they are answered when it answers again."""
    async with with_store(folder) as port:
        pool = new_pool(port, folder)
        await pool.start()
        (folder / "down").touch()
        os.kill(await ask(pool, 1), signal.SIGKILL)
        await wait_until(lambda: not pool.supervisor.running)
        queued = asyncio.create_task(ask(pool, 2))
        await wait_until(lambda: "Socket timed out" in pool.waiting)
        assert "Socket timed out" in pool.unavailable
        later = asyncio.create_task(ask(pool, 3))
        await asyncio.sleep(0)
        assert not queued.done()
        assert not later.done()
        (folder / "down").unlink()
        assert await queued == await later
        await stop(pool, port)
