"""The fields of requests in the types of the installed packages: the server has decided about each."""

import json
import urllib.request

import pytest

from newest_clients.request_types import request_fields, undescribed_fields

pytestmark = pytest.mark.filterwarnings("ignore")


def test_each_field_is_described(url: str) -> None:
    if not [*request_fields()]:
        pytest.skip("no package with types of requests")
    with urllib.request.urlopen(f"{url}/openapi.json") as response:
        assert undescribed_fields(json.load(response)) == []
