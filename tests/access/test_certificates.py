"""Certificates of clients as their keys: names, roles, expiry and revocation, over HTTP/1.1, HTTP/2 and gRPC."""

import asyncio
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from access.access_models import BODY, Doubler, Tripler
from access.authorities import Authority, Certificate
from dragoman.access.certificates import PeerCertificate, parse_certificate_name, peer_certificate
from dragoman.access.control import AccessControl, AccessRules
from dragoman.access.keys import create_key, digest_of, parse_keys
from dragoman.cli import main
from dragoman.core.errors import InvalidInput, Unauthorized
from dragoman.formats import grpc_messages as m
from rest.rest_server import RestServer, serving

x509 = pytest.importorskip("cryptography.x509")

SPIFFE = "spiffe://example.org/batch"
INFER, INDEX = "/v2/models/Doubler/infer", "/v2/repository/index"


class Setup:
    """A server with TLS, its authority, and a key file with entries for certificates."""

    def __init__(self, folder: Path) -> None:
        self.authority = Authority(folder, "authority")
        self.folder, self.keys = folder, folder / "keys.toml"
        self.server_files = self.authority.issue("server")
        self.ops = self.authority.issue("ops")
        self.batch = self.authority.issue("batch-7", [x509.UniformResourceIdentifier(SPIFFE)])
        self.unknown = self.authority.issue("unknown")
        self.key = create_key()
        self.write("")

    def write(self, more: str) -> None:
        self.keys.write_text(
            '[[key]]\nname = "ops"\ncertificate = "CN=ops"\nroles = ["admin"]\n'
            f'[[key]]\nname = "batch"\ncertificate = "{SPIFFE}"\nroles = ["infer"]\nmodels = ["Doubler"]\n'
            f'[[key]]\nname = "user"\nsha256 = "{digest_of(self.key).hex()}"\nroles = ["read"]\n{more}'
        )

    @asynccontextmanager
    async def serve(self, **settings: Any) -> AsyncIterator[RestServer]:
        files = {"tls_cert": str(self.server_files.cert), "tls_key": str(self.server_files.key)}
        files |= {"tls_client_ca": str(self.authority.file), "api_keys": str(self.keys)}
        async with serving(Doubler, Tripler, grpc_port=0, **files, **settings) as server:
            yield server

    def context(self, certificate: Certificate | None) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=str(self.authority.file))
        if certificate is not None:
            context.load_cert_chain(certificate.cert, certificate.key)
        return context

    def http(self, port: int, certificate: Certificate | None, *, http2: bool = False) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            base_url=f"https://127.0.0.1:{port}", verify=self.context(certificate), http2=http2, http1=not http2
        )

    def channel(self, port: int, certificate: Certificate) -> grpc.aio.Channel:
        credentials = grpc.ssl_channel_credentials(
            self.authority.file.read_bytes(), certificate.key.read_bytes(), certificate.cert.read_bytes()
        )
        return grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials)


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    return Setup(tmp_path_factory.mktemp("certificates"))


async def call(channel: grpc.aio.Channel, method: str) -> str:
    """Return the code of a call."""
    try:
        await channel.unary_unary(f"/{m.SERVICE}/{method}")(b"", timeout=60)
    except grpc.aio.AioRpcError as error:
        return str(error.code().name)
    return "OK"


async def test_names_roles_and_models_over_each_transport(setup: Setup) -> None:
    async with setup.serve() as server, AsyncExitStack() as stack:
        for http2 in (False, True):
            ops, batch, unknown = [
                await stack.enter_async_context(setup.http(server.port, each, http2=http2))
                for each in (setup.ops, setup.batch, setup.unknown)
            ]
            assert (await ops.post(INDEX)).status_code == 200
            assert (await batch.post(INFER, content=BODY)).status_code == 200
            assert (await batch.post(INFER.replace("Doubler", "Tripler"), content=BODY)).status_code == 403
            response = await batch.post(INDEX)
            assert (response.status_code, "key 'batch' does not have the role" in response.text) == (403, True)
            response = await unknown.post(INFER, content=BODY)
            assert (response.status_code, "CN=unknown" in response.text) == (401, True)
            # A key goes before the certificate, also a wrong one.
            assert (await ops.post(INDEX, headers={"x-api-key": setup.key})).status_code == 403
            assert (await ops.post(INDEX, headers={"x-api-key": "w" * 30})).status_code == 401
            assert (await unknown.get("/v2", headers={"x-api-key": setup.key})).status_code == 200
            with pytest.raises(httpx.TransportError):
                await (await stack.enter_async_context(setup.http(server.port, None, http2=http2))).get("/v2")
        for port in (server.port, server.dragoman.grpc_port):
            codes = []
            for certificate in (setup.ops, setup.batch, setup.unknown):
                async with setup.channel(port, certificate) as channel:
                    codes += [await call(channel, "RepositoryIndex") for _ in range(2)]
            assert codes == ["OK"] * 2 + ["PERMISSION_DENIED"] * 2 + ["UNAUTHENTICATED"] * 2


async def test_clients_without_a_certificate_need_a_key(setup: Setup, tmp_path: Path) -> None:
    stranger = Authority(tmp_path, "stranger").issue("ops")
    ended = setup.authority.issue("ended", ended=True)
    async with setup.serve(tls_client_optional=True) as server:
        async with setup.http(server.port, None) as client:
            assert (await client.get("/v2")).status_code == 401
            assert (await client.get("/v2", headers={"x-api-key": setup.key})).status_code == 200
            assert (await client.get("/v2/health/live")).status_code == 200
        async with setup.http(server.port, setup.ops) as client:
            assert (await client.get("/v2")).status_code == 200
        for wrong in (stranger, ended):  # is not the same as none
            async with setup.http(server.port, wrong) as client:
                with pytest.raises(httpx.TransportError):
                    await client.get("/v2", headers={"x-api-key": setup.key})


async def test_a_batch_in_the_name_of_a_certificate(setup: Setup) -> None:
    """The lines are sent later, when the certificate is not presented; the key has a counter from the start."""
    async with setup.serve() as server, setup.http(server.port, setup.batch) as client:
        metrics = [
            s.labels["key"] for f in server.dragoman.engine.metric_sources[0]() for s in f.samples if "key" in s.labels
        ]
        assert {"ops", "batch", "user"} - {*metrics} == {"user"}  # which calls no models
        line = b'{"custom_id": "a", "method": "POST", "url": "%b", "body": %b}' % (INFER.encode(), BODY)
        files: Any = {"file": ("in.jsonl", line), "purpose": (None, "batch")}
        file = (await client.post("/v1/files", files=files)).json()
        body = {"input_file_id": file["id"], "endpoint": INFER, "completion_window": "1h"}
        batch = (await client.post("/v1/batches", json=body)).json()
        async with asyncio.timeout(60):
            while batch["status"] in ("validating", "in_progress", "finalizing"):
                await asyncio.sleep(0.02)
                batch = (await client.get(f"/v1/batches/{batch['id']}")).json()
        assert (batch["status"], batch["request_counts"]["completed"]) == ("completed", 1)


async def test_revoked_certificates(setup: Setup) -> None:
    first, second = setup.authority.issue("first"), setup.authority.issue("second")
    setup.write('[[key]]\nname = "second"\ncertificate = "CN=second"\nroles = ["read"]\n')
    file = setup.authority.revoke(first)
    async with setup.serve(tls_client_crl=str(file), tls_min_version="1.3") as server:
        grpc_port = server.dragoman.grpc_port
        async with setup.http(server.port, first) as client:
            with pytest.raises(httpx.TransportError):
                await client.get("/v2")
        async with AsyncExitStack() as stack:
            http1, http2, other = [
                await stack.enter_async_context(setup.http(server.port, each, http2=is_second))
                for each, is_second in ((second, False), (second, True), (setup.ops, False))
            ]
            channel = await stack.enter_async_context(setup.channel(grpc_port, second))
            for client in (http1, http2, other):
                assert (await client.get("/v2")).status_code == 200
            assert await call(channel, "ServerMetadata") == "OK"
            setup.authority.revoke(first, second)
            server.dragoman.reload()
            for client in (http1, http2):  # open connections end, and new ones are rejected
                with pytest.raises(httpx.TransportError):
                    await client.get("/v2")
            assert await call(channel, "ServerMetadata") == "UNAVAILABLE"
            assert (await other.get("/v2")).status_code == 200
        file.write_text("none")  # the last list stays
        server.dragoman.reload()
        async with setup.http(server.port, second) as client:
            with pytest.raises(httpx.TransportError):
                await client.get("/v2")


async def test_no_session_is_resumed(setup: Setup) -> None:
    """A resumed session would not show that its certificate has been revoked, or has expired."""
    async with setup.serve() as server:
        context = setup.context(setup.ops)

        def connect(session: ssl.SSLSession | None) -> tuple[ssl.SSLSession | None, bool]:
            with (
                socket.create_connection(("127.0.0.1", server.port), 60) as plain,
                context.wrap_socket(plain, server_hostname="127.0.0.1", session=session) as encrypted,
            ):
                encrypted.sendall(b"GET /v2 HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
                assert encrypted.recv(100).startswith(b"HTTP/1.1 200")
                return encrypted.session, bool(encrypted.session_reused)

        session, _ = await asyncio.to_thread(connect, None)
        assert session is None or not session.has_ticket
        assert not (await asyncio.to_thread(connect, session))[1]


# --- rules -------------------------------------------------------------------------------------------------------


def certified(*names: str, expires_s: float = 2e9) -> Callable[[], PeerCertificate]:
    return lambda: PeerCertificate(names, expires_s)


def control_of(path: Path, text: str) -> AccessControl:
    path.write_text(text)
    return AccessControl(AccessRules(keys_file=str(path), has_certificates=True))


def test_the_first_name_with_an_entry_counts_and_limits_are_shared(tmp_path: Path) -> None:
    access = control_of(
        tmp_path / "keys.toml",
        '[[key]]\nname = "a"\ncertificate = "DNS:a.example"\nroles = ["infer"]\nmax_concurrent = 1\n'
        '[[key]]\nname = "b"\ncertificate = "CN=b"\nroles = ["read"]\nexpires = 2020-01-01T00:00:00Z\n',
    )

    def grant(certificate: Any) -> Any:
        return access.authorize("infer", {}, lambda: "10.0.0.1", "", certificate)

    found = grant(certified("URI:x", "DNS:a.example", "CN=b"))
    assert (found.name, found.owner) == ("a", "key:a")
    soon_s = time.time() + 10
    shorter = grant(certified("DNS:a.example", expires_s=soon_s))
    assert (shorter.expires_s, shorter.limiter) == (soon_s, found.limiter)
    for wrong in (
        certified("CN=b"),  # expired entry
        certified("DNS:a.example", expires_s=time.time() - 1),
        certified("CN=DNS:a.example"),
        certified("email:a.example"),
        certified(),
    ):
        with pytest.raises(Unauthorized):
            grant(wrong)
    with pytest.raises(Unauthorized, match="this request has no key"):
        grant(lambda: None)


def test_names_in_a_certificate() -> None:
    class Transport:
        def get_extra_info(self, _name: str) -> Any:
            return {
                "subject": ((("countryName", "DE"),), (("commonName", "c n"),)),
                "subjectAltName": (
                    ("DNS", "d"),
                    ("URI", SPIFFE),
                    ("email", "e@x"),
                    ("IP Address", "::1"),
                    ("RID", "1"),
                ),
                "notAfter": "Jan  1 00:00:00 2027 GMT",
            }

    found = peer_certificate(Transport())
    assert found == PeerCertificate(("DNS:d", f"URI:{SPIFFE}", "email:e@x", "IP:::1", "CN=c n"), 1_798_761_600)


@pytest.mark.parametrize("text", ["", "ops", "CN=", "O=x", "DNS:a\nb", "cn=ops"])
def test_invalid_names(text: str) -> None:
    with pytest.raises(InvalidInput, match="'certificate': expected CN="):
        parse_certificate_name(text)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("", "key 'x': expected one of 'sha256' and 'certificate', got none"),
        (f'certificate = "CN=a"\nsha256 = "{"0" * 64}"', "expected one of 'sha256' and 'certificate', got both"),
        ('certificate = "a"', "key 'x': 'certificate': expected CN="),
        (
            'certificate = "CN=a"\n[[key]]\nname = "y"\nroles = ["read"]\ncertificate = "CN=a"',
            "two keys have the certificate 'CN=a'",
        ),
    ],
)
def test_invalid_entries(entry: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        parse_keys(f'[[key]]\nname = "x"\nroles = ["read"]\n{entry}\n')


def test_an_entry_needs_an_authority(tmp_path: Path) -> None:
    (tmp_path / "keys.toml").write_text('[[key]]\nname = "x"\nroles = ["read"]\ncertificate = "CN=a"\n')
    with pytest.raises(InvalidInput, match="key 'x': 'certificate' needs the setting 'tls_client_ca'"):
        AccessControl(AccessRules(keys_file=str(tmp_path / "keys.toml")))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tls_client_ca": None, "tls_client_optional": True}, "setting 'tls_client_optional' needs 'tls_client_ca'"),
        ({"tls_client_optional": True, "api_keys": None}, "setting 'tls_client_optional' needs keys"),
        ({"tls_client_crl": "{crl}"}, "setting 'tls_client_crl' needs 'tls_min_version' 1.3"),
        ({"tls_client_crl": "{none}", "tls_min_version": "1.3"}, "'tls_client_crl' '.*' cannot be read"),
        ({"tls_client_crl": "{ca}", "tls_min_version": "1.3"}, "expected revocation lists in PEM"),
        ({"tls_client_crl": "{bad}", "tls_min_version": "1.3"}, "a revocation list is not valid"),
        ({"tls_client_crl": "{old}", "tls_min_version": "1.3"}, "expected a list that is valid now, got one until"),
    ],
)
async def test_invalid_settings(tmp_path: Path, setup: Setup, changes: dict[str, Any], message: str) -> None:
    files = {"none": tmp_path / "none", "ca": setup.authority.file, "bad": tmp_path / "bad", "old": tmp_path / "old"}
    files["crl"] = setup.authority.revoke()
    files["old"].write_bytes(Authority(tmp_path, "other").revoke(days=-1).read_bytes())
    files["bad"].write_text("-----BEGIN X509 CRL-----\nMAA=\n-----END X509 CRL-----\n")
    settings: dict[str, Any] = {"tls_cert": str(setup.server_files.cert), "tls_key": str(setup.server_files.key)}
    settings |= {"tls_client_ca": str(setup.authority.file), "api_keys": str(setup.keys), **changes}
    named = {n: v.format(**files) if isinstance(v, str) else v for n, v in settings.items() if v is not None}
    with pytest.raises(InvalidInput, match=message):
        async with serving(Doubler, **named):
            pass


def test_the_command_adds_a_certificate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = ["--file", str(tmp_path / "keys.toml")]
    assert main(["keys", "create", "ops", "--roles", "admin", "--certificate", SPIFFE, *file]) == 0
    assert capsys.readouterr().out == ""  # there is no key to show
    assert main(["keys", "list", *file]) == 0
    assert capsys.readouterr().out == f"ops  roles=infer,read,admin  certificate=URI:{SPIFFE}\n"
    assert main(["keys", "create", "other", "--certificate", "ops", *file]) == 2
    assert "'certificate': expected CN=" in capsys.readouterr().err
