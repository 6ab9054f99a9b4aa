"""The one place that decides whether a request may be served: site, credential, role, expiry."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from itertools import chain
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

from dragoman import hooks
from dragoman.access.certificates import PeerCertificate
from dragoman.access.failures import EXPIRED, FORBIDDEN, FOREIGN, INVALID, MISSING, FailedAttempts
from dragoman.access.grants import ANONYMOUS, EVERYTHING, Grant
from dragoman.access.keys import MAX_LENGTH, MIN_LENGTH, digest_of, is_writable_by_everyone, read_keys, single_key
from dragoman.access.refusals import Refusals
from dragoman.access.sites import SiteRules, check_control
from dragoman.access.tokens import TokenVerifier
from dragoman.core.audit import log_reload
from dragoman.core.errors import DragomanError, Forbidden, InvalidInput, NotReady, Unauthorized
from dragoman.core.metrics import Family
from dragoman.core.usage import HOOK
from dragoman.protocols.wire import Role, bearer_token

A = TypeVar("A", bytes, str)
log = logging.getLogger("dragoman.access")

_EXPECTED = "expected a header 'Authorization: Bearer <key>' or 'x-api-key: <key>'"
_CONTROL_EXPECTED = "This API is restricted, expecting header 'Authorization: Bearer <control token>'"

_LOCAL = Grant("loopback", EVERYTHING)
# Headers by which proxies say that a request is not their own.
_FORWARDED = ("forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-real-ip", "origin")


@dataclass(frozen=True, kw_only=True)
class AccessRules:
    """Where credentials come from: a file of hashed keys, a key for everything, a token for model control, tokens.

    `control_loopback`: processes on this machine need none for model control. `control_open`: nobody does. `sites`:
    which web pages may send requests that need none. `has_certificates`: clients may identify themselves by those of
    TLS.
    """

    keys_file: str = ""
    api_key: str = ""
    control_token: str = ""
    control_loopback: bool = False
    control_open: bool = False
    sites: SiteRules = field(default_factory=SiteRules)
    tokens: TokenVerifier | None = None
    failures_per_minute: float = 30.0
    has_certificates: bool = False

    @property
    def needs_credentials(self) -> bool:
        """Whether every request but health checks needs a credential."""
        return bool(self.keys_file or self.api_key or self.tokens)


class AccessControl:
    """Decides about requests. Without keys and tokens only model control needs a credential, the control token.

    `refusals` logs those that are refused. Raises InvalidInput if the key file, the key or the control token is
    invalid. If the file becomes invalid later, every request is rejected until it is valid again.
    """

    def __init__(self, rules: AccessRules) -> None:
        if len(rules.control_token) > MAX_LENGTH:
            got = len(rules.control_token)
            raise InvalidInput(f"setting 'control_token': expected at most {MAX_LENGTH} characters, got {got}")
        self._rules = rules
        self.tokens = rules.tokens
        # What needs no credential.
        self.open_roles: frozenset[str] = frozenset() if rules.needs_credentials else frozenset(("infer", "read"))
        is_local_only = rules.control_loopback and not rules.control_open
        if not (rules.needs_credentials or rules.control_token or is_local_only):
            self.open_roles |= {"admin"}  # the engine rejects it unless `control_open` is set
        self._grants: dict[bytes, Grant] = {}  # by the hash of the key
        self._of_certificates: dict[str, Grant] = {}  # by the name in the certificate
        # Without keys its requests share their state with those of everyone else.
        owner = "control_token" if rules.needs_credentials else ""
        self._control = Grant("control_token", EVERYTHING, owner=owner) if rules.control_token else None
        self._closed = ""  # why no key is accepted
        self.version = 0  # of the keys
        self.logs_reloads = True  # in the audit log; one of several processes does it
        if self.tokens is not None:
            self.tokens.on_change = self._increment_version
        self.failures = FailedAttempts(rules.failures_per_minute)
        self.refusals = Refusals()
        self._grants, self._of_certificates = self._read()

    @property
    def files(self) -> tuple[Path, ...]:
        """Files whose changes `reload` reads."""
        own = (Path(self._rules.keys_file),) if self._rules.keys_file else ()
        return own if self.tokens is None else (*own, *self.tokens.files)

    def reload(self) -> None:
        """Read the files again. A key that did not change keeps the state of its limits."""
        self._increment_version()
        before = self._by_name()
        failure: InvalidInput | None = None
        try:
            (self._grants, self._of_certificates), self._closed = self._read(), ""
        except InvalidInput as error:
            self._grants, self._of_certificates, failure = {}, {}, error
            self._closed = "the API keys of this server cannot be read; its log has more"
            log.error("no API key is accepted until this is fixed: %s", error.message)
        else:
            log.info("API keys reloaded: keys=%d", len(self._grants) + len(self._of_certificates))
        if self.logs_reloads:
            log_reload("keys", "files", _difference(before, self._by_name()), failure)
        if self.tokens is not None:
            self.tokens.reload()

    @property
    def key_names(self) -> list[str]:
        """Names of the keys that may call models, in the order of the file; none if that needs no key."""
        return [grant.name for grant in self._all_grants() if "infer" in grant.roles and self.needs_credentials]

    def is_guarded(self, role: Role) -> bool:
        """Return whether requests that need the role need a credential."""
        return role not in self.open_roles

    def _all_grants(self) -> Iterator[Grant]:
        return chain(self._grants.values(), self._of_certificates.values())

    def _by_name(self) -> dict[str, tuple[bytes | str, Grant]]:
        """Return what identifies each key, and its grant."""
        return {grant.name: (identity, grant) for identity, grant in self._grants.items()} | {
            grant.name: (name, grant) for name, grant in self._of_certificates.items()
        }

    def _increment_version(self) -> None:
        self.version += 1

    def _read(self) -> tuple[dict[bytes, Grant], dict[str, Grant]]:
        """Return the grants of keys, and those of certificates."""
        rules = self._rules
        stored = read_keys(rules.keys_file) if rules.keys_file else []
        if rules.keys_file and is_writable_by_everyone(rules.keys_file):
            log.warning("every user of this machine can add keys; chmod o-w %s", rules.keys_file)
        if rules.api_key:
            stored.append(single_key(rules.api_key))
        grants = {key.digest: key.grant for key in stored if key.digest}
        of_certificates = {key.certificate: key.grant for key in stored if key.certificate}
        if of_certificates and not rules.has_certificates:
            name = next(iter(of_certificates.values())).name
            raise InvalidInput(f"key '{name}': 'certificate' needs the setting 'tls_client_ca', which verifies it")
        limited = next((key.grant.name for key in stored if key.grant.limits_tokens), None)
        if limited is not None and hooks.entry(*HOOK) is None:
            raise InvalidInput(f"key '{limited}': limits of tokens need the feature dragoman_usage: not installed")
        _keep_equivalent(grants, self._grants)
        _keep_equivalent(of_certificates, self._of_certificates)
        if self._control is not None:
            grants[digest_of(rules.control_token)] = self._control
        return grants, of_certificates

    @property
    def needs_credentials(self) -> bool:
        """Whether every request but health checks needs a credential."""
        return self._rules.needs_credentials

    def has_to_check(self, role: Role, headers: Mapping[str, str]) -> bool:
        """Return whether a request with these headers must be authorized even if its role needs no credential."""
        return role == "admin" or self.is_guarded(role) or self._rules.sites.is_suspect(headers)

    def check_site(
        self, role: Role, method: str, headers: Mapping[str, str], address: Callable[[], str], where: str
    ) -> None:
        """Raise Forbidden for an HTTP request of a web page that may not send it.

        Where a credential is needed, it is proof enough: browsers send none by themselves.
        """
        if self.is_guarded(role):
            return
        try:
            if role == "admin" and not bearer_token(headers):
                check_control(headers)
            self._rules.sites.check(method, headers)
        except Forbidden as error:
            self.failures.counts[FOREIGN] += 1
            self.refusals.add(error, where, "", address())
            raise

    def authorize(
        self,
        role: Role,
        headers: Mapping[str, str],
        address: Callable[[], str],
        where: str = "",
        certificate: Callable[[], PeerCertificate | None] = lambda: None,
    ) -> Grant:
        """Return what the caller may do. Raises Unauthorized, Forbidden, RateLimited, or NotReady without keys.

        `address` returns the client's address; it is called only if the credential is not a known key. `where`: what is
        requested, for the audit log. `certificate` returns that of the client; it counts for requests without another
        credential.
        """
        if role in self.open_roles:
            return ANONYMOUS
        credential, name = bearer_token(headers), ""
        try:
            if role == "admin" and not credential and self._rules.control_loopback and is_local(headers, address()):
                return _LOCAL
            presented = certificate() if self._of_certificates and not credential else None
            if presented is not None:
                certified = self._grant_of_certificate(presented)
                name = certified.name
                return self._check_role(certified, role)
            grant = self._grants.get(digest_of(credential)) if len(credential) <= MAX_LENGTH else None
            name = "" if grant is None else grant.name
            if grant is None or grant is self._control or grant.expires_s <= time.time():
                grant = self._resolve(credential, grant, address)
            name = grant.name
            return self._check_role(grant, role)
        except DragomanError as error:
            self.refusals.add(error, where, name, address())
            raise

    def _check_role(self, grant: Grant, role: Role) -> Grant:
        if role not in grant.roles:
            self.failures.counts[FORBIDDEN] += 1
            raise Forbidden(f"key '{grant.name}' does not have the role '{role}' that this request needs")
        return grant

    def _grant_of_certificate(self, certificate: PeerCertificate) -> Grant:
        """Return the grant of the first name in a certificate that has one. Raises Unauthorized."""
        grant = next((self._of_certificates[n] for n in certificate.names if n in self._of_certificates), None)
        if grant is None:
            self.failures.counts[INVALID] += 1
            names = ", ".join(certificate.names)[:200] or "none"
            raise Unauthorized(f"no key of this server has a name of the client's certificate: {names}; {_EXPECTED}")
        grant = grant.until(certificate.expires_s)
        if grant.expires_s <= time.time():
            self.failures.counts[EXPIRED] += 1
            raise Unauthorized(f"key '{grant.name}' or its certificate has expired")
        return grant

    def grant_of(self, owner: str) -> Grant | None:
        """Return what the owner of state may do now, None if it has no key, or only an expired one."""
        if not self._rules.needs_credentials and not owner:
            return ANONYMOUS
        now_s = time.time()
        return next((g for g in self._all_grants() if g.owner == owner and g.expires_s > now_s), None)

    def is_current(self, version: int, expires_s: float) -> bool:
        """Return whether what `authorize` returned when `version` was that of the keys still holds."""
        return version == self.version and time.time() < expires_s

    def _resolve(self, credential: str, grant: Grant | None, address: Callable[[], str]) -> Grant:
        """Return the grant of the control token or of a JSON Web Token.

        What cannot be guessed is accepted whatever other clients of the address have sent; of everything else an
        address may send so much only.
        """
        if not credential:
            self.failures.counts[MISSING] += 1
            if not (self._rules.needs_credentials or self._rules.control_token):
                raise Forbidden("model control is open to processes on the server's machine only")
            raise self._unauthorized_error("this request has no key")
        if grant is None and (found := self._grant_of_token(credential, address)) is not None:
            return found
        if grant is not None and grant is self._control:
            if len(credential) < MIN_LENGTH:  # it could be guessed
                self.failures.check(address())
            return grant
        if grant is not None:
            self._add_failure(address, EXPIRED)
            raise self._unauthorized_error(f"key '{grant.name}' has expired")
        if self._closed:
            self.failures.check(address())
            raise NotReady(self._closed)
        self._add_failure(address, INVALID)
        raise self._unauthorized_error("this key is not valid")

    def _grant_of_token(self, credential: str, address: Callable[[], str]) -> Grant | None:
        """Return the grant of a JSON Web Token, None for what is none."""
        tokens = self.tokens
        if tokens is None or credential.count(".") != 2 or len(credential) > MAX_LENGTH:
            return None
        try:
            return tokens.find(credential) or tokens.verify(credential)
        except Unauthorized as error:
            self._add_failure(address, EXPIRED if "expired" in error.message else INVALID)
            raise

    def _add_failure(self, address: Callable[[], str], reason: str) -> None:
        """Count a failed attempt. Raises RateLimited if there were too many of this address."""
        client = address()
        self.failures.check(client)
        self.failures.add(client, reason)

    def _unauthorized_error(self, why: str) -> DragomanError:
        return Unauthorized(_CONTROL_EXPECTED if self.open_roles else f"{why}; {_EXPECTED}")

    def families(self) -> tuple[Family, ...]:
        """Return the metrics of denied requests."""
        return self.failures.families()


def _keep_equivalent(grants: dict[A, Grant], before: Mapping[A, Grant]) -> None:
    """Replace each grant that has not changed by the one before, which has the state of its limits."""
    for identity, grant in grants.items():
        kept = before.get(identity)
        if kept is not None and kept.is_equivalent(grant):
            grants[identity] = kept


def _difference(
    before: Mapping[str, tuple[bytes | str, Grant]], after: Mapping[str, tuple[bytes | str, Grant]]
) -> dict[str, str | None]:
    """Return the names of the keys that were added, removed and changed."""
    kept = before.keys() & after.keys()
    changed = [n for n in kept if before[n][0] != after[n][0] or not before[n][1].is_equivalent(after[n][1])]
    found = {"added": after.keys() - kept, "removed": before.keys() - kept, "changed": changed}
    return {name: ",".join(sorted(each)) or None for name, each in found.items()}


def is_local(headers: Mapping[str, str], address: str) -> bool:
    """Return whether a process on this machine sent a request, for itself.

    Proxies beside the server, as those of Knative and KServe in a pod, forward requests of others: they add a header,
    or keep the host name that the client used. A web page under a name bound to this machine sends that name too.
    """
    try:
        host = urlsplit(f"//{headers.get('host', '')}").hostname or ""
        return (
            (host == "localhost" or ip_address(host).is_loopback)
            and ip_address(address).is_loopback
            and not any(name in headers for name in _FORWARDED)
        )
    except ValueError:
        return False
