"""Derivatives of functions whose sizes and values depend on the config, by every method."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from dragoman.core.vectors import Config, Vector, VectorFunction, Vectors, as_vector, as_vectors, find_vector_function
from dragoman_simulators.derivatives.decorator import build_vector_function
from features.simulators.derivatives.derivative_models import build, vector_function

# Relative tolerances of first and of second derivatives: analytic methods are exact to rounding, 8 evaluations of a
# mixed difference are not.
EXACT, DIFFERENCES = (1e-12, 1e-9), (1e-9, 1e-5)


def input_sizes(config: Config) -> list[int]:
    return [config.get("n", 2), 1]


def model(x: Any, z: Any, config: Config) -> tuple[Any, Any]:
    """Map two vectors of n and 1 numbers to two of n and 1; inputs may have a leading batch axis."""
    k = config.get("k", 1.0)
    return k * x**3 * z, k * (x * x).sum(-1, keepdims=True) + z**3


def jacobian(x: Any, z: Any, config: Config, output: int, input: int) -> Any:  # noqa: A002
    k = config.get("k", 1.0)
    match output, input:
        case 0, 0:
            return np.diag(3 * k * x**2 * z[0])
        case 0, 1:
            return (k * x**3).reshape(-1, 1)
        case 1, 0:
            return 2 * k * x
    return 3 * z**2


def hessian(x: Any, z: Any, config: Config, output: int, input1: int, input2: int) -> Any:
    """Return the second derivatives, of shape [output, input1, input2]."""
    k, n = config.get("k", 1.0), len(x)
    sizes = (n, 1)
    derivatives = np.zeros((sizes[output], sizes[input1], sizes[input2]))
    match output, input1, input2:
        case 0, 0, 0:
            derivatives[range(n), range(n), range(n)] = 6 * k * x * z[0]
        case 0, 0, 1:
            derivatives[range(n), range(n), 0] = 3 * k * x**2
        case 0, 1, 0:
            derivatives[range(n), 0, range(n)] = 3 * k * x**2
        case 1, 0, 0:
            derivatives[0] = 2 * k * np.eye(n)
        case 1, 1, 1:
            derivatives[:] = 6 * z[0]
    return derivatives


def gradient(x: Any, z: Any, config: Config, output: int, input: int, sens: Any) -> Any:  # noqa: A002
    """Return Jᵀ sens without a matrix, so that a framework or the complex step can differentiate it."""
    k = config.get("k", 1.0)
    match output, input:
        case 0, 0:
            return 3 * k * x**2 * z * sens
        case 0, 1:
            return (k * x**3 * sens).sum().reshape(1)
        case 1, 0:
            return 2 * k * x * sens
    return 3 * z**2 * sens


def apply_jacobian(x: Any, z: Any, config: Config, output: int, input: int, vec: Any) -> Any:  # noqa: A002
    rows = len(x) if output == 0 else 1
    return np.asarray(jacobian(x, z, config, output, input)).reshape(rows, -1) @ vec


class ModelClass(VectorFunction):
    """The model as a class, with the complex step."""

    derivatives = "complex step"

    def input_sizes(self, config: Config) -> Sequence[int]:
        return input_sizes(config)

    def output_sizes(self, config: Config) -> Sequence[int]:
        return input_sizes(config)

    def evaluate(self, inputs: Vectors, config: Config) -> Any:
        return model(inputs[0], inputs[1], config)


class ModelClassWithDerivatives(ModelClass):
    """The model as a class that implements its derivatives."""

    def gradient(self, output: int, input: int, inputs: Vectors, sens: Vector, config: Config) -> Any:  # noqa: A002
        return gradient(inputs[0], inputs[1], config, output, input, sens)

    def apply_jacobian(self, output: int, input: int, inputs: Vectors, vec: Vector, config: Config) -> Any:  # noqa: A002
        return apply_jacobian(inputs[0], inputs[1], config, output, input, vec)

    def apply_hessian(
        self, output: int, input1: int, input2: int, inputs: Vectors, sens: Vector, vec: Vector, config: Config
    ) -> Any:
        return np.einsum("oij,o,j->i", hessian(inputs[0], inputs[1], config, output, input1, input2), sens, vec)


def build_sized(**options: Any) -> VectorFunction:
    return build(model, inputs=input_sizes, outputs=input_sizes, **options)


def build_lazily() -> VectorFunction:
    """Return the function before it is loaded, as a graph or a server keeps it."""
    function = find_vector_function(vector_function(inputs=input_sizes, outputs=input_sizes)(model))
    assert function is not None
    return function


BUILDERS: dict[str, tuple[Callable[[], VectorFunction], tuple[float, float]]] = {
    "auto": (build_sized, EXACT),
    "lazy": (build_lazily, EXACT),
    "complex step": (partial(build_sized, derivatives="complex step"), (1e-12, 1e-7)),
    "complex step, rows": (partial(build_sized, derivatives="complex step", vectorised=True), (1e-12, 1e-7)),
    "complex step, not evaluated": (
        partial(build_sized, derivatives="complex step", evaluate_at_load=False),
        (1e-12, 1e-7),
    ),
    "finite differences": (partial(build_sized, derivatives="finite differences"), DIFFERENCES),
    "jax": (partial(build_sized, derivatives="jax"), EXACT),
    "torch": (partial(build_sized, derivatives="torch"), EXACT),
    "gradient": (partial(build_sized, gradient=gradient), EXACT),
    "gradient, jax": (partial(build_sized, gradient=gradient, derivatives="jax"), EXACT),
    "gradient, torch": (partial(build_sized, gradient=gradient, derivatives="torch"), EXACT),
    "gradient, differences": (partial(build_sized, gradient=gradient, derivatives="finite differences"), (1e-9, 1e-7)),
    "apply_jacobian": (partial(build_sized, apply_jacobian=apply_jacobian, hessian=hessian), EXACT),
    "jacobian": (partial(build_sized, jacobian=jacobian, hessian=hessian, derivatives=None), EXACT),
    "jacobian, torch": (partial(build_sized, jacobian=jacobian, derivatives="torch"), EXACT),
    "class": (lambda: build_vector_function(ModelClass()), (1e-12, 1e-7)),
    "class with derivatives": (lambda: build_vector_function(ModelClassWithDerivatives()), EXACT),
}


@pytest.mark.parametrize("config", [{"n": 3, "k": 2.5}, {"n": 1}, {}])
@pytest.mark.parametrize("name", BUILDERS)
def test_derivatives_follow_the_config(name: str, config: dict[str, Any]) -> None:
    builder, (first, second) = BUILDERS[name]
    function = builder()
    sizes = tuple(input_sizes(config))
    assert (tuple(function.input_sizes(config)), tuple(function.output_sizes(config))) == (sizes, sizes)
    x, z = np.array([0.7, -1.3, 2.0])[: sizes[0]], np.array([1.5])
    weights, directions = [np.array([2.0, -1.0, 0.5])[:size] for size in sizes], [np.cos(np.arange(n)) for n in sizes]
    for actual, expected in zip(as_vectors(function.evaluate([x, z], config), sizes), model(x, z, config), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-14)
    for output in (0, 1):
        sens = weights[output]
        for i in (0, 1):
            matrix = np.asarray(jacobian(x, z, config, output, i)).reshape(sizes[output], sizes[i])
            actual = as_vector(function.gradient(output, i, [x, z], sens, config), sizes[i], "")
            np.testing.assert_allclose(actual, matrix.T @ sens, rtol=first, atol=first)
            actual = as_vector(function.apply_jacobian(output, i, [x, z], directions[i], config), sizes[output], "")
            np.testing.assert_allclose(actual, matrix @ directions[i], rtol=first, atol=first)
            for j in (0, 1):
                expected = np.einsum("oij,o,j->i", hessian(x, z, config, output, i, j), sens, directions[j])
                actual = function.apply_hessian(output, i, j, [x, z], sens, directions[j], config)
                np.testing.assert_allclose(as_vector(actual, sizes[i], ""), expected, rtol=second, atol=second)


def test_a_linear_function_follows_the_config() -> None:
    def scale(x: Any, config: Config) -> Any:
        return config.get("k", 1.0) * x + 1

    function = build(scale, inputs=lambda c: [c.get("n", 2)], outputs=lambda c: [c.get("n", 2)], linear=True)
    config, x, vec = {"n": 3, "k": 2.0}, np.ones(3), np.array([1.0, 2.0, 3.0])
    assert as_vector(function.apply_jacobian(0, 0, [x], vec, config), 3, "").tolist() == [2, 4, 6]
    assert as_vector(function.gradient(0, 0, [x], vec, config), 3, "").tolist() == [2, 4, 6]
    assert as_vector(function.apply_hessian(0, 0, 0, [x], x, vec, config), 3, "").tolist() == [0, 0, 0]
    assert function.sources() == {
        "evaluate": "author",
        "gradient": "apply_jacobian (linear)",
        "apply_jacobian": "linear",
        "apply_hessian": "linear",
    }


@pytest.mark.parametrize("derivatives", ["complex step", "jax", "torch", None])
def test_rows_of_points_follow_the_config(derivatives: str | None) -> None:
    function = build_sized(derivatives=derivatives, vectorised=True)
    assert function.vectorised
    x, z, config = np.arange(6.0).reshape(2, 3), np.array([[2.0], [3.0]]), {"n": 3, "k": 2.0}
    for actual, expected in zip(function.evaluate([x, z], config), model(x, z, config), strict=True):
        np.testing.assert_allclose(np.asarray(actual), expected, rtol=1e-14)
