"""Run Schemathesis over the OpenAPI document of a server process; `./scripts/fuzz` is the command.

Arguments go to `schemathesis run`, as `--max-examples 1000` or `--include-path /v2/models/{model}/infer`.
"""

import json
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from e2e.server_process import running_server

FOLDER = Path(__file__).parent
DEFAULTS = ("--max-examples", "100", "--no-shrink")


@contextmanager
def described_server() -> Iterator[Callable[..., "subprocess.CompletedProcess[str]"]]:
    """Start a server with an API key; yield a function that runs Schemathesis with some arguments against it."""
    key = {"DRAGOMAN_API_KEY": secrets.token_hex(16)}
    limits = ("--auth-failures-per-minute", "0")
    command = (sys.executable, "-m", "schemathesis.cli", "--config-file", str(FOLDER / "schemathesis.toml"), "run")
    with (
        running_server(str(FOLDER / "models"), *limits, environment=key) as server,
        tempfile.TemporaryDirectory() as folder,
    ):
        # The document needs a key, and a header for all requests would hide those that are sent without one.
        headers = {"x-api-key": key["DRAGOMAN_API_KEY"]}
        document = Path(folder) / "openapi.json"
        document.write_text(json.dumps(server.request("GET", "/openapi.json", None, headers)[1]))

        def run(*arguments: str, **options: Any) -> "subprocess.CompletedProcess[str]":
            whole = [*command, str(document), "--url", f"http://{server.url}", *arguments]
            return subprocess.run(whole, env={**os.environ, **key}, text=True, check=False, cwd=folder, **options)

        yield run


def main(arguments: Sequence[str]) -> int:
    """Test everything but unloading first, which would leave no models, then the model repository."""
    with described_server() as run:
        first = run("--exclude-path-regex", "/unload$", *DEFAULTS, *arguments)
        second = run("--include-path-regex", "/repository/", *DEFAULTS, *arguments)
    return first.returncode or second.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
