"""What tests of the wire itself run on: our own HTTP server, and uvicorn."""

from collections.abc import Iterator

import pytest
from rest_house import DEFAULTS


@pytest.fixture(scope="module", params=["own", "uvicorn"])
def http_server(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every test of a module that uses this runs on both."""
    DEFAULTS["http_server"] = request.param
    yield request.param
    del DEFAULTS["http_server"]
