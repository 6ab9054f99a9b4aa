"""`dragoman serve --check`: every fault has a line that names it, and nothing is started."""

import re
import socket
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from dragoman.cli import main
from dragoman.core.state_store import StateStore

MODEL = "def model(x: float) -> float:\n    return x\n"


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "model.py").write_text(MODEL)
    return f"{tmp_path / 'model.py'}:model"


def certificate(folder: Path, name: str, days: int = 1) -> tuple[str, str]:
    """Write a certificate that is valid for so many days, before now if negative, and its key; return their files."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "x")])
    now = datetime.now(UTC)
    built = (
        x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=2))
        .not_valid_after(now + timedelta(days=days))
        .sign(key, hashes.SHA256())
    )
    files = folder / f"{name}.pem", folder / f"{name}.key"
    files[0].write_bytes(built.public_bytes(serialization.Encoding.PEM))
    form = serialization.PrivateFormat.PKCS8
    files[1].write_bytes(key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))
    return str(files[0]), str(files[1])


def errors(capsys: pytest.CaptureFixture[str], words: Sequence[str]) -> list[str]:
    """Return the lines of a check that fails, without the prefix and the last one, which counts them."""
    assert main(["serve", "--check", "--http-port", "0", "--grpc-port", "0", *words]) == 2
    *lines, last = [line.removeprefix("dragoman: ") for line in capsys.readouterr().err.splitlines()]
    assert last.endswith(f"errors={len(lines)}")
    return lines


def test_a_valid_server_is_not_started(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cert, key = certificate(tmp_path, "a")
    flags = ("--tls-cert", cert, "--tls-key", key, "--http-port", "0", "--grpc-port", "0")
    assert main(["serve", model, "--check", *flags]) == 0
    assert capsys.readouterr().out == "dragoman: no error found: models=1\n"


def test_all_faults_are_reported(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "dragoman.toml").write_text("[server]\nmax_rank = 0.5\nmax_tensorss = 3\n")
    (tmp_path / "broken.onnx").write_text("no model")
    (tmp_path / "keys.toml").write_text("no keys")
    monkeypatch.setenv("DRAGOMAN_API_KEY", "short")
    monkeypatch.setenv("DRAGOMAN_MAX_QUEU", "7")
    (cert, _), (_, key) = certificate(tmp_path, "a"), certificate(tmp_path, "b")
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = str(used.getsockname()[1])
        flags = ("--tls-cert", cert, "--tls-key", key, "--api-keys", str(tmp_path / "keys.toml"), "--admin-port", port)
        more = ("--drain-s", "soon", "--jwt-jwks", "ftp://example.org/keys")
        lines = errors(capsys, [str(tmp_path), *flags, *more])
    for part in (
        "setting 'max_rank': expected an integer, got 0.5",
        "unknown setting 'max_tensorss'; did you mean 'max_tensors'?",
        "unknown environment variable 'DRAGOMAN_MAX_QUEU'",
        "setting 'drain_s': expected a number, got 'soon'",
        f"cannot use certificate '{cert}' with key '{key}'",
        "keys.toml",
        "api_key",
        "jwt_jwks",
        f"port {port} of 127.0.0.1 is in use: stop the other server, or choose a port with --admin-port",
    ):
        assert sum(part in line for line in lines) >= 1, (part, lines)


def test_a_certificate_that_has_expired_is_reported(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cert, key = certificate(tmp_path, "old", days=-1)
    (line,) = errors(capsys, [model, "--tls-cert", cert, "--tls-key", key])
    assert line.startswith("setting 'tls_cert': expected a certificate that is valid now, got one valid until ")


def test_two_ports_that_are_the_same(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    (line,) = errors(capsys, [model, "--http-port", port, "--grpc-port", port])
    assert f"port {port} of 127.0.0.1 is in use" in line


def test_a_state_that_cannot_be_used(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is created or changed, also if the file is empty."""
    state = tmp_path / "state"
    state.mkdir()
    (state / "empty").touch()
    for path in (state, state / "empty"):
        assert main(["serve", model, "--check", "--http-port", "0", "--grpc-port", "0", "--state", str(path)]) == 0
    assert [(path.name, path.stat().st_size) for path in state.iterdir()] == [("empty", 0)]
    (state / "other").write_text("no database, but longer than nothing" * 100)
    (line,) = errors(capsys, [model, "--state", str(state / "other")])
    assert line.startswith("setting 'state': the state cannot be saved: file is not a database")
    (line,) = errors(capsys, [model, "--state", str(tmp_path / "no" / "such" / "folder")])
    assert line.startswith("setting 'state': expected a file in a folder that exists")
    store = StateStore(str(state))
    try:
        (line,) = errors(capsys, [model, "--state", str(state)])
        assert line.endswith("is in use by another server: expected a file of this server alone")
    finally:
        store.close()
    monkeypatch.setattr("os.access", lambda *_: False)
    (line,) = errors(capsys, [model, "--state", str(state / "new")])
    assert line.startswith("setting 'state': the state cannot be saved: no permission to write")


def test_the_paths_of_sagemaker_are_checked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With its port, which is the default there."""
    with socket.create_server(("0.0.0.0", 0)) as used:
        monkeypatch.setenv("SAGEMAKER_BIND_TO_PORT", port := str(used.getsockname()[1]))
        assert main(["serve", "--check", "--sagemaker"]) == 2
    lines = capsys.readouterr().err
    assert f"port {port} of 0.0.0.0 is in use" in lines
    assert "/opt/ml/model" in lines
    monkeypatch.setenv("SAGEMAKER_BIND_TO_PORT", "0")
    monkeypatch.setenv("SAGEMAKER_MULTI_MODEL", "true")
    assert main(["serve", "--check", "--sagemaker"]) == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--kafka-topic-input", "a/b"], "setting 'kafka_topic_input': expected 1 to 249 letters"),
        (["--kafka-properties", "{folder}/none"], "setting 'kafka_properties': "),
        (["--kafka-properties", "{folder}/wrong"], "setting 'kafka_properties': .*no.such.property"),
    ],
)
def test_wrong_settings_of_kafka(
    flags: list[str], message: str, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("confluent_kafka")
    (tmp_path / "wrong").write_text("no.such.property=1\n")
    flags = [flag.format(folder=tmp_path) for flag in flags]
    (line,) = errors(capsys, [model, "--kafka-servers", "127.0.0.1:1", *flags])
    assert re.search(message, line)
