"""Options and output of `dragoman check URL`."""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from dragoman._version import __version__
from dragoman.cli.connection import ServerConnection
from dragoman.cli.files import write_file
from dragoman.cli.input_values import parse_json
from dragoman.cli.terminal import colour_text, printable, table
from dragoman.core.errors import InvalidInput
from dragoman_check.conformance.clauses import ClauseFailed, ClauseResult, Outcome, Protocol
from dragoman_check.conformance.http import checked_url
from dragoman_check.conformance.report import as_json, as_junit, verdict
from dragoman_check.conformance.runner import PROTOCOLS, run_clauses
from dragoman_check.conformance.target import Target, read_request, server_target


def check_server(arguments: argparse.Namespace) -> int:
    """Check the server, print the results and return the exit status."""
    target = _target(arguments)
    url = target.http.url or f"grpc://{target.grpc}"
    if target.http.url:
        target.http.require_connection()
    protocols = [p for p in PROTOCOLS if not arguments.protocol or p.name in arguments.protocol]
    if arguments.only and not any(_matches_a_clause(protocols, pattern) for pattern in arguments.only):
        raise InvalidInput(f"--only: no clause matches {', '.join(arguments.only)}")
    server = _server(target)
    if not arguments.json:
        print(_one_line(f"{url}: {server.get('name', 'server')} {server.get('version', '')}".rstrip()))
    results = []
    clause_results = run_clauses(target, protocols, arguments.only or (), arguments.allow_changes)
    for title, rows in groupby(clause_results, lambda result: result.protocol.title):
        if not arguments.json:
            print("\n" + colour_text(title, "1", sys.stdout), flush=True)
        for _, group in groupby(rows, lambda result: (result.outcome, result.reason)):
            alike = list(group)
            results += alike
            if not arguments.json:
                print("\n".join(_lines_of_group(alike, arguments.verbose)), flush=True)
    print(json.dumps(as_json(url, server, results), indent=2) if arguments.json else _summary(results))
    if arguments.junit:
        write_file(arguments.junit, as_junit(url, results))
    return _status(results, arguments.strict)


def _matches_a_clause(protocols: Sequence[Protocol], pattern: str) -> bool:
    from fnmatch import fnmatch

    return any(fnmatch(clause.id, pattern) for protocol in protocols for clause in protocol.clauses)


def _status(results: Sequence[ClauseResult], strict: bool) -> int:
    if any(result.violates or (strict and result.outcome is Outcome.FAIL) for result in results):
        return 1
    return 0 if any(result.outcome is Outcome.PASS for result in results) else 2


# ANSI codes of outcomes.
_COLOURS = {Outcome.PASS: "32", Outcome.FAIL: "31", Outcome.NOT_OFFERED: "33", Outcome.NOT_TRIED: "36"}
_INDENT = " " * 15


def _lines(result: ClauseResult, verbose: bool) -> list[str]:
    """Return the row of a clause; with the last exchange if it failed, with all of them if `verbose` is set."""
    failed = result.outcome is Outcome.FAIL
    outcome = colour_text(f"{result.outcome:<11}", _COLOURS[result.outcome], sys.stdout)
    level = " (recommended)" if result.clause.level == "should" else ""
    lines = [f"  {outcome}  {result.clause.id:<34}  {result.clause.requirement}{level}"]
    if result.reason:
        lines.append(_INDENT + _one_line(result.reason))
    for exchange in result.exchanges if verbose else result.exchanges[-1:] if failed else ():
        lines += [
            f"{_INDENT}sent      {_one_line(exchange.sent)}",
            f"{_INDENT}received  {_one_line(exchange.received)}",
        ]
    if failed:
        lines.append(f"{_INDENT}document  {result.protocol.document}: {result.clause.section}")
    return lines


def _lines_of_group(results: Sequence[ClauseResult], verbose: bool) -> list[str]:
    """Return the rows of clauses of equal outcome and reason; clauses that were not checked share a row."""
    first = results[0]
    if len(results) < 3 or verbose or first.outcome in (Outcome.PASS, Outcome.FAIL):
        return [line for result in results for line in _lines(result, verbose)]
    outcome = colour_text(f"{first.outcome:<11}", _COLOURS[first.outcome], sys.stdout)
    names = f"{first.clause.id} ... {results[-1].clause.id} ({len(results)} clauses)"
    return [f"  {outcome}  {names}", _INDENT + _one_line(first.reason)]


def _one_line(text: str) -> str:
    return printable(text.replace("\n", "\\n").replace("\r", ""))


def _summary(results: Sequence[ClauseResult]) -> str:
    """Return a table of counts by protocol, and a verdict."""
    rows = [("protocol", *map(str, Outcome))]
    for title in dict.fromkeys(result.protocol.title for result in results):
        counts = Counter(result.outcome for result in results if result.protocol.title == title)
        rows.append((title, *(str(counts[outcome]) for outcome in Outcome)))
    return "\n".join(["", *table(rows), "", verdict(results)])


def _target(arguments: argparse.Namespace) -> Target:
    key = ServerConnection.of(arguments, checked_url(arguments.url)).key
    return replace(
        server_target(arguments.url, arguments.grpc, key, arguments.ca, arguments.timeout_s),
        models=arguments.model or (),
        request=read_request(arguments.request) if arguments.request else None,
        config=parse_json(arguments.config, dict, "--config"),
        point=parse_json(arguments.at[0], list, "--at") if arguments.at else None,
    )


def _server(target: Target) -> dict[str, Any]:
    """Return name and version of the server, if the server reports them, and the version of the checker."""
    server: dict[str, Any] = {"checked_by": f"dragoman {__version__}"}
    if not target.http.url:
        return server
    try:
        response = target.http.get("/v2")
        answer = response.json() if response.status == 200 else {}
    except ClauseFailed:
        answer = {}
    return server | {key: answer[key] for key in ("name", "version") if isinstance(answer, dict) and key in answer}
