"""Options, sizes and ports of graphs to the letter."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from dragoman.core.errors import DragomanError, InvalidInput, InvalidOutput, ModelFailed
from dragoman.core.vectors import Config, VectorFunction, Vectors
from dragoman_simulators.graphs.builtin import BUILT_IN, Elementwise, built_in
from dragoman_simulators.graphs.function import GraphFunction
from dragoman_simulators.graphs.graph import Graph, make_node
from dragoman_simulators.graphs.plan import plan_evaluation
from dragoman_simulators.graphs.run import Schedule
from dragoman_simulators.graphs.wiring import BoundValue, GraphInput, Node, Port, describe_source, wire
from dragoman_simulators.graphs.wrappers import ConcurrencyLimit, EvaluationCache


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("linear", {"matrix": [[[1]]]}, "matrix: expected at most 2 axes, got shape [1, 1, 1]"),
        ("linear", {"matrix": [[1]], "shift": [[1]]}, "shift: expected at most 1 axes, got shape [1, 1]"),
        ("linear", {"matrix": [[1]], "shift": "x"}, "shift: expected numbers, got 'x'"),
        ("linear", {"matrix": [[1], [2]], "shift": [1]}, "shift: expected 2 numbers, one per row, got 1"),
        ("scale", {"factor": "x"}, "factor: expected numbers, got 'x'"),
        ("scale", {"shift": "x"}, "shift: expected numbers, got 'x'"),
        ("scale", {"shift": float("inf")}, "shift: expected finite numbers, got NaN or infinity"),
        ("scale", {"dim": 0}, "dim: expected an integer from 1, got 0"),
        (
            "scale",
            {"factor": [1, 2], "shift": [1], "dim": 3},
            "factor, shift and dim: expected one size, got 1 and 2 and 3",
        ),
        ("identity", {"dim": 1.5}, "dim: expected an integer from 1, got 1.5"),
        ("sum", {"dim": 0}, "dim: expected an integer from 1, got 0"),
        ("sum", {"weights": "x"}, "weights: expected numbers, got 'x'"),
        ("sum", {"n": "x" * 99}, f"n: expected an integer from 1, got '{'x' * 79} ..."),
        ("product", {"n": 0}, "n: expected an integer from 1, got 0"),
        ("product", {"dim": 0}, "dim: expected an integer from 1, got 0"),
        ("concatenate", {"n": 0}, "n: expected an integer from 1, got 0"),
        ("concatenate", {"sizes": [1, "x"]}, "sizes: expected an integer from 0, got 'x'"),
        ("concatenate", {"sizes": 3}, "sizes: expected a list of integers, got 3"),
        ("concatenate", {"sizes": "12"}, "sizes: expected a list of integers, got '12'"),
        ("split", {"sizes": b"12"}, "sizes: expected a list of integers, got b'12'"),
        ("select", {"indices": []}, "indices: expected a list of integers, got []"),
        ("select", {"indices": [0], "dim": 0}, "dim: expected an integer from 1, got 0"),
        ("constant", {"value": None}, "value: expected finite numbers, got NaN or infinity"),
        ("constant", {"value": "x"}, "value: expected numbers, got 'x'"),
        ("constant", {}, "missing option 'value' of 'constant'"),
        ("exp", {"dim": 0}, "dim: expected an integer from 1, got 0"),
        ("gaussian_logpdf", {"mean": "x"}, "mean: expected numbers, got 'x'"),
        ("gaussian_logpdf", {"cov": "x"}, "cov: expected numbers, got 'x'"),
        ("gaussian_logpdf", {"mean": [[1]]}, "mean: expected at most 1 axes, got shape [1, 1]"),
        ("gaussian_logpdf", {"cov": [[[1]]]}, "cov: expected at most 2 axes, got shape [1, 1, 1]"),
        ("gaussian_logpdf", {"cov": [1, 0]}, "cov: expected variances above 0, got 0.0"),
        ("gaussian_logpdf", {"cov": [[1, 2, 3]]}, "cov: expected a symmetric matrix, got one of shape [1, 3]"),
        ("gaussian_logpdf", {"dim": 0}, "dim: expected an integer from 1, got 0"),
        (
            "gaussian_logpdf",
            {"mean": [1], "cov": [1, 2], "dim": 3},
            "expected one size, got mean of 1, cov of 2, dim of 3",
        ),
        ("gaussian_loglik", {"data": [1], "mean": [1]}, "data: expected a vector of measurements"),
        ("sine", {}, f"unknown built-in node 'sine': expected one of {', '.join(BUILT_IN)}"),
        ("split", {"size": 1}, "unknown option 'size' of 'split': expected one of sizes"),
    ],
)
def test_wrong_options_are_named(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        built_in(name, options)
    assert caught.value.message == message


def test_unknown_elementwise_functions_are_rejected() -> None:
    with pytest.raises(InvalidInput) as caught:
        Elementwise("sinh")
    assert caught.value.message == (
        "function: expected one of exp, log, sqrt, square, reciprocal, sin, cos, tanh, got 'sinh'"
    )


def test_options_have_the_defaults_that_are_documented() -> None:
    two = [np.array([1.0, 2.0]), np.array([3.0, 4.0])]
    for name, expected in (("sum", [4, 6]), ("product", [3, 8]), ("concatenate", [1, 2, 3, 4])):
        node = built_in(name, {})
        assert np.asarray(node.evaluate(two, {})).tolist() == expected
        assert len(node.input_sizes({})) == 2
    assert np.asarray(built_in("scale", {}).evaluate(two[:1], {})).tolist() == [1, 2]
    assert built_in("sum", {"n": 3, "weights": [1, 2, 3]}).input_sizes({}) == [-1, -1, -1]
    assert built_in("sum", {"n": 2, "weights": [1, 2, 3], "dim": 4}).input_sizes({}) == [4, 4, 4]
    assert built_in("linear", {"matrix": [[1, 2, 3]]}).input_sizes({}) == [3]
    assert built_in("split", {"sizes": np.array([1, 0, 2])}).output_sizes({}) == [1, 0, 2]
    assert built_in("select", {"indices": [0, 1], "dim": 5}).input_sizes({}) == [5]
    assert built_in("constant", {"value": 3}).output_sizes({}) == [1]
    assert built_in("gaussian_logpdf", {"dim": 3}).input_sizes({}) == [3]
    assert built_in("gaussian_logpdf", {"cov": np.eye(2)}).input_sizes({}) == [2]
    assert set(built_in("sum", {}).sources().values()) == {"built in"}


def test_options_are_copied() -> None:
    array = np.array([1.0, 2.0])
    node = built_in("constant", {"value": array})
    array[0] = 9
    assert np.asarray(node.evaluate([], {})).tolist() == [1, 2]
    with pytest.raises(ValueError, match="read-only"):
        node.evaluate([], {})[0] = 5


def graph(
    edges: Sequence[tuple[tuple[str, str], tuple[str, str]]] = (), nodes: Any = None, **more: Any
) -> GraphFunction:
    graph_function = [make_node(name, function) for name, function in nodes.items()]
    return GraphFunction(wire(graph_function, edges, **more))


@pytest.mark.parametrize(
    ("nodes", "sizes", "message"),
    [
        (
            {"c": built_in("concatenate", {"sizes": [1, 2]}), "d": built_in("exp", {"dim": 4})},
            {},
            "node 'd', input 0: expected a vector of 4, got 3 from 'c.0'",
        ),
        (
            {"c": built_in("concatenate", {}), "d": built_in("exp", {"dim": 4})},
            {"x": 5},
            "node 'c': output 0: expected a vector of 4, got 5 from some of its inputs",
        ),
        (
            {"c": built_in("concatenate", {}), "d": built_in("exp", {"dim": 4})},
            {"x": 1, "y": 1},
            "node 'd', input 0: expected a vector of 4, got 2 from 'c.0'",
        ),
        (
            {"c": built_in("sum", {}), "d": built_in("exp", {"dim": 4})},
            {"x": 5},
            "node 'd', input 0: expected a vector of 4, got 5 from 'c.0'",
        ),
        (
            {"c": built_in("sum", {}), "d": built_in("exp", {})},
            {"x": 5, "y": 3},
            "node 'c': expected vectors of one size, got 3 and 5",
        ),
    ],
)
def test_errors_name_sizes_that_do_not_match(nodes: dict[str, Any], sizes: dict[str, int], message: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        graph([(("c", ""), ("d", ""))], nodes, inputs={"x": [("c", "0")], "y": [("c", "1")]}, sizes=sizes)
    assert caught.value.message == message


def test_invalid_sizes_of_built_in_nodes() -> None:
    node: Any = built_in("concatenate", {})
    assert node.fit_sizes([1, 2], [None]) == ([1, 2], [3])
    assert node.fit_sizes([1, 2], [3]) == ([1, 2], [3])
    assert node.fit_sizes([None, 3], [3]) == ([0, 3], [3])
    assert node.fit_sizes([None, None], [3]) == ([None, None], [3])
    assert node.fit_sizes([None, 3], [None]) == ([None, 3], [None])
    for inputs, message in (
        ([1, 1], "output 0: expected a vector of 4, got 2 from its inputs"),
        ([5, None], "output 0: expected a vector of 4, got 5 from some of its inputs"),
    ):
        with pytest.raises(InvalidInput) as caught:
            node.fit_sizes(inputs, [4])
        assert caught.value.message == message
    with pytest.raises(InvalidInput) as caught:
        node = built_in("sum", {})
        node.fit_sizes([5, 3], [4])
    assert caught.value.message == "expected vectors of one size, got 3 and 4 and 5"


def test_sizes_are_inferred_through_concatenations_and_selections() -> None:
    nodes = {"c": built_in("concatenate", {}), "d": built_in("exp", {"dim": 4})}
    ends = {"x": [("c", "0")], "y": [("c", "1")]}
    assert graph([(("c", ""), ("d", ""))], nodes, inputs=ends, sizes={"x": 1}).input_sizes({}) == (1, 3)
    assert graph([(("c", ""), ("d", ""))], nodes, inputs=ends, sizes={"y": 4}).input_sizes({}) == (0, 4)
    with pytest.raises(InvalidInput, match="unknown size"):
        graph([(("c", ""), ("d", ""))], nodes, inputs=ends)
    chosen = {"s": built_in("select", {"indices": [0, 2]})}
    assert graph(nodes=chosen, sizes={"s": 3}).output_sizes({}) == (2,)
    with pytest.raises(InvalidInput) as caught:
        graph(nodes=chosen, sizes={"s": 2})
    assert caught.value.message == "node 's': indices: expected indices below 2, got 2"


class Declares(VectorFunction):
    """Declares any sizes; the number of inputs may depend on the config."""

    name = ""

    def __init__(self, inputs: Any, outputs: Any) -> None:
        self.inputs, self.outputs = inputs, outputs

    def input_sizes(self, config: Config) -> Any:
        return [*self.inputs, *([1] if config else [])]

    def output_sizes(self, config: Config) -> Any:
        return self.outputs

    def evaluate(self, inputs: Vectors, config: Config) -> Any:
        return inputs[0]


@pytest.mark.parametrize(
    ("inputs", "outputs", "message"),
    [
        ([1.0], [1], "node 'n', input 0: expected a size of 0 or more, got 1.0"),
        ([1], [1, True], "node 'n', output 1: expected a size of 0 or more, got True"),
        ([-2], [1], "node 'n', input 0: expected a size of 0 or more, got -2"),
        (
            [1],
            [-1],
            "node 'n', output 0: unknown size; declare the size of the node, or of the graph's input that feeds it",
        ),
    ],
)
def test_declared_sizes_are_checked(inputs: Any, outputs: Any, message: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        graph(nodes={"n": Declares(inputs, outputs)})
    assert caught.value.message == message


def test_the_number_of_vectors_does_not_depend_on_a_config() -> None:
    graph_function = graph(nodes={"n": Declares([1], [1])})
    with pytest.raises(InvalidInput) as caught:
        graph_function.evaluate([np.zeros(1)], {"more": 1})
    assert caught.value.message == "node 'n': expected 1 inputs under this config, got 2"
    with pytest.raises(InvalidInput, match=r"^config: expected JSON values, got Object of type set is not JSON"):
        graph_function.evaluate([np.zeros(1)], {"more": {1}})


def test_errors_name_the_port() -> None:
    nodes = {"p": built_in("sum", {}), "q": built_in("split", {"sizes": [1, 1]})}
    for edge, message in (
        ((("q", "0"), ("p", "")), "node 'p': expected one of its 2 inputs, such as 'p.0'"),
        ((("q", ""), ("p", "0")), "node 'q': expected one of its 2 outputs, such as 'q.0'"),
        ((("q", "0"), ("p", "2")), "node 'p': expected the index of an input below 2, got '2'"),
    ):
        with pytest.raises(InvalidInput) as caught:
            graph([edge], nodes)
        assert caught.value.message == message
    with pytest.raises(InvalidInput) as caught:
        graph(nodes={"v": VectorFunction()})
    assert caught.value.message == "node 'v': VectorFunction does not implement input_sizes and output_sizes"


def test_sources_are_described() -> None:
    assert [describe_source(each) for each in (Port("a", 1), GraphInput(2), BoundValue(np.zeros(1)))] == [
        "'a.1'",
        "the graph's input 2",
        "a bound value",
    ]
    with pytest.raises(InvalidInput, match="expected one source, got the graph's input 0 and the graph's input 0"):
        graph(nodes={"e": built_in("exp", {})}, inputs={"x": [("e", ""), ("e", "")]})
    with pytest.raises(InvalidInput, match=r"expected one source, got 'e\.0' and a bound value"):
        nodes = {"e": built_in("exp", {}), "f": built_in("exp", {})}
        graph([(("e", ""), ("f", ""))], nodes, bound={("f", ""): np.zeros(1)})


def test_a_node_is_named_after_its_function() -> None:
    g = Graph()
    x = g.input("x", 1)
    for name in ("my f", "-x", "é"):
        function = Declares([1], [1])
        function.name = name
        g.output(g.add(function)(x), name)
    g.output(g.add(Declares([1], [1]))(x), "y")
    assert set(g.build().wiring.nodes) == {"my_f", "node", "_", "Declares"}


def test_a_node_gets_its_part_of_the_config() -> None:
    plain = VectorFunction()
    assert Node(name="n", function=plain).merge_config({"a": 1}) == {"a": 1}
    assert Node(name="n", function=plain, config={"b": 2}).merge_config({}) == {"b": 2}
    assert Node(name="n", function=plain, config={"b": 2}).merge_config({"a": 1, "b": 3}) == {"a": 1, "b": 2}
    assert Node(name="n", function=plain, passes=("a",)).merge_config({"a": 1, "c": 3}) == {"a": 1}
    assert Node(name="n", function=plain, config={"b": 2}, passes=()).merge_config({"a": 1}) == {"b": 2}


# --- what nodes return -------------------------------------------------------------------------------------


class ReturnsFixed(VectorFunction):
    """Return or raise a fixed value."""

    vectorised = True

    def __init__(self, result: Any, sizes: Sequence[int] = (1,)) -> None:
        self.result, self.sizes = result, sizes

    def input_sizes(self, config: Config) -> Sequence[int]:
        return (1,)

    def output_sizes(self, config: Config) -> Sequence[int]:
        return self.sizes

    def evaluate(self, inputs: Vectors, config: Config) -> Any:
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


def evaluate_two_rows(result: Any, sizes: Sequence[int] = (1,)) -> list[Any]:
    return graph(nodes={"n": ReturnsFixed(result, sizes)}).evaluate([np.zeros((2, 1))], {})


def test_rows_of_outputs_are_checked() -> None:
    rows = evaluate_two_rows(([1, 2], [[1, 2], [3, 4]]), (1, 2))
    assert [each.tolist() for each in rows] == [[[1], [2]], [[1, 2], [3, 4]]]
    assert not any(each.flags.writeable for each in rows)
    assert evaluate_two_rows(np.array([[1.0], [2.0]]))[0].tolist() == [[1], [2]]
    for output, sizes, message in (
        (np.zeros((3, 1)), (1,), "output 0: expected shape [2, 1], got [3, 1]"),
        ((np.zeros((2, 1)), np.zeros(2)), (1, 2), "output 1: expected shape [2, 2], got [2]"),
        ((1, 2, 3), (1, 1), "expected 2 outputs, got 3"),
    ):
        with pytest.raises(InvalidOutput) as caught:
            evaluate_two_rows(output, sizes)
        assert caught.value.message == f"node 'n': {message}"


def test_errors_of_nodes_keep_their_kind_and_get_the_name() -> None:
    errors = (
        (InvalidInput("no"), InvalidInput, "node 'n': no"),
        (ZeroDivisionError("by zero"), ModelFailed, "node 'n' failed: ZeroDivisionError: by zero"),
        (ValueError("x" * 2000), ModelFailed, f"node 'n' failed: ValueError: {'x' * 1000}"[:1000]),
    )
    for error, kind, message in errors:
        with pytest.raises(DragomanError) as caught:
            evaluate_two_rows(error)
        assert (type(caught.value), caught.value.message) == (kind, message)


class Counted(VectorFunction):
    """Counts its evaluations, and fails on negative numbers."""

    input_names, output_names = ("x",), ("y",)
    vectorised = True

    def __init__(self) -> None:
        self.calls = 0
        self.closed = 0

    def input_sizes(self, config: Config) -> Sequence[int]:
        return (1,)

    def output_sizes(self, config: Config) -> Sequence[int]:
        return (1,)

    def evaluate(self, inputs: Vectors, config: Config) -> Any:
        self.calls += 1
        if inputs[0].flat[0] < 0:
            raise ValueError("negative")
        return 2 * inputs[0]

    def close(self) -> None:
        self.closed += 1


def test_the_last_evaluations_are_cached() -> None:
    counted = Counted()
    remembered = EvaluationCache(counted, 2)

    def evaluate_at(x: float, **config: Any) -> Any:
        return remembered.evaluate([np.array([x])], config)[0].tolist()

    assert [evaluate_at(1), evaluate_at(2), evaluate_at(1)] == [[2], [4], [2]]
    assert counted.calls == 2
    assert [evaluate_at(3), evaluate_at(1)] == [[6], [2]]  # 2 was used longest ago
    assert counted.calls == 3
    assert [evaluate_at(2), evaluate_at(1)] == [[4], [2]]
    assert counted.calls == 4
    assert evaluate_at(1, level=2) == [2]
    assert counted.calls == 5
    for _ in range(2):
        with pytest.raises(ValueError, match="negative"):
            evaluate_at(-1)
    assert counted.calls == 7
    points = np.array([[1.0], [3.0]])
    assert [np.asarray(remembered.evaluate([points], {})).tolist() for _ in range(2)] == [[[2], [6]]] * 2
    assert counted.calls == 9


@pytest.mark.parametrize("make", [lambda f: EvaluationCache(f, 1), lambda f: ConcurrencyLimit(f, 1)])
def test_wrappers_forward_everything_else(make: Any) -> None:
    counted = Counted()
    around = make(counted)
    assert (around.input_names, around.output_names, around.vectorised) == (("x",), ("y",), True)
    assert (around.input_sizes({}), around.output_sizes({}), around.notes()) == ((1,), (1,), {})
    assert around.sources() == {"evaluate": "author"}
    assert np.asarray(around.evaluate([np.array([3.0])], {})).reshape(-1).tolist() == [6]
    around.close()
    assert counted.closed == 1


def test_nodes_that_prove_quick_get_no_thread() -> None:
    two = [make_node(name, Declares([1], [1])) for name in ("a", "b")]
    schedule = Schedule(plan_evaluation(wire(two, [])), [False, False])
    assert schedule.parallel
    assert (schedule.dependency_counts, schedule.dependents) == ([0, 0], [[], []])
    schedule.record(0, 1e-6)
    assert (schedule.cheap, schedule.parallel) == ([True, False], False)
    schedule.record(1, 1.0)
    assert (schedule.cheap, schedule.parallel) == ([True, False], False)
    schedule.record(0, 1.0)
    assert (schedule.cheap, schedule.parallel) == ([False, False], True)
    for _ in range(200):
        schedule.record(0, 1e-6)
    assert (schedule.cheap, schedule.parallel) == ([True, False], False)
    chain = Schedule(plan_evaluation(wire(two, [(("a", ""), ("b", ""))])), [False, False])
    assert (chain.dependency_counts, chain.dependents, chain.parallel) == ([0, 1], [[1], []], False)
