"""Functions that write into their arguments, or return the same array again, have the right derivatives."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import dragoman
from dragoman.core.tensor import Tensor
from dragoman.core.vectors import VectorFunction, as_vector
from dragoman_simulators.derivatives.decorator import build_vector_function
from dragoman_simulators.graphs.graph import Graph
from features.simulators.derivatives.derivative_models import ONE, build, vector_function

X = np.array([0.7, 1.2])
GRADIENT, SECOND = [67.2, 19.6], [96.0, 56.0]


def to_units(x: Any) -> Any:
    """Return 40 x0² x1 after a change of units in place."""
    x *= np.array([2.0, 10.0])
    return np.array([x[0] ** 2 * x[1]])


def to_units_in_torch(x: Any) -> Any:
    x *= torch.tensor([2.0, 10.0], dtype=torch.float64)
    return x[:1] ** 2 * x[1:]


def linear_in_place(x: Any) -> Any:
    x[1] = x[1] * 3
    return np.array([40 / 3 * x[0] * x[1]])


BUFFER = np.zeros(1)


def into_a_buffer(x: Any) -> Any:
    BUFFER[0] = 40 * x[0] ** 2 * x[1]
    return BUFFER


class Units(VectorFunction):
    derivatives: str | None = "finite differences"

    def input_sizes(self, config: Any) -> list[int]:
        return [2]

    def output_sizes(self, config: Any) -> list[int]:
        return [1]

    def evaluate(self, inputs: Any, config: Any) -> Any:
        return to_units(inputs[0])


class OwnUnits(Units):
    """The user's own gradient writes into its arguments."""

    derivatives = None

    def gradient(self, output: int, input: int, inputs: Any, sens: Any, config: Any) -> Any:  # noqa: A002
        x = inputs[0]
        x *= np.array([2.0, 10.0])
        sens *= np.array([2.0])
        return sens * np.array([2 * x[0] * x[1], 5 * x[0] ** 2]) if len(sens) else x


def in_a_graph(function: Any) -> VectorFunction:
    graph = Graph("units")
    graph.output(graph.add(function, "f")(graph.input("x", 2)))
    return graph.build()


@pytest.mark.parametrize(
    "make",
    [
        lambda: build(to_units, inputs=[2]),
        lambda: build(to_units, inputs=[2], derivatives="complex step"),
        lambda: build(to_units, inputs=[2], derivatives="finite differences"),
        lambda: build(into_a_buffer, inputs=[2], derivatives="finite differences"),
        lambda: build(to_units_in_torch, inputs=[2], derivatives="torch"),
        lambda: build_vector_function(Units()),
        lambda: in_a_graph(vector_function(inputs=[2])(to_units)),
        lambda: in_a_graph(Units()),
    ],
)
def test_functions_that_write_into_their_arguments(make: Callable[[], VectorFunction]) -> None:
    function, point, vec = make(), X.copy(), np.eye(2)[0]
    value = function.evaluate([point], {})
    assert np.asarray(value).reshape(-1) == pytest.approx([40 * 0.7**2 * 1.2])
    assert as_vector(function.gradient(0, 0, [point], ONE, {}), 2, "") == pytest.approx(GRADIENT, rel=1e-6)
    assert as_vector(function.apply_jacobian(0, 0, [point], vec, {}), 1, "") == pytest.approx(GRADIENT[:1], rel=1e-6)
    assert as_vector(function.apply_hessian(0, 0, 0, [point], ONE, vec, {}), 2, "") == pytest.approx(SECOND, rel=1e-5)
    assert point.tolist() == X.tolist()
    assert vec.tolist() == [1, 0]


def test_written_derivatives_may_write_into_their_arguments() -> None:
    function, point, sens = build_vector_function(OwnUnits()), X.copy(), np.ones(1)
    assert function.gradient(0, 0, [point], sens, {}) == pytest.approx([2 * 2 * 1.4 * 12, 2 * 5 * 1.4**2])
    assert (point.tolist(), sens.tolist()) == (X.tolist(), [1])


async def test_both_protocols_treat_such_a_function_alike() -> None:
    """Tensors of a request are read-only; the function gets a copy that it may change."""
    from dragoman.core.calls import Gradient, Infer, Request

    marked = vector_function(inputs={"x": 2}, outputs={"y": 1}, placement="thread")(linear_in_place)
    async with dragoman.open_engine(marked) as engine:
        point = Tensor(np.array([1.0, 2.0]), dragoman.FP64)
        call: Any = Infer({"x": point})
        outputs = (await engine.call(Request(call, "linear_in_place"))).answer.outputs
        assert outputs["y"].data == pytest.approx([80])
        call = Gradient(positional=(point,), sens=Tensor(np.ones(1), dragoman.FP64))
        gradient = (await engine.call(Request(call, "linear_in_place"))).answer
        assert gradient.data == pytest.approx([80, 40])
