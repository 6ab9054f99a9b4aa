"""Wiring of graphs, errors of invalid ones, and the Python interface."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dragoman.core.errors import InvalidInput
from dragoman.core.vectors import Config, Vector, VectorFunction, Vectors
from dragoman_simulators.graphs.builtin import built_in
from dragoman_simulators.graphs.function import GraphFunction
from dragoman_simulators.graphs.graph import Graph, make_node
from dragoman_simulators.graphs.wiring import Node, wire
from features.simulators.graphs.ridge import Ridge


def nodes(**built: Any) -> list[Node]:
    return [make_node(name, function) for name, function in built.items()]


def edge(text: str) -> tuple[tuple[str, str], tuple[str, str]]:
    (a, i), (b, j) = (part.strip().split(".") for part in text.split("->"))
    return (a, i), (b, j)


def test_inputs_and_outputs_by_default() -> None:
    built = nodes(a=Ridge([2], [2, 3], ["sin", "sin"], 0), b=Ridge([2, 4], [1], ["sin"], 0))
    wiring = wire(built, [edge("a.0 -> b.0")])
    assert wiring.input_names == ("a", "b.1")
    assert wiring.output_names == ("a.1", "b")
    graph = GraphFunction(wiring)
    assert list(graph.input_sizes({})) == [2, 4]
    assert list(graph.output_sizes({})) == [3, 1]


@pytest.mark.parametrize(
    ("edges", "more", "message"),
    [
        (["a.0 -> x.0"], {}, "unknown node 'x': expected one of 'a', 'b', 'e'"),
        (["a.2 -> b.0"], {}, "node 'a': expected the index of an output below 2, got '2'"),
        (["a.-1 -> b.0"], {}, "node 'a': expected the index of an output below 2, got '-1'"),
        (["a.0 -> b.y"], {}, "node 'b': expected the index of an input below 2, got 'y'"),
        (
            ["a.0 -> b.0", "a.0 -> b.0"],
            {},
            "node 'b', input 0: expected one source, got 'a.0' and 'a.0'; a `sum` node adds them",
        ),
        (["a.0 -> b.0", "b.0 -> e.0", "e.0 -> a.0"], {}, "the graph has a cycle: "),
        (["a.1 -> b.0"], {}, "node 'b', input 0: expected a vector of 2, got 3 from 'a.1'"),
        (
            ["a.0 -> b.0", "a.0 -> e.0"],
            {"inputs": {"x": [("a", "0")]}},
            "node 'b', input 1: expected an edge, an input of the graph or a bound value, got no source",
        ),
        (
            [],
            {"inputs": {"x": [("a", "0"), ("b", "1")]}, "bound": {("b", "0"): [1, 1], ("e", "0"): [1]}},
            "node 'b', input 1: expected a vector of 4, got 2 from the graph's input 'x'",
        ),
        ([], {"bound": {("b", "0"): [1, 1, 1]}}, "node 'b', input 0: expected a vector of 2, got 3 bound to it"),
        ([], {"sizes": {"x": 3}}, "unknown input 'x' of the graph: expected one of 'a', 'b.0', 'b.1', 'e'"),
        (
            ["a.0 -> e.0"],
            {"sizes": {"a": 3}},
            "node 'a', input 0: expected a vector of 2, got 3 from the graph's input 'a'",
        ),
        ([], {}, "node 'e', input 0: unknown size; declare the size of the node, or of the graph's input"),
        ([], {"inputs": {"x": []}}, "input 'x' of the graph: expected at least one input of a node, got none"),
        ([], {"outputs": {}}, "a graph needs at least one output, got none"),
        ([], {"outputs": {"y": ("a", "5")}}, "node 'a': expected the index of an output below 2, got '5'"),
    ],
)
def test_errors_of_wiring(edges: list[str], more: dict[str, Any], message: str) -> None:
    built = nodes(a=Ridge([2], [2, 3], ["sin", "sin"], 0), b=Ridge([2, 4], [1], ["sin"], 0), e=built_in("exp", {}))
    with pytest.raises(InvalidInput, match=re.escape(message)):
        GraphFunction(wire(built, map(edge, edges), **more))


def test_the_error_names_a_cycle() -> None:
    built = nodes(a=built_in("exp", {}), b=built_in("exp", {}), c=built_in("sum", {}))
    with pytest.raises(InvalidInput, match=r"the graph has a cycle: (\w) -> (\w) -> \1$"):
        wire(built, map(edge, ["a.0 -> b.0", "b.0 -> a.0", "b.0 -> c.0"]))


def test_node_names_are_unique() -> None:
    with pytest.raises(InvalidInput, match="a graph needs at least one node, got none"):
        wire([], [])
    with pytest.raises(InvalidInput, match="duplicate node name 'a'"):
        wire([*nodes(a=built_in("exp", {})), *nodes(a=built_in("exp", {}))], [])
    with pytest.raises(InvalidInput, match=r"invalid node name 'a\.b'"):
        make_node("a.b", built_in("exp", {}))


def test_sizes_are_inferred_through_flexible_nodes() -> None:
    g = Graph()
    x, y = g.input("x"), g.input("y", 2)
    both = g.concatenate(g.exp(x), -y)
    g.output(g.gaussian_logpdf(both, mean=[0, 0, 0, 0, 0]))
    graph = g.build()
    assert list(graph.input_sizes({})) == [3, 2]
    assert graph.sizes({}).node_outputs["concatenate"] == (5,)


def test_ports_by_name() -> None:
    ridge = Ridge([2], [2, 3], ["sin", "sin"], 0)
    ridge.input_names, ridge.output_names = ("load",), ("shift", "moment")
    wiring = wire(nodes(a=ridge, e=built_in("exp", {})), [(("a", "moment"), ("e", "0"))])
    assert GraphFunction(wiring).sizes({}).node_inputs["e"] == (3,)
    with pytest.raises(
        InvalidInput,
        match="node 'a': expected the index of an output below 2, got 'force'; its outputs are 'shift', 'moment'",
    ):
        wire(nodes(a=ridge), [], outputs={"y": ("a", "force")})


# --- in Python -------------------------------------------------------------------------------------------


def test_operators() -> None:
    g = Graph()
    x, y = g.input("x"), g.input("y")
    built: dict[str, Callable[[Any, Any], Any]] = {
        "sum": lambda a, b: a + b,
        "difference": lambda a, b: a - b,
        "product": lambda a, b: a * b,
        "quotient": lambda a, b: a / b,
        "shifted": lambda a, b: 3 + a - np.array([1.0, 2.0]),
        "turned": lambda a, b: 1 - a,
        "scaled": lambda a, b: -2 * a / 4,
        "mapped": lambda a, b: np.array([[1.0, 2.0], [3.0, 4.0]]) @ b,
        "picked": lambda a, b: a[[1, 1, 0]],
    }
    for name, make in built.items():
        g.output(make(x, y), name)
    graph = g.build()
    at = [np.array([1.0, 2.0]), np.array([4.0, -5.0])]
    assert list(graph.output_names) == [*built]
    for result, make in zip(graph.evaluate(at, {}), built.values(), strict=True):
        np.testing.assert_allclose(result, make(*at), rtol=1e-15)


def test_a_function_may_be_applied_several_times() -> None:
    ridge = Ridge([2], [2], ["sin"], 0)
    g = Graph()
    part = g.add(ridge, "f")
    g.output(part(part(g.input("x"))))
    graph = g.build()
    assert [*graph.wiring.nodes] == ["f", "f_2"]
    once = ridge.evaluate([np.ones(2)], {})
    np.testing.assert_allclose(graph.evaluate([np.ones(2)], {})[0], ridge.evaluate(once, {})[0])


def test_a_graph_is_a_function_that_may_be_a_node() -> None:
    inner = Graph("inner")
    inner.output(inner.exp(inner.input("x", 2)))
    g = Graph()
    g.output(g.add(inner)(g.square(g.input("x"))))
    result = g.build().apply_hessian(0, 0, 0, [np.array([1.0, 0.5])], np.ones(2), np.ones(2), {})
    x = np.array([1.0, 0.5])
    np.testing.assert_allclose(result, np.exp(x**2) * (2 + 4 * x**2))


def test_derivatives_are_added_to_a_class_with_a_method() -> None:
    class Cubes(VectorFunction):
        derivatives = "complex step"

        def input_sizes(self, config: Config) -> list[int]:
            return [2]

        output_sizes = input_sizes

        def evaluate(self, inputs: Vectors, config: Config) -> Vector:
            result: Vector = inputs[0] ** 3
            return result

    g = Graph()
    g.output(2 * g.add(Cubes)(g.input("x")))
    result = g.build().gradient(0, 0, [np.array([1.0, 2.0])], np.ones(2), {})
    np.testing.assert_allclose(result, [6, 24])


def test_an_input_may_be_an_output() -> None:
    g = Graph()
    x = g.input("x", 2)
    g.output(x, "same")
    graph = g.build()
    assert graph.evaluate([np.ones(2)], {})[0].tolist() == [1, 1]
    assert graph.gradient(0, 0, [np.ones(2)], np.array([1.0, 5.0]), {}).tolist() == [1, 5]


def test_mistakes_in_python() -> None:
    g, other = Graph(), Graph()
    x = g.input("x", 2)
    with pytest.raises(InvalidInput, match="duplicate input 'x'"):
        g.input("x")
    with pytest.raises(InvalidInput, match="node 'exp': expected 1 inputs, got 2"):
        g.exp(x, x)
    with pytest.raises(InvalidInput, match="node 'exp', input 0: this value belongs to another graph"):
        other.exp(x)
    with pytest.raises(InvalidInput, match="this value belongs to another graph"):
        other.output(x)
    message = "^function is not a vector function: expected a VectorFunction, or a function marked with "
    with pytest.raises(InvalidInput, match=message):
        g.add(lambda x: x)
    with pytest.raises(AttributeError, match="unknown built-in node 'expp': expected one of identity, "):
        g.expp(x)
    with pytest.raises(TypeError, match="a graph value cannot be iterated"):
        list(x)
    g.output(g.exp(x), "y")
    with pytest.raises(InvalidInput, match="duplicate output 'y'"):
        g.output(x, "y")
