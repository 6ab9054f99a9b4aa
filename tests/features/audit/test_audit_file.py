"""The audit log in a file: its lines and their chain, rotation, full disks, several processes, `dragoman audit`."""

import errno
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from access.access_models import BODY, Doubler, KeyFile, bearer
from dragoman.cli import main
from dragoman.core.audit import audited
from dragoman.core.callers import Caller
from dragoman.core.errors import InvalidInput, NotReady
from dragoman.system.cpus import cores
from dragoman_audit import audit_file
from dragoman_audit.audit_command import verify
from dragoman_audit.audit_file import AuditFile
from e2e.server_process import running_server, wait_until
from rest.rest_server import serving

UNLOAD, LOAD = "/v2/repository/models/Doubler/unload", "/v2/repository/models/Doubler/load"


def lines_of(*files: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for file in files for line in file.read_bytes().splitlines()]


def add(log: AuditFile, *models: str) -> None:
    for model in models:
        log.write({"action": "load", "model": model})


def models_of(*files: Path) -> list[str]:
    return [line["model"] for line in lines_of(*files)]


# --- lines of a server -------------------------------------------------------------------------------------------


async def test_lines_of_a_server(tmp_path: Path) -> None:
    keys, file = KeyFile(tmp_path / "keys.toml"), tmp_path / "audit.log"
    ops, user = keys.add("ops", ["admin"]), keys.add("user")
    secrets = [ops, user, "wrong-" * 8]
    async with serving(Doubler, api_keys=str(keys.path), audit_log=str(file)) as server:
        number = {**bearer(ops), "x-request-id": "r-1"}
        assert (await server.request("POST", UNLOAD, b"", number)).status == 200
        assert lines_of(file)[-1]["outcome"] == "done"  # before the response
        await server.request("POST", UNLOAD, b"", bearer(user))
        await server.request("POST", "/v2/models/Doubler/infer", BODY, bearer(secrets[2]))
        hostile = 'a"\n{"action": "forged"}\u2028\x1b[31m'
        await server.request("POST", "/v2/trace/setting", {hostile: hostile}, bearer(ops))
        await server.request("POST", "/models", {"url": f"s3://user:{secrets[2]}@host/x"}, bearer(ops))
        keys.add("new")
        server.dragoman.reload()
        families = {family.name: family.samples[0].value for family in server.dragoman.engine.audit.families()}
    lines = lines_of(file)
    names = ("action", "key", "client", "outcome", "model", "before", "after", "status", "added", "cause", "request_id")
    shown = [{n: line[n] for n in names if n in line} for line in lines]
    assert shown[0] == {
        "action": "unload", "key": "ops", "client": "127.0.0.1", "outcome": "done", "model": "Doubler",
        "before": "READY", "after": "", "request_id": "r-1",
    }  # fmt: skip
    assert [(s["action"], s.get("key"), s.get("status"), s.get("added")) for s in shown[1:]] == [
        ("refused", "user", 403, None),
        ("refused", "", 401, None),
        ("trace settings", "ops", None, None),
        ("load", "ops", None, None),
        ("reload keys", "", None, "new"),
        ("reload settings", "", None, None),
    ]
    assert json.loads(lines[3]["settings"]) == {hostile: hostile}
    assert len({line["prev"] for line in lines}) == len(lines)
    assert all(line["time"].endswith("Z") and line["time"] > "2026" for line in lines)
    text = file.read_text()
    assert text.isascii()
    assert not any(secret in text for secret in secrets)
    assert (families["dragoman_audit_log_writable"], families["dragoman_audit_log_lines_total"]) == (1, len(lines))
    assert verify([str(file)]).errors == []


async def test_a_deleted_response_has_a_line(tmp_path: Path) -> None:
    from dragoman.core.calls import Request
    from dragoman.core.record_calls import DeleteRecord, SaveRecord

    file = tmp_path / "audit.log"
    async with serving(Doubler, audit_log=str(file)) as server:
        engine, caller = server.dragoman.engine, Caller("key:ann", "ann", "10.0.0.1")
        await engine.call(Request(SaveRecord("key:ann", "resp_1", b"{}"), caller=caller))
        answers = [
            (await engine.call(Request(DeleteRecord("key:ann", "resp_1"), caller=caller))).answer for _ in range(2)
        ]
    assert answers == [True, False]
    (line,) = lines_of(file)
    assert (line["action"], line["record"], line["key"], line["outcome"]) == ("delete", "resp_1", "ann", "done")


@pytest.mark.skipif(sys.platform != "linux" or cores() < 2, reason="one process per core of Linux")
def test_several_processes_a_full_disk_and_rotation(tmp_path: Path) -> None:
    keys, file = KeyFile(tmp_path / "keys.toml"), tmp_path / "audit.log"
    ops = bearer(keys.add("ops", ["admin"]))
    source = "import dragoman\n\n@dragoman.model\ndef Doubler(x: float) -> float:\n    return x\n"
    (tmp_path / "Doubler.py").write_text(source)
    flags = ("--processes", "2", "--api-keys", str(keys.path), "--audit-log", str(file), "--audit-log-required")
    with running_server(f"{tmp_path / 'Doubler.py'}:Doubler", *flags) as server:

        def change(path: str) -> int:
            return server.request("POST", path, b"", ops)[0]

        def limit(size: int) -> None:
            resource.prlimit(server.popen.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

        for number in range(8):  # of both processes
            assert server.request("GET", f"/v2/models/{number}", headers={})[0] == 401
        assert change(UNLOAD) == 200
        wait_until(lambda: sum(line.get("times", 1) for line in lines_of(file) if line["action"] == "refused") >= 2, "")
        assert [line["outcome"] for line in lines_of(file) if line["action"] == "unload"] == ["begun", "done"]

        limit(file.stat().st_size + 20)  # within a line
        assert change(LOAD) == 503
        assert server.request("GET", "/v2/models/Doubler/ready", headers=ops)[0] != 200
        (problem,) = server.request("GET", "/v2/repository/status", headers=ops)[1]["problems"]
        assert problem == "the audit log cannot be written: File too large"
        assert b"dragoman_audit_log_writable 0" in server.request("GET", "/metrics", headers=ops)[1]
        limit(resource.RLIM_INFINITY)
        wait_until(lambda: file.read_bytes().endswith(b"\n"), "the end of the line")
        assert change(LOAD) == 200

        moved = file.rename(tmp_path / "audit.log.1")
        server.popen.send_signal(signal.SIGHUP)
        wait_until(file.exists, "the new file")
        keys.add("new")
        wait_until(lambda: "reload keys" in file.read_text(), "the line about the keys")
        assert change(UNLOAD) == 200
        server.popen.send_signal(signal.SIGTERM)
        server.popen.wait()
    report = verify([str(moved), str(file)])
    assert (report.errors, report.notes) == ([], [])
    lines = lines_of(moved, file)
    refused = sum(line.get("times", 1) for line in lines if line["action"] == "refused")
    assert refused == 8
    assert [line["outcome"] for line in lines if line["action"] == "load"] == ["begun", "failed", "begun", "done"]
    assert [line["added"] for line in lines if line["action"] == "reload keys"] == ["new"]


# --- the file ----------------------------------------------------------------------------------------------------


def test_a_chain_goes_on_after_a_restart_and_rotations(tmp_path: Path) -> None:
    file, first, second = tmp_path / "a", tmp_path / "a.1", tmp_path / "a.2"
    log = AuditFile(str(file))
    add(log, "1", "2")
    file.rename(second)
    add(log, "3")
    log.close()
    log = AuditFile(str(file))
    add(log, "4")
    file.rename(first)
    add(log, "5")
    log.close()
    assert models_of(second, first, file) == ["1", "2", "3", "4", "5"]
    assert verify([str(second), str(first), str(file)]) == verify([str(second), str(first), str(file)])
    report = verify([str(second), str(first), str(file)])
    assert (report.lines, report.errors, report.notes) == (5, [], [])
    assert verify([str(first), str(file)]).notes == [f"{first}:1: it continues an older file"]
    assert len(verify([str(second), str(file)]).errors) == 1  # a whole file is missing


@pytest.mark.parametrize("change", ["remove", "edit", "add", "swap"])
def test_changed_lines_are_found(tmp_path: Path, change: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a"
    log = AuditFile(str(file))
    add(log, *"12345")
    log.close()
    lines = file.read_bytes().splitlines(keepends=True)
    match change:
        case "remove":
            del lines[2]
        case "edit":
            lines[2] = lines[2].replace(b'"3"', b'"9"')
        case "add":
            lines.insert(2, lines[2])
        case "swap":
            lines[1:3] = lines[2], lines[1]
    file.write_bytes(b"".join(lines))
    assert main(["audit", "verify", str(file)]) == 1
    number = {"remove": 3, "edit": 4, "add": 4, "swap": 2}[change]
    assert f"{file}:{number}: a line before it was changed, added or removed" in capsys.readouterr().err


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a"
    log = AuditFile(str(file))
    add(log, "1", "2")
    log.close()
    assert main(["audit", "verify", str(file)]) == 0
    assert capsys.readouterr().out.startswith("lines=2 errors=0 last=")
    assert main(["audit", "verify", "--json", str(file)]) == 0
    assert json.loads(capsys.readouterr().out)["lines"] == 2
    assert main(["audit", "verify", str(tmp_path / "none")]) == 2
    assert "cannot be read: No such file" in capsys.readouterr().err
    file.write_bytes(file.read_bytes() + b"[1]\n\xff\n" + b'{"prev": "')
    report = verify([str(file)])
    assert (report.lines, len(report.errors), len(report.notes)) == (4, 0, 3)


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines wait, and the file has each of them once, also the one that was written in part."""
    monkeypatch.setattr(audit_file, "RETRY_S", 0.01)
    file, free, write = tmp_path / "a", [60], os.write

    def limited(descriptor: int, data: bytes) -> int:
        if not free[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count = write(descriptor, data[: free[0]])
        free[0] -= count
        return count

    monkeypatch.setattr(os, "write", limited)
    log = AuditFile(str(file))
    for model in "123":
        add(log, model)
    assert log.problem == "the audit log cannot be written: No space left on device"
    assert file.stat().st_size == 60
    free[0] = 70
    wait_until(lambda: file.stat().st_size == 130, "the next bytes")
    moved = file.rename(tmp_path / "a.1")  # within a line, which begins again in the new file
    free[0] = 10_000
    wait_until(lambda: not log.problem, "the end of the problem")
    add(log, "4")
    log.close()
    assert models_of(file)[-1] == "4"
    report = verify([str(moved), str(file)])
    assert (report.errors, len(report.notes)) == ([], 1)
    whole = [line for line in moved.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    assert [json.loads(line)["model"] for line in whole] + models_of(file) == ["1", "2", "3", "4"]


def test_a_server_that_was_killed_within_a_line(tmp_path: Path) -> None:
    file = tmp_path / "a"
    log = AuditFile(str(file))
    add(log, "1")
    log.close()
    file.write_bytes(file.read_bytes() + b'{"action": "lo')
    log = AuditFile(str(file))
    add(log, "2")
    log.close()
    report = verify([str(file)])
    assert (report.lines, report.errors, len(report.notes)) == (3, [], 1)


@pytest.mark.parametrize("is_required", [False, True])
def test_changes_while_nothing_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_required: bool
) -> None:
    monkeypatch.setattr(audit_file, "MAX_WAITING", 2)
    file = tmp_path / "a"
    made: list[str] = []

    def fail(*_: Any) -> int:
        raise OSError(errno.EIO, "I/O error")

    def change(model: str) -> None:
        with audited("load", Caller("key:ann", "ann", "10.0.0.1"), {"model": model}, lambda: len(made)):
            made.append(model)

    log = AuditFile(str(file), is_required=is_required)
    log.attach()
    try:
        change("1")
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", fail)
            for model in ("2", "3", "4"):
                if is_required:
                    with pytest.raises(NotReady, match=r"changes are rejected: the audit log cannot .* I/O error"):
                        change(model)
                else:
                    change(model)
        change("5")
    finally:
        log.close()
    assert made == (["1", "5"] if is_required else ["1", "2", "3", "4", "5"])
    shown = [(line["model"], line["outcome"], line["before"], line.get("after")) for line in lines_of(file)]
    if is_required:  # the attempt, and the rejections for which there was room
        assert shown[:2] == [("1", "begun", 0, None), ("1", "done", 0, 1)]
        assert shown[2:4] == [("2", "begun", 1, None), ("2", "failed", 1, None)]
        assert shown[-2:] == [("5", "begun", 1, None), ("5", "done", 1, 2)]
    else:
        assert shown == [("1", "done", 0, 1), ("2", "done", 1, 2), ("3", "done", 2, 3), ("5", "done", 4, 5)]
    lost = next(family for family in log.families() if family.name == "dragoman_audit_log_lost_total")
    assert lost.samples[0].value > 0


def test_one_server_writes_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_file, "LOCK_WAIT_S", 0.0)
    file = tmp_path / "a"
    program = (
        "from dragoman_audit.audit_file import AuditFile; import sys; f = AuditFile(sys.argv[1]); print(); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        assert other.stdin is not None
        other.stdout.readline()
        with pytest.raises(InvalidInput, match=r"setting 'audit_log': cannot open .*: another server writes it"):
            AuditFile(str(file))
        other.stdin.write(b"\n")
    AuditFile(str(file)).close()


def test_pipes_and_the_standard_output_have_no_chain(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log = AuditFile("-")
    add(log, "1")
    log.close()
    assert json.loads(capfd.readouterr().out) == {"action": "load", "model": "1"}
    os.mkfifo(tmp_path / "pipe")
    log = AuditFile(str(tmp_path / "pipe"))
    with (tmp_path / "pipe").open("rb") as reader:
        add(log, "2")
        assert json.loads(reader.readline()) == {"action": "load", "model": "2"}
        log.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"audit_log": ""}, "setting 'audit_log': expected a value, got an empty one"),
        ({"audit_log_required": True}, "setting 'audit_log_required' needs 'audit_log'"),
        ({"audit_log": "{folder}"}, "setting 'audit_log': cannot open '.*': Is a directory"),
        ({"audit_log": "{folder}/none/a"}, "setting 'audit_log': cannot open '.*': No such file or directory"),
    ],
)
async def test_invalid_settings(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    given = {name: value.format(folder=tmp_path) if value is not True else True for name, value in settings.items()}
    with pytest.raises(InvalidInput, match=message):
        async with serving(Doubler, **given):
            pass
