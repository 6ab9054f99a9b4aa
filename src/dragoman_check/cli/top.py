"""`dragoman top [URL]`: what a running server does, refreshed every second."""

import argparse
import json
import sys
import time
from typing import Any

from dragoman.cli.connection import DEFAULT_URL, KEY_HELP, ServerConnection, add_connection_arguments
from dragoman.cli.terminal import colour_text, is_interactive, terminal_columns
from dragoman.core.errors import InvalidInput

_SORTS = ("calls", "errors", "p99", "p50", "queue", "in-flight", "tokens", "name", "state")
_SORT_FIELDS = dict(
    zip(
        _SORTS,
        ("calls_per_s", "errors_per_s", "p99_ms", "p50_ms", "queued", "in_flight", "tokens_per_s", "name", "state"),
        strict=True,
    )
)
_EPILOG = f"""\
Rates, and latencies p50 and p99, are those since the last refresh. Calls in flight are queued or running. The requests
of this command are not counted in the server's metrics.

keys:
  q             quit
  /             show models whose name contains a text; Enter keeps it, Esc clears it
  c e p 5 u     sort by calls/s, errors/s, p99, p50, queue
  f t n s       sort by calls in flight, tokens/s, name, state; again, or r, reverses
  w             show or hide the workers
  j k           scroll, as the arrows do

Where the output is not a terminal, a table is printed at each refresh, without control codes.

{KEY_HELP}\
It has the role read. With --admin-port, URL is that of the admin port.

examples:
  dragoman top
  dragoman top http://127.0.0.1:8080 --sort p99 --interval 5
  dragoman top --once
  dragoman top --json | jq .calls_per_s

Exit status: 0 if it was quit, or with --once if every model is ready, 1 if one is not, 2 if the server cannot be read.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.description = "Show the models and workers of a running server, and their rates and latencies, like top."
    parser.epilog = _EPILOG
    add = parser.add_argument
    add("url", nargs="?", default=DEFAULT_URL, metavar="URL", help="server (default: %(default)s)")
    add("--once", action="store_true", help="print one table and end")
    add("--interval", type=float, default=1.0, metavar="S", help="seconds between refreshes (default: %(default)g)")
    add("--sort", choices=_SORTS, default="calls", help="column to sort by (default: calls)")
    add("--filter", default="", metavar="TEXT", help="models whose name contains a text")
    add("--no-workers", action="store_true", help="without the table of workers")
    add_connection_arguments(parser, timeout_s=10.0)


def run(arguments: argparse.Namespace) -> int:
    """Show the figures; return the exit status."""
    from dragoman_check.top.snapshot import Source, snapshot
    from dragoman_check.top.view import View

    if not 0.1 <= arguments.interval <= 3600:
        raise InvalidInput(f"--interval: expected seconds from 0.1 to 3600, got {arguments.interval:g}")
    connection = ServerConnection.of(arguments, arguments.url)
    source = Source(connection)
    before = source.read()

    def read() -> dict[str, Any]:
        nonlocal before
        after = source.read()
        found = snapshot(connection.url, before, after)
        before = after
        return found

    view = View(_SORT_FIELDS[arguments.sort], filter=arguments.filter, shows_workers=not arguments.no_workers)
    if not (arguments.once or arguments.json) and is_interactive(sys.stdout) and sys.stdin.isatty():
        from dragoman_check.top.screen import show

        show(read, read(), view, arguments.interval)
        return 0
    while True:
        time.sleep(arguments.interval)
        found = read()
        _print(found, view, as_json=arguments.json)
        if arguments.once:
            return 0 if found["ready"] else 1


def _print(found: dict[str, Any], view: Any, *, as_json: bool) -> None:
    from dragoman_check.top.view import lines

    if as_json:
        kept = [model["name"] for model in view.models(found)]
        workers = [each for each in found["workers"] if each["model"] in kept and view.shows_workers]
        print(json.dumps({**found, "models": view.models(found), "workers": workers}), flush=True)
        return
    columns = terminal_columns(sys.stdout) if sys.stdout.isatty() else 10_000
    for text, code in lines(found, view, columns):
        print(colour_text(text, code, sys.stdout) if code else text)
    print(flush=True)
