"""JSON Web Tokens: verified by the public keys of a JWKS file or URL, with PyJWT."""

import asyncio
import importlib
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from dragoman import hooks
from dragoman.access.grants import CallLimiter, Grant
from dragoman.access.keys import CallLimits, contradiction, digest_of, expand_roles
from dragoman.access.urls import is_secure
from dragoman.core.documents import parse_json
from dragoman.core.errors import InvalidInput, Unauthorized
from dragoman.core.usage import HOOK

log = logging.getLogger("dragoman.access")

# Maximum age and number of cached verifications: to verify a signature takes a hundred times as long as a look-up.
_CACHE_S = 300.0
_MAX_CACHED = 10_000
# Tolerated difference between the clocks of the issuer and of this machine.
_LEEWAY_S = 60
# Interval at which a URL is read again, and the shortest one, for tokens signed by an unknown key.
REFRESH_S, COOLDOWN_S = 300.0, 30.0
_TICK_S = 1.0


@dataclass(frozen=True, kw_only=True)
class TokenRules:
    """Which tokens are accepted. `jwks`: a file, or an https URL. A claim may be a path such as `realm.roles`.

    `limits_claim`: an object with fields of `CallLimits`.
    """

    jwks: str
    issuer: str
    audience: str
    roles_claim: str = "roles"
    models_claim: str = "models"
    limits_claim: str = "limits"


class TokenVerifier:
    """Verifies tokens. The algorithm is that of the issuer's key, never the token's choice.

    Raises InvalidInput if a file of keys or a URL is invalid, or PyJWT is missing. Until a URL has been read, tokens
    are rejected.
    """

    def __init__(self, rules: TokenRules) -> None:
        try:
            self._jwt = importlib.import_module("jwt")
        except ImportError as error:
            raise InvalidInput("JSON Web Tokens need PyJWT: pip install 'dragoman[jwt]'") from error
        if not rules.issuer or not rules.audience:
            raise InvalidInput("setting 'jwt_jwks' needs 'jwt_issuer' and 'jwt_audience', which tokens must have")
        self._rules = rules
        self._keys: dict[str, Any] = {}
        self._cached_grants: dict[bytes, Grant] = {}
        self._limiters: dict[str, CallLimiter] = {}  # by owner, the one that was needed longest ago first
        self.is_remote = "://" in rules.jwks
        if self.is_remote and not is_secure(rules.jwks):
            raise InvalidInput(
                f"setting 'jwt_jwks': expected a file or an https URL (http for this machine only), got {rules.jwks!r}"
            )
        self._wants_refresh = False
        self.on_change: Callable[[], None] = lambda: None  # called when the keys are replaced
        if not self.is_remote:
            self._set_keys(self._read_file())

    @property
    def files(self) -> tuple[Path, ...]:
        return () if self.is_remote else (Path(self._rules.jwks),)

    # --- keys ------------------------------------------------------------------------------------------------------

    def reload(self) -> None:
        """Read the file again; if that fails, no token is accepted. A URL is read again by `refresh`."""
        if self.is_remote:
            self._wants_refresh = True
            return
        try:
            self._set_keys(self._read_file())
        except InvalidInput as error:
            self._set_keys({})
            log.error("no JSON Web Token is accepted until this is fixed: %s", error.message)

    async def refresh(self) -> None:
        """Read the URL now, regularly, and soon after a token that is signed by an unknown key."""
        while True:
            await self._use_fetched()
            waited_s = 0.0
            while waited_s < REFRESH_S and not (self._wants_refresh and waited_s >= COOLDOWN_S):
                await asyncio.sleep(_TICK_S)
                waited_s += _TICK_S

    async def _use_fetched(self) -> None:
        """Replace the keys by those at the URL; keep the last ones if it cannot be read."""
        self._wants_refresh = False
        keys = await asyncio.to_thread(self._fetch)
        if keys is None:
            self._wants_refresh = not self._keys
        else:
            self._set_keys(keys)

    def _fetch(self) -> dict[str, Any] | None:
        try:
            from dragoman.access.download import (
                download,  # few servers need urllib's client, which takes 12 ms to import
            )

            return self._parse(download(self._rules.jwks))
        except Exception as error:  # whatever the issuer sends, the URL is read again later
            log.error("JWKS cannot be read, the last keys remain valid: url=%s error=%r", self._rules.jwks, error)
            return None

    def _set_keys(self, keys: dict[str, Any]) -> None:
        self._keys = keys
        self._cached_grants.clear()
        self.on_change()

    def _read_file(self) -> dict[str, Any]:
        path = self._rules.jwks
        try:
            return self._parse(Path(path).read_bytes())
        except OSError as error:
            raise InvalidInput(f"JWKS file '{path}' cannot be read: {error.strerror or error}") from error
        except Exception as error:
            raise InvalidInput(f"JWKS file '{path}': expected a JSON Web Key Set: {error or repr(error)}") from error

    def _parse(self, text: bytes) -> dict[str, Any]:
        """Return the keys of a JSON Web Key Set. Raises exceptions of many types for an invalid one."""
        return self._usable(self._jwt.PyJWKSet.from_dict(parse_json(text)).keys)

    def _usable(self, keys: list[Any]) -> dict[str, Any]:
        """Return public keys for signatures by their ids. Symmetric keys would let every server forge tokens."""
        usable_keys = {
            k.key_id or "": k for k in keys if k.key_type in ("RSA", "EC", "OKP") and k.public_key_use != "enc"
        }
        if not usable_keys:
            raise ValueError("it has no public key for signatures (RSA, EC or OKP)")
        return usable_keys

    # --- tokens ----------------------------------------------------------------------------------------------------

    def find(self, token: str) -> Grant | None:
        """Return the grant of a token that has been verified before."""
        grant = self._cached_grants.get(digest_of(token))
        return None if grant is None or grant.expires_s <= time.time() else grant

    def verify(self, token: str) -> Grant:
        """Return the grant of a token. Raises Unauthorized."""
        jwt, rules = self._jwt, self._rules
        try:
            key = self._key_of(jwt.get_unverified_header(token))
            claims = jwt.decode(
                token,
                key.key,
                algorithms=[key.algorithm_name],
                audience=rules.audience,
                issuer=rules.issuer,
                leeway=_LEEWAY_S,
                options={"require": ["exp", "iss", "aud"]},
            )
            grant = self._grant(claims, token)
        except Unauthorized:
            raise
        except jwt.ExpiredSignatureError as error:
            raise Unauthorized("the token has expired") from error
        except Exception as error:  # whatever the issuer has signed, and a client has sent
            raise Unauthorized(f"the token is not valid: {error}") from error
        if len(self._cached_grants) >= _MAX_CACHED:
            del self._cached_grants[next(iter(self._cached_grants))]
        self._cached_grants[digest_of(token)] = grant
        return grant

    def _key_of(self, header: Mapping[str, Any]) -> Any:
        kid = header.get("kid", "")
        key = self._keys.get(kid) if isinstance(kid, str) else None
        if key is None and not kid and len(self._keys) == 1:
            (key,) = self._keys.values()
        if key is None:
            self._wants_refresh = self.is_remote
            raise ValueError("it is signed by an unknown key")
        return key

    def _grant(self, claims: Mapping[str, Any], token: str) -> Grant:
        """Return the grant of the claims of a token.

        Its limits, and what it leaves behind, are those of its subject, if it names one. Raises Unauthorized.
        """
        for name in ("exp", "nbf", "iat"):
            _check_time(claims.get(name), name)
        models = _texts(_claim(claims, self._rules.models_claim), self._rules.models_claim)
        roles = _texts(_claim(claims, self._rules.roles_claim), self._rules.roles_claim) or ()
        expires_s = min(float(claims["exp"]) + _LEEWAY_S, time.time() + _CACHE_S)
        subject = str(claims.get("sub", ""))
        owner = f"jwt:{digest_of(subject or token).hex()}"
        allowed = None if models is None else frozenset(models)
        limits = self._limits(claims).of_grant()
        grant = Grant(subject[:64], expand_roles(roles), allowed, expires_s=expires_s, owner=owner, **limits)
        if reason := contradiction(grant):
            raise self._limits_error(reason)
        if grant.limits_tokens and hooks.entry(*HOOK) is None:
            raise self._limits_error("limits of tokens need the feature dragoman_usage, which the server does not have")
        return replace(grant, limiter=self._limiter(grant))

    def _limits(self, claims: Mapping[str, Any]) -> CallLimits:
        value = _claim(claims, self._rules.limits_claim)
        try:
            return CallLimits() if value is None else msgspec.convert(value, CallLimits)
        except msgspec.ValidationError as error:
            raise self._limits_error(str(error)) from error

    def _limits_error(self, reason: str) -> Unauthorized:
        return Unauthorized(f"the token is not valid: claim '{self._rules.limits_claim}': {reason}")

    def _limiter(self, grant: Grant) -> CallLimiter | None:
        """Return what counts the calls of all tokens of an owner, by the limits of the one that was verified last."""
        limiter = self._limiters.pop(grant.owner, grant.limiter)
        if limiter is None or grant.limiter is None:
            return None
        limiter.set(grant.calls_per_s, grant.max_concurrent)
        if len(self._limiters) >= _MAX_CACHED:
            del self._limiters[next(iter(self._limiters))]
        self._limiters[grant.owner] = limiter
        return limiter


def _claim(claims: Mapping[str, Any], path: str) -> Any:
    """Return a claim, or one inside objects by a path with dots; None if there is none."""
    if path in claims:
        return claims[path]
    value: Any = claims
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _texts(value: Any, claim: str) -> tuple[str, ...] | None:
    """Return a claim that is a list of strings, or one string with spaces; None without it. Raises Unauthorized."""
    if value is None:
        return None
    if isinstance(value, str):
        return tuple(value.split())
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        return tuple(value)
    raise Unauthorized(f"the token is not valid: claim '{claim}': expected a list of strings")


def _check_time(value: Any, claim: str) -> None:
    """Raise Unauthorized unless a claim is a number (RFC 7519, 2: NumericDate) or missing."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise Unauthorized(f"the token is not valid: claim '{claim}': expected a number of seconds")
