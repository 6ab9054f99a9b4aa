"""Triton's generate extension for models of tensors, and as an alias of infer."""

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

import dragoman
from dragoman import BOOL, BYTES, FP32, INT32, Infer, Inference, TensorSpec
from rest.rest_server import RestServer, binary, inputs, serving, tensor

pytestmark = pytest.mark.asyncio(loop_scope="module")


class Scale(dragoman.Model):
    """`x` times `factor`, where `flag` is set; the request's parameters come back."""

    placement = "inline"
    inputs = (
        TensorSpec("x", INT32, (-1, 2)),
        TensorSpec("factor", FP32, (1,), optional=True),
        TensorSpec("flag", BOOL, (1,), optional=True),
    )
    outputs = (TensorSpec("y", FP32, (-1, 2)),)

    def infer(self, call: Infer) -> Inference:
        factor = call.inputs["factor"].data[0] if "factor" in call.inputs else 1
        y = (call.inputs["x"].data * factor).astype(np.float32)
        return Inference({"y": dragoman.Tensor(y, FP32)}, call.parameters)


class Words(dragoman.Model):
    """The words of a text, one in each response; without `text_input` none."""

    placement = "inline"
    inputs = (TensorSpec("text_input", BYTES, (-1, 1)),)
    outputs = (TensorSpec("word", BYTES, (1,)), TensorSpec("empty", INT32, (0,)))

    def infer(self, call: Infer) -> Iterator[Any]:
        text = bytes(call.inputs["text_input"].data.reshape(-1)[0])
        for word in text.split():
            if word == b"fail":
                raise dragoman.errors.InvalidInput("fail is no word")
            yield {"word": np.array([word], object), "empty": np.array([], np.int32)}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[RestServer]:
    async with serving(Scale, Words) as server:
        yield server


async def generate(server: RestServer, body: Any, model: str = "Scale", path: str = "generate") -> Any:
    return await server.request("POST", f"/v2/models/{model}/{path}", body)


@pytest.mark.parametrize(
    ("body", "y"),
    [
        ({"x": [1, 2]}, [1.0, 2.0]),
        ({"x": [1, 2, 3, 4]}, [1.0, 2.0, 3.0, 4.0]),
        ({"x": [[1, 2], [3, 4]], "factor": 2}, [2.0, 4.0, 6.0, 8.0]),
        ({"x": [1, 2], "parameters": {"factor": [0.5]}}, [0.5, 1.0]),
        ({"x": []}, []),
        ({"x": [1, 2], "flag": True}, [1.0, 2.0]),
    ],
)
async def test_keys_are_inputs(server: RestServer, body: Any, y: Any) -> None:
    response = await generate(server, body)
    assert response.status == 200, response.body
    assert response.json == {"model_name": "Scale", "y": y}
    assert response.headers["content-type"] == "application/json"


async def test_other_keys_are_parameters(server: RestServer) -> None:
    response = await generate(
        server, {"x": [1, 2], "id": "7", "top": 1, "parameters": {"s": "t", "b": False, "n": None}}
    )
    assert response.json == {"id": "7", "model_name": "Scale", "y": [1.0, 2.0], "top": 1, "s": "t", "b": False}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ('{"x": [1, 2], "x": 1}', "input 'x' already exists in request"),
        ({"x": [1, 2], "parameters": {"x": 1}}, "input 'x' already exists in request"),
        ({"x": [1, 2, 3]}, "The schema can not convert input 'x' to tensor with proper shape"),
        ({"x": [1, 2], "factor": [1, 2]}, "The schema can not convert input 'factor' to tensor with proper shape"),
        ({"x": [1, 2], "flag": 1}, "attempt to access JSON non-boolean as boolean"),
        ({"x": ["1", "2"]}, "input 'x'"),
        ({"x": [1, 1 << 40]}, "input 'x'"),
        ({"x": [1, 2], "parameters": [1]}, "Expected JSON object for keyword: 'parameters'"),
        ({"x": [1, 2], "p": {"a": 1}}, "parameter 'p' has invalid type"),
        (
            {"x": [1, 2], "parameters": {"p": [1]}},
            "Converting keyword: 'parameters': parameter 'p' has invalid type.",
        ),
        ({"factor": 1}, "expected number of inputs between 1 and 3 but got 1"),
        ("[1]", "must be a JSON object"),
        ({"x": [1, 2], "timeout": -5}, "'timeout'"),
    ],
)
async def test_invalid_requests(server: RestServer, body: Any, message: str) -> None:
    for path in ("generate", "generate_stream"):
        response = await generate(server, body, path=path)
        assert response.status in (400, 422)
        assert message in response.json["error"]


async def test_texts_and_streams(server: RestServer) -> None:
    one = await generate(server, {"text_input": "hello"}, "Words")
    assert one.json == {"model_name": "Words", "word": "hello", "empty": []}
    for body in ({"text_input": "two words"}, {"text_input": ""}):
        response = await generate(server, body, "Words")
        assert (response.status, "generate expects model to produce exactly 1 response" in response.error) == (
            400,
            True,
        )
    stream = await generate(server, {"text_input": "two fail"}, "Words", "generate_stream")
    assert stream.headers["content-type"].startswith("text/event-stream")
    first, second = (json.loads(event[6:]) for event in stream.body.split(b"\n\n")[:-1])
    assert first == {"model_name": "Words", "word": "two", "empty": []}
    assert second == {"error": "fail is no word"}
    failed = await generate(server, {"text_input": "fail"}, "Words", "generate_stream")
    assert (failed.status, failed.json) == (400, {"error": "fail is no word"})
    nothing = await generate(server, {"text_input": ""}, "Words", "generate_stream")
    assert (nothing.status, nothing.body) == (200, b"")
    wrong = await generate(server, {"text_input": 3}, "Words")
    assert wrong.json["error"] == "input 'text_input': attempt to access JSON non-string as string"


async def test_an_inference_request_is_one_also_here(server: RestServer) -> None:
    body = inputs(tensor("x", [1, 2], data=[1, 2]), id="4")
    for path in ("generate", "infer"):
        response = await generate(server, body, path=path)
        assert response.json["outputs"][0]["data"] == [1.0, 2.0]
    raw, headers = binary(
        inputs({"name": "x", "shape": [1, 2], "datatype": "INT32", "parameters": {"binary_data_size": 8}}),
        b"\1\0\0\0" * 2,
    )
    response = await server.request("POST", "/v2/models/Scale/generate", raw, headers)
    assert response.json["outputs"][0]["data"] == [1.0, 1.0]
    words = inputs(tensor("text_input", [1, 1], "BYTES", ["a b"]))
    stream = await generate(server, words, "Words", "generate_stream")
    assert [json.loads(event[6:])["outputs"][0]["data"] for event in stream.body.split(b"\n\n")[:-1]] == [["a"], ["b"]]


async def test_unknown_models(server: RestServer) -> None:
    response = await generate(server, {"x": 1}, "Nothing")
    assert (response.status, response.error) == (404, "Request for unknown model: 'Nothing' is not found")
