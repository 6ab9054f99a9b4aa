"""JSON Web Tokens: keys from a file and a URL, claims, algorithms."""

import asyncio
import base64
import http.server
import json
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

import dragoman
from access.access_models import BODY, Doubler, Tripler, bearer
from dragoman.access.download import download
from dragoman.access.tokens import TokenRules, TokenVerifier
from dragoman.access.urls import is_secure
from dragoman.core.errors import InvalidInput, Unauthorized
from rest.rest_server import serving

jwt = pytest.importorskip("jwt")
pytest.importorskip("cryptography")

INFER = "/v2/models/Doubler/infer"
ISSUER, AUDIENCE = "https://login.example", "dragoman"


class Issuer:
    """A key pair with a key id."""

    def __init__(self, kid: str, algorithm: str = "ES256") -> None:
        from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

        self.kid, self.algorithm = kid, algorithm
        make = {
            "ES256": lambda: ec.generate_private_key(ec.SECP256R1()),
            "RS256": lambda: rsa.generate_private_key(65537, 2048),
            "EdDSA": ed25519.Ed25519PrivateKey.generate,
        }
        self.private: Any = make[algorithm]()

    @property
    def jwk(self) -> dict[str, Any]:
        found: dict[str, Any] = jwt.get_algorithm_by_name(self.algorithm).to_jwk(
            self.private.public_key(), as_dict=True
        )
        return {**found, "kid": self.kid, "use": "sig"}

    def token(self, *without: str, algorithm: str = "", key: Any = None, **claims: Any) -> str:
        base = {"iss": ISSUER, "aud": AUDIENCE, "exp": time.time() + 300, "sub": "ann", "roles": ["infer"]}
        payload = {name: value for name, value in {**base, **claims}.items() if name not in without}
        headers = {"kid": self.kid}
        return str(jwt.encode(payload, key or self.private, algorithm or self.algorithm, headers=headers))


@pytest.fixture(scope="module")
def issuer() -> Issuer:
    return Issuer("one")


def settings(jwks: Path | str) -> dict[str, Any]:
    return {"jwt_jwks": str(jwks), "jwt_issuer": ISSUER, "jwt_audience": AUDIENCE}


def write(path: Path, *issuers: Issuer) -> Path:
    path.write_text(json.dumps({"keys": [each.jwk for each in issuers]}))
    return path


@pytest.mark.parametrize("algorithm", ["ES256", "RS256", "EdDSA"])
async def test_a_token_is_accepted_like_a_key(algorithm: str, tmp_path: Path) -> None:
    issuer = Issuer("one", algorithm)
    async with serving(Doubler, Tripler, **settings(write(tmp_path / "jwks", issuer))) as server:
        for headers in (bearer(issuer.token()), bearer(issuer.token(roles="infer read"))):
            for _ in range(2):
                assert (await server.request("POST", INFER, BODY, headers)).status == 200
        denied = await server.request("POST", INFER, BODY)
        assert (denied.status, denied.headers["www-authenticate"]) == (401, "Bearer")


async def test_a_token_has_limits_like_a_key(issuer: Issuer, tmp_path: Path) -> None:
    """Those of all tokens of a subject, also after they were verified again."""
    async with serving(Doubler, **settings(write(tmp_path / "jwks", issuer))) as server:

        async def statuses(*tokens: str) -> list[int]:
            return [(await server.request("POST", INFER, BODY, bearer(token))).status for token in tokens]

        slow = {"calls_per_s": 0.001}
        assert await statuses(issuer.token(sub="bob", limits=slow), issuer.token(sub="bob", limits=slow)) == [200, 429]
        assert await statuses(issuer.token(sub="eve", limits=slow), issuer.token(sub="kim")) == [200, 200]
        assert await statuses(issuer.token(sub="bob", limits={})) == [200]


def test_limits_and_priority_of_a_token(issuer: Issuer, tmp_path: Path) -> None:
    rules = TokenRules(jwks=str(write(tmp_path / "jwks", issuer)), issuer=ISSUER, audience=AUDIENCE)
    limits = {"calls_per_s": 5, "max_concurrent": 2, "tokens_per_minute": 10, "tokens_per_day": 20, "priority": "low"}
    grant = TokenVerifier(rules).verify(issuer.token(limits=limits))
    assert {name: getattr(grant, name) for name in limits} == limits
    assert grant.caller().priority == "low"


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"calls_per_second": 5}, "claim 'limits': .*calls_per_second"),
        ({"calls_per_s": -1}, r"claim 'limits': .*\$.calls_per_s"),
        ({"max_concurrent": True}, r"claim 'limits': .*\$.max_concurrent"),
        ({"tokens_per_day": 10**16}, r"claim 'limits': .*\$.tokens_per_day"),
        ({"tokens_per_minute": 20, "tokens_per_day": 10}, "claim 'limits': 'tokens_per_minute' is never reached"),
        ({"priority": "urgent"}, r"claim 'limits': .*\$.priority"),
        ("low", "claim 'limits': .*got `str`"),
    ],
)
def test_invalid_limits_make_a_token_invalid(issuer: Issuer, tmp_path: Path, limits: Any, message: str) -> None:
    rules = TokenRules(jwks=str(write(tmp_path / "jwks", issuer)), issuer=ISSUER, audience=AUDIENCE)
    with pytest.raises(Unauthorized, match=message):
        TokenVerifier(rules).verify(issuer.token(limits=limits))


def test_limits_of_tokens_need_what_counts_them(
    issuer: Issuer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dragoman.hooks.entry", lambda *_: None)
    rules = TokenRules(jwks=str(write(tmp_path / "jwks", issuer)), issuer=ISSUER, audience=AUDIENCE)
    with pytest.raises(Unauthorized, match="need the feature dragoman_usage"):
        TokenVerifier(rules).verify(issuer.token(limits={"tokens_per_day": 5}))


def unsigned(issuer: Issuer) -> str:
    def part(value: Any) -> str:
        return base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")

    claims = {"iss": ISSUER, "aud": AUDIENCE, "exp": time.time() + 300, "roles": ["admin"]}
    return f"{part({'alg': 'none', 'kid': issuer.kid})}.{part(claims)}."


def hmac_with_public_key(issuer: Issuer) -> str:
    """Sign with HS256 and the text of the public key, which a verifier that trusts `alg` would accept."""
    import hashlib
    import hmac

    from cryptography.hazmat.primitives import serialization as s

    def part(data: bytes) -> str:
        return base64.urlsafe_b64encode(data).decode().rstrip("=")

    pem = issuer.private.public_key().public_bytes(s.Encoding.PEM, s.PublicFormat.SubjectPublicKeyInfo)
    claims = {"iss": ISSUER, "aud": AUDIENCE, "exp": time.time() + 300, "roles": ["admin"]}
    signed = ".".join(part(json.dumps(each).encode()) for each in ({"alg": "HS256", "kid": issuer.kid}, claims))
    return f"{signed}.{part(hmac.new(pem, signed.encode(), hashlib.sha256).digest())}"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda i: i.token(exp=time.time() - 120), "expired"),
        (lambda i: i.token("exp"), '"exp"'),
        (lambda i: i.token(exp=10**400), "not valid"),
        (lambda i: i.token(exp=str(int(time.time()) + 300)), "claim 'exp': expected a number of seconds"),
        (lambda i: i.token(iat=str(int(time.time()))), "claim 'iat': expected a number of seconds"),
        (lambda i: i.token(nbf=True), "claim 'nbf': expected a number of seconds"),
        (lambda i: i.token(exp=float("inf")), "not valid"),
        (lambda i: i.token("iss"), '"iss"'),
        (lambda i: i.token("aud"), '"aud"'),
        (lambda i: i.token(iss="https://evil.example"), "issuer"),
        (lambda i: i.token(aud="other"), "udience"),
        (lambda i: i.token(nbf=time.time() + 600), "not yet valid"),
        (lambda i: i.token(sub=5), "not valid"),
        (lambda i: i.token(roles=5), "claim 'roles': expected a list of strings"),
        (lambda i: i.token(models={"a": 1}), "claim 'models': expected a list of strings"),
        (lambda i: i.token()[:-8] + "AAAAAAAA", "ignature"),
        (lambda i: Issuer("one").token(), "ignature"),
        (lambda i: Issuer("two").token(), "unknown key"),
        (unsigned, "not valid"),
        (hmac_with_public_key, "not valid"),
        (lambda i: "a.b.c", "not valid"),
        (lambda i: "e30.e30.e30", "not valid"),
        (lambda i: "[" * 4000 + "..", "not valid"),
        (lambda i: i.token(text="x" * 9000), "not valid"),
    ],
)
async def test_other_tokens_get_401(issuer: Issuer, tmp_path: Path, make: Any, message: str) -> None:
    async with serving(Doubler, **settings(write(tmp_path / "jwks", issuer))) as server:
        response = await server.request("POST", INFER, BODY, bearer(make(issuer)))
        assert response.status == 401, response
        assert message in response.error
        assert (await server.request("POST", INFER, BODY, bearer(issuer.token()))).status == 200


async def test_new_tokens_are_accepted_after_failures_of_their_address(issuer: Issuer, tmp_path: Path) -> None:
    limit = {"auth_failures_per_minute": 2}
    async with serving(Doubler, **settings(write(tmp_path / "jwks", issuer)), **limit) as server:

        async def status(token: str) -> int:
            return int((await server.request("POST", INFER, BODY, bearer(token))).status)

        wrong = Issuer("one")
        assert [await status(wrong.token()) for _ in range(4)] == [401, 401, 429, 429]
        assert await status("wrong") == 429
        assert await status(issuer.token()) == 200
        assert await status(issuer.token(exp=time.time() - 120)) == 429


async def test_roles_and_models_of_a_token_hold(issuer: Issuer, tmp_path: Path) -> None:
    more = {"jwt_roles_claim": "realm.roles", "jwt_models_claim": "may_use", "jwt_limits_claim": "realm.limits"}
    async with serving(Doubler, Tripler, **settings(write(tmp_path / "jwks", issuer)), **more) as server:

        async def status(path: str, **claims: Any) -> int:
            return int((await server.request("POST", path, BODY, bearer(issuer.token("roles", **claims)))).status)

        assert await status(INFER) == 403
        assert await status(INFER, realm={"roles": ["editor"]}) == 403
        assert await status(INFER, realm={"roles": ["infer", "editor"]}) == 200
        bound = {"realm": {"roles": ["infer"]}, "may_use": ["Doubler"]}
        assert await status(INFER, **bound) == 200
        assert await status("/v2/models/Tripler/infer", **bound) == 403


def test_a_verified_token_ends_when_it_expires(issuer: Issuer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rules = TokenRules(jwks=str(write(tmp_path / "jwks", issuer)), issuer=ISSUER, audience=AUDIENCE)
    verifier, token, now_s = TokenVerifier(rules), issuer.token(exp=time.time() + 100), time.time()
    grant = verifier.verify(token)
    assert verifier.find(token) is grant
    monkeypatch.setattr(time, "time", lambda: now_s + 159)  # the clocks may differ by a minute
    assert verifier.find(token) is grant
    monkeypatch.setattr(time, "time", lambda: now_s + 161)
    assert verifier.find(token) is None


def token_verifier(path: Path, *issuers: Issuer) -> TokenVerifier:
    return TokenVerifier(TokenRules(jwks=str(write(path, *issuers)), issuer=ISSUER, audience=AUDIENCE))


def test_a_verified_token_is_verified_again_after_five_minutes(
    issuer: Issuer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verifier, token, now_s = (
        token_verifier(tmp_path / "jwks", issuer),
        issuer.token(exp=time.time() + 9000),
        time.time(),
    )
    grant = verifier.verify(token)
    monkeypatch.setattr(time, "time", lambda: now_s + 299)
    assert verifier.find(token) is grant
    monkeypatch.setattr(time, "time", lambda: now_s + 302)
    assert verifier.find(token) is None
    monkeypatch.undo()
    monkeypatch.setattr("dragoman.access.tokens._MAX_CACHED", 2)
    tokens = [issuer.token(sub=name) for name in "abc"]
    for each in tokens:
        verifier.verify(each)
    assert [verifier.find(each) is not None for each in tokens] == [False, True, True]
    verifier.reload()
    assert [verifier.find(each) for each in tokens] == [None] * 3


def test_the_grant_of_a_token(issuer: Issuer, tmp_path: Path) -> None:
    verifier = token_verifier(tmp_path / "jwks", issuer)
    first, again = (verifier.verify(issuer.token(sub="s" * 70, roles=["read"], n=n)) for n in (1, 2))
    assert (first.name, first.roles, first.models, first.limiter) == ("s" * 64, frozenset(("read",)), None, None)
    assert first.owner.startswith("jwt:")
    assert (first.owner == again.owner, first.owner == verifier.verify(issuer.token(sub="s" * 64)).owner) == (
        True,
        False,
    )
    nobody, other = (verifier.verify(issuer.token("sub", n=n)) for n in (1, 2))  # without a subject each has its own
    assert (nobody.name, nobody.owner == other.owner) == ("", False)
    assert verifier.verify(issuer.token("roles")).roles == frozenset()
    assert verifier.verify(issuer.token(roles="admin")).roles == {"infer", "read", "admin"}
    assert verifier.verify(issuer.token(models=["a", "b"])).models == frozenset("ab")
    assert verifier.verify(issuer.token(models="a b")).models == frozenset("ab")
    assert verifier.verify(issuer.token(models=[])).models == frozenset()


def test_the_key_of_a_token(tmp_path: Path) -> None:
    one, two, nameless = Issuer("one"), Issuer("two"), Issuer("")
    single = token_verifier(tmp_path / "one", one)
    token = jwt.encode({"iss": ISSUER, "aud": AUDIENCE, "exp": time.time() + 300}, one.private, "ES256")
    assert single.verify(token).name == ""  # there is no other key
    with pytest.raises(Unauthorized, match=r"^the token is not valid: it is signed by an unknown key$"):
        token_verifier(tmp_path / "two", one, two).verify(token)
    assert token_verifier(tmp_path / "three", two, nameless).verify(nameless.token()).name == "ann"
    with pytest.raises(Unauthorized, match="unknown key"):
        single.verify(two.token())


def test_keys_that_encrypt_verify_no_token(issuer: Issuer, tmp_path: Path) -> None:
    file, other = tmp_path / "jwks", Issuer("enc")
    file.write_text(json.dumps({"keys": [{**other.jwk, "use": "enc"}, issuer.jwk]}))
    verifier = TokenVerifier(TokenRules(jwks=str(file), issuer=ISSUER, audience=AUDIENCE))
    assert verifier.files == (file,)
    assert verifier.verify(issuer.token()).name == "ann"
    with pytest.raises(Unauthorized, match="unknown key"):
        verifier.verify(other.token())


async def test_when_a_url_is_read_again(issuer: Issuer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every 300 s, and for a token of an unknown key after 30 s at the earliest."""
    verifier = TokenVerifier(TokenRules(jwks="https://issuer.example/jwks", issuer=ISSUER, audience=AUDIENCE))
    assert (verifier.is_remote, verifier.files) == (True, ())
    found = json.dumps({"keys": [issuer.jwk]}).encode()
    replies: list[bytes | None] = [None, found, found, None, found]  # None: it cannot be read
    now_s, reads, changes = 0.0, [], []

    def download(url: str) -> bytes:
        reads.append((url, now_s))
        reply = replies[len(reads) - 1]
        if reply is None:
            raise OSError("refused")
        return reply

    async def sleep(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds
        if now_s in (335.0, 400.0):
            with pytest.raises(Unauthorized):
                verifier.verify(Issuer("new").token())
        if len(reads) == len(replies):
            raise asyncio.CancelledError

    verifier.on_change = lambda: changes.append(now_s)
    monkeypatch.setattr("dragoman.access.download.download", download)
    monkeypatch.setattr("dragoman.access.tokens.asyncio.sleep", sleep)
    with pytest.raises(asyncio.CancelledError):
        await verifier.refresh()
    # At the start, 30 s after that failed, 300 s later, 65 s after that for a token, 300 s after that failed: the last
    # keys stayed.
    assert [at for _, at in reads] == [0.0, 30.0, 330.0, 360.0, 400.0]
    assert {url for url, _ in reads} == {"https://issuer.example/jwks"}
    assert changes == [30.0, 330.0, 400.0]


async def test_a_changed_file_replaces_the_keys(
    issuer: Issuer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, new = write(tmp_path / "jwks", issuer), Issuer("two")
    async with serving(Doubler, **settings(file)) as server:

        async def statuses() -> list[int]:
            tokens = (issuer.token(), new.token())
            return [(await server.request("POST", INFER, BODY, bearer(each))).status for each in tokens]

        assert await statuses() == [200, 401]
        write(file, new)
        server.dragoman.reload()
        assert await statuses() == [401, 200]
        file.write_text("{")
        server.dragoman.reload()
        assert await statuses() == [401, 401]
        assert "no JSON Web Token is accepted until this is fixed" in caplog.text
        assert (await server.request("GET", "/v2/health/ready")).status == 200


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read"),
        ("{", "expected a JSON Web Key Set"),
        ('{"keys": []}', "expected a JSON Web Key Set"),
        (
            '{"keys": [{"kty": "oct", "k": "c2VjcmV0c2VjcmV0c2VjcmV0c2VjcmV0c2VjcmV0", "alg": "HS256"}]}',
            "no public key",
        ),
        ("[]", "expected a JSON Web Key Set"),
        ('{"keys": "abc"}', "expected a JSON Web Key Set"),
        (
            '{"keys": [{"kty": "RSA", "kid": "a", "alg": "none", "n": "AA", "e": "AQAB"}]}',
            "expected a JSON Web Key Set",
        ),
    ],
)
def test_an_invalid_file_stops_the_start(text: str | None, message: str, tmp_path: Path) -> None:
    file = tmp_path / "jwks"
    if text is not None:
        file.write_text(text)
    with pytest.raises(InvalidInput, match="JWKS file") as found:
        dragoman.asgi(Doubler, **settings(file))
    assert message in found.value.message


def test_issuer_and_audience_are_required(issuer: Issuer, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="'jwt_jwks' needs 'jwt_issuer' and 'jwt_audience'"):
        dragoman.asgi(Doubler, jwt_jwks=str(write(tmp_path / "jwks", issuer)), jwt_issuer=ISSUER)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("https://issuer.example/jwks", True),
        ("https://10.0.0.1/jwks", True),
        ("http://localhost:8080/jwks", True),
        ("http://127.0.0.1/jwks", True),
        ("http://127.9.9.9/jwks", True),
        ("http://[::1]:80/jwks", True),
        ("http://10.0.0.1/jwks", False),
        ("http://localhost.issuer.example/jwks", False),
        ("http:///jwks", False),
        ("https:///jwks", False),
        ("HTTPS://issuer.example", True),
        ("ftp://localhost/jwks", False),
        ("/jwks", False),
    ],
)
def test_urls_whose_contents_nobody_can_replace(url: str, expected: bool) -> None:
    assert is_secure(url) is expected


@pytest.mark.parametrize("url", ["http://issuer.example/jwks", "ftp://127.0.0.1/jwks", "https:///jwks", "file:///a"])
def test_an_insecure_url_stops_the_start(url: str) -> None:
    with pytest.raises(InvalidInput, match="'jwt_jwks': expected a file or an https URL"):
        dragoman.asgi(Doubler, **settings(url))


class JwksServer(http.server.ThreadingHTTPServer):
    body = b""
    headers: ClassVar[dict[str, str]] = {}


class JwksHandler(http.server.BaseHTTPRequestHandler):
    server: JwksServer

    def do_GET(self) -> None:
        body = self.server.body
        self.send_response(302 if self.server.headers else 200 if body else 500)
        for name, value in ({"content-length": str(len(body))} | self.server.headers).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None: ...


@pytest.fixture
def jwks_server() -> Iterator[JwksServer]:
    with JwksServer(("127.0.0.1", 0), JwksHandler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


async def test_keys_are_read_from_a_url_and_again_for_unknown_ones(
    issuer: Issuer, jwks_server: JwksServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("dragoman.access.tokens.COOLDOWN_S", 0.0)
    monkeypatch.setattr("dragoman.access.tokens._TICK_S", 0.02)
    url, new = f"http://127.0.0.1:{jwks_server.server_address[1]}/jwks", Issuer("two")
    async with serving(Doubler, **settings(url), auth_failures_per_minute=0) as server:

        async def wait_for(token: str, status: int = 200) -> None:
            async with asyncio.timeout(60):
                while (await server.request("POST", INFER, BODY, bearer(token))).status != status:
                    await asyncio.sleep(0.02)

        # The server starts without the keys, and accepts nothing.
        assert (await server.request("POST", INFER, BODY, bearer(issuer.token()))).status == 401
        async with asyncio.timeout(60):
            while "JWKS cannot be read" not in caplog.text:
                await asyncio.sleep(0.02)
        jwks_server.body = json.dumps({"keys": [issuer.jwk]}).encode()
        await wait_for(issuer.token())
        # While it cannot be read, the last keys stay.
        jwks_server.body = b""
        await wait_for(new.token(), 401)
        await wait_for(issuer.token())
        jwks_server.body = json.dumps({"keys": [issuer.jwk, new.jwk]}).encode()
        await wait_for(new.token())
        jwks_server.body = json.dumps({"keys": [new.jwk]}).encode()
        server.dragoman.reload()
        await wait_for(issuer.token(), 401)


@pytest.mark.parametrize(
    ("body", "headers", "message"),
    [
        (b"[]", {}, "AttributeError"),
        (b'{"keys": [{"kty": "RSA", "alg": "none", "n": "AA", "e": "AQAB"}]}', {}, "NotImplementedError"),
        (b" " * ((1 << 20) + 1), {}, "expected at most 1048576 bytes"),
        (b"{}", {"content-length": "50"}, "error="),
        (b"{}", {"location": "http://issuer.example/jwks"}, "redirect to"),
        (b"{}", {"location": "ftp://127.0.0.1/jwks"}, "redirect to"),
    ],
)
async def test_what_a_url_returns_does_not_end_the_refresh(
    issuer: Issuer,
    jwks_server: JwksServer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    body: bytes,
    headers: dict[str, str],
    message: str,
) -> None:
    monkeypatch.setattr("dragoman.access.tokens.COOLDOWN_S", 0.0)
    monkeypatch.setattr("dragoman.access.tokens._TICK_S", 0.02)
    jwks_server.body, jwks_server.headers = body, headers  # type: ignore[misc]
    url = f"http://127.0.0.1:{jwks_server.server_address[1]}/jwks"
    async with serving(Doubler, **settings(url), auth_failures_per_minute=0) as server, asyncio.timeout(60):
        while "JWKS cannot be read" not in caplog.text:
            await asyncio.sleep(0.02)
        assert message in caplog.text
        jwks_server.body, jwks_server.headers = json.dumps({"keys": [issuer.jwk]}).encode(), {}  # type: ignore[misc]
        while (await server.request("POST", INFER, BODY, bearer(issuer.token()))).status != 200:
            await asyncio.sleep(0.02)


def test_a_redirect_to_a_secure_url_is_followed(jwks_server: JwksServer) -> None:
    class Redirecting(JwksHandler):
        def do_GET(self) -> None:
            if self.path == "/first":
                self.send_response(302)
                self.send_header("location", f"http://localhost:{jwks_server.server_address[1]}/jwks")
                self.end_headers()
            else:
                super().do_GET()

    jwks_server.RequestHandlerClass, jwks_server.body = Redirecting, b"x" * (1 << 20)
    assert download(f"http://127.0.0.1:{jwks_server.server_address[1]}/first") == jwks_server.body


async def test_tokens_appear_in_no_log(issuer: Issuer, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with serving(Doubler, **settings(write(tmp_path / "jwks", issuer))) as server:
        tokens = [issuer.token(), issuer.token(aud="other"), Issuer("one").token()]
        found = [await server.request("POST", INFER, BODY, bearer(token)) for token in tokens]
    everything = caplog.text + "".join(response.body.decode() for response in found)
    assert not [token for token in tokens if token.rpartition(".")[2] in everything]
