"""Workers in jobs of a SLURM cluster of this machine; skipped where SLURM is not installed.

Each call is answered exactly once: right, or with an error that says that its worker was lost.
"""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from dragoman.core.calls import Inference
from dragoman.core.errors import ModelFailed, NotReady, WorkerLost
from dragoman.core.spec import LaunchOptions
from dragoman.workers.process import ProcessPool
from dragoman_cluster.drain import slurm_time_left_s
from dragoman_cluster.worker_port import WorkerPort
from e2e.server_process import free_ports, started_server
from features.cluster.local_clusters import local_slurm
from features.cluster.test_join import open_port, outcomes_of_pids
from workers.workers_harness import call, first_value, print_outcomes, spec_of, wait_until

by_named_command = pytest.mark.skipif(
    "DRAGOMAN_TEST_CLUSTERS" not in os.environ, reason="slow; run by ./scripts/test-clusters"
)
LONG_S = 30.0


@pytest.fixture(scope="module")
def configuration(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with local_slurm(tmp_path_factory.mktemp("slurm") / "cluster") as found:
        yield found


@pytest.fixture(autouse=True)
def cluster(configuration: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("SLURM_CONF", configuration)
    monkeypatch.chdir(tmp_path)  # jobs run there and write their output
    yield
    assert jobs() == {}


def jobs() -> dict[str, str]:
    """Return the states of the jobs that have not ended, by id."""
    return dict(line.split("|") for line in slurm("squeue", "--noheader", "--format=%i|%T").splitlines())


def slurm(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def new_pool(port: WorkerPort, model: str = "Actions", **launch: Any) -> ProcessPool:
    options = LaunchOptions(launcher="slurm", **launch)
    return ProcessPool(spec_of(model, launch=options, replicas=options.replicas, worker_port=port), lambda: None)


@asynccontextmanager
async def jobs_of(port: WorkerPort, **launch: Any) -> AsyncIterator[ProcessPool]:
    pool = new_pool(port, **launch)
    try:
        await pool.start()
        yield pool
    finally:
        await pool.close()
        await wait_until(lambda: not jobs(), LONG_S)


async def test_a_job_computes_leaves_and_is_replaced(tmp_path: Path) -> None:
    """One worker after the other: SIGTERM, and the loss of the node with its processes."""
    results: list[object] = []
    (tmp_path / "job.sh").write_text("#!/bin/bash\n#SBATCH --comment=ours\n#SBATCH --time=10\nexport READ=yes\n")
    begun, go, script = tmp_path / "begun", tmp_path / "go", str(tmp_path / "job.sh")
    async with open_port() as port, jobs_of(port, script=script, resources={"cpus_per_task": 2}) as pool:
        first = first_value(await call(pool, do="pid"))
        (job,) = jobs()
        assert "ours 10:00 2" in slurm("squeue", "--noheader", "--format=%k %l %C")
        assert b"READ=yes" in Path(f"/proc/{first}/environ").read_bytes()
        left_s = slurm_time_left_s({"SLURM_JOB_ID": job})
        assert left_s is not None
        assert 500 < left_s <= 600

        held = asyncio.create_task(call(pool, do="hold", begun=begun, go=go, then="pid"))
        await wait_until(begun.exists)
        slurm("scancel", "--signal=TERM", "--batch", job)
        await wait_until(lambda: pool.unavailable == "its worker leaves: SIGTERM")
        queued = [asyncio.create_task(call(pool, do="pid")) for _ in range(50)]
        await asyncio.sleep(0.1)
        assert not any(task.done() for task in queued)
        go.touch()
        assert first_value(await held) == first
        results += await asyncio.gather(*queued)
        (second,) = {first_value(response) for response in await asyncio.gather(*queued)}
        assert second != first

        held = asyncio.create_task(call(pool, do="hold", begun=tmp_path / "again", go=tmp_path / "never"))
        await wait_until((tmp_path / "again").exists)
        (node,) = slurm("sinfo", "--noheader", "--format=%n").split()
        slurm("scontrol", "update", f"nodename={node}", "state=down", "reason=a test")
        os.kill(second, signal.SIGKILL)
        with pytest.raises(WorkerLost, match=r"connection was closed; SLURM job \d+ ended with NODE_FAIL\) while it "):
            await held
        results.append(held.exception())
        await wait_until(lambda: "waiting for resources: SLURM job" in pool.unavailable, LONG_S)
        await wait_until(lambda: "is PENDING (" in pool.unavailable, LONG_S)
        assert pool.unavailable.endswith("): 0 of 1 are loaded")
        queued = [asyncio.create_task(call(pool, do="pid")) for _ in range(50)]
        slurm("scontrol", "update", f"nodename={node}", "state=resume")
        (third,) = set(await outcomes_of_pids(pool, 50)) | {first_value(r) for r in await asyncio.gather(*queued)}
        assert third != second
        results += await asyncio.gather(*queued)
    counts = print_outcomes("SLURM job: SIGTERM, node lost", results)
    assert counts == {"right": 100, "WorkerLost": 1}


@pytest.mark.skipif(
    "DRAGOMAN_TEST_CLUSTERS" not in os.environ, reason="takes 2 minutes; run by ./scripts/test-clusters"
)
async def test_jobs_that_reach_their_time_limit(tmp_path: Path) -> None:
    """Their workers leave before, and SLURM ends a job whose worker still computes a call then: only that is lost."""
    begun, results = tmp_path / "begun", []
    resources = {"time": "00:01:00", "cpus_per_task": 1}
    async with open_port() as port, jobs_of(port, replicas=2, resources=resources, drain_s=30.0) as pool:
        held = asyncio.create_task(call(pool, do="hold", begun=begun, go=tmp_path / "never"))
        await wait_until(begun.exists)

        async def client() -> None:
            while not held.done():
                (result,) = await asyncio.gather(call(pool, do="pid"), return_exceptions=True)
                results.append(result)
                await asyncio.sleep(0.02)

        async with asyncio.timeout(180):
            await asyncio.gather(*(client() for _ in range(4)))
        with pytest.raises(WorkerLost, match=r"SLURM job \d+ (ended with TIMEOUT|was cancelled)"):
            await held
    counts = print_outcomes("SLURM time limit", [*results, held.exception()])
    assert counts == {"right": len(results), "WorkerLost": 1}
    workers = {first_value(response) for response in results if isinstance(response, Inference)}
    assert len(workers) >= 3


SERVED = """
import os
import time
import numpy as np
import dragoman

class Wait(dragoman.Model):
    def predict(self, x: np.ndarray) -> np.ndarray:
        if x[0] > 0:
            open("computing", "w").close()
            time.sleep(x[0])
        return np.array([os.getpid()])
"""
SERVED_OPTIONS = """
[model]
runtime = "python"
uri = "model.py:Wait"
[model.placement]
launcher = "slurm"
replicas = 2
resources = { cpus_per_task = 4 }
command = "exec {worker} --connect-timeout-s 1"
"""


@by_named_command
async def test_jobs_follow_the_load(tmp_path: Path) -> None:
    """A range from 0: jobs are submitted while calls wait, at most so many, and end when their workers are idle."""
    results: list[object] = []
    async with open_port() as port, jobs_of(port, replicas=3, min_replicas=0, min_ready=0, idle_s=2.0) as pool:
        for turn in range(2):
            await wait_until(lambda: not jobs(), LONG_S)
            assert pool.ready
            go = tmp_path / f"go{turn}"
            begun = [tmp_path / f"begun{n}" for n in range(12)]
            calls = [asyncio.create_task(call(pool, do="hold", begun=each, go=go, then="pid")) for each in begun]
            await wait_until(lambda: len([*tmp_path.glob("begun*")]) == 3, LONG_S)
            assert [*jobs().values()] == 3 * ["RUNNING"]
            go.touch()
            found = await asyncio.gather(*calls)
            assert len({first_value(response) for response in found}) == 3
            results += found
            for each in begun:
                each.unlink()
        await wait_until(lambda: not jobs(), LONG_S)
    assert print_outcomes("SLURM jobs from 0 to 3 and back, twice", results) == {"right": 24}


@by_named_command
async def test_jobs_end_when_the_server_is_killed(tmp_path: Path) -> None:
    """One runs, in the middle of a call, and the other one waits for its cores: it ends as soon as it starts."""
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "model.py").write_text(SERVED)
    (tmp_path / "m" / "dragoman.toml").write_text(SERVED_OPTIONS)
    environment = {"DRAGOMAN_WORKER_SECRET": "the secret of this test"}
    with started_server(
        "m", "--worker-port", str(free_ports(1)[0]), environment=environment, folder=tmp_path
    ) as server:
        await asyncio.to_thread(server.wait_until_ready)
        worker = int(server.infer("m", [0.0])[1]["outputs"][0]["data"][0])
        assert sorted(jobs().values()) == ["PENDING", "RUNNING"]
        (pending,) = [job for job, state in jobs().items() if state == "PENDING"]
        computed = asyncio.create_task(asyncio.to_thread(server.infer, "m", [600.0]))
        await wait_until((tmp_path / "computing").exists)
        server.popen.kill()
        results = await asyncio.gather(computed, return_exceptions=True)
    await wait_until(lambda: not jobs(), LONG_S)
    assert not Path(f"/proc/{worker}").exists()
    assert "JobState=FAILED" in slurm("scontrol", "show", "job", pending)
    counts = print_outcomes("server killed, with a running and a pending SLURM job", results)
    assert counts == {"RemoteDisconnected": 1} or counts == {"ConnectionResetError": 1}


async def test_a_start_that_is_cancelled_while_its_job_is_submitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sbatch").write_text(f'#!/bin/sh\ntouch begun\nsleep 0.5\nexec {shutil.which("sbatch")} "$@"\n')
    (tmp_path / "sbatch").chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    async with open_port() as port:
        pool = new_pool(port, resources={"begin": "now+1hour"})
        starting = asyncio.create_task(pool.start())
        await wait_until((tmp_path / "begun").exists)
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await pool.close()
    assert jobs() == {}
    assert "JobState=CANCELLED" in slurm("scontrol", "show", "job")


@by_named_command
async def test_the_first_rank_of_srun_is_the_worker(tmp_path: Path) -> None:
    """The other ranks, which never end by themselves, end with it, also when it is killed; so does the job."""
    ranks = 'test $SLURM_PROCID = 0 && exec "$@"; trap "" TERM; echo $$ > rank$SLURM_PROCID; sleep 600'
    (tmp_path / "rank.sh").write_text(ranks)
    options: dict[str, Any] = {
        "command": "srun --kill-on-bad-exit=1 sh rank.sh {worker}; sleep 600",
        "resources": {"ntasks": 3},
    }
    async with open_port() as port, jobs_of(port, **options) as pool:
        first = first_value(await call(pool, do="pid"))
        await wait_until(lambda: all(Path(f"rank{n}").exists() and Path(f"rank{n}").read_text() for n in (1, 2)))
        others = [int(Path(f"rank{n}").read_text()) for n in (1, 2)]
        os.kill(first, signal.SIGKILL)
        await wait_until(lambda: not pool.ready)
        second = first_value(await call(pool, do="pid"))
        assert second != first
        assert not any(Path(f"/proc/{pid}").exists() for pid in others)


@pytest.mark.parametrize(
    ("resources", "reason"), [({"begin": "now+1hour"}, "BeginTime"), ({"cpus_per_task": 99}, "PartitionConfig")]
)
async def test_a_queue_that_never_starts(resources: dict[str, Any], reason: str) -> None:
    """The model waits, says so in SLURM's words, and its jobs are cancelled with it."""
    async with open_port() as port:
        pool = new_pool(port, replicas=2, resources=resources)
        starting = asyncio.create_task(pool.start())
        try:
            await wait_until(lambda: f"({reason})" in pool.waiting)
            numbers = sorted(jobs())
            assert len(numbers) == 2
            job = pool.waiting.split()[5]
            assert pool.waiting == (
                f"waiting for resources: SLURM job {job} is PENDING ({reason}), and 1 more: 0 of 2 are loaded"
            )
        finally:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            await pool.close()
        await wait_until(lambda: not jobs(), LONG_S)


@pytest.mark.parametrize(
    ("launch", "error", "message"),
    [
        ({"resources": {"partition": "gpu"}}, ModelFailed, "sbatch failed: .* Invalid partition name specified"),
        (
            {"resources": {"gres": "gpu:1"}},
            ModelFailed,
            r"sbatch failed: .* Invalid generic resource \(gres\) specific",
        ),
        ({"resources": {"cpu per task": 1}}, ModelFailed, "resources.cpu per task': expected a long option of sbatch"),
        ({"script": "no/such/file"}, ModelFailed, "'placement.script' cannot be read: .* No such file"),
        ({"command": "{adress}"}, ModelFailed, "expected a command line with {address}"),
        (
            {"command": f"{sys.executable} -m dragoman worker --join 127.0.0.1:1/t --connect-timeout-s 0"},
            NotReady,
            "FAILED before its worker joined: dragoman: cannot connect to 127.0.0.1:1 within 0 s: .* refused",
        ),
        (
            {"command": "DRAGOMAN_WORKER_SECRET=0123456789012345678901 {worker}"},
            NotReady,
            "did not accept this worker: the secrets of worker and server differ",
        ),
    ],
    ids=["partition", "gres", "option", "script", "command", "address", "secret"],
)
async def test_jobs_that_cannot_work(launch: Any, error: type[Exception], message: str) -> None:
    expected = f"failed to load 'm', .*{message.replace('{', chr(92) + '{')}"
    async with open_port() as port:
        with pytest.raises(error, match=expected):
            async with asyncio.timeout(LONG_S), jobs_of(port, **launch):
                pass
        if "secrets" in message:
            assert port.last_rejection == (
                "the last worker was not accepted: 127.0.0.1: 'the secrets of worker and server differ'"
            )


async def test_a_machine_without_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_port() as port:
        with (
            monkeypatch.context() as changed,
            pytest.raises(ModelFailed, match="'slurm' needs 'sbatch', which is not f"),
        ):
            changed.setenv("PATH", "/nowhere")
            new_pool(port)


async def test_an_unreachable_controller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, configuration: str) -> None:
    """It may come back: the model is loaded again later."""
    text = Path(configuration).read_text().splitlines()
    (tmp_path / "slurm.conf").write_text("\n".join([*text, "SlurmctldPort=1", "MessageTimeout=1"]))
    async with open_port() as port:
        pool = new_pool(port)
        monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
        with pytest.raises(NotReady, match=r"sbatch failed: .* Unable to contact slurm controller"):
            await pool.start()
        await pool.close()
        again = new_pool(port)
        starting = asyncio.create_task(again.start())
        await wait_until(lambda: "; sbatch failed: " in again.waiting)
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await again.close()
        monkeypatch.setenv("SLURM_CONF", configuration)
