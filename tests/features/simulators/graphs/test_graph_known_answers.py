"""Small graphs whose derivatives can be written down by hand."""

from typing import Any

import numpy as np
import pytest

from dragoman.core.vectors import Config, Vector, VectorFunction, Vectors
from dragoman_simulators.graphs.function import GraphFunction
from dragoman_simulators.graphs.graph import Graph


def near(got: Any, expected: Any, tolerance: float = 1e-12) -> None:
    np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance)


def test_a_diamond() -> None:
    """f(x) = sin(x²) exp(x²): the square feeds both branches."""
    g = Graph()
    square = g.square(g.input("x", 2))
    g.output(g.sin(square) * g.exp(square))
    graph = g.build()
    x = np.array([0.3, -0.7])
    s, e, c = np.sin(x**2), np.exp(x**2), np.cos(x**2)
    first = 2 * x * e * (s + c)
    second = 2 * e * (s + c) + 4 * x**2 * e * 2 * c
    sens, vec = np.array([2.0, -1.0]), np.array([0.5, 3.0])
    near(graph.evaluate([x], {})[0], s * e)
    near(graph.gradient(0, 0, [x], sens, {}), first * sens)
    near(graph.apply_jacobian(0, 0, [x], vec, {}), first * vec)
    near(graph.apply_hessian(0, 0, 0, [x], sens, vec, {}), second * sens * vec)


class SumAndProduct(VectorFunction):
    """(x, y) -> (x + y, x y, x² y): the second derivatives of each output differ."""

    def input_sizes(self, config: Config) -> list[int]:
        return [1, 1]

    def output_sizes(self, config: Config) -> list[int]:
        return [1, 1, 1]

    def evaluate(self, inputs: Vectors, config: Config) -> tuple[Vector, ...]:
        x, y = inputs
        return x + y, x * y, x**2 * y

    def _first(self, inputs: Vectors) -> list[list[float]]:
        x, y = inputs[0][0], inputs[1][0]
        return [[1, 1], [y, x], [2 * x * y, x**2]]

    def gradient(self, output: int, input: int, inputs: Vectors, sens: Vector, config: Config) -> Vector:  # noqa: A002
        return self._first(inputs)[output][input] * sens

    def apply_jacobian(self, output: int, input: int, inputs: Vectors, vec: Vector, config: Config) -> Vector:  # noqa: A002
        return self._first(inputs)[output][input] * vec

    def apply_hessian(
        self, output: int, input1: int, input2: int, inputs: Vectors, sens: Vector, vec: Vector, config: Config
    ) -> Vector:
        x, y = inputs[0][0], inputs[1][0]
        second: list[Any] = [[[0, 0], [0, 0]], [[0, 1], [1, 0]], [[2 * y, 2 * x], [2 * x, 0]]]
        return np.asarray(second[output][input1][input2] * sens * vec)


def split_graph() -> GraphFunction:
    """z_o = exp(y_o) with y = SumAndProduct(a², b), for each o; all are outputs, beside y_2 itself."""
    g = Graph()
    parts = g.add(SumAndProduct())(g.square(g.input("a")), g.input("b"))
    for o, part in enumerate(parts):
        g.output(g.exp(part), f"z{o}")
    g.output(parts[2], "y2")
    return g.build()


@pytest.mark.parametrize("output", range(4))
@pytest.mark.parametrize("input1", range(2))
@pytest.mark.parametrize("input2", range(2))
def test_second_derivatives_by_every_output_of_a_node(output: int, input1: int, input2: int) -> None:
    graph = split_graph()
    a, b = 0.6, -0.8
    # y_o(a, b) = a² + b, a² b, a⁴ b: values, first and second derivatives.
    values = [a**2 + b, a**2 * b, a**4 * b]
    first: list[Any] = [[2 * a, 1], [2 * a * b, a**2], [4 * a**3 * b, a**4]]
    second: list[Any] = [[[2, 0], [0, 0]], [[2 * b, 2 * a], [2 * a, 0]], [[12 * a**2 * b, 4 * a**3], [4 * a**3, 0]]]
    if output < 3:
        e, d, h = np.exp(values[output]), first[output], second[output]
        jacobian, hessian = e * d[input1], e * (h[input1][input2] + d[input1] * d[input2])
    else:
        jacobian, hessian = first[2][input1], second[2][input1][input2]
    x, sens, vec = [np.array([a]), np.array([b])], np.array([1.7]), np.array([-0.4])
    near(graph.gradient(output, input1, x, sens, {}), [jacobian * 1.7])
    near(graph.apply_jacobian(output, input1, x, vec, {}), [jacobian * -0.4])
    near(graph.apply_hessian(output, input1, input2, x, sens, vec, {}), [hessian * 1.7 * -0.4])


def test_a_linear_gaussian_posterior() -> None:
    """log N(data; A m, noise) + log N(m; mean, cov) is a quadratic; its precision is known."""
    matrix = np.array([[1.0, 2.0], [0.0, 1.0], [1.0, -1.0]])
    data, noise = np.array([1.0, -1.0, 0.5]), 0.25
    mean, cov = np.array([0.1, -0.2]), np.array([[2.0, 0.5], [0.5, 1.0]])
    g = Graph()
    m = g.input("m")
    g.output(g.gaussian_loglik(matrix @ m, data=data, cov=noise) + g.gaussian_logpdf(m, mean=mean, cov=cov))
    graph = g.build()
    assert list(graph.input_sizes({})) == [2]
    x = np.array([0.7, 0.4])
    precision = matrix.T @ matrix / noise + np.linalg.inv(cov)
    r, p = matrix @ x - data, x - mean
    value = -0.5 * (r @ r / noise + 3 * np.log(2 * np.pi * noise))
    value += -0.5 * (p @ np.linalg.solve(cov, p) + np.log(np.linalg.det(2 * np.pi * cov)))
    gradient = -matrix.T @ r / noise - np.linalg.solve(cov, p)
    vec = np.array([1.0, -3.0])
    near(graph.evaluate([x], {})[0], [value])
    near(graph.gradient(0, 0, [x], np.array([2.0]), {}), 2 * gradient)
    near(graph.apply_jacobian(0, 0, [x], vec, {}), [gradient @ vec])
    near(graph.apply_hessian(0, 0, 0, [x], np.array([2.0]), vec, {}), -2 * precision @ vec)
    # One Newton step from anywhere leads to the posterior's mean.
    hessian = np.column_stack([graph.apply_hessian(0, 0, 0, [x], np.ones(1), e, {}) for e in np.eye(2)])
    top = x - np.linalg.solve(hessian, graph.gradient(0, 0, [x], np.ones(1), {}))
    near(top, np.linalg.solve(precision, matrix.T @ data / noise + np.linalg.solve(cov, mean)))


def test_rows_give_the_results_of_single_points() -> None:
    matrix = np.array([[1.0, 2.0], [0.0, 1.0], [1.0, -1.0]])
    g = Graph()
    m, shift = g.input("m"), g.constant(value=[0.5, 0.5, -0.5])
    u = g.exp(g.tanh(matrix @ m) + shift) * g.sqrt(g.square(matrix @ m) + 1.0)
    head, tail = g.split(g.concatenate(u, u[[2, 0]]), sizes=[1, 4])
    g.output(g.gaussian_logpdf(tail, mean=0.1, cov=[1.0, 2.0, 3.0, 4.0]), "density")
    g.output(head, "head")
    g.output(shift, "shift")
    graph = g.build()
    assert graph.vectorised
    points = np.random.default_rng(0).normal(size=(5, 2))
    together = graph.evaluate([points], {})
    assert [y.shape for y in together] == [(5, 1), (5, 1), (5, 3)]
    for i, point in enumerate(points):
        for y, single in zip(together, graph.evaluate([point], {}), strict=True):
            near(y[i], single)
