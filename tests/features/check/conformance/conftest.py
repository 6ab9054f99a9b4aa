"""A server whose models together offer every protocol."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.server_process import ServerProcess, running_server

MODELS = Path(__file__).parent / "models"
TOKEN = "open-sesame"


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    environment = {"PYTHONPATH": str(MODELS.parents[3])}
    arguments = (str(MODELS), "--placement", "inline", "--control-token", TOKEN)
    with running_server(*arguments, environment=environment) as process:
        yield process
