"""Secrets in files: variables `*_FILE` and the credentials of systemd."""

import logging
import os
from pathlib import Path

import pytest

from dragoman.cli import main
from dragoman.core.errors import InvalidInput
from dragoman.core.options import collector_headers
from dragoman.settings import from_environment
from e2e.server_process import running_server

SECRET = "s" * 24


@pytest.fixture
def file(tmp_path: Path) -> Path:
    found = tmp_path / "secret"
    found.write_text(SECRET + "\n")
    found.chmod(0o600)
    return found


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
@pytest.mark.parametrize("name", ["api_key", "control_token"])
def test_a_file_has_the_secret(file: Path, name: str, end: str) -> None:
    file.write_bytes(f"{SECRET} \n{end}".encode())  # only the last line break is not part of it
    secret = f"{SECRET} " if not end else f"{SECRET} \n"
    assert from_environment({f"DRAGOMAN_{name.upper()}_FILE": str(file)}) == {name: secret}


@pytest.mark.parametrize("name", ["api_key", "control_token", "worker_secret"])
def test_credentials_of_systemd(file: Path, name: str) -> None:
    folder = file.rename(file.with_name(f"dragoman_{name}")).parent
    assert from_environment({"CREDENTIALS_DIRECTORY": str(folder)}) == {name: SECRET}
    assert from_environment({"CREDENTIALS_DIRECTORY": str(folder / "none")}) == {}


def test_the_file_of_the_workers_is_a_setting(file: Path) -> None:
    variable = {"DRAGOMAN_WORKER_SECRET_FILE": str(file)}
    assert from_environment(variable) == {"worker_secret_file": str(file)}
    with pytest.raises(
        InvalidInput, match="given twice: expected only one of DRAGOMAN_WORKER_SECRET and DRAGOMAN_WORKER"
    ):
        from_environment({**variable, "DRAGOMAN_WORKER_SECRET": SECRET})


def test_headers_of_a_collector(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text("api-key=1\n")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS_FILE", str(file))
    assert collector_headers("traces") == "api-key=1"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "api-key=2")
    assert (collector_headers("traces"), collector_headers("logs")) == ("api-key=2", "api-key=1")


def test_secrets_that_are_given_twice(file: Path) -> None:
    credential = file.with_name("dragoman_api_key")
    credential.write_text(SECRET)
    sources = {
        "DRAGOMAN_API_KEY": SECRET,
        "DRAGOMAN_API_KEY_FILE": str(file),
        "CREDENTIALS_DIRECTORY": str(file.parent),
    }
    for left_out in sources:
        with pytest.raises(InvalidInput, match="a secret is given twice: expected only one of"):
            from_environment({name: value for name, value in sources.items() if name != left_out})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: No such file"),
        (b"\n", "expected a secret, got an empty file"),
        (b"\xff" * 30, "cannot be read: it is not UTF-8 text"),
        (b"s" * (1 << 17), "expected at most 65536 bytes"),
    ],
)
def test_invalid_files(file: Path, content: bytes | None, message: str) -> None:
    file.unlink() if content is None else file.write_bytes(content)
    with pytest.raises(InvalidInput, match=f"DRAGOMAN_API_KEY_FILE: file '.*': ?{message}|{message}"):
        from_environment({"DRAGOMAN_API_KEY_FILE": str(file)})
    with pytest.raises(InvalidInput, match="'DRAGOMAN_API_KEY_FILE': expected the name of a file"):
        from_environment({"DRAGOMAN_API_KEY_FILE": ""})


def test_a_file_that_others_may_read(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    for mode, count in ((0o600, 0), (0o640, 0), (0o644, 1)):
        caplog.clear()
        file.chmod(mode)
        with caplog.at_level(logging.WARNING):
            from_environment({"DRAGOMAN_API_KEY_FILE": str(file)})
        assert len(caplog.records) == count
    assert SECRET not in caplog.text


def test_a_server_with_a_key_in_a_file(tmp_path: Path, file: Path) -> None:
    model = tmp_path / "m.py"
    model.write_text("import dragoman\n\n@dragoman.model\ndef m(x: float) -> float:\n    return x\n")
    with running_server(f"{model}:m", environment={"DRAGOMAN_API_KEY_FILE": str(file)}) as server:
        assert server.request("GET", "/v2", headers={})[0] == 401
        assert server.request("GET", "/v2", headers={"authorization": f"Bearer {SECRET}"})[0] == 200
        file.write_text("t" * 24)
        os.kill(server.popen.pid, 1)  # SIGHUP
        server.wait_for_log("setting 'api_key' has changed, which needs a restart")
        assert "t" * 24 not in server.log()


def test_the_check_reports_them(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DRAGOMAN_API_KEY_FILE", str(tmp_path / "none"))
    assert main(["serve", "--check", str(tmp_path)]) == 2
    assert "DRAGOMAN_API_KEY_FILE: file " in capsys.readouterr().err
