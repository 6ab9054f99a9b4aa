"""Jobs of a scheduler outlive the server that has submitted them, and calls outlive a scheduler that does not answer.

The programs of SLURM are scripts here that run jobs on this machine; `test_slurm.py` has the real ones, and
`test_hyperqueue.py` and `test_ray.py` those of other schedulers.
"""

import asyncio
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from dragoman.core.errors import ModelFailed
from dragoman.core.spec import LaunchOptions, ModelSpec
from dragoman.core.state_store import StateStore
from dragoman.workers.process import ProcessPool
from dragoman_cluster import worker_port
from dragoman_cluster.launchers import command
from dragoman_cluster.launchers.command import CommandLauncher
from dragoman_cluster.worker_port import WorkerPort
from features.cluster.test_rejoin import MODEL, SECRET, ask, loads, server
from workers.workers_harness import wait_until

PROGRAMS = {
    "sbatch": """
if [ -e down ]; then echo "sbatch: error: Batch job submission failed: Socket timed out on send/recv" >&2; exit 1; fi
cat > script.$$  # one for each job: two are submitted at once
setsid sh script.$$ > /dev/null 2>&1 & echo $! | tee -a jobs
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
    monkeypatch.chdir(tmp_path)
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


# Launchers and their command lines: a job, a command that runs as long as its worker, and one that its worker outlives.
LAUNCHERS = {
    "slurm": ("slurm", "exec {worker}"),
    "command": ("command", "sh -c 'echo $$ >> jobs; exec \"$@\"' sh {worker}"),
    "detached": ("command", "sh -c 'echo $$ >> jobs; setsid \"$@\" & echo $! >> jobs; wait' sh {worker}"),
}


def new_pool(port: WorkerPort, folder: Path, launcher: str = "slurm", *, keep: bool = False) -> ProcessPool:
    return ProcessPool(spec_of(port, folder, launcher, keep=keep), lambda: None)


def spec_of(port: WorkerPort, folder: Path, launcher: str, *, keep: bool = False) -> ModelSpec:
    name, line = LAUNCHERS[launcher]
    launch = LaunchOptions(launcher=name, command=line, keep=keep)
    return ModelSpec(name="m", runtime=f"{folder / 'm' / 'model.py'}:Model", launch=launch, worker_port=port)


async def stop(pool: ProcessPool, port: WorkerPort, *, is_killed: bool = False) -> None:
    """End a server: regularly, or as SIGKILL does, which cancels no job."""
    for replica in pool.supervisor.running if is_killed else ():
        replica._process.end_starter = None  # type: ignore[attr-defined]
    port.begin_stop()
    await pool.close()
    for process in getattr(pool._launcher, "_started", {}).values():  # children of a process that is gone
        process.returncode = 0


@pytest.mark.parametrize("launcher", ["slurm", "command"])
@pytest.mark.parametrize("is_killed", [True, False])
async def test_the_next_server_adopts_jobs(folder: Path, launcher: str, is_killed: bool) -> None:
    model = folder / "m" / "model.py"
    async with with_store(folder) as port:
        number, pool = port.port, new_pool(port, folder, launcher, keep=not is_killed)
        await pool.start()
        pid = await ask(pool, 1)
        await stop(pool, port, is_killed=is_killed)
    assert [runs(job) for job in jobs(folder)] == [True]
    async with with_store(folder, number) as port:
        pool = new_pool(port, folder, launcher)
        await pool.start()
        assert await ask(pool, 2) == pid
        assert loads(model) == {pid: 1}
        await stop(pool, port)  # not kept this time
        assert [runs(job) for job in jobs(folder)] == [False]
    async with with_store(folder, number) as port:
        assert port.adopt("m", "SLURM job") is port.adopt("m", "command") is None


@pytest.mark.parametrize("launcher", ["slurm", "command"])
async def test_a_job_that_has_ended_meanwhile_is_replaced(
    folder: Path, launcher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "_REJOIN_S", 0.1)
    async with with_store(folder) as port:
        number, pool = port.port, new_pool(port, folder, launcher)
        await pool.start()
        await stop(pool, port, is_killed=True)
    (job,) = jobs(folder)
    os.killpg(job, signal.SIGKILL)
    await wait_until(lambda: not runs(job))
    async with with_store(folder, number) as port:
        pool = new_pool(port, folder, launcher)
        await pool.start()
        assert await ask(pool, 1)
        assert len(jobs(folder)) == 2
        await stop(pool, port)


async def test_a_worker_outlives_the_command_that_has_started_it(folder: Path) -> None:
    """As when the connection of `ssh` is cut: the worker comes back by itself."""
    async with with_store(folder) as port:
        number, pool = port.port, new_pool(port, folder, "detached")
        await pool.start()
        pid = await ask(pool, 1)
        await stop(pool, port, is_killed=True)
    command_pid, worker = jobs(folder)
    os.killpg(command_pid, signal.SIGKILL)
    await wait_until(lambda: not runs(command_pid))
    assert worker == pid
    async with with_store(folder, number) as port:
        pool = new_pool(port, folder, "detached")
        await pool.start()
        assert await ask(pool, 2) == pid
        await stop(pool, port)
    await wait_until(lambda: not runs(worker))


async def test_the_number_of_a_process_that_is_used_again(folder: Path) -> None:
    """A process of another start is none of ours: it is not killed."""
    async with with_store(folder) as port:
        launcher = CommandLauncher(spec_of(port, folder, "command"))
        with subprocess.Popen(["sleep", "60"], process_group=0) as other:
            job = f"{other.pid}/1/{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"
            await launcher.cancel(job)
            with pytest.raises(subprocess.TimeoutExpired):
                other.wait(0.3)
            other.kill()


async def test_jobs_are_kept_only_with_a_store(folder: Path) -> None:
    async with server() as port:
        with pytest.raises(ModelFailed, match=r"'placement\.keep': expected a server with --state"):
            new_pool(port, folder, keep=True)


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
