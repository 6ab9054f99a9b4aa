"""Batches of texts through the SDKs of OpenAI and Anthropic, unchanged."""

import asyncio
import io
import json
import time
import warnings
from collections.abc import AsyncIterator
from typing import Any

import pytest

from text_server import TextServer, serve

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import anthropic
    import openai

pytestmark = pytest.mark.filterwarnings("ignore::pydantic.PydanticDeprecatedSince20", "ignore::ResourceWarning")

WAIT_S = 120.0
USER = [{"role": "user", "content": "one two"}]


@pytest.fixture
async def server() -> AsyncIterator[TextServer]:
    async with serve() as server:
        yield server


async def test_openai_batches(server: TextServer) -> None:
    await asyncio.to_thread(_openai_batches, openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0))


def _openai_batches(client: openai.OpenAI) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"model": "ReverseModel", "messages": USER},
        "/v1/completions": {"model": "ReverseModel", "prompt": "one two"},
        "/v1/responses": {"model": "ReverseModel", "input": "one two"},
        "/v1/messages": {"model": "ReverseModel", "max_tokens": 9, "messages": USER},
        "/v1/embeddings": {"model": "ReverseModel", "input": "one two"},
    }
    streamed = {"model": "ReverseModel", "messages": USER, "stream": True}
    lines = [{"custom_id": url, "method": "POST", "url": url, "body": body} for url, body in bodies.items()]
    lines.append({"custom_id": "stream", "method": "POST", "url": "/v1/chat/completions", "body": streamed})
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    file = client.files.create(file=io.BytesIO(content), purpose="batch")
    assert file.filename == "upload"
    endpoint: Any = "*"
    batch = client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h")
    end_s = time.monotonic() + WAIT_S
    while batch.status != "completed":
        assert time.monotonic() < end_s, batch
        time.sleep(0.02)
        batch = client.batches.retrieve(batch.id)
    found = [json.loads(line) for line in client.files.content(batch.output_file_id or "").text.splitlines()]
    body = {each["custom_id"]: each["response"]["body"] for each in found}
    assert [*body] == [*bodies]
    assert body["/v1/chat/completions"]["choices"][0]["message"]["content"] == "two one user:"
    assert body["/v1/completions"]["choices"][0]["text"] == "two one"
    assert body["/v1/responses"]["output"][0]["content"][0]["text"] == "two one user:"
    assert body["/v1/messages"]["content"][0]["text"] == "two one user:"
    (error,) = client.files.content(batch.error_file_id or "").text.splitlines()
    assert json.loads(error)["response"]["body"]["error"]["param"] == "stream"


async def test_anthropic_message_batches(server: TextServer) -> None:
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    await asyncio.to_thread(_anthropic_batches, client)


def _anthropic_batches(client: anthropic.Anthropic) -> None:
    params: Any = {"model": "ReverseModel", "max_tokens": 9, "messages": USER}
    requests: list[Any] = [{"custom_id": f"n-{number}", "params": params} for number in range(3)]
    requests.append({"custom_id": "bad", "params": {**params, "max_tokens": "many"}})
    batch = client.messages.batches.create(requests=requests)
    assert (batch.type, batch.results_url) == ("message_batch", None)
    end_s = time.monotonic() + WAIT_S
    while batch.processing_status != "ended":
        assert time.monotonic() < end_s, batch
        time.sleep(0.02)
        batch = client.messages.batches.retrieve(batch.id)
    assert batch.request_counts.model_dump() == {
        "processing": 0, "succeeded": 3, "errored": 1, "canceled": 0, "expired": 0,
    }  # fmt: skip
    results = [*client.messages.batches.results(batch.id)]
    assert [each.custom_id for each in results] == ["n-0", "n-1", "n-2", "bad"]
    for each in results[:3]:
        assert each.result.type == "succeeded"
        assert each.result.message.content[0].text == "two one user:"
    assert results[3].result.type == "errored"
    assert results[3].result.error.error.type == "invalid_request_error"
    assert [each.id for each in client.messages.batches.list(limit=1)] == [batch.id]
    assert client.messages.batches.cancel(batch.id).processing_status == "ended"
    assert client.messages.batches.delete(batch.id).type == "message_batch_deleted"
    for attempt in (client.messages.batches.retrieve, client.messages.batches.results):
        with pytest.raises(anthropic.NotFoundError):
            attempt(batch.id)


@pytest.mark.parametrize(
    ("requests", "named"),
    [
        ([], "`requests`"),
        ([{"custom_id": "", "params": {}}], "`requests[0].custom_id`"),
        ([{"custom_id": "a", "params": 1}], "`requests[0].params`"),
        ([{"custom_id": "a", "params": {}}, {"custom_id": "a", "params": {}}], "`requests[1].custom_id`"),
        ([{"params": {}}], "`requests[0].custom_id`"),
    ],
)
async def test_wrong_requests_of_a_message_batch_are_named(server: TextServer, requests: Any, named: str) -> None:
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    with pytest.raises(anthropic.BadRequestError) as raised:
        await asyncio.to_thread(client.messages.batches.create, requests=requests)
    assert raised.value.body["error"]["message"].startswith(named)
