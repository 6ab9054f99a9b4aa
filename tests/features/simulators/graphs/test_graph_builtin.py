"""The built-in nodes: their derivatives against complex step and finite differences, their options and their errors."""

import re
from typing import Any

import numpy as np
import pytest

from dragoman.core.errors import InvalidInput
from dragoman.core.vectors import VectorFunction
from dragoman_simulators.graphs.builtin import BUILT_IN, built_in

_MATRIX = np.array([[1.0, 2.0, -1.0], [0.0, 1.0, 0.5]])
_COV = np.array([[2.0, 0.3, 0.1], [0.3, 1.0, 0.2], [0.1, 0.2, 0.5]])
_CASES: list[tuple[str, dict[str, Any], list[int]]] = [
    ("identity", {"dim": 3}, [3]),
    ("scale", {"factor": 2.5, "shift": [1, 2, 3]}, [3]),
    ("scale", {"factor": [2.5, 0, -1]}, [3]),
    ("linear", {"matrix": _MATRIX, "shift": [1, 2]}, [3]),
    ("sum", {"n": 3}, [3, 3, 3]),
    ("sum", {"weights": [2, -3]}, [3, 3]),
    ("product", {"n": 3}, [3, 3, 3]),
    ("concatenate", {"n": 2}, [3, 2]),
    ("split", {"sizes": [2, 1]}, [3]),
    ("select", {"indices": [2, 0, 2]}, [3]),
    ("constant", {"value": [1, 2]}, []),
    ("gaussian_logpdf", {}, [3]),
    ("gaussian_logpdf", {"mean": [1, 2, 3], "cov": [1, 2, 3]}, [3]),
    ("gaussian_logpdf", {"mean": 0.5, "cov": _COV}, [3]),
    ("gaussian_loglik", {"data": [1, 2, 3], "cov": 0.05}, [3]),
    *((name, {}, [3]) for name in ("exp", "log", "sqrt", "square", "reciprocal", "sin", "cos", "tanh")),
]


def outputs(node: VectorFunction, x: list[Any]) -> list[Any]:
    result = node.evaluate(x, {})
    return [*result] if isinstance(result, list) else [result]


def slopes(f: Any, x: list[Any], i: int, direction: Any) -> Any:
    """The derivative of f by x[i] in a direction, from central differences of fourth order."""
    step = 4e-4

    def at(k: int) -> Any:
        moved = [*x]
        moved[i] = x[i] + k * step * direction
        return f(moved)

    return (8 * (at(1) - at(-1)) - (at(2) - at(-2))) / (12 * step)


def test_every_built_in_node_is_tested() -> None:
    assert {name for name, _, _ in _CASES} == set(BUILT_IN)


@pytest.mark.parametrize(("name", "options", "sizes"), _CASES)
def test_derivatives(name: str, options: dict[str, Any], sizes: list[int]) -> None:
    node = built_in(name, options)
    random = np.random.default_rng(3)
    x = [random.uniform(0.5, 1.5, n) for n in sizes]
    for o, y in enumerate(outputs(node, x)):
        sens = random.normal(size=y.shape)
        for i in range(len(x)):
            vec = random.normal(size=sizes[i])
            expected = slopes(lambda at, o=o: outputs(node, at)[o], x, i, vec)
            np.testing.assert_allclose(node.apply_jacobian(o, i, x, vec, {}), expected, rtol=1e-8, atol=1e-9)
            pulled = node.gradient(o, i, x, sens, {})
            assert pulled.shape == (sizes[i],)
            np.testing.assert_allclose(pulled @ vec, sens @ expected, rtol=1e-8, atol=1e-9)
            for j in range(len(x)):
                along = random.normal(size=sizes[j])
                curved = slopes(lambda at, o=o, i=i, s=sens: node.gradient(o, i, at, s, {}), x, j, along)
                np.testing.assert_allclose(
                    node.apply_hessian(o, i, j, x, sens, along, {}), curved, rtol=1e-8, atol=1e-9
                )


@pytest.mark.parametrize(("name", "options", "sizes"), _CASES)
def test_rows_are_points(name: str, options: dict[str, Any], sizes: list[int]) -> None:
    node = built_in(name, options)
    points = [np.random.default_rng(4).uniform(0.5, 1.5, (4, n)) for n in sizes]
    together = outputs(node, points)
    if sizes:
        for row in range(4):
            for y, single in zip(together, outputs(node, [p[row] for p in points]), strict=True):
                np.testing.assert_allclose(y[row], single, rtol=1e-13)


def test_the_density_of_a_gaussian() -> None:
    """log N(1; 3, 4) = -½ (1 - 3)²/4 - ½ log(8π)."""
    node = built_in("gaussian_logpdf", {"mean": 3, "cov": 4})
    np.testing.assert_allclose(outputs(node, [np.array([1.0])])[0], [-0.5 - 0.5 * np.log(8 * np.pi)])
    alike = built_in("gaussian_logpdf", {"mean": 0.5, "cov": [2.0, 2.0, 2.0]})
    for cov in (2.0, np.eye(3) * 2):
        other = built_in("gaussian_logpdf", {"mean": 0.5, "cov": cov})
        x = [np.array([1.0, -2.0, 0.3])]
        np.testing.assert_allclose(outputs(other, x)[0], outputs(alike, x)[0], rtol=1e-14)


def test_functions_are_not_finite_outside_of_their_domain() -> None:
    result = outputs(built_in("log", {}), [np.array([0.0, -1.0])])[0]
    assert result[0] == -np.inf
    assert np.isnan(result[1])


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("summ", {}, "unknown built-in node 'summ': expected one of identity, "),
        ("sum", {"m": 2}, "unknown option 'm' of 'sum': expected one of n, weights, dim"),
        ("sum", {"n": 0}, "n: expected an integer from 1, got 0"),
        ("sum", {"n": True}, "n: expected an integer from 1, got True"),
        ("sum", {"n": 3, "weights": [1, 2]}, "weights: expected 3 numbers, one per input, got 2"),
        ("linear", {}, "missing option 'matrix' of 'linear'"),
        ("linear", {"matrix": [1, 2]}, "matrix: expected two axes, got shape [2]"),
        ("linear", {"matrix": "x"}, "matrix: expected numbers, got 'x'"),
        (
            "linear",
            {"matrix": [[1, 2]], "shift": [1, 2, 3]},
            "shift: expected 1 numbers, one per row, got 3",
        ),
        ("linear", {"matrix": [[1, float("nan")]]}, "matrix: expected finite numbers, got NaN or infinity"),
        ("scale", {"factor": [1, 2], "dim": 3}, "factor, shift and dim: expected one size, got 2 and 3"),
        ("scale", {"factor": [[1, 2]]}, "factor: expected at most 1 axes, got shape [1, 2]"),
        ("split", {"sizes": []}, "sizes: expected a list of integers, got []"),
        ("split", {"sizes": [1, -1]}, "sizes: expected an integer from 0, got -1"),
        ("select", {"indices": [0.5]}, "indices: expected an integer from 0, got 0.5"),
        ("identity", {"dim": 0}, "dim: expected an integer from 1, got 0"),
        ("gaussian_logpdf", {"cov": 0}, "cov: expected variances above 0, got 0.0"),
        ("gaussian_logpdf", {"cov": [[1, 2], [3, 4]]}, "cov: expected a symmetric matrix, got one of shape [2, 2]"),
        ("gaussian_logpdf", {"cov": [[1, 2], [2, 1]]}, "cov: expected a positive definite matrix, got one that is not"),
        ("gaussian_logpdf", {"mean": [1, 2], "dim": 3}, "expected one size, got mean of 2, dim of 3"),
        ("gaussian_loglik", {"cov": 1}, "data: expected a vector of measurements"),
    ],
)
def test_wrong_options(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(message)):
        built_in(name, options)
