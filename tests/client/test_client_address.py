"""URLs, TLS, and imports of the client."""

import datetime
import ipaddress
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

import dragoman
from client.client_servers import Echo, LoopThread, url_of
from dragoman import errors
from dragoman.client.messages import address

X = {"x": np.ones(1)}


# --- URLs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "scheme", "authority", "base"),
    [
        ("http://h", "http", "h:80", ""),
        ("https://h/", "https", "h:443", ""),
        ("HTTP://h:8080/a/b/", "http", "h:8080", "/a/b"),
        ("grpc://[::1]:8081", "grpc", "[::1]:8081", ""),
        ("grpcs://h", "grpcs", "h:443", ""),
    ],
)
def test_urls(url: str, scheme: str, authority: str, base: str) -> None:
    found = address(url, "", None, None, "", True)
    assert (found.scheme, found.authority, found.base) == (scheme, authority, base)


@pytest.mark.parametrize(
    "url",
    ["", "h:8080", "ftp://h", "http://", "grpc://h", "http://h:x", "http://h:99999", "http://h?q", "grpc://h:1/path"],
)
def test_invalid_urls(url: str) -> None:
    with pytest.raises(errors.InvalidInput, match="url: expected"):
        dragoman.Client(url)


def test_invalid_settings() -> None:
    with pytest.raises(errors.InvalidInput, match="compression: expected"):
        dragoman.Client("http://h:1", compression="br")  # type: ignore[arg-type]
    for url in ("https://h:1", "grpcs://h:1"):
        with pytest.raises(errors.InvalidInput, match=r"tls_ca: 'nosuch\.pem' cannot be read as certificates"):
            dragoman.Client(url, tls_ca="nosuch.pem")
    for headers in ({"a": "b\r\nc: d"}, {"a\n": "b"}, {"": "b"}, {"a:": "b"}):
        with pytest.raises(errors.InvalidInput, match="without line breaks"):
            dragoman.Client("http://h:1", headers=headers)
    with pytest.raises(errors.InvalidInput, match="'authorization'"):
        dragoman.AsyncClient("http://h:1", token="a\nb")


# --- TLS -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a self-signed certificate for 127.0.0.1 and its key."""
    folder = tmp_path_factory.mktemp("tls")
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "tests")])
    now = datetime.datetime.now(datetime.UTC)
    result = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        .sign(key, hashes.SHA256())
    )
    encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    (folder / "key.pem").write_bytes(key.private_bytes(encoding, form, serialization.NoEncryption()))
    (folder / "cert.pem").write_bytes(result.public_bytes(encoding))
    return folder / "cert.pem"


@pytest.fixture(scope="module")
def secure(loop_thread: LoopThread, certificate: Path) -> Iterator[dragoman.Server]:
    key = str(certificate.with_name("key.pem"))
    with loop_thread.serving(Echo, tls_cert=str(certificate), tls_key=key) as server:
        yield server


def test_a_trusted_certificate(loop_thread: LoopThread, secure: dragoman.Server, kind: Any, certificate: Path) -> None:
    wire, client_kind = kind
    large = np.arange(100_000.0)
    with loop_thread.client(client_kind, url_of(secure, wire), tls_ca=certificate) as client:
        for _ in range(2):
            np.testing.assert_array_equal(client.infer("Echo", {"x": large})["x"], large)
        assert [r["x"].tolist() for r in client.stream("Echo", X)] == [[1]]


def test_an_untrusted_certificate(loop_thread: LoopThread, secure: dragoman.Server, kind: Any) -> None:
    wire, client_kind = kind
    with (
        loop_thread.client(client_kind, url_of(secure, wire), timeout_s=10) as client,
        pytest.raises(ConnectionError, match=r"(?i)self.signed|certificate.verify"),
    ):
        client.live()


def test_tls_verify_false(loop_thread: LoopThread, secure: dragoman.Server, kind: Any) -> None:
    wire, client_kind = kind
    with loop_thread.client(client_kind, url_of(secure, wire), tls_verify=False) as client:
        assert client.infer("Echo", X)["x"].tolist() == [1]


# --- what a client needs ---------------------------------------------------------------------------------------


def loaded_after(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize("url", ["http://h:1", "grpc://h:1"])
@pytest.mark.parametrize("name", ["Client", "AsyncClient"])
def test_the_client_imports_no_server_modules(url: str, name: str) -> None:
    modules = loaded_after(f"import dragoman; dragoman.{name}('{url}')" if name == "Client" else _ASYNC.format(url))
    rooms = {m.split(".")[1] for m in modules if m.startswith("dragoman.")}
    assert not rooms & {"engine", "transports", "protocols", "workers", "runtimes", "server", "cli"}
    assert not modules & {"uvloop", "pandas", "PIL", "grpc"}


_ASYNC = """import asyncio, dragoman
async def main(): await dragoman.AsyncClient('{}').close()
asyncio.run(main())"""
