"""What a model has started ends with its worker process, however that ends; what is secret it never sees."""

import asyncio
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from workers_harness import MODELS, ask, children, first, forget_children, processes, spec_of, until  # noqa: F401 - a fixture

from dragoman.core.errors import ModelFailed, WorkerLost
from dragoman.engine.deployment import Deployment


def runs(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] not in b"ZX"
    return False


def guard_of(worker: int) -> int:
    """The process that waits for the end of a worker."""
    (guard,) = Path(f"/proc/{worker}/task/{worker}/children").read_text().split()
    assert Path(f"/proc/{guard}/comm").read_text() == "dragoman-guard\n"
    return int(guard)


@pytest.mark.parametrize("guarded", [True, False])  # else it is the server's part alone
@pytest.mark.parametrize("how", ["os._exit", "segfault", "kill"])
async def test_a_program_ends_with_the_worker_that_started_it(how: str, guarded: bool) -> None:
    async with processes("Acts") as pool:
        if not guarded:
            os.kill(guard_of(children().pop()), signal.SIGKILL)
        program = first(await pool.call(ask(do="start")))
        assert runs(program)
        with pytest.raises(WorkerLost):
            await pool.call(ask(do=how))
        await until(lambda: not runs(program))


async def test_a_program_ends_with_a_call_that_nobody_waits_for(tmp_path: Path) -> None:
    async with processes("Acts", cancel_grace_s=0.1) as pool:
        program = first(await pool.call(ask(do="start")))
        stuck = asyncio.create_task(pool.call(ask(do="hold", begun=tmp_path / "b", go=tmp_path / "never")))
        await until((tmp_path / "b").exists)
        stuck.cancel()
        await until(lambda: not runs(program))


async def test_a_program_ends_with_its_pool() -> None:
    async with processes("Acts") as pool:
        program = first(await pool.call(ask(do="start")))
    await until(lambda: not runs(program))


def test_a_program_ends_with_a_server_that_is_killed() -> None:
    script = f"""
import asyncio, sys
sys.path.insert(0, {str(MODELS.parent)!r})
from workers_harness import ask, first, processes
async def main():
    async with processes("Acts") as pool:
        print(first(await pool.call(ask(do="start"))), flush=True)
        await asyncio.sleep(600)
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        program = int(server.stdout.readline())
        assert runs(program)
        server.kill()
    asyncio.run(until(lambda: not runs(program)))


async def test_a_worker_leads_a_group_of_its_own_in_the_same_session() -> None:
    async with processes("Acts"):
        worker = children().pop()
        assert os.getpgid(worker) == worker
        assert os.getsid(worker) == os.getsid(0)


async def test_secrets_do_not_reach_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAGOMAN_CONTROL_TOKEN", "sesame")
    monkeypatch.setenv("DRAGOMAN_TEST_OTHER", "seen")
    async with processes("Acts"):
        environment = Path(f"/proc/{children().pop()}/environ").read_bytes().split(b"\0")
    assert b"DRAGOMAN_TEST_OTHER=seen" in environment
    assert not [variable for variable in environment if b"sesame" in variable]


async def written(folder: Path, **options: Any) -> tuple[list[int], set[str]]:
    """What three replicas read of the file that each wrote, and the folders in which they did."""
    async with processes("Writes", replicas=3, **options) as pool:
        answers = await asyncio.gather(*(pool.call(ask(n, folder=folder)) for n in (1, 2, 3)))
        places = {str(Path(f"/proc/{worker}/cwd").resolve()) for worker in children()}
    return [first(answer) for answer in answers], places


async def test_replicas_share_the_working_directory_of_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    read, places = await written(tmp_path)
    assert len(set(read)) == 1
    assert places == {str(tmp_path)}


async def test_replicas_with_a_working_directory_each_read_what_they_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    read, places = await written(tmp_path, working_directory="own")
    assert read == [1, 2, 3]
    assert len(places - {str(tmp_path)}) == 3
    assert not [place for place in places if Path(place).exists()]
    assert not (tmp_path / "input.txt").exists()


async def test_a_model_that_shares_a_process_has_no_working_directory_of_its_own(tmp_path: Path) -> None:
    spec = spec_of("Acts", working_directory="own", placement="thread")
    with pytest.raises(ModelFailed, match="working_directory 'own': expected placement 'process', got 'thread'"):
        await Deployment(spec, lambda: None).start()
