"""The one place that decides whether a request may be served: credential, role, expiry."""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from dragoman.access.failures import EXPIRED, FORBIDDEN, INVALID, MISSING, FailedAttempts
from dragoman.access.grants import ANONYMOUS, EVERYTHING, Grant
from dragoman.access.keys import digest_of, is_writable_by_everyone, read_keys, single_key
from dragoman.access.tokens import TokenVerifier
from dragoman.core.errors import DragomanError, Forbidden, InvalidInput, NotReady, Unauthorized
from dragoman.core.metrics import Family
from dragoman.protocols.wire import Role, bearer_token

log = logging.getLogger("dragoman.access")

# Longer credentials are rejected before anything is computed from them.
_MAX_CREDENTIAL = 8192
_EXPECTED = "expected a header 'Authorization: Bearer <key>' or 'x-api-key: <key>'"
_CONTROL_EXPECTED = "This API is restricted, expecting header 'Authorization: Bearer <control token>'"

_LOCAL = Grant("loopback", EVERYTHING)
_LOOPBACK_V6 = "::/64"  # addresses of clients are networks of 64 bits in IPv6
# Headers by which proxies say that a request is not their own.
_FORWARDED = ("forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-real-ip", "origin")


@dataclass(frozen=True, kw_only=True)
class AccessRules:
    """Where credentials come from: a file of hashed keys, a key for everything, a token for model control, tokens.

    `control_loopback`: processes on this machine need none for model control.
    """

    keys_file: str = ""
    api_key: str = ""
    control_token: str = ""
    control_loopback: bool = False
    tokens: TokenVerifier | None = None
    failures_per_minute: float = 30.0

    @property
    def needs_credentials(self) -> bool:
        """Whether every request but health checks needs a credential."""
        return bool(self.keys_file or self.api_key or self.tokens)


class AccessControl:
    """Decides about requests. Without keys and tokens only model control needs a credential, the control token.

    Raises InvalidInput if the key file is invalid. If it becomes invalid later, every request is rejected until it is
    valid again.
    """

    def __init__(self, rules: AccessRules) -> None:
        self._rules = rules
        self.tokens = rules.tokens
        self._open_roles: frozenset[str] = frozenset() if rules.needs_credentials else frozenset(("infer", "read"))
        self._grants: dict[bytes, Grant] = {}
        # Without keys its requests share their state with those of everyone else.
        owner = "control_token" if rules.needs_credentials else ""
        self._control = Grant("control_token", EVERYTHING, owner=owner) if rules.control_token else None
        self._closed = ""  # why no key is accepted
        self.version = 0  # of the keys
        if self.tokens is not None:
            self.tokens.on_change = self._increment_version
        self.failures = FailedAttempts(rules.failures_per_minute)
        self._grants = self._read()

    @property
    def files(self) -> tuple[Path, ...]:
        """Files whose changes `reload` reads."""
        own = (Path(self._rules.keys_file),) if self._rules.keys_file else ()
        return own if self.tokens is None else (*own, *self.tokens.files)

    def reload(self) -> None:
        """Read the files again. A key that did not change keeps the state of its limits."""
        self._increment_version()
        try:
            self._grants, self._closed = self._read(), ""
        except InvalidInput as error:
            self._grants, self._closed = {}, "the API keys of this server cannot be read; its log has more"
            log.error("no API key is accepted until this is fixed: %s", error.message)
        else:
            log.info("API keys reloaded: keys=%d", len(self._grants))
        if self.tokens is not None:
            self.tokens.reload()

    def is_guarded(self, role: Role) -> bool:
        """Return whether requests that need the role need a credential."""
        return role not in self._open_roles

    def _increment_version(self) -> None:
        self.version += 1

    def _read(self) -> dict[bytes, Grant]:
        rules = self._rules
        stored = read_keys(rules.keys_file) if rules.keys_file else []
        if rules.keys_file and is_writable_by_everyone(rules.keys_file):
            log.warning("every user of this machine can add keys; chmod o-w %s", rules.keys_file)
        if rules.api_key:
            stored.append(single_key(rules.api_key))
        grants = {key.digest: key.grant for key in stored}
        for digest, grant in grants.items():
            before = self._grants.get(digest)
            if before is not None and before.is_equivalent(grant):
                grants[digest] = before
        if self._control is not None:
            grants[digest_of(rules.control_token)] = self._control
        return grants

    def authorize(self, role: Role, headers: Mapping[str, str], address: Callable[[], str]) -> Grant:
        """Return what the caller may do. Raises Unauthorized, Forbidden, RateLimited, or NotReady without keys.

        `address` returns the client's address; it is called only if the credential is not a known key.
        """
        if role in self._open_roles:
            return ANONYMOUS
        credential = bearer_token(headers)
        if role == "admin" and not credential and self._rules.control_loopback and is_local(headers, address()):
            return _LOCAL
        grant = self._grants.get(digest_of(credential)) if len(credential) <= _MAX_CREDENTIAL else None
        if grant is None or grant is self._control or grant.expires_s <= time.time():
            grant = self._resolve(credential, grant, address)
        if role not in grant.roles:
            self.failures.counts[FORBIDDEN] += 1
            raise Forbidden(f"key '{grant.name}' does not have the role '{role}' that this request needs")
        return grant

    def is_current(self, version: int, expires_s: float) -> bool:
        """Return whether what `authorize` returned when `version` was that of the keys still holds."""
        return version == self.version and time.time() < expires_s

    def _resolve(self, credential: str, grant: Grant | None, address: Callable[[], str]) -> Grant:
        """Return the grant of the control token or of a JSON Web Token, neither of which is tried without limit."""
        if not credential:
            self.failures.counts[MISSING] += 1
            if not (self._rules.needs_credentials or self._rules.control_token):
                raise Forbidden("model control is open to processes on the server's machine only")
            raise self._unauthorized_error("this request has no key")
        if grant is None and self.tokens is not None:
            known = self.tokens.find(credential)
            if known is not None:
                return known
        client = address()
        self.failures.check(client)
        if grant is not None and grant is self._control:
            return grant
        if grant is not None:
            self.failures.add(client, EXPIRED)
            raise self._unauthorized_error(f"key '{grant.name}' has expired")
        if self.tokens is not None and credential.count(".") == 2 and len(credential) <= _MAX_CREDENTIAL:
            try:
                return self.tokens.verify(credential)
            except Unauthorized as error:
                self.failures.add(client, EXPIRED if "expired" in error.message else INVALID)
                raise
        if self._closed:
            raise NotReady(self._closed)
        self.failures.add(client, INVALID)
        raise self._unauthorized_error("this key is not valid")

    def _unauthorized_error(self, why: str) -> DragomanError:
        return Unauthorized(_CONTROL_EXPECTED if self._open_roles else f"{why}; {_EXPECTED}")

    def families(self) -> tuple[Family, ...]:
        """Return the metrics of denied requests."""
        return self.failures.families()


def is_local(headers: Mapping[str, str], address: str) -> bool:
    """Return whether a process on this machine sent a request, for itself.

    Proxies beside the server, as those of Knative and KServe in a pod, forward requests of others: they add a header,
    or keep the host name that the client used. A web page under a name bound to this machine sends that name too.
    """
    try:
        host = urlsplit(f"//{headers.get('host', '')}").hostname or ""
        return (
            (host == "localhost" or ip_address(host).is_loopback)
            and (address == _LOOPBACK_V6 or ip_address(address).is_loopback)
            and not any(name in headers for name in _FORWARDED)
        )
    except ValueError:
        return False
