"""Process groups of workers: programs of a model end with its worker; secrets do not reach workers."""

import asyncio
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from dragoman.core.errors import ModelFailed, WorkerLost
from dragoman.engine.deployment import Deployment
from workers.workers_harness import (  # noqa: F401 - a fixture
    MODELS,
    call,
    children,
    first_value,
    forget_children,
    make_request,
    processes,
    spec_of,
    wait_until,
)


def is_running(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] not in b"ZX"
    return False


def guard_of(worker: int) -> int:
    """Return the guard process of a worker."""
    (guard,) = Path(f"/proc/{worker}/task/{worker}/children").read_text().split()
    assert Path(f"/proc/{guard}/comm").read_text() == "dragoman-guard\n"
    return int(guard)


@pytest.mark.parametrize("guarded", [True, False])  # without the guard, the server kills the group
@pytest.mark.parametrize("how", ["os._exit", "segfault", "kill"])
async def test_programs_of_a_model_end_when_its_worker_dies(how: str, guarded: bool) -> None:
    async with processes("Actions") as pool:
        if not guarded:
            os.kill(guard_of(children().pop()), signal.SIGKILL)
        program = first_value(await call(pool, do="start"))
        assert is_running(program)
        with pytest.raises(WorkerLost):
            await call(pool, do=how)
        await wait_until(lambda: not is_running(program))


async def test_programs_of_a_model_end_when_its_worker_is_killed_for_a_cancelled_call(tmp_path: Path) -> None:
    async with processes("Actions", cancel_grace_s=0.1) as pool:
        program = first_value(await call(pool, do="start"))
        stuck = asyncio.create_task(call(pool, do="hold", begun=tmp_path / "b", go=tmp_path / "never"))
        await wait_until((tmp_path / "b").exists)
        stuck.cancel()
        await wait_until(lambda: not is_running(program))


async def test_programs_of_a_model_end_when_the_pool_is_closed() -> None:
    async with processes("Actions") as pool:
        program = first_value(await call(pool, do="start"))
    await wait_until(lambda: not is_running(program))


def test_programs_of_a_model_end_when_the_server_is_killed() -> None:
    script = f"""
import asyncio, sys
sys.path.insert(0, {str(MODELS.parents[1])!r})
from workers.workers_harness import call, first_value, processes
async def main():
    async with processes("Actions") as pool:
        print(first_value(await call(pool, do="start")), flush=True)
        await asyncio.sleep(600)
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        program = int(server.stdout.readline())
        assert is_running(program)
        server.kill()
    asyncio.run(wait_until(lambda: not is_running(program)))


async def test_a_worker_leads_a_process_group_in_the_same_session() -> None:
    async with processes("Actions"):
        worker = children().pop()
        assert os.getpgid(worker) == worker
        assert os.getsid(worker) == os.getsid(0)


async def test_secrets_do_not_reach_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAGOMAN_CONTROL_TOKEN", "sesame")
    monkeypatch.setenv("DRAGOMAN_TEST_OTHER", "seen")
    async with processes("Actions"):
        environment = Path(f"/proc/{children().pop()}/environ").read_bytes().split(b"\0")
    assert b"DRAGOMAN_TEST_OTHER=seen" in environment
    assert not [variable for variable in environment if b"sesame" in variable]


async def replica_files(folder: Path, **options: Any) -> tuple[list[int], set[str]]:
    """Let three replicas write and read a file; return the numbers that they read and their working directories."""
    async with processes("WritesFile", replicas=3, **options) as pool:
        responses = await asyncio.gather(*(call(pool, n, folder=folder) for n in (1, 2, 3)))
        folders = {str(Path(f"/proc/{worker}/cwd").resolve()) for worker in children()}
    return [first_value(response) for response in responses], folders


async def test_replicas_share_the_working_directory_of_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    read, folders = await replica_files(tmp_path)
    assert len(set(read)) == 1
    assert folders == {str(tmp_path)}


async def test_replicas_with_own_working_directories_do_not_share_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    read, folders = await replica_files(tmp_path, working_directory="own")
    assert read == [1, 2, 3]
    assert len(folders - {str(tmp_path)}) == 3
    assert not [folder for folder in folders if Path(folder).exists()]
    assert not (tmp_path / "input.txt").exists()


async def test_own_working_directory_needs_placement_process(tmp_path: Path) -> None:
    spec = spec_of("Actions", working_directory="own", placement="thread")
    with pytest.raises(ModelFailed, match="working_directory 'own': expected placement 'process', got 'thread'"):
        await Deployment(spec, lambda: None).start()
