"""A key file and a server that uses it."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from access.access_models import Doubler, KeyFile, Tripler
from rest.rest_server import RestServer, serving


@pytest.fixture
def keys(tmp_path: Path) -> KeyFile:
    found = KeyFile(tmp_path / "keys.toml")
    found.add("user")
    return found


@pytest_asyncio.fixture
async def server(keys: KeyFile) -> AsyncIterator[RestServer]:
    async with serving(Doubler, Tripler, grpc_port=0, api_keys=str(keys.path)) as server:
        yield server
