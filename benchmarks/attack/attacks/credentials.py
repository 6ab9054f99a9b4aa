"""Floods of wrong keys and tokens, beside clients with right ones."""

import asyncio
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePrivateKey, generate_private_key

from benchmarks.attack.attack import AimMissedError, Attack, Target

_KEY = "the key of the well-behaved client"
_ADDRESSES = 11_000  # more than the server remembers
_FLOOD_S = 5.0
_THREADS = 8
_PATH = "/v2/models/doubled/infer"
_BODY = b'{"inputs":[{"name":"x","datatype":"FP64","shape":[1],"data":[1]}]}'


# --- many addresses ------------------------------------------------------------------------------------------------


def _many_addresses(target: Target) -> str:
    """Send a wrong key from each of many addresses."""
    answers = asyncio.run(_from_many_addresses(target))
    if set(answers) != {401}:
        raise AimMissedError(f"expected 401 for a wrong key of each address, got {dict(answers)}")
    return f"{answers.total():,} addresses, all got 401"


async def _from_many_addresses(target: Target) -> Counter[int]:
    answers: Counter[int] = Counter()
    turns = asyncio.Semaphore(64)

    async def attack(number: int) -> None:
        source = f"127.{1 + (number >> 16)}.{number >> 8 & 255}.{number & 255}"
        async with turns:
            reader, writer = await asyncio.open_connection(
                target.host, target.http_port, local_addr=(source, 0), limit=1 << 16
            )
            key = f"wrong key {number} of an address"
            head = f"POST {_PATH} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {key}\r\nConnection: close\r\n"
            writer.write(f"{head}Content-Length: {len(_BODY)}\r\n\r\n".encode() + _BODY)
            response = await asyncio.wait_for(reader.read(), 60)
            writer.close()
        head_text, _, body = response.partition(b"\r\n\r\n")
        is_right = b"www-authenticate: bearer" in head_text.lower() and set(json.loads(body)) == {"error"}
        answers[int(response.split()[1]) if is_right else 0] += 1

    await asyncio.gather(*(attack(256 + number) for number in range(_ADDRESSES)))
    return answers


# --- one address ---------------------------------------------------------------------------------------------------


def _one_address(target: Target, wrong: Sequence[str], right: Callable[[], str]) -> str:
    """Send wrong credentials for some seconds, beside clients of the same address with right, new ones."""
    answers: Counter[str] = Counter()
    end_s = time.monotonic() + _FLOOD_S
    threads = [threading.Thread(target=_flood, args=(target, wrong, end_s, answers)) for _ in range(_THREADS)]
    for thread in threads:
        thread.start()
    accepted, refused = 0, ""
    while time.monotonic() < end_s:
        status, text, _ = _call(target, right())
        accepted += status == 200
        refused = refused or (f"{status} {text}" if status != 200 else "")
        time.sleep(0.05)
    for thread in threads:
        thread.join()
    if refused:
        raise AimMissedError(f"a right credential from the same address got {refused}")
    if set(answers) != {"401", "429"}:
        raise AimMissedError(f"expected 401 and then 429 for wrong credentials, got {dict(answers)}")
    return f"{answers.total():,} wrong credentials ({dict(answers)}), {accepted} new right ones accepted"


def _flood(target: Target, wrong: Sequence[str], end_s: float, answers: Counter[str]) -> None:
    connection = HTTPConnection(target.host, target.http_port, timeout=60)
    number = 0
    while time.monotonic() < end_s:
        number += 1
        try:
            status, text, headers = _call(target, wrong[number % len(wrong)], connection)
        except (OSError, HTTPException) as error:
            answers[type(error).__name__] += 1
            connection.close()
            continue
        named = headers.get("www-authenticate") if status == 401 else headers.get("retry-after")
        answers[str(status) if named and '{"error":' in text else f"{status} {text}"] += 1
    connection.close()


def _call(
    target: Target, credential: str, connection: HTTPConnection | None = None
) -> tuple[int, str, Mapping[str, str]]:
    """Return status, body and headers of an inference; on a connection of its own if none is given."""
    used = connection or HTTPConnection(target.host, target.http_port, timeout=60)
    try:
        used.request("POST", _PATH, _BODY, {"authorization": f"Bearer {credential}"})
        response = used.getresponse()
        return response.status, response.read().decode()[:200], {k.lower(): v for k, v in response.getheaders()}
    finally:
        if connection is None:
            used.close()


def _keys_of_one_address(target: Target) -> str:
    wrong = [f"wrong key {number} of an address" for number in range(1000)] + ["x" * 8000, "a.b.c", "\xff" * 40]
    return _one_address(target, wrong, lambda: _KEY)


# --- tokens --------------------------------------------------------------------------------------------------------

_CLAIMS: Mapping[str, Any] = {"iss": "issuer", "aud": "dragoman", "roles": ["infer"]}


@cache
def _issuer() -> EllipticCurvePrivateKey:
    return generate_private_key(SECP256R1())


def _token(subject: str, key: Any = None, **changes: Any) -> str:
    claims = {**_CLAIMS, "sub": subject, "exp": int(time.time()) + 3600, **changes}
    return jwt.encode(claims, key or _issuer(), algorithm="ES256", headers={"kid": "1"})


def _prepare_tokens(folder: Path) -> Sequence[str]:
    """Write the issuer's keys, and return the flags for them."""
    public = json.loads(jwt.algorithms.ECAlgorithm.to_jwk(_issuer().public_key()))
    file = folder / "jwks.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"keys": [{**public, "kid": "1", "use": "sig"}]}))
    return "--jwt-jwks", str(file), "--jwt-issuer", "issuer", "--jwt-audience", "dragoman", "--api-key", _KEY


def _tokens_of_one_address(target: Target) -> str:
    """Send tokens of which each costs the verification of a signature, and such as break parsers."""
    other = generate_private_key(SECP256R1())
    unsigned = jwt.encode({**_CLAIMS, "exp": 1 << 40}, "", algorithm="none")
    wrong = [_token(f"forged {number}", other) for number in range(200)]
    wrong += [unsigned, _token("infinite", exp=10**400), _token("text", exp="9" * 20), _token("old", exp=1)]
    wrong += [_token("deep", roles=json.loads("[" * 90 + "]" * 90)), ".".join(["e30"] * 2000), "e30.e30." + "A" * 8000]
    numbers = iter(range(1 << 20))
    return _one_address(target, wrong, lambda: _token(f"user {next(numbers)}"))


_small = partial(Attack, token=_KEY, body_bytes=1 << 20)
ATTACKS = (
    _small(
        name="keys-many-addresses",
        about=f"wrong keys from {_ADDRESSES:,} addresses",
        run=_many_addresses,
        options=("--api-key", _KEY),
    ),
    _small(
        name="keys-one-address",
        about=f"wrong keys on {_THREADS} connections, from the address of clients with a right one",
        run=_keys_of_one_address,
        options=("--api-key", _KEY),
    ),
    _small(
        name="tokens-one-address",
        about=f"wrong tokens on {_THREADS} connections, from the address of clients with right, new ones",
        run=_tokens_of_one_address,
        prepare=_prepare_tokens,
    ),
)
