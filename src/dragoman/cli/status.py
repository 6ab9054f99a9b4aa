"""`dragoman status [URL]`: show the models and workers of a running server."""

import argparse
import http.client
import json
import os
import ssl
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from dragoman.cli.terminal import table
from dragoman.core.errors import InvalidInput, NotReady

_PATH = "/v2/repository/status"
_VARIABLES = ("DRAGOMAN_API_KEY", "DRAGOMAN_CONTROL_TOKEN")
_EPILOG = f"""\
A server with API keys needs one with the role read: in --api-key, or in the variable {_VARIABLES[0]}, which other users
of the machine cannot see. With --admin-port, URL is that of the admin port.

examples:
  dragoman status
  dragoman status https://models.example.org --json
  watch -n 2 dragoman status http://127.0.0.1:8080

Exit status: 0 if every model is ready, 1 if one is not, 2 if the server's status cannot be read.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Show the models of a running server: states, reasons, calls, and workers by host."
    parser.epilog = _EPILOG
    add = parser.add_argument
    add("url", nargs="?", default="http://127.0.0.1:8080", metavar="URL", help="server (default: %(default)s)")
    add("--json", action="store_true", help="print the server's response as JSON")
    add("--api-key", "--token", metavar="KEY", default="", help="API key or token of the server")
    add("--ca", metavar="FILE", default="", help="certificate authority of the server (default: those of the system)")
    add("--timeout-s", type=float, default=10.0, metavar="S", help="how long to wait (default: 10)")


def run(arguments: argparse.Namespace) -> int:
    """Print the status; return the exit status."""
    url = (arguments.url if "://" in arguments.url else f"http://{arguments.url}").rstrip("/")
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
        raise InvalidInput(f"expected URL as http://HOST:PORT, got {arguments.url!r}")
    key = arguments.api_key or next(filter(None, map(os.environ.get, _VARIABLES)), "")
    status = _read_status(url, key, arguments.ca, arguments.timeout_s)
    print(json.dumps(status, indent=2) if arguments.json else _text(status))
    return 0 if status["ready"] else 1


def _read_status(url: str, key: str, ca: str, timeout_s: float) -> Mapping[str, Any]:
    """Return the server's response. Raises NotReady, which says why there is none."""
    request = urllib.request.Request(url + _PATH, headers={"authorization": f"Bearer {key}"} if key else {})  # noqa: S310
    try:
        context = ssl.create_default_context(cafile=ca or None)
        with urllib.request.urlopen(request, timeout=timeout_s, context=context) as response:  # noqa: S310
            status = json.load(response)
            return {"ready": bool(status["ready"]), "models": list(status["models"])}
    except urllib.error.HTTPError as error:
        raise NotReady(_describe_status(url, error)) from error
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise NotReady(f"cannot read the status of {url}: {reason}") from error
    except (ValueError, LookupError, TypeError) as error:
        raise NotReady(f"cannot read the status of {url}: its response is not that of a Dragoman server") from error


def _describe_status(url: str, error: urllib.error.HTTPError) -> str:
    try:
        reason = json.load(error)["error"]
    except (ValueError, LookupError, TypeError, OSError):
        reason = error.reason
    hints = {401: "; expected a key in --api-key", 404: "; with an admin port, expected its URL"}
    return f"{url} responds with {error.code}: {reason}{hints.get(error.code, '')}"


def _text(status: Mapping[str, Any]) -> str:
    models = status["models"]
    rows = [("model", "version", "state", "calls", "workers", "reason"), *map(_model_row, models)]
    lines = table(rows) if models else ["no models"]
    workers = [(model, worker) for model in models for worker in model["workers"] if worker["state"] != "waiting"]
    if workers:
        workers.sort(key=lambda pair: (pair[1]["host"], pair[0]["name"]))
        header = ("host", "worker", "model", "state", "calls", "time/call", "reason")
        lines += ["", *table([header, *(_worker_row(*pair) for pair in workers)])]
    return "\n".join([*lines, "", "ready" if status["ready"] else "not ready"])


def _model_row(model: Mapping[str, Any]) -> Sequence[str]:
    counts = Counter(worker["state"] for worker in model["workers"])
    workers = ", ".join(f"{count} {state}" for state, count in counts.items())
    return model["name"], model["version"] or "-", model["state"], str(model["calls"]), workers or "-", model["reason"]


def _worker_row(model: Mapping[str, Any], worker: Mapping[str, Any]) -> Sequence[str]:
    name = f"{model['name']} {model['version']}".rstrip()
    time = f"{1000 * worker['mean_s']:.3g} ms" if worker["mean_s"] else "-"
    calls = str(worker["calls"])
    return worker["host"] or "(server)", worker["process"], name, worker["state"], calls, time, worker["reason"]
