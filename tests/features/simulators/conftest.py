"""A shared server with simulators."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.server_process import ServerProcess, running_server

SIMULATORS = Path(__file__).parent / "models" / "simulators.py"
NAMES = ("forward", "Points", "Faulty", "Slow", "Double", "shout")


@pytest.fixture(scope="session")
def simulators() -> Iterator[ServerProcess]:
    """Start a server with each simulator in four threads."""
    models = [f"{SIMULATORS}:{name}" for name in NAMES]
    more = ["--placement", "thread", "--replicas", "4", "--max-batch-size", "64", "--max-body-bytes", str(100 << 20)]
    with running_server(*models, *more, "--log-level", "error") as process:
        yield process
