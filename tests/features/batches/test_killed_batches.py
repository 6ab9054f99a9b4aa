"""Batches survive: servers that are killed, disks that are full, servers that are overloaded, calls of others."""

import asyncio
import itertools
import json
import resource
import subprocess
import sys
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from benchmarks import batches

from dragoman.core.services import WireResponse
from dragoman_batches.errors import StorageFull
from dragoman_batches.input import Input
from dragoman_batches.journal import Journal
from dragoman_batches.results import format_result
from dragoman_batches.runner import LineGate, LineRun

OK = WireResponse(200, {"content-type": "application/json"}, b"{}")
BUSY = WireResponse(503, {"content-type": "application/json", "retry-after": "0"}, b"{}")


@pytest.mark.slow
def test_a_server_that_is_killed_answers_each_line_once_with_the_same_bytes() -> None:
    result = batches.compare(1200, kills=2)
    assert (result["answered_exactly_once"], result["counts"]["failed"]) == (1200, 70)


@pytest.mark.skipif(sys.platform != "linux", reason="needs prlimit")
def test_a_full_disk_stops_the_batch_and_not_the_server(tmp_path: Path) -> None:
    server = batches.BatchServer(tmp_path)
    server.start()
    try:
        file_id = server.upload(batches.make_lines(300))
        process = server._process
        assert process is not None
        most = (tmp_path / "dragoman-state-files" / "files" / file_id).stat().st_size  # results are larger
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (most, most))
        body = {"input_file_id": file_id, "endpoint": batches.PATH, "completion_window": "24h"}
        batch = server.json("POST", "/v1/batches", body)
        while batch["status"] in ("validating", "in_progress", "finalizing"):
            time.sleep(0.02)
            batch = server.json("GET", f"/v1/batches/{batch['id']}")
        assert (batch["status"], batch["errors"]["data"][0]["code"]) == ("failed", "storage_full")
        counts, answered = (
            batch["request_counts"],
            server.request("GET", f"/v1/files/{batch['output_file_id']}/content"),
        )
        assert 0 < counts["completed"] + counts["failed"] == len(answered.splitlines()) < 300
        line = json.loads(batches.make_lines(1))
        assert server.json("POST", line["url"], line["body"])["outputs"]
    finally:
        server.stop()


# --- the runner ------------------------------------------------------------------------------------------------


def input_of(count: int) -> Input:
    lines = [b'{"custom_id":"%d","url":"/x","body":{}}\n' % number for number in range(count)]
    starts = array("Q", (sum(map(len, lines[:number])) for number in range(count + 1)))
    return Input(starts, b"".join(lines))


async def run_lines(
    path: Path, count: int, send: Any, gate: LineGate | None = None, deadline_s: float = float("inf")
) -> list[str]:
    """Run lines and return the ids in the journal."""
    journal = Journal(path / "journal")
    try:
        run = LineRun(
            input_of(count),
            journal,
            send,
            lambda number, custom_id, response: format_result("openai", "batch_0", number, custom_id, response),
            gate or LineGate(4, lambda: False),
            deadline_s=deadline_s,
            line_id=str,
        )
        await run.run()
    finally:
        journal.close()
    return [json.loads(each)["custom_id"] for each in (path / "journal").read_bytes().splitlines()]


async def test_results_are_in_order_whatever_line_is_answered_first(tmp_path: Path) -> None:
    running = most = 0

    async def send(_path: str, _body: bytes, request_id: str) -> WireResponse:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01 if int(request_id) % 4 == 0 else 0)
        running -= 1
        return OK

    assert await run_lines(tmp_path, 40, send) == [f"{number}" for number in range(40)]
    assert most == 4


async def test_a_line_that_is_refused_is_sent_again_and_others_wait(tmp_path: Path) -> None:
    attempts: list[str] = []

    async def send(_path: str, _body: bytes, request_id: str) -> WireResponse:
        attempts.append(request_id)
        return BUSY if request_id == "2" and attempts.count("2") < 4 else OK

    assert await run_lines(tmp_path, 8, send, LineGate(1, lambda: False)) == [f"{number}" for number in range(8)]
    assert attempts == ["0", "1", "2", "2", "2", "2", "3", "4", "5", "6", "7"]


async def test_lines_give_way_to_calls_of_others(tmp_path: Path) -> None:
    """While others wait one line runs at a time, and then none for four times as long as it took."""
    begun: list[float] = []
    running = most = 0
    is_busy = True

    async def send(_path: str, _body: bytes, _request_id: str) -> WireResponse:
        nonlocal running, most, is_busy
        begun.append(time.monotonic())
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.02)
        running -= 1
        is_busy = len(begun) < 4
        return OK

    await run_lines(tmp_path, 12, send, LineGate(4, lambda: is_busy, calm_s=0.05))
    rests = [later - earlier for earlier, later in itertools.pairwise(begun[:4])]
    assert min(rests) > 5 * 0.02 - 0.001
    assert most == 4  # once nobody waits


async def test_owners_share_the_lines_that_run() -> None:
    gate = LineGate(4, lambda: False)
    gate.open("ann")
    taken = [gate.try_enter("ann") for _ in range(5)]
    gate.leave("ann", 0.0)
    gate.open("bob")
    assert taken == [True] * 4 + [False]
    assert [gate.try_enter("ann"), gate.try_enter("bob"), gate.try_enter("bob")] == [False, True, False]


async def test_results_that_cannot_be_written_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if there is room again later: results after those that are lost are not written."""
    append: Callable[[Journal, Any], None] = Journal.append
    has_failed = False

    def fail_once(journal: Journal, records: list[bytes]) -> None:
        nonlocal has_failed
        if journal.lines > 10 and not has_failed:
            has_failed = True
            raise StorageFull("full")
        append(journal, records)

    monkeypatch.setattr(Journal, "append", fail_once)

    async def send(_path: str, _body: bytes, _request_id: str) -> WireResponse:
        await asyncio.sleep(0.001)
        return OK

    with pytest.raises(StorageFull):
        await run_lines(tmp_path, 1000, send)
    count = (tmp_path / "journal").read_bytes().count(b"\n")
    monkeypatch.undo()
    assert count < 1000
    assert await run_lines(tmp_path, 1000, send) == [f"{number}" for number in range(1000)]


def test_a_journal_ends_before_a_line_that_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    whole = [format_result("openai", "batch_0", n, f"{n}", OK) for n in range(3)]
    for torn in (whole[2][:-1], whole[2][:20], b"\0" * 30 + b"\n"):
        path.write_bytes(b"".join(whole[:2]) + torn)
        journal = Journal(path)
        assert (journal.lines, journal.succeeded) == (2, 2)
        journal.append(whole[2:])
        journal.close()
        assert path.read_bytes() == b"".join(whole)


# --- the command -----------------------------------------------------------------------------------------------


def batch_command(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dragoman", "batch", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)


def test_the_command_runs_a_file_with_and_without_a_server(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(batches.make_lines(20))
    done = batch_command("in.jsonl", "--model", batches.MODEL, "--json", cwd=tmp_path)
    assert (done.returncode, json.loads(done.stdout)) == (1, {"total": 20, "completed": 19, "failed": 1}), done.stderr
    here = [bodies(tmp_path / name) for name in ("in.jsonl.output.jsonl", "in.jsonl.errors.jsonl")]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "in.jsonl", "in.jsonl.errors.jsonl", "in.jsonl.output.jsonl",
    ]  # fmt: skip
    server = batches.BatchServer(tmp_path)
    server.start()
    try:
        options = ["--url", server.url, "--output", "o", "--errors", "e"]
        done = batch_command("in.jsonl", *options, cwd=tmp_path)
        assert done.returncode == 1, done.stderr
        assert [bodies(tmp_path / name) for name in ("o", "e")] == here
        (tmp_path / "bad.jsonl").write_text("{}\n")
        done = batch_command("bad.jsonl", *options, cwd=tmp_path)
        assert (done.returncode, "line 1: `custom_id`" in done.stderr) == (2, True), done.stderr
    finally:
        server.stop()


def bodies(path: Path) -> list[tuple[str, int, Any]]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [(each["custom_id"], each["response"]["status_code"], each["response"]["body"]) for each in found]
