"""A live server for clients of the text APIs. Run by ./scripts/test-text-clients; skipped where a client is missing."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a server in a process of `DRAGOMAN_PYTHON`, the server's environment."""
    python = os.environ.get("DRAGOMAN_PYTHON", sys.executable)
    paths = [str(TESTS), str(TESTS.parent / "src")]
    with subprocess.Popen(
        [python, str(Path(__file__).with_name("served_models.py")), str(tmp_path_factory.mktemp("models"))],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        port = process.stdout.readline().strip()
        assert port, "the server did not start"
        yield f"http://127.0.0.1:{port}"
        process.communicate("", timeout=60)
