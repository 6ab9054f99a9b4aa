"""The command `dragoman worker`, beside the connection that it makes."""

import asyncio
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from access.access_models import Doubler
from dragoman.cli import main
from rest.rest_server import serving


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_has_the_flags_of_the_command(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert [flag for flag in ("time-limit-s", "cache-gib", "plaintext") if flag not in script] == []


def test_an_address_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        main(["worker"])
    assert exited.value.code == 2
    assert capsys.readouterr().err.endswith("the following arguments are required: --join\n")


def joining(address: str, secret: Path, *more: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "dragoman", "worker", "--join", address, "--secret-file", str(secret), *more]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    file = tmp_path / "secret"
    file.write_text("a secret of the tests, long enough")
    file.chmod(0o600)
    return file


def test_a_server_that_is_not_there_is_logged_at_once(secret: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    with joining(address, secret, "--connect-timeout-s", "600") as worker:
        assert worker.stderr is not None
        line = worker.stderr.readline()  # it comes 600 s before the end
        worker.kill()
    assert f"cannot reach {address} (Connection refused); trying again for 600 s" in line


@pytest.mark.parametrize("tls", [(), ("--tls",)])
async def test_a_port_of_http_is_recognised(secret: Path, tls: tuple[str, ...]) -> None:
    async with serving(Doubler) as server:
        address = f"127.0.0.1:{server.port}"
        worker = joining(address, secret, *tls)
        error = (await asyncio.to_thread(worker.communicate))[1]
    assert worker.returncode == 2
    assert error.rstrip().endswith("; is this the port that --worker-port names?")
