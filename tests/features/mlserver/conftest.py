"""A folder of custom models, served by a separate process."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.server_process import ServerProcess, running_server

FOLDER = Path(__file__).parent / "folder"


@pytest.fixture(scope="package")  # tests of workers count the processes that are left
def served_folder() -> Iterator[ServerProcess]:
    with running_server(str(FOLDER)) as process:
        yield process
