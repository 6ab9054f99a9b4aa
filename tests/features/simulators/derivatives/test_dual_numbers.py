"""Hessian actions of NumPy functions by dual numbers: exact, or an error."""

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from dragoman.core.errors import ModelFailed
from dragoman.core.vectors import VectorFunction, as_vector
from dragoman_simulators.derivatives.dual_hessian import FUNCTIONS
from features.simulators.derivatives.derivative_models import ONE, build

A = np.array([[2.0, 1.0], [-1.0, 3.0]])


def assert_same_hessian(
    function: VectorFunction, reference: VectorFunction, point: list[Any], output: int, sens: Any
) -> None:
    for i, x in enumerate(point):
        for j, y in enumerate(point):
            vec = np.cos(np.arange(len(y)) + 0.5)
            actual, expected = (f.apply_hessian(output, i, j, point, sens, vec, {}) for f in (function, reference))
            expected = as_vector(expected, len(x), "")
            assert np.asarray(actual) == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_hessian_actions_of_numpy_functions(name: str) -> None:
    at = [np.array([1.3, 1.7] if name == "arccosh" else [0.3, 0.7])]
    function = build(lambda x: getattr(np, name)(x[0] * x) * x[1], at=at)
    reference = build(lambda x: getattr(torch, name)(x[0] * x) * x[1], at=at, derivatives="torch")
    assert function.sources()["apply_hessian"] == "dual numbers"
    point = [np.array([1.4, 1.2]) if name == "arccosh" else np.array([0.4, 0.8])]
    assert_same_hessian(function, reference, point, 0, np.array([1.0, -2.0]))


def all_operations(lib: Any, lift: Callable[[Any], Any]) -> Callable[..., Any]:
    """Sums, products, powers, quotients, matrices, stacks and indices, of two vectors and to two outputs."""
    join = lib.concatenate if lib is np else torch.cat

    def function(x: Any, y: Any) -> Any:
        mixed = lift(A) @ x / (2.0 + y[:2] ** 2) - 3 + x[0] ** y[0] - 1 / y[2] + 2.0 ** x[1] - (-x[1]) * +y[1]
        first = (mixed * mixed[0]).sum() + x @ lift(A) @ x
        second = join([x**3, y**-2, lib.stack([x[0] * y[2], y[0] ** 0.5, x[1] ** 1 + x[1] ** 0])])
        return lib.stack([first, first * y[0]]), second

    return function


def test_hessian_actions_of_arithmetic_operations() -> None:
    options: dict[str, Any] = {"inputs": [2, 3], "outputs": [2, 8]}
    function = build(all_operations(np, np.asarray), **options)
    reference = build(all_operations(torch, torch.as_tensor), **options, derivatives="torch")
    assert function.sources()["apply_hessian"] == "dual numbers"
    point = [np.array([0.7, 0.4]), np.array([1.2, 0.5, -0.8])]
    assert_same_hessian(function, reference, point, 0, np.array([1.0, 2.0]))
    assert_same_hessian(function, reference, point, 1, np.arange(8.0))


def test_a_simulation_in_plain_python_with_a_config() -> None:
    def oscillator(x: Any, damping: Any, *, steps: int = 20) -> Any:
        position, velocity = x
        for _ in range(steps):
            velocity = velocity - 0.1 * (np.sin(position) + damping[0] * velocity)
            position = position + 0.1 * velocity
        return np.array([position, velocity]) if isinstance(position, float) else np.stack([position, velocity])

    function = build(oscillator, inputs=[2, 1], outputs=[2])
    point, vec, sens = [np.array([1.0, 0.2]), np.array([0.3])], np.array([1.0, -1.0]), np.array([2.0, 1.0])
    for config in ({}, {"steps": 35}):
        there, back = function.apply_hessian(0, 1, 0, point, sens, vec, config), np.zeros(2)
        for k, unit in enumerate(np.eye(2)):
            back[k] = as_vector(function.apply_hessian(0, 1, 0, point, sens, unit, config), 1, "")[0]
        across = function.apply_hessian(0, 0, 1, point, sens, np.ones(1), config)
        assert as_vector(there, 1, "") == pytest.approx([back @ vec], rel=1e-12)
        assert as_vector(across, 2, "") == pytest.approx(back, rel=1e-11)


def test_functions_without_dual_numbers_have_no_hessian(caplog: pytest.LogCaptureFixture) -> None:
    long: dict[str, Any] = {"inputs": [300]}
    for function, options, reason in (
        (lambda x: np.linalg.solve(A, x), {"inputs": [2]}, "UFuncTypeError"),
        (lambda x: x**2, long, "vectors of more than 256 numbers"),
        (lambda x: sum(x[0] * k for k in range(200_000)), {"inputs": [1], "outputs": [1]}, "too many operations"),
    ):
        with caplog.at_level(logging.INFO, "dragoman"):
            vector_function = build(function, **options)
        assert set(vector_function.sources()) == {"evaluate", "gradient", "apply_jacobian"}
        assert reason in caplog.text
        caplog.clear()


def test_a_branch_that_is_not_smooth_is_rejected() -> None:
    def turning(x: Any) -> Any:
        inside = x[1] if isinstance(x[1], float | np.floating) else getattr(x[1], "value", 1.0)
        return x**2 if np.asarray(inside).real > 0 else np.maximum(x, 0.0)

    function = build(turning, inputs=[2])
    result = function.apply_hessian(0, 0, 0, [np.ones(2)], np.ones(2), np.array([1.0, 3.0]), {})
    assert np.asarray(result).tolist() == [2.0, 6.0]
    with pytest.raises(ModelFailed, match="compares numbers"):
        function.apply_hessian(0, 0, 0, [-np.ones(2)], np.ones(2), np.ones(2), {})


def test_dual_numbers_that_take_another_branch_are_rejected() -> None:
    def by_type(x: Any) -> Any:
        return x**2 if getattr(x[0], "value", 0.0) < 1 else x**3  # NumPy's own numbers have no such value

    function = build(by_type, inputs=[1])
    assert np.asarray(function.apply_hessian(0, 0, 0, [ONE / 2], ONE, ONE, {})).tolist() == [2.0]
    with pytest.raises(ModelFailed, match="their value differs by 4 from the expected one"):
        function.apply_hessian(0, 0, 0, [2 * ONE], ONE, ONE, {})


def test_an_infinite_second_derivative_is_returned() -> None:
    function = build(lambda x: x**1.5, inputs=[1])
    assert np.isinf(function.apply_hessian(0, 0, 0, [np.zeros(1)], np.ones(1), np.ones(1), {})).all()
