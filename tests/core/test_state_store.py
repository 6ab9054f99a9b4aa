"""The state store: what is flushed outlives the process, and a file that cannot be written is no outage."""

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dragoman import errors
from dragoman.core import state_store
from dragoman.core.state_store import FILE_NAME, StateStore


@contextmanager
def opened(path: Path | str) -> Iterator[StateStore]:
    store = StateStore(str(path), lock_wait_s=0.05)
    try:
        yield store
    finally:
        store.close()


def values(path: Path, table: str = "numbers") -> dict[str, Any]:
    with opened(path) as store:
        return {key: value for (_, key), value in store.table(table).read().items()}


def metrics(store: StateStore) -> dict[str, float]:
    return {sample.name: sample.value for family in store.families() for sample in family.samples}


def run(script: str, *arguments: object) -> "subprocess.Popen[bytes]":
    program = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


async def test_rows_outlive_the_store(tmp_path: Path) -> None:
    with opened(tmp_path) as store:  # a folder
        table, other = store.table("numbers"), store.table("others", version=3)
        assert table.read() == {}
        assert table.stored_version == 0
        for n in range(1000):
            table.put("count", n)
        table.put("x", {"a": [1.5, None], "text": "ü\u0000"}, owner="key")
        table.put("bytes", b"\xff")
        table.put("gone", 1)
        table.delete("gone")
        other.put("count", 7)
        assert await table.flush()
        assert metrics(store) == {
            "dragoman_state_writable": 1, "dragoman_state_pending_rows": 0, "dragoman_state_lost_total": 0
        }  # fmt: skip
        table.put("last", "written by close")
    file = tmp_path / FILE_NAME
    assert [each.name for each in tmp_path.iterdir()] == [FILE_NAME]
    assert file.stat().st_mode & 0o777 == 0o600
    with opened(file) as store:
        assert store.table("others", version=3).read() == {("", "count"): 7}
        assert store.table("numbers").read() == {
            ("", "count"): 999,
            ("key", "x"): {"a": [1.5, None], "text": "ü\u0000"},
            ("", "bytes"): "/w==",
            ("", "last"): "written by close",
        }
        assert store.table("numbers").read(int) == {("", "count"): 999}  # others are of another type


async def test_without_a_file_it_works_in_memory() -> None:
    with opened("") as store:
        table = store.table("numbers")
        table.put("x", 1)
        assert not await table.flush()
        assert (table.read(), store.problem, metrics(store)) == ({}, "", {})


_WRITE = """
import asyncio, sys, itertools
from dragoman.core.state_store import StateStore
async def main():
    store = StateStore(sys.argv[1], lock_wait_s=0.05)
    table = store.table("numbers")
    for n in itertools.count():
        for key in "abcdefgh":  # all or none
            table.put(key, n)
        if n % 50 == 0 and await table.flush():
            print(n, flush=True)
asyncio.run(main())
"""


def test_kill_in_the_middle_of_writes_loses_nothing_that_was_flushed(tmp_path: Path) -> None:
    file = tmp_path / "state"
    for _ in range(3):
        with run(_WRITE, file) as process:
            assert process.stdout is not None
            for _ in range(20):
                process.stdout.readline()
            process.send_signal(signal.SIGKILL)
            flushed = max(map(int, process.stdout.read().split()), default=0)  # before it died
        found = values(file)
        assert {*found} == {*"abcdefgh"}
        assert min(found.values()) >= flushed
        assert max(found.values()) - min(found.values()) <= 1  # a transaction is written as a whole


def test_a_second_server_is_refused(tmp_path: Path) -> None:
    with run(_WRITE, tmp_path / "state") as process:
        assert process.stdout is not None
        process.stdout.readline()
        with pytest.raises(errors.InvalidInput, match=r"^setting 'state': '.*state' is in use by another server"):
            StateStore(str(tmp_path / "state"), lock_wait_s=0.05)
        process.kill()
    with opened(tmp_path / "state"):
        with pytest.raises(errors.InvalidInput, match="in use by another server"):
            StateStore(str(tmp_path / "state"), lock_wait_s=0.05)  # in the same process
        with run(_WRITE, tmp_path / "state") as process:  # the refused one has not released the lock
            assert process.wait() == 1


_FULL = """
import asyncio, resource, sys, time
from dragoman.core.state_store import StateStore
async def main():
    store = StateStore(sys.argv[1])
    table = store.table("numbers")
    table.put("before", 1)
    assert await table.flush()
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
    table.put("large", "x" * 1_000_000)
    table.put("small", 2)
    assert not await table.flush()
    print(store.problem)
    pending = {s.name: s.value for f in store.families() for s in f.samples}
    assert (pending["dragoman_state_writable"], pending["dragoman_state_pending_rows"]) == (0, 2), pending
    if len(sys.argv) > 2:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        while store.problem:
            time.sleep(0.01)  # it tries again by itself
        print("saved")
    store.close()
asyncio.run(main())
"""


@pytest.mark.parametrize("recovers", [True, False])
def test_a_full_disk_is_no_outage(tmp_path: Path, recovers: bool) -> None:
    with run(_FULL, tmp_path / "state", *["recovers"] * recovers) as process:
        output = process.communicate()[0].decode()
    assert process.returncode == 0, output
    assert "the state cannot be saved" in output
    found = values(tmp_path / "state")
    assert found == ({"before": 1, "small": 2, "large": "x" * 1_000_000} if recovers else {"before": 1})


async def test_a_removed_file_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_store, "_LOOK_S", 0.01)
    monkeypatch.setattr(state_store, "_RETRY_S", (0.01,))
    with opened(tmp_path / "state") as store:
        table = store.table("numbers")
        table.put("x", 1)
        assert await table.flush()
        (tmp_path / "state").rename(tmp_path / "moved")
        while not store.problem:  # without a change
            await asyncio.sleep(0.005)
        assert "removed or replaced" in store.problem
        table.put("x", 2)
        assert not await table.flush()
        (tmp_path / "moved").rename(tmp_path / "state")
        while store.problem:
            await asyncio.sleep(0.005)
    assert values(tmp_path / "state") == {"x": 2}


@pytest.mark.parametrize("where", [0, 60_000])
async def test_a_damaged_file_stays_as_it_is(tmp_path: Path, where: int) -> None:
    file = tmp_path / "state"
    with opened(file) as store:
        table = store.table("numbers")
        for n in range(2000):
            table.put(f"{n}", "text" * 10)
    data = bytearray(file.read_bytes())
    data[where : where + 30_000] = os.urandom(min(30_000, len(data) - where))
    file.write_bytes(data)
    with opened(file) as store:
        assert "damaged" in store.problem or "not a database" in store.problem or "malformed" in store.problem
        assert metrics(store)["dragoman_state_writable"] == 0
        table = store.table("numbers")
        table.put("x", 1)
        assert not await table.flush()
    assert file.read_bytes() == data


_READ = """
import asyncio, resource, sys
from dragoman.core.state_store import StateStore
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
store = StateStore(sys.argv[1])
assert store.table("numbers").read() == {("", "x"): 1}
assert store.problem and not asyncio.run(store.flush())
store.close()
"""


def test_a_file_that_cannot_be_written_is_read(tmp_path: Path) -> None:
    with opened(tmp_path / "state") as store:
        store.table("numbers").put("x", 1)
    with run(_READ, tmp_path / "state") as process:
        output = process.communicate()[0].decode()
    assert process.returncode == 0, output


def test_files_of_others_and_of_newer_servers_are_refused(tmp_path: Path) -> None:
    with opened(tmp_path / "state") as store:
        store.table("numbers", version=2)
    with opened(tmp_path / "state") as store:
        assert store.table("numbers", version=3).stored_version == 2
        assert store.table("others").stored_version == 0
    with (
        opened(tmp_path / "state") as store,
        pytest.raises(errors.InvalidInput, match=r"'state'.* table 'numbers' has version 3, expected 2 or lower"),
    ):
        store.table("numbers", version=2)
    with sqlite3.connect(tmp_path / "newer") as connection:
        connection.execute(f"PRAGMA application_id = {state_store._APPLICATION}")
        connection.execute("PRAGMA user_version = 99")
    with pytest.raises(errors.InvalidInput, match="format 99, expected 1 or lower"):
        StateStore(str(tmp_path / "newer"))
    with sqlite3.connect(tmp_path / "other") as connection:
        connection.execute("CREATE TABLE theirs (x)")
    with pytest.raises(errors.InvalidInput, match="of another program"):
        StateStore(str(tmp_path / "other"))
    with pytest.raises(errors.InvalidInput, match="a folder that exists"):
        StateStore(str(tmp_path / "nowhere" / "state"))


async def test_changes_beyond_the_memory_for_them_are_lost_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_store, "MAX_PENDING_BYTES", 1000)
    monkeypatch.setattr(state_store, "_GATHER_S", 60.0)
    with opened(tmp_path / "state") as store:
        table = store.table("numbers")
        for n in range(100):
            table.put(f"{n}", n)
            table.put("same", n)  # counts once
        assert 0 < metrics(store)["dragoman_state_lost_total"] < 200
        assert metrics(store)["dragoman_state_pending_rows"] < 10
        assert await table.flush()
        table.put("later", 1)
    assert values(tmp_path / "state")["later"] == 1


def test_a_name_that_is_no_table_or_no_text(tmp_path: Path) -> None:
    with opened(tmp_path / "state") as store:
        with pytest.raises(ValueError, match="lower-case"):
            store.table('x"; DROP TABLE tables')
        with pytest.raises(UnicodeEncodeError):
            store.table("numbers").put("\ud800", 1)
