"""Derivatives at the edges: answers of a wrong size, functions with sizes from a config, ways that are combined."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import dragoman
from dragoman.core.errors import DragomanError, InvalidOutput, ModelFailed
from dragoman.core.vectors import VectorFunction
from dragoman.derivatives.analytic import NotAnalytic, watched
from dragoman.derivatives.authoring import prepared
from dragoman.derivatives.of_config import OfConfig

mark: Any = dragoman.vector_function
X = np.array([0.3, 0.7])
ONE = np.ones(1)


def made(function: Callable[..., Any], **options: Any) -> VectorFunction:
    return prepared(mark(**options)(function))


def message(act: Callable[[], Any], error: type[DragomanError]) -> str:
    with pytest.raises(error) as caught:
        act()
    return caught.value.message


# --- the complex step ----------------------------------------------------------------------------------------


def test_a_function_may_write_into_its_own_arrays() -> None:
    def f(x: Any) -> Any:
        y = x.copy()
        np.multiply(y, x, out=y)
        y += 3 * x.astype(complex) if np.iscomplexobj(x) else 3 * x
        return y

    function = made(f, inputs=[2], derivatives="complex step")
    np.testing.assert_allclose(function.apply_jacobian(0, 0, [X], X, {}), (2 * X + 3) * X, rtol=1e-12)


def test_operations_that_are_not_analytic_are_named() -> None:
    z = watched(np.array([1 + 1j, 2 - 1j]))
    refused: tuple[tuple[Callable[[], Any], str], ...] = (
        (lambda: np.cbrt(z), "it uses cbrt, which takes no complex numbers: "),
        (lambda: z.astype(np.float32), "it uses astype(float32)"),
        (lambda: z.real, "it uses real"),
    )
    for act, told in refused:
        with pytest.raises(NotAnalytic) as caught:
            act()
        assert str(caught.value).startswith(told)
    again = z.astype(np.complex64, copy=False)
    assert (type(again), again.dtype) == (type(z), np.dtype(np.complex64))


# --- answers that do not fit ---------------------------------------------------------------------------------


def test_a_gradient_may_be_the_jacobian_of_one_output() -> None:
    written = made(lambda x: x @ x, inputs=[2], jacobian=lambda x: 2 * x, derivatives=None)
    np.testing.assert_allclose(written.gradient(0, 0, [X], np.array([3.0]), {}), 6 * X)
    np.testing.assert_allclose(written.apply_jacobian(0, 0, [X], X, {}), [2 * X @ X])


def test_a_complex_hessian_is_no_answer() -> None:
    function = made(lambda x: x @ x, inputs=[2], hessian=lambda x: 2j * np.eye(2), derivatives=None)
    told = message(lambda: function.apply_hessian(0, 0, 0, [X], ONE, X, {}), InvalidOutput)
    assert told == "hessian: expected real numbers, got ndarray of complex128"


def test_outputs_that_change_their_size_are_named() -> None:
    sizes = [2]

    def f(x: Any) -> Any:
        return np.ones(sizes[0]) * x.sum()

    function = made(f, inputs=[2], derivatives="complex step")
    sizes[0] = 3
    told = message(lambda: function.apply_jacobian(0, 0, [X], X, {}), InvalidOutput)
    assert told == "output 0: expected 2 numbers, got 3"


def test_a_function_that_is_not_vectorised_is_named() -> None:
    def f(x: Any) -> Any:
        return x**2 + x.sum()

    told = message(partial(made, f, inputs=[3], vectorised=True, derivatives=None), ModelFailed)
    start = "'f' is said to be vectorised; expected the same numbers as for each alone for three rows of points in "
    assert told.startswith(start + "output 0, got a difference of ")


# --- sizes and configs ---------------------------------------------------------------------------------------


def test_sizes_may_follow_from_a_config_where_nothing_is_evaluated() -> None:
    def sizes(config: Any) -> Sequence[int]:
        return [config.get("n", 2)]

    function = made(
        lambda x, config: x[0] * np.ones(config.get("n", 2)),
        inputs=[1],
        outputs=sizes,
        evaluate_at_load=False,
        derivatives="finite differences",
    )
    assert (tuple(function.output_sizes({})), tuple(function.output_sizes({"n": 5}))) == ((2,), (5,))
    np.testing.assert_allclose(function.apply_jacobian(0, 0, [ONE], ONE, {"n": 3}), np.ones(3), rtol=1e-8)


def test_the_last_32_configs_are_kept() -> None:
    made_of: list[int] = []

    def make(config: Any) -> int:
        made_of.append(config["n"])
        return int(config["n"])

    of_config = OfConfig(make)
    assert [of_config({"n": n}) for n in (*range(32), *range(32))] == [*range(32), *range(32)]
    assert made_of == [*range(32)]
    of_config({"n": 32})
    of_config({"n": 1})
    assert made_of == [*range(33)]
    of_config({"n": 0})
    assert made_of == [*range(33), 0]


def test_a_function_of_rows_stays_one_with_derivatives_added() -> None:
    def f(x: Any) -> Any:
        return x**2

    for derivatives in ("complex step", "finite differences", None):
        assert made(f, inputs=[2], vectorised=True, derivatives=derivatives).vectorised
        assert not made(f, inputs=[2], derivatives=derivatives).vectorised


# --- frameworks and gradients of the author ------------------------------------------------------------------


def test_lists_of_numbers_are_outputs_in_torch() -> None:
    def f(x: Any) -> Any:
        return [x[0] * x[1], 2.0], [1.0, 4.0], [x.sum()]

    function = made(f, inputs=[2], outputs=[2, 2, 1], derivatives="torch")
    assert [np.asarray(each).tolist() for each in function.evaluate([X], {})] == [[0.21, 2.0], [1.0, 4.0], [1.0]]
    np.testing.assert_allclose(function.gradient(0, 0, [X], np.array([2.0, 3.0]), {}), 2 * X[::-1])
    np.testing.assert_allclose(function.gradient(2, 0, [X], ONE, {}), [1, 1])
    assert np.asarray(function.gradient(1, 0, [X], np.ones(2), {})).tolist() == [0, 0]


@pytest.mark.parametrize(("derivatives", "lib"), [("torch", torch), ("jax", jnp)])
def test_written_derivatives_get_arrays_of_the_framework(derivatives: str, lib: Any) -> None:
    kind = torch.Tensor if lib is torch else np.ndarray | jnp.ndarray

    class Own(VectorFunction):
        def input_sizes(self, config: Any) -> Sequence[int]:
            return (2,)

        def output_sizes(self, config: Any) -> Sequence[int]:
            return (1,)

        def evaluate(self, inputs: Any, config: Any) -> Any:
            return (inputs[0] ** 3).sum()

        def apply_jacobian(self, output: int, input: int, inputs: Any, vec: Any, config: Any) -> Any:  # noqa: A002
            assert isinstance(inputs[0], kind)
            assert isinstance(vec, kind)
            return (3 * inputs[0] ** 2 * vec).sum()

        def apply_hessian(
            self, output: int, input1: int, input2: int, inputs: Any, sens: Any, vec: Any, config: Any
        ) -> Any:
            assert all(isinstance(each, kind) for each in (inputs[0], sens, vec))
            return 6 * inputs[0] * vec * sens[0]

    Own.derivatives = derivatives
    function = prepared(Own())
    vec, sens = np.array([2.0, -1.0]), np.array([1.5])
    np.testing.assert_allclose(np.asarray(function.apply_jacobian(0, 0, [X], vec, {})).reshape(-1), [3 * X**2 @ vec])
    np.testing.assert_allclose(function.apply_hessian(0, 0, 0, [X], sens, vec, {}), 6 * X * vec * 1.5)


def test_differences_of_a_written_gradient_are_the_hessian() -> None:
    def gradient(x: Any, y: Any, output: int, input: int, sens: Any) -> Any:  # noqa: A002
        return sens[0] * (2 * x * y[0] if input == 0 else np.array([x @ x]))

    function = made(
        lambda x, y: x @ x * y, inputs=[2, 1], gradient=gradient, derivatives="finite differences", outputs=[1]
    )
    y, vec = np.array([4.0]), np.array([1.0, 2.0])
    weight = np.array([0.5])
    np.testing.assert_allclose(function.apply_hessian(0, 0, 0, [X, y], weight, vec, {}), vec * 4, rtol=1e-7)
    np.testing.assert_allclose(function.apply_hessian(0, 0, 1, [X, y], weight, np.array([3.0]), {}), 3 * X, rtol=1e-7)
    np.testing.assert_allclose(function.apply_hessian(0, 1, 0, [X, y], weight, vec, {}), [X @ vec], rtol=1e-7)
