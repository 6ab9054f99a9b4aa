"""API keys: random keys for clients, and the file with their SHA-256 hashes, or with names in certificates instead."""

import hashlib
import json
import math
import secrets
import stat
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from dragoman.access.certificates import parse_certificate_name
from dragoman.access.grants import EVERYTHING, ROLES, Grant
from dragoman.core.documents import parse_toml
from dragoman.core.errors import InvalidInput
from dragoman.protocols.wire import Role
from dragoman.system.files import replace_file

# Scanners for leaked secrets find keys by this prefix.
PREFIX = "drg_"
# Shorter keys could be guessed from their hash.
MIN_LENGTH = 20
# Longer credentials are rejected before anything is computed from them.
MAX_LENGTH = 8192
# Fields that concern calls of models.
_OF_CALLS = ("tokens_per_minute", "tokens_per_day", "priority")
_HEADER = "# API keys of Dragoman: `dragoman keys create NAME` adds one. Only hashes are stored.\n"


_Tokens = Annotated[int, msgspec.Meta(ge=1, le=10**15)]


class CallLimits(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Limits and class of calls to models, as a file of keys and a JSON Web Token have them."""

    calls_per_s: Annotated[float, msgspec.Meta(ge=0, le=1e9)] = 0.0
    max_concurrent: Annotated[int, msgspec.Meta(ge=0)] = 0
    tokens_per_minute: _Tokens | None = None
    tokens_per_day: _Tokens | None = None
    priority: Literal["low", "normal", "high"] | None = None

    def of_grant(self) -> dict[str, Any]:
        """Return them as arguments of a `Grant`."""
        return {
            "calls_per_s": self.calls_per_s,
            "max_concurrent": self.max_concurrent,
            "tokens_per_minute": self.tokens_per_minute or 0,
            "tokens_per_day": self.tokens_per_day or 0,
            "priority": self.priority or "",
        }


class _KeyEntry(CallLimits, forbid_unknown_fields=True, kw_only=True):
    """An entry as it is written in the file."""

    name: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,63}\Z")]
    sha256: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")] | None = None
    certificate: str | None = None
    roles: Annotated[list[Role], msgspec.Meta(min_length=1)]
    models: Annotated[list[Annotated[str, msgspec.Meta(min_length=1)]], msgspec.Meta(min_length=1)] | None = None
    expires: Annotated[datetime, msgspec.Meta(tz=True)] | None = None


class _KeyFile(msgspec.Struct, forbid_unknown_fields=True):
    key: list[_KeyEntry] = []


class StoredKey(msgspec.Struct, frozen=True):
    """An entry of a key file: the hash of a key, or "" and the name in a client's certificate; and what it grants."""

    digest: bytes
    grant: Grant
    certificate: str = ""


def create_key() -> str:
    """Return a new key: 32 random bytes."""
    return PREFIX + secrets.token_urlsafe(32)


def digest_of(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def single_key(key: str) -> StoredKey:
    """Return the entry of a key that has every role. Raises InvalidInput if it is too short or too long."""
    if not MIN_LENGTH <= len(key) <= MAX_LENGTH:
        raise InvalidInput(f"setting 'api_key': expected {MIN_LENGTH} to {MAX_LENGTH} characters, got {len(key)}")
    return StoredKey(digest_of(key), Grant("api_key", EVERYTHING, owner="api_key"))


def read_keys(path: str | Path) -> list[StoredKey]:
    """Return the entries of a key file. Raises InvalidInput that names the entry and the field."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"key file '{path}' cannot be read: {getattr(error, 'strerror', None) or error}") from error
    try:
        return parse_keys(text)
    except InvalidInput as error:
        raise InvalidInput(f"key file '{path}': {error.message}") from error


def is_writable_by_everyone(path: str | Path) -> bool:
    """Return whether every user of this machine may change a file, and so add keys to it."""
    try:
        return bool(Path(path).stat().st_mode & stat.S_IWOTH)
    except OSError:  # it is being replaced
        return False


def parse_keys(text: str) -> list[StoredKey]:
    """Return the entries of the text of a key file."""
    try:
        document = msgspec.convert(parse_toml(text), _KeyFile)
    except msgspec.ValidationError as error:
        raise InvalidInput(str(error)) from error
    except ValueError as error:
        raise InvalidInput(f"expected TOML: {error}") from error
    keys = [_stored_key(entry) for entry in document.key]
    for field, values in (
        ("name", [k.grant.name for k in keys]),
        ("sha256", [k.digest.hex() for k in keys if k.digest]),
        ("certificate", [k.certificate for k in keys if k.certificate]),
    ):
        repeated = next((value for value in values if values.count(value) > 1), None)
        if repeated is not None:
            raise InvalidInput(f"two keys have the {field} '{repeated}'")
    return keys


def _stored_key(entry: "_KeyEntry") -> StoredKey:
    models = None if entry.models is None else frozenset(entry.models)
    expires_s = math.inf if entry.expires is None else entry.expires.timestamp()
    roles = expand_roles(entry.roles)
    owner = f"key:{entry.name}"
    grant = Grant(entry.name, roles, models, expires_s=expires_s, owner=owner, **entry.of_grant())
    if reason := contradiction(grant):
        raise InvalidInput(f"key '{grant.name}': {reason}")
    if (entry.sha256 is None) == (entry.certificate is None):
        got = "none" if entry.sha256 is None else "both"
        raise InvalidInput(f"key '{grant.name}': expected one of 'sha256' and 'certificate', got {got}")
    if entry.certificate is None:
        return StoredKey(bytes.fromhex(entry.sha256 or ""), grant)
    try:
        return StoredKey(b"", grant, parse_certificate_name(entry.certificate))
    except InvalidInput as error:
        raise InvalidInput(f"key '{grant.name}': {error.message}") from error


def contradiction(grant: Grant) -> str:
    """Return why the limits of a grant make no sense together; "" if they do."""
    if 0 < grant.tokens_per_day < grant.tokens_per_minute:
        return (
            f"'tokens_per_minute' is never reached: expected at most 'tokens_per_day' ({grant.tokens_per_day}), "
            f"got {grant.tokens_per_minute}"
        )
    if "infer" not in grant.roles and (names := [name for name in _OF_CALLS if getattr(grant, name)]):
        return f"'{names[0]}' needs the role 'infer', which calls models"
    return ""


def expand_roles(roles: Iterable[str]) -> frozenset[str]:
    """Return the known roles among these; admin includes the others."""
    expanded = EVERYTHING.intersection(roles)
    return EVERYTHING if "admin" in expanded else expanded


def format_keys(keys: Iterable[StoredKey]) -> str:
    """Return the text of a key file."""
    return _HEADER + "".join(map(_format_entry, keys))


def _format_entry(key: StoredKey) -> str:
    grant = key.grant
    identity = {"certificate": key.certificate} if key.certificate else {"sha256": key.digest.hex()}
    fields: dict[str, Any] = {"name": grant.name, **identity}
    fields["roles"] = ["admin"] if grant.roles == EVERYTHING else [role for role in ROLES if role in grant.roles]
    if grant.models is not None:
        fields["models"] = sorted(grant.models)
    if grant.calls_per_s:
        fields["calls_per_s"] = grant.calls_per_s
    if grant.max_concurrent:
        fields["max_concurrent"] = grant.max_concurrent
    fields |= {name: value for name in _OF_CALLS if (value := getattr(grant, name))}
    lines = [f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in fields.items()]
    if grant.expires_s != math.inf:
        lines.append(f"expires = {format_time(grant.expires_s)}")
    return "\n[[key]]\n" + "\n".join(lines) + "\n"


def format_time(time_s: float) -> str:
    return datetime.fromtimestamp(int(time_s), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def write_keys(path: Path, keys: Iterable[StoredKey]) -> None:
    """Replace a key file in one step; a new one is readable by its owner only. Raises InvalidInput if an
    entry is invalid."""
    text = format_keys(keys)
    parse_keys(text)
    try:
        replace_file(path, text)
    except OSError as error:
        raise InvalidInput(f"key file '{path}' cannot be written: {error.strerror or error}") from error
