"""Output arrays that a model reuses do not change earlier responses."""

import asyncio

import numpy as np
import pytest

from dragoman.core.calls import Infer, Inference
from dragoman.core.tensor import Tensor
from dragoman.workers.results import copy_outputs
from workers.workers_harness import PLACEMENTS, call, first_value, make_request, pool_of

OUTPUT_KINDS = ("array", "view", "tensor", "inference", "bytes")


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("model", ["Reuses", "AsyncReuses"])
async def test_responses_of_a_model_that_reuses_its_array(placement: str, model: str) -> None:
    async with pool_of(placement, model) as pool:
        for how in OUTPUT_KINDS:
            responses = await asyncio.gather(*(call(pool, n, how=how) for n in range(100)))
            assert [first_value(response) for response in responses] == list(range(100)), how


@pytest.mark.parametrize("placement", PLACEMENTS)
async def test_chunks_of_a_model_that_reuses_its_array(placement: str) -> None:
    async with pool_of(placement, "ReusesInChunks") as pool:
        for how in OUTPUT_KINDS:
            chunks = [chunk async for chunk in pool.stream(make_request(40, how=how))]
            assert [first_value(chunk) for chunk in chunks] == list(range(40)), how


def call_with(array: np.ndarray) -> Infer:
    return Infer({"x": Tensor.of(array)})


NO_INPUTS = call_with(np.zeros(1))


def test_large_arrays_in_immutable_memory_are_not_copied() -> None:
    response = Inference({"y": Tensor.of(np.frombuffer(bytes(1 << 16))[1:])})
    assert copy_outputs(response, NO_INPUTS) is response


def test_inputs_are_not_copied() -> None:
    array = np.arange(6000.0)
    response = Inference({"x": Tensor.of(array), "part": Tensor.of(array[2:])})
    assert copy_outputs(response, call_with(array)) is response
    call = call_with(np.arange(6.0))
    response = Inference({"x": call.inputs["x"]})
    assert copy_outputs(response, call) is response


@pytest.mark.parametrize(
    "array", [np.arange(6.0), np.arange(9000.0), np.arange(12.0)[::2], np.frombuffer(bytearray(16))]
)
def test_arrays_that_the_model_may_hold_are_copied(array: np.ndarray) -> None:
    response = copy_outputs(Inference({"y": Tensor.of(array[1:])}), NO_INPUTS)
    assert not np.shares_memory(response.outputs["y"].data, array)
    tensor = Tensor.of(array)
    assert not np.shares_memory(copy_outputs(Inference({"y": tensor}), NO_INPUTS).outputs["y"].data, array)
