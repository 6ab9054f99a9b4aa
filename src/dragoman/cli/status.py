"""`dragoman status [URL]`: show the models and workers of a running server."""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from dragoman.cli.connection import (
    DEFAULT_URL,
    KEY_HELP,
    STATUS_PATH,
    ServerConnection,
    add_connection_arguments,
)
from dragoman.cli.terminal import colour_text, table
from dragoman.core.documents import parse_json
from dragoman.core.errors import ModelNotFound, NotReady

_EPILOG = f"""\
{KEY_HELP}\
It has the role read. With --admin-port, URL is that of the admin port.

examples:
  dragoman status
  dragoman status http://127.0.0.1:8080 iris
  dragoman status https://models.example.org --json
  watch -n 2 dragoman status http://127.0.0.1:8080

Exit status: 0 if every model is ready, 1 if one is not, 2 if the server's status cannot be read.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.description = "Show the models of a running server: states, reasons, calls in flight, and workers by host."
    parser.epilog = _EPILOG
    add = parser.add_argument
    add("url", nargs="?", default=DEFAULT_URL, metavar="URL", help="server (default: %(default)s)")
    add("names", nargs="*", default=[], metavar="NAME", help="models to show (default: all)")
    add_connection_arguments(parser, timeout_s=10.0)


def run(arguments: argparse.Namespace) -> int:
    """Print the status; return the exit status."""
    connection = ServerConnection.of(arguments, arguments.url)
    body = _read_status(connection)
    try:
        response = parse_json(body)
        models = list(response["models"])
        connection.check_names(arguments.names, [model["name"] for model in models])
        models = [each for each in models if not arguments.names or each["name"] in arguments.names]
        is_ready = all(each["state"] == "READY" for each in models) if arguments.names else bool(response["ready"])
        status = {"ready": is_ready, "models": models, "problems": list(response.get("problems", ()))}
        text = json.dumps(status, indent=2) if arguments.json else _text(status)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise NotReady(f"{connection.url} does not respond as a Dragoman server") from error
    print(text)
    return 0 if status["ready"] else 1


def _read_status(connection: ServerConnection) -> bytes:
    """Return the body of the server's response. Raises NotReady, which says why there is none."""
    try:
        with connection.open(STATUS_PATH) as response:
            return response.read()
    except ModelNotFound as error:
        raise NotReady(f"{error.message}; with an admin port, expected its URL") from error


def _text(status: Mapping[str, Any]) -> str:
    models = status["models"]
    rows = [("model", "version", "state", "in flight", "workers", "reason"), *map(_model_row, models)]
    lines = table(rows) if models else ["no models"]
    workers = [(model, worker) for model in models for worker in model["workers"] if worker["state"] != "waiting"]
    if workers:
        workers.sort(key=lambda pair: (pair[1]["host"], pair[0]["name"]))
        header = ("host", "worker", "model", "state", "in flight", "time/call", "reason")
        lines += ["", *table([header, *(_worker_row(*pair) for pair in workers)])]
    state = colour_text("ready", "32", sys.stdout) if status["ready"] else colour_text("not ready", "31", sys.stdout)
    return "\n".join([*lines, *(f"\nproblem: {problem}" for problem in status["problems"]), "", state])


def _model_row(model: Mapping[str, Any]) -> Sequence[str]:
    counts = Counter(worker["state"] for worker in model["workers"])
    workers = ", ".join(f"{count} {state}" for state, count in counts.items())
    return model["name"], model["version"] or "-", model["state"], str(model["calls"]), workers or "-", model["reason"]


def _worker_row(model: Mapping[str, Any], worker: Mapping[str, Any]) -> Sequence[str]:
    name = f"{model['name']} {model['version']}".rstrip()
    time = f"{1000 * worker['mean_s']:.3g} ms" if worker["mean_s"] else "-"
    calls = str(worker["calls"])
    return worker["host"] or "(server)", worker["process"], name, worker["state"], calls, time, worker["reason"]
