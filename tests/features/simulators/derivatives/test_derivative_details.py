"""Error messages for wrong options, and marked functions used without a server."""

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

import numpy as np
import pytest

import dragoman
from dragoman.core.errors import InvalidOutput, ModelFailed
from dragoman.core.vectors import Config, Vector, VectorFunction, Vectors, find_vector_function
from dragoman_simulators.derivatives.decorator import build_vector_function
from features.simulators.derivatives.derivative_models import ONE, X, build, error_message, vector_function

UNKNOWN = (
    "function 'f': the sizes of its input vectors are unknown: expected inputs=[...], a function of the config, "
    "a point at=[...], or annotations with Shape(n); got none for "
)


def test_unknown_sizes_are_an_error() -> None:
    def plain(x, y):  # type: ignore[no-untyped-def]
        return x

    def partly(x: Annotated[Vector, dragoman.Shape(2)], y: Vector) -> Any:
        return x

    def nowhere(x: "Nowhere") -> Any:  # type: ignore[name-defined]  # noqa: F821
        return x

    def negative(x: Annotated[Vector, dragoman.Shape(-1)]) -> Any:
        return x

    for function, missing in ((plain, "['x', 'y']"), (partly, "['y']"), (nowhere, "['x']"), (negative, "['x']")):
        function.__name__ = "f"
        assert error_message(partial(build, function), ModelFailed) == UNKNOWN + missing


@pytest.mark.parametrize("sizes", [[-1], [1.5], ["2"]])
def test_invalid_sizes_are_an_error(sizes: list[Any]) -> None:
    def f(x: Any) -> Any:
        return x

    assert (
        error_message(lambda: build(f, inputs=sizes), ModelFailed)
        == f"function 'f': inputs: expected sizes, got {sizes}"
    )


def test_outputs_must_be_vectors() -> None:
    def f(x: Any) -> Any:
        return (np.ones((2, 2)), np.ones(3))

    message = error_message(lambda: build(f, inputs=[1], derivatives=None).output_sizes({}), InvalidOutput)
    assert message == "expected output vectors, got shapes [[2, 2], [3]]"


def test_a_hessian_of_a_wrong_shape_is_an_error() -> None:
    def hessian(x: Any, output: int, input1: int, input2: int) -> Any:
        return np.ones((2, 3))

    function = build(lambda x: x @ x, inputs=[2], hessian=hessian, derivatives=None)
    message = error_message(lambda: function.apply_hessian(0, 0, 0, [X], ONE, X, {}), InvalidOutput)
    assert message == "hessian: expected shape [1, 2, 2], got [1, 2, 3]"


def test_a_hessian_is_applied_for_every_output() -> None:
    curvatures = np.array([[[2.0, 1.0], [1.0, 4.0]], [[0.0, 3.0], [3.0, 0.0]]])

    def hessian(x: Any, output: int, input1: int, input2: int) -> Any:
        return curvatures

    def f(x: Any) -> Any:
        return np.array([x[0] ** 2 + x[0] * x[1] + 2 * x[1] ** 2, 3 * x[0] * x[1]])

    function = build(f, inputs=[2], hessian=hessian, derivatives=None)
    sens, vec = np.array([1.0, 10.0]), np.array([1.0, -2.0])
    result = np.asarray(function.apply_hessian(0, 0, 0, [X], sens, vec, {}))
    np.testing.assert_allclose(result, np.einsum("o,oij,j->i", sens, curvatures, vec), rtol=1e-12)


def cube(x: Any) -> Any:
    return x @ x * x


def test_a_marked_function_can_be_used_without_a_server() -> None:
    marked = vector_function(inputs={"x": 2}, outputs={"y": 2})(cube)
    function = find_vector_function(marked)
    assert function is not None
    assert (function.input_names, function.output_names, function.vectorised) == (("x",), ("y",), False)
    assert (list(function.input_sizes({})), list(function.output_sizes({}))) == ([2], [2])
    np.testing.assert_allclose(np.asarray(function.evaluate([X], {})).reshape(-1), cube(X), rtol=1e-14)
    jacobian = X @ X * np.eye(2) + 2 * np.outer(X, X)
    sens, vec = np.array([1.0, -2.0]), np.array([0.5, 3.0])
    np.testing.assert_allclose(function.gradient(0, 0, [X], sens, {}), jacobian.T @ sens, rtol=1e-10)
    np.testing.assert_allclose(function.apply_jacobian(0, 0, [X], vec, {}), jacobian @ vec, rtol=1e-10)
    hessian = 2 * (np.outer(sens, X) + np.outer(X, sens) + sens @ X * np.eye(2))
    np.testing.assert_allclose(function.apply_hessian(0, 0, 0, [X], sens, vec, {}), hessian @ vec, rtol=1e-6)
    assert function.sources()["evaluate"] == "author"
    assert set(function.sources()) == {"evaluate", "gradient", "apply_jacobian", "apply_hessian"}
    assert isinstance(function.notes(), dict)
    function.close()
    find_vector_function(vector_function(inputs=[2])(cube)).close()  # type: ignore[union-attr]


class CompleteClass(VectorFunction):
    """A class that implements every method itself; `closed` counts calls of `close`."""

    derivatives = "complex step"
    closed = 0

    def input_sizes(self, config: Config) -> Sequence[int]:
        return (2,)

    def output_sizes(self, config: Config) -> Sequence[int]:
        return (1,)

    def evaluate(self, inputs: Vectors, config: Config) -> Any:
        return inputs[0] @ inputs[0]

    def gradient(self, output: int, input: int, inputs: Vectors, sens: Vector, config: Config) -> Any:  # noqa: A002
        return 2 * inputs[0] * sens[0]

    def apply_jacobian(self, output: int, input: int, inputs: Vectors, vec: Vector, config: Config) -> Any:  # noqa: A002
        return np.array([2 * inputs[0] @ vec])

    def apply_hessian(
        self, output: int, input1: int, input2: int, inputs: Vectors, sens: Vector, vec: Vector, config: Config
    ) -> Any:
        return 2 * vec * sens[0] + config.get("shift", 0)

    def notes(self) -> dict[str, Any]:
        return {"own": "note"}

    def close(self) -> None:
        type(self).closed += 1


def test_derivatives_of_a_class_are_used() -> None:
    function = build_vector_function(CompleteClass())
    assert np.asarray(function.evaluate([X], {})).reshape(-1).tolist() == [X @ X]
    np.testing.assert_allclose(function.gradient(0, 0, [X], ONE, {}), 2 * X)
    np.testing.assert_allclose(function.apply_jacobian(0, 0, [X], X, {}), [2 * X @ X])
    np.testing.assert_allclose(function.apply_hessian(0, 0, 0, [X], ONE, X, {"shift": 5}), 2 * X + 5)
    assert set(function.sources().values()) == {"author"}
    assert function.notes().items() >= {"own": "note"}.items()
    function.close()
    assert CompleteClass.closed == 1


def test_vectorised_functions_return_all_outputs_for_rows() -> None:
    def fails(x: Any) -> Any:
        if x.ndim > 1:
            raise ValueError("one point at a time")
        return x

    def loses(x: Any) -> Any:
        return x[..., 0] if x.ndim > 1 else (x[0], x[1])

    for function, message in (
        (fails, "expected a result for three rows of points in output 0, got ValueError: one point at a time"),
        (loses, "expected 2 outputs for three rows of points in output 0, got 1"),
    ):
        function.__name__ = "f"
        actual = error_message(partial(build, function, inputs=[2], vectorised=True, derivatives=None), ModelFailed)
        assert actual == f"'f' is declared vectorised: {message}"
