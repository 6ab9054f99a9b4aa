"""Scheduling of graphs: only the nodes that are needed, independent ones concurrently."""

import contextlib
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from dragoman.core.errors import InvalidInput, InvalidOutput, ModelFailed, NotSupported
from dragoman.core.vectors import Config, Vector, VectorFunction, Vectors
from dragoman_simulators.graphs.graph import Graph
from e2e.server_process import wait_until
from features.simulators.graphs.ridge import Ridge


def take_counts(*ridges: Ridge) -> list[dict[str, int]]:
    counts = [dict(ridge.calls) for ridge in ridges]
    for ridge in ridges:
        ridge.calls.clear()
    return counts


def test_nodes_outside_the_subgraph_are_not_called() -> None:
    first, second, other = (Ridge([2], [2], ["sin"], seed) for seed in range(3))
    g = Graph()
    x, y = g.input("x"), g.input("y", 2)
    u = g.add(first, "first")(x)
    g.output(g.add(second, "second")(u), "through")
    g.add(other, "other")(u)  # leads nowhere
    g.output(g.exp(y), "apart")
    graph = g.build()
    at, one = [np.ones(2), np.ones(2)], np.ones(2)
    graph.evaluate(at, {})
    assert take_counts(first, second, other) == [{"evaluate": 1}, {"evaluate": 1}, {}]
    graph.gradient(0, 0, at, one, {})
    assert take_counts(first, second, other) == [{"evaluate": 1, "gradient": 1}, {"gradient": 1}, {}]
    graph.apply_jacobian(0, 0, at, one, {})
    assert take_counts(first, second, other) == [{"evaluate": 1, "apply_jacobian": 1}, {"apply_jacobian": 1}, {}]
    graph.apply_hessian(0, 0, 0, at, one, one, {})
    expected = {"evaluate": 1, "apply_jacobian": 1, "gradient": 1, "apply_hessian": 1}
    assert take_counts(first, second, other) == [expected, {"gradient": 1, "apply_hessian": 1}, {}]
    for o, i in ((0, 1), (1, 0)):  # no way leads from the one to the other
        assert not graph.gradient(o, i, at, one, {}).any()
        assert not graph.apply_jacobian(o, i, at, one, {}).any()
        assert not graph.apply_hessian(o, 0, i, at, one, one, {}).any()
    assert take_counts(first, second, other) == [{}, {}, {}]


def test_nodes_before_an_affine_node_are_not_evaluated() -> None:
    ridge = Ridge([2], [3], ["sin"], 1)
    g = Graph()
    x = g.input("x")
    g.output(np.ones((1, 3)) @ g.add(ridge)(x) + g.gaussian_logpdf(x))
    graph = g.build()
    graph.gradient(0, 0, [np.ones(2)], np.ones(1), {})
    assert take_counts(ridge) == [{"gradient": 1}]
    graph.apply_hessian(0, 0, 0, [np.ones(2)], np.ones(1), np.ones(2), {})
    assert take_counts(ridge) == [{"apply_hessian": 1}]


class Doubles(VectorFunction):
    """y = 2 x, without ApplyHessian; `meets` other nodes in the middle of a call."""

    def __init__(self, meeting: threading.Barrier | None = None) -> None:
        self.meeting = meeting

    def input_sizes(self, config: Config) -> Sequence[int]:
        return [config.get("size", 2)]

    def output_sizes(self, config: Config) -> Sequence[int]:
        return [config.get("size", 2)]

    def evaluate(self, inputs: Vectors, config: Config) -> Any:
        self._meet()
        return 2 * inputs[0]

    def gradient(self, output: int, input: int, inputs: Vectors, sens: Vector, config: Config) -> Any:  # noqa: A002
        self._meet()
        return 2 * sens

    def apply_jacobian(self, output: int, input: int, inputs: Vectors, vec: Vector, config: Config) -> Any:  # noqa: A002
        self._meet()
        return 2 * vec

    def _meet(self) -> None:
        if self.meeting is not None:
            self.meeting.wait(60)


@pytest.mark.parametrize("threads", [4, 1])
def test_branches_run_at_the_same_time(threads: int) -> None:
    """Each branch waits in the middle of its call until the other is there too."""
    meeting = threading.Barrier(2)
    g = Graph(threads=threads)
    x = g.input("x")
    left = g.add(Doubles(meeting), "left")(g.add(Doubles(), "before")(x))
    right = g.add(Doubles(meeting), "right")(x)
    g.output(g.sum(left, right))
    graph = g.build()
    at, one = [np.ones(2)], np.ones(2)
    assert graph.evaluate(at, {})[0].tolist() == [6, 6]
    assert graph.gradient(0, 0, at, one, {}).tolist() == [6, 6]
    assert graph.apply_jacobian(0, 0, at, one, {}).tolist() == [6, 6]
    graph.close()


def test_a_slow_branch_does_not_block_another() -> None:
    """The other branch goes through all its steps while the first is in the middle of its only one."""
    done = threading.Event()

    class Waits(Doubles):
        def evaluate(self, inputs: Vectors, config: Config) -> Any:
            assert done.wait(60)
            return inputs[0]

    class Signals(Doubles):
        def evaluate(self, inputs: Vectors, config: Config) -> Any:
            done.set()
            return inputs[0]

    for turn in range(2):
        done.clear()
        g = Graph(threads=2)
        x = g.input("x")
        branches = [g.add(Waits())(x), g.add(Signals())(g.add(Doubles())(g.exp(g.add(Doubles())(x))))]
        g.output(g.sum(*(branches if turn else reversed(branches))))
        graph = g.build()
        graph.evaluate([np.ones(2)], {})
        graph.close()


def test_a_call_finishes_if_the_graph_is_closed_during_it() -> None:
    class Closes(Doubles):
        def evaluate(self, inputs: Vectors, config: Config) -> Any:
            graph.close()
            return inputs[0]

    g = Graph(threads=2)
    x = g.add(Closes())(g.input("x"))
    g.output(g.sum(*(g.add(Doubles())(x) for _ in range(5)), g.add(Doubles())(g.add(Doubles())(x))))
    graph = g.build()
    assert graph.evaluate([np.ones(2)], {})[0].tolist() == [14, 14]


def test_steps_that_prove_quick_run_in_one_thread() -> None:
    where: set[int] = set()

    class RecordsThread(Doubles):
        def __init__(self) -> None:
            super().__init__()
            self.slow = False

        def evaluate(self, inputs: Vectors, config: Config) -> Any:
            where.add(threading.get_ident())
            if self.slow:
                time.sleep(0.01)
            return inputs[0]

    g = Graph()
    x = g.input("x")
    nodes = [RecordsThread() for _ in range(4)]
    g.output(g.sum(*(g.add(node)(x) for node in nodes)))
    graph = g.build()

    def threads() -> int:
        where.clear()
        graph.evaluate([np.ones(2)], {})
        return len(where)

    wait_until(lambda: threads() == 1, "all steps are taken in one thread")
    for node in nodes:
        node.slow = True
    graph.evaluate([np.ones(2)], {})
    assert threads() > 1
    graph.close()


def test_many_calls_share_the_threads() -> None:
    ridges = [Ridge([2], [2], ["sin"], seed) for seed in range(6)]
    g = Graph(threads=2)
    x = g.input("x")
    g.output(g.sum(*(g.add(ridge)(x) for ridge in ridges)))
    graph = g.build()
    points = [np.array([i, 1.0]) for i in range(20)]
    expected = [graph.evaluate([p], {})[0] for p in points]
    results: dict[int, Any] = {}

    def send_request(i: int) -> None:
        results[i] = graph.evaluate([points[i]], {})[0]

    threads = [threading.Thread(target=send_request, args=(i,)) for i in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert [results[i].tolist() for i in range(20)] == [w.tolist() for w in expected]  # to the last bit
    graph.close()


def test_abilities_follow_from_the_nodes() -> None:
    g = Graph()
    x, y = g.input("x"), g.input("y", 2)
    g.output(g.gaussian_logpdf(g.add(Doubles(), "doubles")(x)), "a")
    g.output(g.gaussian_logpdf(g.exp(y)), "b")
    graph = g.build()
    assert graph.sources() == {"evaluate": "graph", "gradient": "graph", "apply_jacobian": "graph"}
    at = [np.ones(2), np.ones(2)]
    assert graph.apply_hessian(1, 1, 1, at, np.ones(1), np.ones(2), {}).shape == (2,)
    with pytest.raises(NotSupported, match="apply_hessian: node 'doubles' does not support apply_hessian"):
        graph.apply_hessian(0, 0, 0, at, np.ones(1), np.ones(2), {})


def test_a_node_declared_linear_needs_no_hessian() -> None:
    g = Graph()
    x = g.input("x")
    g.output(g.gaussian_logpdf(g.add(Doubles(), linear=True)(g.square(x))))
    graph = g.build()
    assert "apply_hessian" in graph.sources()
    # -½ |2 x²|²: its second derivative is -24 x².
    result = graph.apply_hessian(0, 0, 0, [np.array([1.0, 2.0])], np.ones(1), np.ones(2), {})
    np.testing.assert_allclose(result, [-24, -96])


def test_a_node_may_cache_evaluations() -> None:
    ridge, end = Ridge([2], [2], ["sin"], 1), Ridge([2], [1], ["exp"], 2)
    g = Graph()
    g.output(g.add(end, "end")(g.add(ridge, "kept", cache=2)(g.input("x"))))
    graph = g.build()
    points = [np.array([0.1 * i, 1.0]) for i in range(3)]
    plain = [end.evaluate(ridge.evaluate([p], {}), {})[0] for p in points]
    take_counts(ridge, end)
    for p, expected in zip(points, plain, strict=True):
        assert graph.evaluate([p], {})[0].tolist() == expected.tolist()
        graph.gradient(0, 0, [p], np.ones(1), {})
    assert take_counts(ridge, end) == [{"evaluate": 3, "gradient": 3}, {"evaluate": 3, "gradient": 3}]
    graph.evaluate([points[2]], {})
    graph.evaluate([points[0]], {})  # forgotten: the last two are kept
    assert take_counts(ridge)[0] == {"evaluate": 1}
    graph.evaluate([points[0]], {"level": 1})  # another config is another question
    assert take_counts(ridge)[0] == {"evaluate": 1}


def test_concurrent_equal_evaluations_are_computed_once() -> None:
    started, proceed = threading.Event(), threading.Event()
    count = 0

    class Slow(Doubles):
        def evaluate(self, inputs: Vectors, config: Config) -> Any:
            nonlocal count
            count += 1
            started.set()
            assert proceed.wait(60)
            if count == 1:
                raise ValueError("the first time")
            return 2 * inputs[0]

    g = Graph(threads=0)
    g.output(g.add(Slow(), "slow", cache=4)(g.input("x")))
    graph = g.build()
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(graph.evaluate, [np.ones(2)], {})
        assert started.wait(60)
        second = threads.submit(graph.evaluate, [np.ones(2)], {})
        proceed.set()
        with pytest.raises(ModelFailed, match="the first time"):
            first.result(60)
        with contextlib.suppress(ModelFailed):  # it shares that fault, or came too late for it
            second.result(60)
    assert graph.evaluate([np.ones(2)], {})[0].tolist() == [2, 2]  # faults are not kept
    evaluations = count
    assert graph.evaluate([np.ones(2)], {})[0].tolist() == [2, 2]
    assert count == evaluations


# --- config ----------------------------------------------------------------------------------------------


def test_config_reaches_the_nodes_that_it_is_passed_to() -> None:
    configs: dict[str, Config] = {}

    class RecordsConfig(Doubles):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def evaluate(self, inputs: Vectors, config: Config) -> Any:
            configs[self.name] = config
            return inputs[0]

    g = Graph()
    x = g.input("x")
    a = g.add(RecordsConfig("all"))(x)
    b = g.add(RecordsConfig("fixed"), config={"level": 3})(a)
    c = g.add(RecordsConfig("some"), passes=["size"])(b)
    g.output(g.add(RecordsConfig("none"), config={"size": 2}, passes=())(c[[0, 1]]))
    graph = g.build()
    assert list(graph.input_sizes({})) == [2]
    assert list(graph.input_sizes({"size": 3})) == [3]
    graph.evaluate([np.ones(3)], {"size": 3, "level": 1})
    assert configs == {
        "all": {"size": 3, "level": 1},
        "fixed": {"size": 3, "level": 3},
        "some": {"size": 3},
        "none": {"size": 2},
    }
    with pytest.raises(InvalidInput, match=r"node 'select': indices: expected indices below 1, got 1"):
        graph.input_sizes({"size": 1})


# --- errors ----------------------------------------------------------------------------------------------


class Outcome(Doubles):
    """Return or raise `outcome`."""

    def __init__(self, outcome: Any) -> None:
        super().__init__()
        self.outcome = outcome

    def evaluate(self, inputs: Vectors, config: Config) -> Any:
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome

    gradient = apply_jacobian = lambda self, *_: self.evaluate((), {})  # type: ignore[assignment]


@pytest.mark.parametrize("threads", [0, 4])
@pytest.mark.parametrize(
    ("outcome", "kind", "message"),
    [
        (InvalidInput("E must be above 0"), InvalidInput, "node 'bad': E must be above 0"),
        (ValueError("singular"), ModelFailed, "node 'bad' failed: ValueError: singular"),
        ([1.0, 2.0, 3.0], InvalidOutput, "node 'bad': output 0: expected 2 numbers, got 3"),
        (([1.0, 2.0], [3.0]), InvalidOutput, "node 'bad': expected 1 output vectors, got 2"),
        ("text", InvalidOutput, "node 'bad': output 0: expected real numbers, got str of str128"),
        (None, InvalidOutput, "node 'bad': output 0: expected real numbers, got NoneType of object"),
    ],
)
def test_errors_name_the_node(threads: int, outcome: Any, kind: type[Exception], message: str) -> None:
    g = Graph(threads=threads)
    x = g.input("x")
    g.output(g.sum(g.add(Outcome(outcome), "bad")(x), g.add(Doubles(), "good")(x)))
    graph = g.build()
    with pytest.raises(kind) as error:
        graph.evaluate([np.ones(2)], {})
    assert str(error.value) == message
    if isinstance(outcome, list):
        with pytest.raises(kind, match="node 'bad': gradient: expected 2 numbers, got 3"):
            graph.gradient(0, 0, [np.ones(2)], np.ones(2), {})
    graph.close()


def test_a_node_cannot_change_what_others_get() -> None:
    class WritesInput(Doubles):
        def evaluate(self, inputs: Vectors, config: Config) -> Any:
            inputs[0][0] = 7
            return inputs[0]

    g = Graph()
    u = g.exp(g.input("x"))
    g.output(g.sum(g.add(WritesInput(), "writes")(u), u))
    point = np.ones(2)
    assert g.build().evaluate([point], {})[0].tolist() == [7 + np.e, 2 * np.e]
    assert point.tolist() == [1, 1]


# --- configs and errors of nodes ------------------------------------------------------------------------------


def test_a_node_gets_the_entries_that_its_function_accepts() -> None:
    import dragoman

    @dragoman.vector_function(inputs=[2])
    def scaled(x: Any, *, scale: float = 1.0) -> Any:
        return scale * x

    @dragoman.vector_function(inputs=[2])
    def shifted(x: Any) -> Any:
        return x + 1

    g = Graph()
    g.output(g.exp(g.add(shifted)(g.add(scaled)(g.input("x")))))
    function = g.build()
    np.testing.assert_allclose(function.evaluate([np.ones(2)], {"scale": 2.0})[0], np.exp([3, 3]))
    sens = np.ones(2)
    np.testing.assert_allclose(function.gradient(0, 0, [sens], sens, {"scale": 2.0}), 2 * np.exp([3, 3]))
    message = "config: unexpected entry 'scal': expected an entry that a node of the graph accepts"
    with pytest.raises(InvalidInput, match=message):
        function.evaluate([sens], {"scal": 2.0})
    with pytest.raises(InvalidInput, match="config: entry 'scale': expected a number, got 'two'"):
        function.evaluate([sens], {"scale": "two"})


def test_an_overflow_within_a_graph_is_no_fault_of_the_client() -> None:
    import dragoman

    @dragoman.vector_function(inputs=[1])
    def squared(x: Any) -> Any:
        return x**2

    g = Graph()
    g.output(g.add(squared)(g.exp(g.input("x"))))
    function = g.build()
    message = r"node 'exp', output 0: expected finite numbers, got inf, which node 'squared' rejects"
    with pytest.raises(InvalidOutput, match=message), np.errstate(over="ignore"):
        function.gradient(0, 0, [np.array([1000.0])], np.ones(1), {})
    with pytest.raises(InvalidInput, match="expected a finite number, got inf"):  # the client's own
        alone = Graph()
        alone.output(alone.add(squared)(alone.input("x")))
        alone.build().gradient(0, 0, [np.array([np.inf])], np.ones(1), {})


def test_a_missing_derivative_names_the_node_and_the_reason() -> None:
    import dragoman

    @dragoman.vector_function(inputs=[2], outputs=[1])
    def table(x: Any) -> Any:
        return np.array([np.interp(x[0], [0.0, 1.0], [0.0, 2.0]) * x[1]])

    g = Graph()
    g.output(g.exp(g.add(table)(g.input("x"))))
    function = g.build()
    reason = function.missing()["gradient"]
    assert reason.startswith("node 'table' does not support gradient: 'table' is not analytic")
    assert "it uses np.interp; write it in JAX or PyTorch" in reason
    with pytest.raises(NotSupported, match="gradient: node 'table' does not support gradient: 'table' is not analytic"):
        function.gradient(0, 0, [np.ones(2)], np.ones(1), {})
