"""What a model writes later changes no answer that it has given."""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from workers_harness import PLACES, ask, first, pool_of

import dragoman
from dragoman.core.calls import Infer, Inference, Request
from dragoman.core.datatypes import BYTES, FP64
from dragoman.core.tensor import Tensor, object_array
from dragoman.workers.owned import owned

HOWS = ("array", "view", "tensor", "inference", "bytes")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("model", ["Reuses", "AsyncReuses"])
@pytest.mark.parametrize("how", HOWS)
async def test_answers_of_a_model_that_uses_its_array_again(place: str, model: str, how: str) -> None:
    async with pool_of(place, model, parameters={"how": how}) as pool:
        answers = await asyncio.gather(*(pool.call(ask(n)) for n in range(100)))
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


def test_fresh_arrays_are_not_copied() -> None:
    def fresh() -> Inference:
        words = Tensor(object_array([b"a"], (1,)), BYTES)
        return Inference({"y": Tensor.of(np.ones(3)), "v": Tensor.of(np.arange(6.0).reshape(2, 3)), "s": words})

    answer = fresh()
    where = [id(t.data) for t in answer.outputs.values()]
    assert [id(t.data) for t in owned(answer, NOTHING).outputs.values()] == where


def test_inputs_are_not_copied() -> None:
    array = np.arange(6.0)
    answer = Inference({"x": Tensor.of(array), "part": Tensor.of(array[2:])})
    assert owned(answer, call_with(array)) is answer


@pytest.mark.parametrize("array", [np.arange(6.0), np.arange(12.0)[::2], np.frombuffer(bytearray(16))])
def test_arrays_that_somebody_holds_are_copied(array: np.ndarray) -> None:
    answer = owned(Inference({"y": Tensor.of(array[1:])}), NOTHING)
    assert not np.shares_memory(answer.outputs["y"].data, array)
    held = Tensor.of(array)
    assert not np.shares_memory(owned(Inference({"y": held}), NOTHING).outputs["y"].data, array)


@pytest.mark.parametrize("how", HOWS)
async def test_answers_that_are_there_at_once_are_their_readers_own_too(how: str) -> None:
    async with pool_of("inline", "Reuses", parameters={"how": how}) as pool:
        step = pool.now[Infer]
        answers = [step(ask(n)) for n in range(100)]
        assert [first(answer) for answer in answers] == list(range(100))


@pytest.mark.parametrize("form", [lambda y: y, lambda y: {"y": y}, Tensor.of, lambda y: Inference({"y": Tensor.of(y)})])
async def test_what_a_model_has_just_made_is_not_copied(form: Callable[[np.ndarray], Any]) -> None:
    made: list[int] = []

    class Fresh(dragoman.Model):
        placement = "inline"

        def signature(self) -> dragoman.Signature:
            return dragoman.Signature(outputs=(dragoman.TensorSpec("y", FP64, (3,)),))

        def infer(self, call: Infer) -> Any:
            array = np.full(3, 7.0)
            made.append(array.ctypes.data)
            return form(array)

    async with dragoman.open_engine(Fresh) as engine:
        response = engine.now(Request(Infer({}), "Fresh"))
        assert response is not None
        assert response.answer.outputs["y"].data.ctypes.data == made[-1]
