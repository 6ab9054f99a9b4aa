"""TLS: client certificates, lowest version, and certificates that change while the server runs."""

import asyncio
import ssl
from pathlib import Path
from typing import Any

import pytest

import dragoman
from access.access_models import Doubler
from access.authorities import Authority, Certificate
from dragoman.core.errors import InvalidInput
from rest.rest_server import serving

pytest.importorskip("cryptography.x509")


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "authority")


def client_context(authority: Authority, certificate: Certificate | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(authority.file))
    if certificate is not None:
        context.load_cert_chain(certificate.cert, certificate.key)
    return context


async def connect(port: int, context: ssl.SSLContext) -> str:
    """Send a request; return the name in the server's certificate. Raises OSError if TLS fails."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    try:
        writer.write(b"GET /v2/health/live HTTP/1.1\r\nHost: a\r\n\r\n")
        line = await asyncio.wait_for(reader.readline(), 60)
        if not line:
            raise ConnectionResetError
        assert line.startswith(b"HTTP/1.1 200"), line
        subject: Any = writer.get_extra_info("peercert")["subject"]
        return str(subject[0][0][1])
    finally:
        writer.close()


async def test_clients_need_a_certificate_of_the_authority(authority: Authority, tmp_path: Path) -> None:
    server_files, client_files = authority.issue("server"), authority.issue("client")
    (tmp_path / "other").mkdir()
    stranger = Authority(tmp_path / "other", "stranger").issue("client")
    settings = {"tls_cert": str(server_files.cert), "tls_key": str(server_files.key)}
    async with serving(Doubler, grpc_port=0, tls_client_ca=str(authority.file), **settings) as server:
        for port in (server.port, server.dragoman.grpc_port):
            context = client_context(authority, client_files)
            if port != server.port:
                context.set_alpn_protocols(["h2"])
                _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
                writer.close()
            else:
                assert await connect(port, context) == "server"
            for wrong in (None, stranger):
                with pytest.raises(OSError):
                    await connect(port, client_context(authority, wrong))


@pytest.mark.parametrize(("version", "is_accepted"), [("1.2", True), ("1.3", False)])
async def test_the_lowest_version_is_a_setting(authority: Authority, version: str, is_accepted: bool) -> None:
    files = authority.issue("server")
    settings = {"tls_cert": str(files.cert), "tls_key": str(files.key), "tls_min_version": version}
    context = client_context(authority)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    async with serving(Doubler, **settings) as server:
        if is_accepted:
            assert await connect(server.port, context) == "server"
        else:
            with pytest.raises(OSError):
                await connect(server.port, context)
        assert await connect(server.port, client_context(authority)) == "server"


async def test_a_new_certificate_is_used_and_a_wrong_one_is_not(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    first, second, third = authority.issue("first"), authority.issue("second"), authority.issue("third")
    settings = {"tls_cert": str(first.cert), "tls_key": str(first.key)}
    context = client_context(authority)
    async with serving(Doubler, **settings) as server:
        assert await connect(server.port, context) == "first"
        first.cert.write_bytes(second.cert.read_bytes())  # it does not match the key yet
        server.dragoman.reload()
        assert "the TLS certificate is not reloaded" in caplog.text
        assert await connect(server.port, context) == "first"
        first.key.write_bytes(second.key.read_bytes())
        server.dragoman.reload()
        assert await connect(server.port, context) == "second"
        # Without a signal as well.
        first.key.write_bytes(third.key.read_bytes())
        first.cert.write_bytes(third.cert.read_bytes())
        async with asyncio.timeout(60):
            while await connect(server.port, context) != "third":
                await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tls_client_ca": "ca.pem"}, "setting 'tls_client_ca' needs 'tls_cert'"),
        ({"tls_key": "key.pem"}, "setting 'tls_key' needs 'tls_cert'"),
    ],
)
def test_settings_without_a_certificate(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        asyncio.run(_start(settings))


def test_an_invalid_authority_stops_the_start(authority: Authority, tmp_path: Path) -> None:
    files = authority.issue("server")
    (tmp_path / "ca.pem").write_text("none")
    settings = {"tls_cert": str(files.cert), "tls_key": str(files.key), "tls_client_ca": str(tmp_path / "ca.pem")}
    with pytest.raises(InvalidInput, match="cannot use 'tls_client_ca'"):
        asyncio.run(_start(settings))


async def _start(settings: dict[str, Any]) -> None:
    async with dragoman.Server(Doubler, http_port=0, grpc_port=-1, **settings):
        pass
