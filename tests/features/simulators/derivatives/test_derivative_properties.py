"""Properties of random functions: all methods agree, and derivatives are adjoint, linear and symmetric."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.core.vectors import Vector, VectorFunction, as_vector, as_vectors
from features.simulators.derivatives.derivative_models import build

EPS = float(np.finfo(np.float64).eps)
QUICK = settings(max_examples=10, deadline=None)
SLOW = settings(max_examples=2, deadline=None)  # each function is compiled

LIBRARIES: Mapping[str, tuple[ModuleType, Callable[[Any], Any]]] = {
    "complex step": (np, np.asarray),
    "finite differences": (np, np.asarray),
    "torch": (torch, torch.as_tensor),
    "jax": (jnp, jnp.asarray),
}


@dataclass(frozen=True)
class RandomFunction:
    """A random function: sizes, depth of its composition, degree of its polynomial, seed of its coefficients."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    depth: int
    degree: int
    seed: int

    def coefficients(self) -> Callable[..., Vector]:
        rng = np.random.default_rng(self.seed)
        return lambda *shape: rng.uniform(-1, 1, size=shape) / np.sqrt(shape[-1])

    def function(self, lib: Any, lift: Callable[[Any], Any]) -> Callable[..., Any]:
        """Return sin(A_k ... sin(A_1 z)) exp(a · z) plus a polynomial of z; z joins all inputs."""
        draw, width = self.coefficients(), sum(self.inputs)
        layers = [[draw(width, width) for _ in range(self.depth)] for _ in self.outputs]
        last = [(draw(size, width), draw(width), draw(size, width)) for size in self.outputs]

        def evaluate(*vectors: Any) -> Any:
            z = lib.concatenate(vectors) if lib is not torch else torch.cat(vectors)
            outputs = []
            for matrices, (out, tilt, power) in zip(layers, last, strict=True):
                at = z
                for matrix in matrices:
                    at = lib.sin(lift(matrix) @ at)
                outputs.append((lift(out) @ at) * lib.exp((lift(tilt) * z).sum()) + lift(power) @ z**self.degree)
            return tuple(outputs)

        return evaluate

    def build(self, method: str) -> VectorFunction:
        lib, lift = LIBRARIES[method]
        evaluate = self.function(lib, lift)
        options: dict[str, Any] = {"inputs": list(self.inputs), "outputs": list(self.outputs), "derivatives": method}
        return build(lambda *vectors: evaluate(*vectors), **options)

    def points(self) -> tuple[list[Vector], list[Vector], list[Vector], list[Vector]]:
        """Return a point, two directions in the inputs and one in the outputs."""
        rng = np.random.default_rng((self.seed, 1))
        inputs = [[rng.uniform(-1, 1, size=size) for size in self.inputs] for _ in range(3)]
        return inputs[0], inputs[1], inputs[2], [rng.uniform(-1, 1, size=size) for size in self.outputs]


sizes = st.lists(st.integers(1, 4), min_size=1, max_size=2).map(tuple)
random_functions = st.builds(
    RandomFunction,
    inputs=sizes,
    outputs=sizes,
    depth=st.integers(0, 2),
    degree=st.integers(1, 4),
    seed=st.integers(0, 2**32 - 1),
)


def first_derivatives(
    function: VectorFunction, o: int, i: int, at: list[Vector], sens: Vector, vec: Vector
) -> tuple[Vector, ...]:
    """Return Jᵀ s and J v."""
    pulled = as_vector(function.gradient(o, i, at, sens, {}), len(at[i]), "gradient")
    return pulled, as_vector(function.apply_jacobian(o, i, at, vec, {}), len(sens), "apply_jacobian")


def second_derivative(
    function: VectorFunction, o: int, i: int, j: int, at: list[Vector], sens: Vector, vec: Vector
) -> Vector:
    return as_vector(function.apply_hessian(o, i, j, at, sens, vec, {}), len(at[i]), "apply_hessian")


def assert_close(actual: Vector, expected: Vector, relative: float) -> None:
    assert np.abs(actual - expected).max() <= relative * max(1.0, float(np.abs(expected).max()))


def assert_methods_agree(
    case: RandomFunction, method: str, reference_method: str, relative: float, rounding: float = 0.0
) -> None:
    """Compare a method with another one.

    `rounding`: allowed error of a Hessian element, divided by the steps of its two components.
    """
    function, reference = case.build(method), case.build(reference_method)
    at, _, direction, weights = case.points()
    values = as_vectors(function.evaluate(at, {}), case.outputs), as_vectors(reference.evaluate(at, {}), case.outputs)
    for o, sens in enumerate(weights):
        assert_close(values[0][o], values[1][o], 1e-12)
        for i, v in enumerate(direction):
            for actual, expected in zip(
                first_derivatives(function, o, i, at, sens, v),
                first_derivatives(reference, o, i, at, sens, v),
                strict=True,
            ):
                assert_close(actual, expected, relative)
            for j, w in enumerate(direction):
                actual, expected = (second_derivative(f, o, i, j, at, sens, w) for f in (function, reference))
                step = float(np.min(np.abs(at[j]) / np.abs(w)))  # moves no component by more than its magnitude
                errors = relative * max(1.0, float(np.abs(expected).max())) + rounding / (step * np.abs(at[i]))
                assert (np.abs(actual - expected) <= errors).all()


def assert_identities(case: RandomFunction, method: str, relative: float) -> None:
    """Check that <J v, s> = <v, Jᵀ s>, that both are linear in s and v, and that <u, H v> = <v, H u>."""
    function = case.build(method)
    at, u, v, weights = case.points()
    for o, s in enumerate(weights):
        t = np.roll(s, 1) + 0.5
        for i in range(len(at)):
            pulled, pushed = first_derivatives(function, o, i, at, s, v[i])
            assert_close(np.atleast_1d(pushed @ s), np.atleast_1d(pulled @ v[i]), relative)
            others = first_derivatives(function, o, i, at, t, u[i])
            both = first_derivatives(function, o, i, at, 2 * s - 3 * t, 2 * v[i] - 3 * u[i])
            assert_close(both[0], 2 * pulled - 3 * others[0], relative)
            assert_close(both[1], 2 * pushed - 3 * others[1], relative)
            for j in range(len(at)):
                there, back = (
                    second_derivative(function, o, i, j, at, s, v[j]),
                    second_derivative(function, o, j, i, at, s, u[i]),
                )
                assert_close(np.atleast_1d(u[i] @ there), np.atleast_1d(v[j] @ back), relative)
                more = second_derivative(function, o, i, j, at, t, v[j])
                assert_close(
                    second_derivative(function, o, i, j, at, 2 * s - 3 * t, v[j]), 2 * there - 3 * more, relative
                )
                along = second_derivative(function, o, i, j, at, s, v[j] - 2 * u[j])
                assert_close(along, there - 2 * second_derivative(function, o, i, j, at, s, u[j]), relative)


@QUICK
@given(case=random_functions)
def test_torch_agrees_with_the_complex_step(case: RandomFunction) -> None:
    assert_methods_agree(case, "torch", "complex step", 1e-12)


@QUICK
@given(case=random_functions)
def test_finite_differences_agree_with_torch(case: RandomFunction) -> None:
    # A mixed difference with the steps h and k has four corners, each with a rounding error of some eps |f|, over
    # 4 h k. Half of the first steps, h = eps^(1/6) |x| / 2 and so k, count 4/3 in the extrapolation: 16/3 eps^(2/3)
    # |f| over |x| and the reach of the direction. |f|: sums of up to eight terms below e² + 1 each, times weights
    # below 1, of four outputs; rounding of the sums before they cancel is a few eps of that.
    values = as_vectors(case.build("torch").evaluate(case.points()[0], {}), case.outputs)
    size = 1.0 + max(float(np.abs(value).sum()) for value in values)
    assert_methods_agree(case, "finite differences", "torch", 3e-6, 4 * 16 / 3 * EPS ** (2 / 3) * size)


@SLOW
@given(
    case=st.builds(RandomFunction, st.just((2, 3)), st.just((1, 2)), st.just(1), st.integers(2, 3), st.integers(0, 99))
)
def test_jax_agrees_with_torch(case: RandomFunction) -> None:
    assert_methods_agree(case, "jax", "torch", 1e-12)


@QUICK
@given(case=random_functions)
def test_identities_of_torch(case: RandomFunction) -> None:
    assert_identities(case, "torch", 1e-11)


@QUICK
@given(case=random_functions)
def test_identities_of_the_complex_step(case: RandomFunction) -> None:
    assert_identities(case, "complex step", 1e-11)


@cache
def jax_function() -> VectorFunction:
    return RandomFunction((2, 3), (1, 2), 1, 3, 5).build("jax")


@QUICK
@given(
    x=st.lists(st.floats(-3, 3), min_size=5, max_size=5),
    s=st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=2),
    v=st.lists(st.floats(-1e3, 1e3), min_size=3, max_size=3),
)
def test_jax_is_adjoint_everywhere(x: list[float], s: list[float], v: list[float]) -> None:
    at, sens, vec = [np.array(x[:2]), np.array(x[2:])], np.array(s), np.array(v)
    pulled, pushed = first_derivatives(jax_function(), 1, 1, at, sens, vec)
    lengths = [np.abs(vector).sum() for vector in (pulled, vec, pushed, sens)]  # squares would underflow
    size = lengths[0] * lengths[1] + lengths[2] * lengths[3]
    assert abs(pulled @ vec - pushed @ sens) <= 1e-12 * size + 1e-300


@pytest.mark.parametrize("method", ["complex step", "torch", "finite differences"])
def test_a_zero_direction_gives_zero(method: str) -> None:
    case = RandomFunction((2,), (3,), 1, 2, 1)
    function = case.build(method)
    at, zero = [np.array([0.5, -0.5])], np.zeros(2)
    pulled, pushed = first_derivatives(function, 0, 0, at, np.zeros(3), zero)
    assert not pulled.any()
    assert not pushed.any()
    assert not second_derivative(function, 0, 0, 0, at, np.ones(3), zero).any()


@pytest.mark.parametrize("scale", [1e-150, 1e-8, 1e8, 1e150])
def test_the_size_of_a_direction_does_not_matter(scale: float) -> None:
    case = RandomFunction((2,), (2,), 1, 2, 2)
    at, vec, sens = [np.array([0.5, -0.5])], np.array([1.0, 2.0]), np.ones(2)
    for method, relative in (("complex step", 1e-14), ("torch", 1e-14), ("finite differences", 1e-8)):
        function = case.build(method)
        expected = first_derivatives(function, 0, 0, at, sens, vec)[1]
        actual = first_derivatives(function, 0, 0, at, sens, scale * vec)[1] / scale
        assert_close(actual, expected, relative)
