"""TGI's `/vertex`: each instance is a `/generate` or chat request."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from text_server import TextServer, serve


@pytest.fixture
async def server() -> AsyncIterator[TextServer]:
    async with serve() as server:
        yield server


def chat_instance(**more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hello"}], **more}


async def test_predictions_have_the_order_of_the_instances(server: TextServer) -> None:
    instances = [{"inputs": "a b c"}, chat_instance(max_tokens=1), {"inputs": "d e"}, chat_instance()]
    response = await server.post("/vertex", {"instances": instances})
    assert response.status == 200
    assert response.json == {"predictions": ["c b a", "hello", "e d", "hello user:"]}
    response = await server.post("/models/ReverseModel/vertex", {"instances": [{"inputs": "a b"}]})
    assert response.json == {"predictions": ["b a"]}


async def test_instances_with_equal_parameters_are_one_call(server: TextServer) -> None:
    instances = [{"inputs": "a"}, {"inputs": "b"}, {"inputs": "c", "parameters": {"max_new_tokens": 3}}]
    await server.post("/vertex", {"instances": instances})
    assert sorted((call.prompts, call.sampling.max_new_tokens) for call in server.model().calls) == [
        (("a", "b"), None),
        (("c",), 3),
    ]


async def test_parameters_and_sampling_by_default(server: TextServer) -> None:
    async def post_instance(instance: Any, **body: Any) -> Any:
        response = await server.post("/vertex", {"instances": [instance], **body})
        assert response.status == 200, response.json
        return server.model().calls[-1].sampling

    assert (await post_instance({"inputs": "a"})).do_sample
    assert (await post_instance({"inputs": "a", "parameters": None})).do_sample
    assert not (await post_instance({"inputs": "a", "parameters": {"do_sample": False}})).do_sample
    parameters = {"max_new_tokens": 4, "seed": 3, "top_p": 0.5, "stop": ["x"]}
    for sampling in (
        await post_instance({"inputs": "a", "parameters": parameters}),
        await post_instance({"inputs": "a"}, parameters=parameters),
        await post_instance({"inputs": "a", "parameters": {"seed": 3}}, parameters={**parameters, "seed": 4}),
    ):
        assert (sampling.max_new_tokens, sampling.seed, sampling.top_p, sampling.stop) == (4, 3, 0.5, ("x",))
    assert (await post_instance(chat_instance(temperature=0), parameters={"max_tokens": 5})).max_new_tokens == 5


async def test_return_full_text(server: TextServer) -> None:
    instances = [{"inputs": "a b", "parameters": {"return_full_text": True, "best_of": 2}}]
    assert (await server.post("/vertex", {"instances": instances})).json == {"predictions": ["a bb a"]}


async def test_instances_run_concurrently(server: TextServer) -> None:
    instances = [{"inputs": "a !wait"}, {"inputs": "b !wait", "parameters": {"seed": 1}}]
    request = asyncio.ensure_future(server.post("/vertex", {"instances": instances}))
    while server.model().active < 2:
        await asyncio.sleep(0)
    server.model().gate.set()
    assert (await request).json == {"predictions": ["!wait a", "!wait b"]}


async def test_an_error_of_one_instance_cancels_the_others(server: TextServer) -> None:
    instances = [{"inputs": "a !wait"}, {"inputs": "!fault b", "parameters": {"seed": 1}}]
    response = await server.post("/vertex", {"instances": instances})
    assert (response.status, response.json["error_type"]) == (424, "generation")
    assert "generated !fault" in response.json["error"]
    while server.model().active:
        await server.request("GET", "/health")
    assert server.model().cancelled == 1


async def test_parameters_without_effect_are_reported(server: TextServer) -> None:
    instances = [
        {"inputs": "a", "stream": True, "parameters": {"details": True, "watermark": False, "tone": 1}},
        chat_instance(n=2, logprobs=True, model="tgi"),
    ]
    response = await server.post("/vertex", {"instances": instances, "labels": {}})
    assert len(response.json["predictions"]) == 2
    assert response.headers["x-ignored-parameters"] == "labels, tone, details, stream, n, logprobs"
    assert server.model().calls[-1].sampling.n == 1
    async with serve(strict_parameters=True) as strict:
        for instance in instances:
            assert (await strict.post("/vertex", {"instances": [instance]})).status == 422


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "`instances` must be a list of 1 to 128 instances; got null"),
        ({"instances": []}, "`instances` must be a list of 1 to 128 instances; got []"),
        ({"instances": [{"inputs": "a"}] * 129}, "`instances` must be a list of 1 to 128 instances; got"),
        (
            {"instances": ["a"]},
            '`instances[0]`: expected an object with `inputs`, a string, or with `messages`; got "a"',
        ),
        ({"instances": [{"inputs": ["a"]}]}, "`instances[0]`: expected an object with `inputs`, a string"),
        ({"instances": [{"inputs": "a"}, {"inputs": ""}]}, "`instances[1]`: `inputs` cannot be empty"),
        ({"instances": [{"inputs": "a", "parameters": {"seed": "x"}}]}, "`instances[0]`: `seed` must be"),
        ({"instances": [chat_instance(), chat_instance(max_tokens="x")]}, "`instances[1]`: `max_tokens` must be"),
        (
            {"instances": [chat_instance(model="a"), chat_instance(model="b")]},
            "`instances` must all be for one model; got a, b",
        ),
        ({"instances": [{"inputs": " ".join("a" * 70)}]}, "the prompt has 70 tokens and the context 64"),
    ],
)
async def test_invalid_instances_are_rejected(server: TextServer, body: Any, message: str) -> None:
    response = await server.post("/vertex", body)
    assert (response.status, response.json["error_type"]) == (422, "validation")
    assert response.json["error"].startswith(f"Input validation error: {message}")


async def test_model_names_in_instances() -> None:
    from text_server import ReverseModel

    class Other(ReverseModel):
        pass

    async with serve(ReverseModel, Other) as server:
        for body in (
            {"model": "Other", "instances": [{"inputs": "a"}]},
            {"instances": [chat_instance(model="Other")]},
            {"instances": [chat_instance(model="Other:pirate"), chat_instance()]},
        ):
            before = len(server.model("Other").calls)
            assert (await server.post("/vertex", body)).status == 200
            assert len(server.model("Other").calls) > before
        response = await server.post("/vertex", {"instances": [{"inputs": "a"}]})
        assert response.status == 400
        assert "one of Other, ReverseModel" in response.json["error"]
