"""Options and output of `dragoman check URL`."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from dragoman._version import __version__
from dragoman.conformance.clauses import ClauseFailed, Outcome, Protocol, Result
from dragoman.conformance.http import HttpTarget, checked_url
from dragoman.conformance.report import as_json, as_junit, heading, summary, text_line
from dragoman.conformance.runner import PROTOCOLS, run_clauses
from dragoman.conformance.target import Target, read_request
from dragoman.core.errors import InvalidInput


def check_server(arguments: argparse.Namespace) -> int:
    """Check the server, print the results and return the exit status."""
    target = _target(arguments)
    url = target.http.url or f"grpc://{target.grpc}"
    if target.http.url:
        target.http.require_connection()
    protocols = [p for p in PROTOCOLS if not arguments.protocol or p.name in arguments.protocol]
    if arguments.only and not any(_chosen(protocols, pattern) for pattern in arguments.only):
        raise InvalidInput(f"--only: no clause matches {', '.join(arguments.only)}")
    colours = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    server = _server(target)
    if not arguments.json:
        print(f"{url}: {server.get('name', 'server')} {server.get('version', '')}".rstrip())
    results = []
    title = ""
    for result in run_clauses(target, protocols, arguments.only or (), arguments.allow_changes):
        results.append(result)
        if not arguments.json:
            if result.protocol.title != title:
                title = result.protocol.title
                print(heading(title, colours))
            print(text_line(result, colours, arguments.verbose), flush=True)
    print(json.dumps(as_json(url, server, results), indent=2) if arguments.json else summary(results))
    if arguments.junit:
        _write(arguments.junit, as_junit(url, results))
    return _status(results, arguments.strict)


def _chosen(protocols: Sequence[Protocol], pattern: str) -> bool:
    from fnmatch import fnmatch

    return any(fnmatch(clause.id, pattern) for protocol in protocols for clause in protocol.clauses)


def _status(results: Sequence[Result], strict: bool) -> int:
    if any(result.violates or (strict and result.outcome is Outcome.FAIL) for result in results):
        return 1
    return 0 if any(result.outcome is Outcome.PASS for result in results) else 2


def _target(arguments: argparse.Namespace) -> Target:
    url = checked_url(arguments.what)
    address = urlsplit(url)
    key = arguments.api_key or os.environ.get("DRAGOMAN_API_KEY", "")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    port = address.port or (443 if address.scheme == "https" else 80)
    host = f"[{address.hostname}]" if ":" in (address.hostname or "") else address.hostname
    http = HttpTarget("" if address.scheme == "grpc" else url, headers, arguments.ca, arguments.timeout_s)
    return Target(
        http,
        arguments.grpc or f"{host}:{port}",
        arguments.model or (),
        read_request(arguments.request) if arguments.request else None,
        _parsed("--config", arguments.config, dict),
        _parsed("--at", arguments.at[0], list) if arguments.at else None,
    )


def _parsed(flag: str, text: str, kind: type) -> Any:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise InvalidInput(f"{flag}: expected JSON, got {text}: {error}") from error
    if not isinstance(found, kind):
        raise InvalidInput(f"{flag}: expected {'an object' if kind is dict else 'a list'}, got {text}")
    return found


def _server(target: Target) -> dict[str, Any]:
    """Return name and version of the server, as far as it gives them, and the version of the checker."""
    found: dict[str, Any] = {"checked_by": f"dragoman {__version__}"}
    if not target.http.url:
        return found
    try:
        response = target.http.get("/v2")
        answer = response.json() if response.status == 200 else {}
    except ClauseFailed:
        answer = {}
    return found | {key: answer[key] for key in ("name", "version") if isinstance(answer, dict) and key in answer}


def _write(path: str, content: bytes) -> None:
    try:
        Path(path).write_bytes(content)
    except OSError as error:
        raise InvalidInput(f"'{path}' cannot be written: {error}") from error
