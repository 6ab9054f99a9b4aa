"""`dragoman keys`: create, list and delete API keys in a file of hashes."""

import argparse
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

from dragoman.access.certificates import parse_certificate_name
from dragoman.access.grants import EVERYTHING, ROLES, Grant
from dragoman.access.keys import StoredKey, create_key, digest_of, expand_roles, format_time, read_keys, write_keys
from dragoman.core.errors import InvalidInput
from dragoman.core.options import split_list, suggestion

_EPILOG = """\
roles:
  infer   run models
  read    metadata of models, lists, metrics
  admin   load and unload models; includes the others

examples:
  dragoman keys create notebook --file keys.toml
  dragoman keys create chat --tokens-per-minute 20000 --tokens-per-day 1000000 --priority low
  dragoman keys create ci --models iris,digits --calls-per-s 20 --max-concurrent 4 --expires-days 90
  dragoman keys create ops --roles admin --certificate CN=ops.example.org
  dragoman serve models/ --api-keys keys.toml

The key is printed once, to standard output; the file holds its SHA-256 hash. A running server reads a changed file
within a second.

Exit status: 0 success, 2 if the file cannot be read or written, or the name is wrong.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.description = "Create, list and delete API keys."
    parser.epilog = _EPILOG
    add = parser.add_argument
    add("action", choices=("create", "list", "delete"), help="what to do")
    add("name", nargs="?", default="", metavar="NAME", help="name of the key, for logs and messages")
    add("--file", default="", metavar="FILE", help="the key file (default: $DRAGOMAN_API_KEYS, else keys.toml)")
    add("--roles", default="infer,read", metavar="ROLES", help="infer, read, admin (default infer,read)")
    add("--models", default="", metavar="MODELS", help="the only models of the key (default: all)")
    add("--calls-per-s", type=float, default=0.0, metavar="X", help="limit of its rate (default: none)")
    add("--max-concurrent", type=int, default=0, metavar="N", help="limit of its concurrent calls (default: none)")
    add(
        "--tokens-per-minute", type=int, default=0, metavar="N", help="tokens of prompts and completions (default: any)"
    )
    add("--tokens-per-day", type=int, default=0, metavar="N", help="the same in a day, UTC (default: any)")
    add("--priority", choices=("low", "normal", "high"), default="", help="class in queues (default: none)")
    add("--certificate", default="", metavar="NAME", help="name in a client's certificate, instead of a key: CN=ops")
    add("--expires-days", type=float, default=0.0, metavar="X", help="days until it expires (default: never)")
    add("--json", action="store_true", help="print JSON, for programs")


def run(arguments: argparse.Namespace) -> int:
    """Run the command; return its exit status."""
    path = Path(arguments.file or os.environ.get("DRAGOMAN_API_KEYS") or "keys.toml")
    stored = read_keys(path) if path.exists() or arguments.action != "create" else []
    if arguments.action == "list":
        text = "\n".join(map(_describe, stored)) or "no keys"
        print(json.dumps([_fields(key) for key in stored], indent=2) if arguments.json else text)
        return 0
    if not arguments.name:
        raise InvalidInput(f"expected NAME: dragoman keys {arguments.action} NAME")
    if arguments.action == "create":
        _create(path, stored, arguments)
    else:
        _delete(path, stored, arguments.name)
        if arguments.json:
            print(json.dumps({"deleted": arguments.name}))
    return 0


def _create(path: Path, stored: list[StoredKey], arguments: argparse.Namespace) -> None:
    roles, models = split_list(arguments.roles), split_list(arguments.models)
    if not roles or not EVERYTHING.issuperset(roles):
        raise InvalidInput(f"--roles: expected some of {', '.join(ROLES)}, got {arguments.roles!r}")
    expires_s = time.time() + arguments.expires_days * 86400 if arguments.expires_days else math.inf
    grant = Grant(
        arguments.name,
        expand_roles(roles),
        frozenset(models) or None,
        arguments.calls_per_s,
        arguments.max_concurrent,
        expires_s,
        "",
        arguments.tokens_per_minute,
        arguments.tokens_per_day,
        arguments.priority,
    )
    if arguments.certificate:
        named = StoredKey(b"", grant, parse_certificate_name(arguments.certificate))
        write_keys(path, [*stored, named])
        print(json.dumps(_fields(named), indent=2)) if arguments.json else None
        print(f"key '{grant.name}' added to {path}: clients with the certificate {named.certificate}", file=sys.stderr)
        return
    key = create_key()
    added = StoredKey(digest_of(key), grant)
    # Print first, so that a key is never stored without having been shown, for example when the disk is full.
    print(json.dumps({**_fields(added), "key": key}, indent=2) if arguments.json else key, flush=True)
    write_keys(path, [*stored, added])
    print(f"key '{grant.name}' added to {path}; it is shown only now", file=sys.stderr)


def _delete(path: Path, stored: list[StoredKey], name: str) -> None:
    names = [key.grant.name for key in stored]
    if name not in names:
        raise InvalidInput(f"no key '{name}' in '{path}'{suggestion(name, names)}")
    write_keys(path, [key for key in stored if key.grant.name != name])
    print(f"key '{name}' deleted from {path}", file=sys.stderr)


def _fields(key: StoredKey) -> dict[str, Any]:
    """Return what is known of a key as JSON values, without its hash; None: no limit."""
    grant = key.grant
    return {
        "name": grant.name,
        "certificate": key.certificate or None,
        "roles": [role for role in ROLES if role in grant.roles],
        "models": None if grant.models is None else sorted(grant.models),
        "calls_per_s": grant.calls_per_s or None,
        "max_concurrent": grant.max_concurrent or None,
        "tokens_per_minute": grant.tokens_per_minute or None,
        "tokens_per_day": grant.tokens_per_day or None,
        "priority": grant.priority or None,
        "expires": None if grant.expires_s == math.inf else format_time(grant.expires_s),
    }


def _describe(key: StoredKey) -> str:
    """Return one line about a key; its hash is of no use to readers."""
    grant = key.grant
    parts = [grant.name, "roles=" + ",".join(role for role in ROLES if role in grant.roles)]
    if key.certificate:
        parts.append(f"certificate={key.certificate}")
    if grant.models is not None:
        parts.append("models=" + ",".join(sorted(grant.models)))
    if grant.calls_per_s:
        parts.append(f"calls_per_s={grant.calls_per_s:g}")
    limits = {
        name: getattr(grant, name) for name in ("max_concurrent", "tokens_per_minute", "tokens_per_day", "priority")
    }
    parts += [f"{name}={value}" for name, value in limits.items() if value]
    if grant.expires_s != math.inf:
        parts.append(f"{'expired' if grant.expires_s <= time.time() else 'expires'}={format_time(grant.expires_s)}")
    return "  ".join(parts)
