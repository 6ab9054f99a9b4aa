"""Addresses of live servers for clients. Run by ./scripts/test-newest-clients; skipped where a client is missing."""

import gc
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
ADDRESSES = "DRAGOMAN_ADDRESSES"  # of servers that run already
KEY = "open-sesame-open-sesame"


@pytest.fixture(scope="package", autouse=True)
def _collect_clients() -> Iterator[None]:
    """Free what clients leave open: the warnings of their packages are not errors of these tests."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()


@pytest.fixture(scope="session")
def addresses(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, str]]:
    """Addresses as `served_models.py` prints them, of a process of this environment unless servers run already."""
    if ADDRESSES in os.environ:
        yield json.loads(os.environ[ADDRESSES])
        return
    paths = [str(TESTS), str(TESTS.parent / "src")]
    with subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("served_models.py")), str(tmp_path_factory.mktemp("models"))],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, "the server did not start"
        yield json.loads(line)
        process.communicate("", timeout=60)


@pytest.fixture(scope="session")
def url(addresses: Mapping[str, str]) -> str:
    return addresses["url"]


@pytest.fixture(scope="session")
def keyed(addresses: Mapping[str, str]) -> str:
    """Address of a server with a key."""
    return addresses["keyed"]


@pytest.fixture(scope="session")
def grpc_url(addresses: Mapping[str, str]) -> str:
    return addresses["grpc"]
