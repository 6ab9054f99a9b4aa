"""cohere: the client of the rerank API."""

from typing import Any

import pytest

cohere: Any = pytest.importorskip("cohere")

pytestmark = pytest.mark.filterwarnings("ignore")


def test_rerank(url: str) -> None:
    client = cohere.ClientV2(base_url=url, api_key="-")
    response = client.rerank(model="SharedWords", query="a b", documents=["b", "a b c", "d"], top_n=2)
    assert [(each.index, each.relevance_score) for each in response.results] == [(1, 2.0), (0, 1.0)]
