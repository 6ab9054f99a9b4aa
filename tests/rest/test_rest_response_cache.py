"""A server with a response cache gives the same bytes as one without, for random sequences of requests."""

import asyncio
import itertools
import json
import random
import struct
from typing import Any

import pytest

import dragoman
from dragoman import FP64, ApplyHessian, ApplyJacobian, Gradient, Infer, Inference, Tensor, TensorSpec

from .rest_server import Identity, Phrase, Picture, RawResponse, RestServer, serving

SIZE = 20_000  # fewer bytes than the answers: some are removed
ROUNDS, CONCURRENT = 40, 8


class Describing(dragoman.Model):
    """Return the inputs, and a description of the call in every other place that a response has."""

    def infer(self, call: Infer) -> Any:
        if call.parameters.get("p") == 2:
            raise dragoman.errors.InvalidInput(f"not {call.inputs}"[:80])
        text = repr([(n, t.datatype, t.data.tolist(), dict(t.parameters)) for n, t in call.inputs.items()])
        outputs = {**call.inputs, "text": Tensor.of([text, repr((call.outputs, call.parameters))], parameters={"q": 1})}
        if call.outputs:
            outputs = {name: outputs[name] for name in call.outputs if name in outputs}
        return Inference(outputs, {"length": len(text)}, {"x-length": str(len(text))})


class DescribingInline(Describing):
    placement = "inline"


class Cubic(dragoman.Model):
    """Vectors of UM-Bridge; `config` is a factor."""

    placement = "thread"
    inputs = (TensorSpec("x", FP64, (2,)),)
    outputs = (TensorSpec("y", FP64, (2,)),)

    def infer(self, call: Infer) -> Any:
        return {"y": call.config.get("a", 1) * call.inputs["x"].data ** 3}

    def gradient(self, call: Gradient) -> Any:
        return call.sens.data * call.inputs["x"].data

    def apply_jacobian(self, call: ApplyJacobian) -> Any:
        return call.vec.data * call.inputs["x"].data

    def apply_hessian(self, call: ApplyHessian) -> Any:
        return call.vec.data * call.inputs["x"].data - call.sens.data


MODELS = (Describing, DescribingInline, Identity, Phrase, Picture, Cubic)
Message = tuple[str, Any, dict[str, str]]


def infer_messages() -> list[Message]:
    """Return inference requests that differ in one place each."""
    plain: dict[str, Any] = {"name": "x", "datatype": "FP32", "shape": [2], "data": [1.0, 2.0]}
    tensors = [
        plain,
        {**plain, "name": "y"},
        {**plain, "datatype": "FP64"},
        {**plain, "datatype": "INT64", "data": [1, 2]},
        {**plain, "datatype": "BOOL", "data": [True, True]},
        {**plain, "datatype": "BYTES", "data": ["1.0", "2.0"]},
        {**plain, "datatype": "BYTES", "data": ["é\u0000", ""]},
        {**plain, "shape": [1, 2]},
        {**plain, "shape": [2, 1]},
        {**plain, "data": [0.0, 0.0]},
        {**plain, "data": [-0.0, 0.0]},
        {**plain, "parameters": {"q": 1}},
        {**plain, "shape": [600], "data": list(range(600))},
    ]
    bodies: list[dict[str, Any]] = [{"inputs": [tensor]} for tensor in tensors]
    bodies += [{"inputs": [plain, {**plain, "name": "y"}]}, {"inputs": [{**plain, "name": "y"}, plain]}]
    bodies += [{"inputs": [plain], "parameters": {"p": p}} for p in (1, 1.0, True, "1", 2)]
    bodies += [{"inputs": [plain], "outputs": [{"name": name}]} for name in ("x", "text", "unknown")]
    bodies += [{"inputs": [plain], "parameters": {"binary_data_output": True}}]
    bodies += [{"inputs": [plain], "outputs": [{"name": "x", "parameters": {"binary_data": True}}, {"name": "text"}]}]
    bodies += [{"inputs": [plain], "id": "one"}, {"inputs": [plain], "id": "two"}]
    messages: list[Message] = [
        (f"/v2/models/{model}/infer", body, {}) for model in ("Describing", "DescribingInline") for body in bodies
    ]
    binary = json.dumps(
        {"inputs": [{"name": "x", "datatype": "FP32", "shape": [2], "parameters": {"binary_data_size": 8}}]}
    )
    for data in (struct.pack("<2f", 1, 2), struct.pack("<2f", 1, 3)):
        headers = {"inference-header-content-length": str(len(binary))}
        messages += [
            (f"/v2/models/{model}/infer", binary.encode() + data, headers) for model in ("Describing", "Identity")
        ]
        messages += [
            (f"/v2/models/{m}/infer", data, {"inference-header-content-length": "0"}) for m in ("Picture", "Phrase")
        ]
    return messages


def umbridge_messages() -> list[Message]:
    points, vectors = ([1.0, 2.0], [2.0, 1.0]), ([1.0, 0.5], [0.5, 1.0])
    configs: tuple[dict[str, Any], ...] = ({}, {"a": 2}, {"a": 2.0})
    bodies = [
        {
            "name": "Cubic",
            "input": [x],
            "config": c,
            "outWrt": 0,
            "inWrt": 0,
            "inWrt1": 0,
            "inWrt2": 0,
            "sens": v,
            "vec": w,
        }
        for x, v, w, c in itertools.product(points, vectors, vectors, configs)
    ]
    verbs = ("Evaluate", "Gradient", "ApplyJacobian", "ApplyHessian")
    return [(f"/{verb}", body, {}) for verb in verbs for body in bodies]


async def send(server: RestServer, message: Message) -> tuple[int, dict[str, str], bytes]:
    path, body, headers = message
    response: RawResponse = await server.request("POST", path, body, headers)
    return (
        response.status,
        {k: v for k, v in response.headers.items() if k not in ("x-request-id", "date")},
        response.body,
    )


async def metric(server: RestServer, name: str) -> float:
    lines = (await server.request("GET", "/metrics")).body.decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


@pytest.mark.parametrize("messages", [infer_messages(), umbridge_messages()], ids=["Open Inference", "UM-Bridge"])
@pytest.mark.parametrize("seed", [1, 2])
async def test_responses_are_those_of_a_server_without_a_cache(messages: list[Message], seed: int) -> None:
    choose = random.Random(seed)
    async with (
        serving(*MODELS) as plain,
        serving(*MODELS, response_cache_bytes=SIZE, max_batch_size=4, metrics_as="triton") as cached,
    ):
        expected: dict[int, Any] = {}
        for _ in range(ROUNDS):
            chosen = [choose.randrange(len(messages)) for _ in range(CONCURRENT)]
            chosen[1] = chosen[0]  # at the same time
            for n in chosen:
                if n not in expected:
                    expected[n] = await send(plain, messages[n])
            for n, found in zip(
                chosen, await asyncio.gather(*(send(cached, messages[n]) for n in chosen)), strict=True
            ):
                assert found == expected[n], messages[n]
        assert {status for status, _, _ in expected.values()} >= {200}
        for name in ("hits_total", "misses_total", "evictions_total", "bytes"):
            assert await metric(cached, f"dragoman_response_cache_{name}") > 0, name
        if messages[0][0].startswith("/v2"):
            hits = await metric(cached, "nv_cache_num_hits_per_model")
            assert hits == await metric(cached, "dragoman_response_cache_hits_total")
            executions = await metric(cached, "nv_inference_exec_count")
            # Calls for an output that a batch does not have fail after its execution.
            assert 0 < executions <= await metric(cached, "nv_cache_num_misses_per_model")
            statistics = json.loads((await cached.request("GET", "/v2/models/stats")).body)["model_stats"]
            assert sum(each["inference_stats"]["cache_hit"]["count"] for each in statistics) == hits
            misses = sum(each["inference_stats"]["cache_miss"]["count"] for each in statistics)
            assert sum(each["execution_count"] for each in statistics) == executions <= misses
        assert await metric(plain, "dragoman_response_cache") == 0
