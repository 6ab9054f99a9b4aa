"""Answers that are fetched later, as LMI's and SageMaker's asynchronous clients do."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from rest.rest_server import RawResponse

from .text_house import House, lines, speaking

LATER = {"x-synchronous": "false"}
ATTRIBUTES = "x-amzn-sagemaker-custom-attributes"


@pytest.fixture
async def house() -> AsyncIterator[House]:
    async with speaking() as made:
        yield made


async def _begin(house: House, body: Any, headers: dict[str, str] = LATER) -> str:
    answer = await house.post("/invocations", body, headers)
    assert (answer.status, answer.body) == (200, b"")
    token = answer.headers["x-next-token"]
    assert answer.headers[ATTRIBUTES] == f"x-next-token={token}"
    return token


async def _fetch(house: House, token: str, **more: str) -> RawResponse:
    headers = {"x-starting-token": token, **{name.replace("_", "-"): value for name, value in more.items()}}
    return await house.post("/invocations", b"", headers)


async def _until_there(house: House, token: str, **more: str) -> RawResponse:
    async with asyncio.timeout(60):
        while (answer := await _fetch(house, token, **more)).status == 202:
            await asyncio.sleep(0.001)
    return answer


async def test_an_answer_is_fetched_when_it_is_there(house: House) -> None:
    token = await _begin(house, {"inputs": "!wait now"})
    pending = await _fetch(house, token)
    assert pending.status == 202
    assert pending.json == {"code": 202, "message": "The model result is not yet available"}
    house.model().gate.set()
    answer = await _until_there(house, pending.headers["x-next-token"])
    assert (answer.status, answer.json) == (200, {"generated_text": "now !wait"})
    assert answer.headers["content-type"] == "application/json"
    assert "x-next-token" not in answer.headers
    assert (await _fetch(house, token)).json == answer.json  # as often as one likes


async def test_a_stream_is_fetched_in_parts(house: House) -> None:
    token = await _begin(house, {"inputs": "d c !wait b a", "stream": True})
    async with asyncio.timeout(60):
        while not house.model().active or (answer := await _fetch(house, token)).status == 202:
            await asyncio.sleep(0.001)
    assert answer.headers["content-type"] == "application/jsonlines"
    found, following = lines(answer.body), answer.headers["x-next-token"]
    while len(found) < 2:
        more = await _fetch(house, following)
        found, following = found + (lines(more.body) if more.body else []), more.headers["x-next-token"]
    house.model().gate.set()
    while following:
        more = await _fetch(house, following, x_max_items="1")
        assert len(more.body.splitlines()) <= 1
        found += lines(more.body) if more.body else []
        following = more.headers.get("x-next-token", "")
    assert "".join(line["token"]["text"] for line in found) == "a b !wait c d"
    assert found[-1]["generated_text"] == "a b !wait c d"


async def test_sagemakers_custom_attributes_do_as_well(house: House) -> None:
    token = await _begin(house, {"inputs": "a b"}, {ATTRIBUTES: "x-synchronous=false"})
    async with asyncio.timeout(60):
        while True:
            answer = await house.post("/invocations", b"", {ATTRIBUTES: f"x-starting-token={token}"})
            if answer.status == 200:
                break
    assert answer.json == {"generated_text": "b a"}


@pytest.mark.parametrize(
    ("body", "message"),
    [({"inputs": "a", "parameters": {"temperature": -1}}, "temperature"), (b"{", "not valid JSON")],
)
async def test_what_went_wrong_is_fetched_too(house: House, body: Any, message: str) -> None:
    answer = await _until_there(house, await _begin(house, body))
    assert answer.status == 424
    assert message in answer.json["error"]
    failed = await _until_there(house, await _begin(house, {"inputs": "!fault"}))
    assert failed.json["details"]["finish_reason"] == "error"


async def test_tokens_that_are_none(house: House) -> None:
    token = await _begin(house, {"inputs": "a"})
    for wrong in ("x", f"{token}.99", f"{token}.x", "."):
        answer = await _fetch(house, wrong)
        assert (answer.status, answer.json["type"]) == (400, "BadRequestException")
        assert answer.json["message"] == f"Invalid x-starting-token: {wrong}"
    assert (await _fetch(house, token, x_max_items="many")).status == 424


async def test_at_once_is_how_others_are_answered(house: House) -> None:
    answer = await house.post("/invocations", {"inputs": "a b"}, {"x-synchronous": "true"})
    assert answer.json == {"generated_text": "b a"}


async def test_too_many_are_refused(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dragoman.transports.async_results._MAX_RESULTS", 2)
    for _ in range(2):
        await _begin(house, {"inputs": "a"})
    full = await house.post("/invocations", {"inputs": "a"}, LATER)
    assert (full.status, full.json["type"]) == (503, "WlmCapacityException")


async def test_an_answer_is_not_kept_for_ever(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dragoman.transports.async_results._KEEP_S", 0.01)
    token = await _begin(house, {"inputs": "!wait", "stream": True})
    async with asyncio.timeout(60):
        while (await _fetch(house, token)).status != 400 or house.model().active:
            await asyncio.sleep(0.05)
    assert house.model().cancelled == 1


async def test_a_place_with_any_number_of_digits_is_none(house: House) -> None:
    token = await _begin(house, {"inputs": "a"})
    await _until_there(house, token)
    assert (await _fetch(house, f"{token}.0")).status == 200
    for place in ("2", "0" * 12 + "1", "1" * 5000):
        assert (await _fetch(house, f"{token}.{place}")).status == 400
