"""What a model writes later changes no answer that it has given."""

import asyncio

import numpy as np
import pytest
from workers_harness import PLACES, ask, first, pool_of

from dragoman.core.calls import Infer, Inference
from dragoman.core.tensor import Tensor
from dragoman.system.coroutines import complete
from dragoman.workers.results import copy_outputs

HOWS = ("array", "view", "tensor", "inference", "bytes")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("model", ["Reuses", "AsyncReuses"])
@pytest.mark.parametrize("how", HOWS)
async def test_answers_of_a_model_that_uses_its_array_again(place: str, model: str, how: str) -> None:
    async with pool_of(place, model, parameters={"how": how}) as pool:
        answers = await asyncio.gather(*(complete(pool.call(ask(n))) for n in range(100)))
        assert [first(answer) for answer in answers] == list(range(100))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("how", HOWS)
async def test_pieces_of_a_model_that_uses_its_array_again(place: str, how: str) -> None:
    async with pool_of(place, "ReusesInPieces", parameters={"how": how}) as pool:
        pieces = [piece async for piece in pool.stream(ask(40))]
        assert [first(piece) for piece in pieces] == list(range(40))


def call_with(array: np.ndarray) -> Infer:
    return Infer({"x": Tensor.of(array)})


NOTHING = call_with(np.zeros(1))


def test_large_arrays_in_immutable_memory_are_not_copied() -> None:
    answer = Inference({"y": Tensor.of(np.frombuffer(bytes(1 << 16))[1:])})
    assert copy_outputs(answer, NOTHING) is answer


def test_inputs_are_not_copied() -> None:
    array = np.arange(6000.0)
    answer = Inference({"x": Tensor.of(array), "part": Tensor.of(array[2:])})
    assert copy_outputs(answer, call_with(array)) is answer
    call = call_with(np.arange(6.0))
    answer = Inference({"x": call.inputs["x"]})
    assert copy_outputs(answer, call) is answer


@pytest.mark.parametrize(
    "array", [np.arange(6.0), np.arange(9000.0), np.arange(12.0)[::2], np.frombuffer(bytearray(16))]
)
def test_arrays_that_somebody_holds_are_copied(array: np.ndarray) -> None:
    answer = copy_outputs(Inference({"y": Tensor.of(array[1:])}), NOTHING)
    assert not np.shares_memory(answer.outputs["y"].data, array)
    held = Tensor.of(array)
    assert not np.shares_memory(copy_outputs(Inference({"y": held}), NOTHING).outputs["y"].data, array)
