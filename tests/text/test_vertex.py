"""TGI's `/vertex`: instances become predictions, each as its own path would answer it."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from .text_house import House, speaking


@pytest.fixture
async def house() -> AsyncIterator[House]:
    async with speaking() as made:
        yield made


def hello(**more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hello"}], **more}


async def test_instances_become_predictions_in_their_order(house: House) -> None:
    instances = [{"inputs": "a b c"}, hello(max_tokens=1), {"inputs": "d e"}, hello()]
    answer = await house.post("/vertex", {"instances": instances})
    assert answer.status == 200
    assert answer.json == {"predictions": ["c b a", "hello", "e d", "hello user:"]}
    answer = await house.post("/models/Speaker/vertex", {"instances": [{"inputs": "a b"}]})
    assert answer.json == {"predictions": ["b a"]}


async def test_what_is_asked_in_the_same_way_is_one_call(house: House) -> None:
    instances = [{"inputs": "a"}, {"inputs": "b"}, {"inputs": "c", "parameters": {"max_new_tokens": 3}}]
    await house.post("/vertex", {"instances": instances})
    assert sorted((call.prompts, call.sampling.max_new_tokens) for call in house.model().calls) == [
        (("a", "b"), None),
        (("c",), 3),
    ]


async def test_parameters_are_those_of_tgi_and_tokens_are_drawn_unless_that_is_refused(house: House) -> None:
    async def sampled(instance: Any, **body: Any) -> Any:
        answer = await house.post("/vertex", {"instances": [instance], **body})
        assert answer.status == 200, answer.json
        return house.model().calls[-1].sampling

    assert (await sampled({"inputs": "a"})).do_sample
    assert (await sampled({"inputs": "a", "parameters": None})).do_sample
    assert not (await sampled({"inputs": "a", "parameters": {"do_sample": False}})).do_sample
    given = {"max_new_tokens": 4, "seed": 3, "top_p": 0.5, "stop": ["x"]}
    for found in (
        await sampled({"inputs": "a", "parameters": given}),
        await sampled({"inputs": "a"}, parameters=given),
        await sampled({"inputs": "a", "parameters": {"seed": 3}}, parameters={**given, "seed": 4}),
    ):
        assert (found.max_new_tokens, found.seed, found.top_p, found.stop) == (4, 3, 0.5, ("x",))
    assert (await sampled(hello(temperature=0), parameters={"max_tokens": 5})).max_new_tokens == 5


async def test_the_prompt_may_stand_in_front(house: House) -> None:
    instances = [{"inputs": "a b", "parameters": {"return_full_text": True, "best_of": 2}}]
    assert (await house.post("/vertex", {"instances": instances})).json == {"predictions": ["a bb a"]}


async def test_different_instances_are_answered_side_by_side(house: House) -> None:
    instances = [{"inputs": "a !wait"}, {"inputs": "b !wait", "parameters": {"seed": 1}}]
    asking = asyncio.ensure_future(house.post("/vertex", {"instances": instances}))
    while house.model().active < 2:
        await asyncio.sleep(0)
    house.model().gate.set()
    assert (await asking).json == {"predictions": ["!wait a", "!wait b"]}


async def test_a_fault_of_one_ends_the_others(house: House) -> None:
    instances = [{"inputs": "a !wait"}, {"inputs": "!fault b", "parameters": {"seed": 1}}]
    answer = await house.post("/vertex", {"instances": instances})
    assert (answer.status, answer.json["error_type"]) == (424, "generation")
    assert "it would not say that" in answer.json["error"]
    while house.model().active:
        await house.ask("GET", "/health")
    assert house.model().cancelled == 1


async def test_what_a_prediction_cannot_show_is_named(house: House) -> None:
    instances = [
        {"inputs": "a", "stream": True, "parameters": {"details": True, "watermark": False, "tone": 1}},
        hello(n=2, logprobs=True, model="tgi"),
    ]
    answer = await house.post("/vertex", {"instances": instances, "labels": {}})
    assert len(answer.json["predictions"]) == 2
    assert answer.headers["x-ignored-parameters"] == "labels, tone, details, stream, n, logprobs"
    assert house.model().calls[-1].sampling.n == 1
    async with speaking(strict_parameters=True) as strict:
        for instance in instances:
            assert (await strict.post("/vertex", {"instances": [instance]})).status == 422


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({}, "`instances` must be a list of 1 to 128 instances; got null"),
        ({"instances": []}, "`instances` must be a list of 1 to 128 instances; got []"),
        ({"instances": [{"inputs": "a"}] * 129}, "`instances` must be a list of 1 to 128 instances; got"),
        ({"instances": ["a"]}, '`instances[0]`: expected an object with `inputs`, a text, or with `messages`; got "a"'),
        ({"instances": [{"inputs": ["a"]}]}, "`instances[0]`: expected an object with `inputs`, a text"),
        ({"instances": [{"inputs": "a"}, {"inputs": ""}]}, "`instances[1]`: `inputs` cannot be empty"),
        ({"instances": [{"inputs": "a", "parameters": {"seed": "x"}}]}, "`instances[0]`: `seed` must be"),
        ({"instances": [hello(), hello(max_tokens="x")]}, "`instances[1]`: `max_tokens` must be"),
        ({"instances": [hello(model="a"), hello(model="b")]}, "`instances` must all be for one model; got a, b"),
        ({"instances": [{"inputs": " ".join("a" * 70)}]}, "the prompt has 70 tokens and the context 64"),
    ],
)
async def test_what_does_not_fit_is_refused(house: House, body: Any, told: str) -> None:
    answer = await house.post("/vertex", body)
    assert (answer.status, answer.json["error_type"]) == (422, "validation")
    assert answer.json["error"].startswith(f"Input validation error: {told}")


async def test_an_instance_may_name_the_model() -> None:
    from .text_house import Speaker

    class Other(Speaker):
        pass

    async with speaking(Speaker, Other) as house:
        for body in (
            {"model": "Other", "instances": [{"inputs": "a"}]},
            {"instances": [hello(model="Other")]},
            {"instances": [hello(model="Other:pirate"), hello()]},
        ):
            before = len(house.model("Other").calls)
            assert (await house.post("/vertex", body)).status == 200
            assert len(house.model("Other").calls) > before
        answer = await house.post("/vertex", {"instances": [{"inputs": "a"}]})
        assert answer.status == 400
        assert "one of Other, Speaker" in answer.json["error"]
