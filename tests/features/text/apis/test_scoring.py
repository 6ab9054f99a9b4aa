"""Rerank and score in the shapes of Cohere, Jina, vLLM and TEI, by cross-encoders and by embeddings."""

from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

import dragoman
from dragoman.core.calls import Embed, Embedded
from dragoman.core.errors import InvalidInput
from dragoman.core.scoring import Score, Scored
from dragoman.core.tensor import Tensor
from text_server import TextServer, serve

pytestmark = pytest.mark.asyncio(loop_scope="module")
DOCUMENTS = ["b", "a b c", "a"]


class SharedWords(dragoman.Model):
    """A cross-encoder whose score is the number of words of the query in the document, 10 more if raw."""

    placement = "inline"

    def load(self) -> None:
        self.calls: list[Score] = []

    def score(self, call: Score) -> Scored:
        self.calls.append(call)
        if any("!long" in text for _, text in call.pairs):
            raise InvalidInput("pair 0 has 100 tokens; the model takes at most 64")
        if call.truncate == 1:
            raise InvalidInput("truncate: expected at least 4; got 1")
        counts = [len(set(a.split()) & set(b.split())) + 10.0 * call.raw for a, b in call.pairs]
        return Scored(tuple(counts), sum(len(f"{a} {b}".split()) for a, b in call.pairs))


class Angles(dragoman.Model):
    """Embeds a text as a vector of length 2 with the angle that it is, in degrees."""

    placement = "inline"

    def load(self) -> None:
        self.calls: list[Embed] = []

    def embed(self, call: Embed) -> Embedded:
        self.calls.append(call)
        angles = np.radians([float(text) for text in call.inputs if isinstance(text, str)])
        return Embedded(Tensor.of(2 * np.stack([np.cos(angles), np.sin(angles)], 1).astype(np.float32)), len(angles))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[TextServer]:
    async with serve(SharedWords, Angles) as server:
        yield server


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank", "/models/SharedWords/rerank"])
async def test_rerank(server: TextServer, path: str) -> None:
    body = {"query": "a b", "documents": ["b", {"text": "a b c"}, "a"], "return_documents": True}
    response = await server.post(path, {"model": "SharedWords", **body})
    assert response.status == 200, response.body
    result = response.json
    assert result.pop("id").startswith("rerank-")
    assert result == {
        "model": "SharedWords",
        "usage": {"prompt_tokens": 11, "total_tokens": 11},
        "results": [
            {"index": 1, "relevance_score": 2.0, "document": {"text": "a b c"}},
            {"index": 0, "relevance_score": 1.0, "document": {"text": "b"}},
            {"index": 2, "relevance_score": 1.0, "document": {"text": "a"}},
        ],
    }


async def test_options_of_rerank(server: TextServer) -> None:
    body = {"model": "SharedWords", "query": "a b", "documents": DOCUMENTS, "top_n": 1, "return_documents": False}
    response = await server.post("/rerank", {**body, "use_activation": False, "truncate_prompt_tokens": -1, "x": 1})
    assert response.json["results"] == [{"index": 1, "relevance_score": 12.0}]
    assert response.headers["x-ignored-parameters"] == "x"
    assert server.model("SharedWords").calls[-1].truncate == 0
    response = await server.post("/rerank", {**body, "truncate_prompt_tokens": 1})
    assert (response.status, response.json["error"]["param"]) == (400, "truncate_prompt_tokens")
    await server.post("/rerank", {**body, "truncate_prompt_tokens": 3, "truncation_side": "left"})
    call = server.model("SharedWords").calls[-1]
    assert (call.truncate, call.truncation_side) == (3, "left")
    response = await server.post("/rerank", {**body, "truncate_prompt_tokens": 0})
    assert (response.status, response.json["error"]["param"]) == (400, "truncate_prompt_tokens")
    assert len((await server.post("/rerank", {**body, "top_n": 0})).json["results"]) == 3


async def test_rerank_as_in_tei(server: TextServer) -> None:
    body = {"query": "a b", "texts": DOCUMENTS, "return_text": True, "truncate": True, "truncation_direction": "Left"}
    response = await server.post("/models/SharedWords/rerank", body)
    assert response.json == [
        {"index": 1, "score": 2.0, "text": "a b c"},
        {"index": 0, "score": 1.0, "text": "b"},
        {"index": 2, "score": 1.0, "text": "a"},
    ]
    call = server.model("SharedWords").calls[-1]
    assert (call.truncate, call.truncation_side) == (0, "left")
    response = await server.post("/models/SharedWords/rerank", {**body, "truncation_direction": "left"})
    assert (response.status, response.json["error_type"]) == (422, "Validation")
    assert '`truncation_direction` must be "Left" or "Right"' in response.json["error"]
    body = {"model": "SharedWords", "query": "a", "texts": ["a"], "raw_scores": True}
    assert (await server.post("/rerank", body)).json == [{"index": 0, "score": 11.0}]
    for texts in (["!long"], [], [5], None):
        response = await server.post("/rerank", {"model": "SharedWords", "query": "a", "texts": texts})
        assert (response.status, response.json["error_type"]) == (422, "Validation")
    response = await server.post("/rerank", {"model": "missing", "query": "a", "texts": ["a"]})
    assert (response.status, list(response.json)) == (404, ["error", "error_type"])


@pytest.mark.parametrize(
    "sides",
    [
        {"text_1": "a b", "text_2": DOCUMENTS},
        {"queries": ["a b"] * 3, "documents": DOCUMENTS},
        {"queries": "a b", "items": DOCUMENTS},
        {"data_1": "a b", "data_2": DOCUMENTS},
    ],
)
async def test_score(server: TextServer, sides: Any) -> None:
    result = (await server.post("/v1/score", {"model": "SharedWords", **sides})).json
    assert result["data"] == [{"index": i, "object": "score", "score": s} for i, s in enumerate([1.0, 2.0, 1.0])]
    assert result["usage"] == {"prompt_tokens": 11, "total_tokens": 11}


async def test_cosines_of_embeddings(server: TextServer) -> None:
    body = {"model": "Angles", "text_1": "0", "text_2": ["90", "0", "180", "60"]}
    result = (await server.post("/score", body)).json
    assert [each["score"] for each in result["data"]] == pytest.approx([0, 1, -1, 0.5], abs=1e-6)
    ranked = (await server.post("/rerank", {"model": "Angles", "query": "0", "documents": ["90", "0"]})).json
    assert [each["index"] for each in ranked["results"]] == [1, 0]


async def test_embeddings_as_in_tei(server: TextServer) -> None:
    options = {"truncate": True, "truncation_direction": "Left", "normalize": True}
    response = await server.post("/embed", {"model": "Angles", "inputs": ["0", "90"], **options})
    assert response.json == [pytest.approx([1, 0], abs=1e-6), pytest.approx([0, 1], abs=1e-6)]
    call = server.model("Angles").calls[-1]
    assert (call.inputs, call.truncate, call.truncation_side) == (("0", "90"), 0, "left")
    response = await server.post("/models/Angles/embed", {"inputs": "180", "dimensions": 1})
    assert response.json == [[-1.0]]
    assert server.model("Angles").calls[-1].truncate is None
    body = {"inputs": ["0", "90"], "normalize": False, "prompt_name": "query"}
    response = await server.post("/models/Angles/embed", body)
    assert response.json == [pytest.approx([2, 0], abs=1e-6), pytest.approx([0, 2], abs=1e-6)]
    assert server.model("Angles").calls[-1].prompt_name == "query"
    response = await server.post("/models/Angles/embed", {**body, "dimensions": 1})
    assert response.json == [pytest.approx([2], abs=1e-6), pytest.approx([0], abs=1e-6)]
    response = await server.post("/v1/embeddings", {"model": "Angles", "input": ["0"], "prompt_name": "document"})
    assert response.json["data"][0]["embedding"] == pytest.approx([2, 0], abs=1e-6)
    assert server.model("Angles").calls[-1].prompt_name == "document"
    wrong: list[Any] = [{"inputs": []}, {"inputs": 5}, {"inputs": None}]
    for body in (*wrong, {"normalize": 0}, {"prompt_name": 5}, {"dimensions": 3}):
        response = await server.post("/models/Angles/embed", {"inputs": "0", **body})
        assert (response.status, response.json["error_type"]) == (422, "Validation"), body


async def test_an_empty_document_is_scored(server: TextServer) -> None:
    documents = ["a b", "", "b"]
    for path in ("/v1/rerank", "/v2/rerank", "/rerank"):
        response = await server.post(path, {"model": "SharedWords", "query": "a b", "documents": documents})
        assert [(each["index"], each["relevance_score"]) for each in response.json["results"]] == [
            (0, 2),
            (2, 1),
            (1, 0),
        ]
    response = await server.post("/models/SharedWords/rerank", {"query": "a b", "texts": documents})
    assert [(each["index"], each["score"]) for each in response.json] == [(0, 2), (2, 1), (1, 0)]
    response = await server.post("/score", {"model": "SharedWords", "text_1": "a b", "text_2": documents})
    assert [each["score"] for each in response.json["data"]] == [2, 0, 1]


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("rerank", {"documents": ["a"]}, "`query` must be a non-empty string"),
        ("rerank", {"query": 5, "documents": ["a"]}, "`query` must be a string"),
        ("rerank", {"query": "a"}, "`documents` must be a list"),
        ("rerank", {"query": "a", "documents": []}, "`documents` must be a list"),
        ("rerank", {"query": "a", "documents": [{"no": 1}]}, "`documents` must be a list"),
        ("rerank", {"query": "a", "documents": ["a"] * 2049}, "`documents` must be a list of 1 to 2048"),
        ("rerank", {"query": "a", "documents": ["a"], "top_n": -1}, "`top_n` must be"),
        ("rerank", {"query": "a", "documents": ["!long"]}, "pair 0 has 100 tokens"),
        ("score", {"text_1": "a"}, "must be given"),
        ("score", {"text_1": ["a", "b"], "text_2": ["a"]}, "`text_1` must have one string"),
        ("score", {"text_1": 5, "text_2": ["a"]}, "`text_1` must be a string, or a list of 1 to 2048 strings"),
    ],
)
async def test_invalid_requests(server: TextServer, path: str, body: Any, message: str) -> None:
    response = await server.post(f"/{path}", {"model": "SharedWords", **body})
    assert response.status == 400, response.body
    assert message in response.json["error"]["message"]
