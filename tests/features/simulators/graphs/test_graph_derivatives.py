"""Derivatives of random graphs are those of the same function written whole in PyTorch."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.core.vectors import ABILITIES, Ability, Vector
from dragoman_simulators.graphs import plan
from dragoman_simulators.graphs.function import GraphFunction
from dragoman_simulators.graphs.graph import Graph, GraphValue
from features.simulators.graphs.ridge import Ridge

# What torch.func.jvp does inside.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")

Whole = Callable[..., list[torch.Tensor]]
_KINDS = st.sampled_from(["sin", "cubic", "exp"])


@dataclass
class RandomGraph:
    """A graph, the same function in PyTorch, and its nodes that are no built-in ones."""

    graph: GraphFunction
    by_torch: Whole
    ridges: list[Ridge]
    sizes: list[int] = field(default_factory=list)


@st.composite
def graphs(draw: st.DrawFn) -> RandomGraph:
    """Nodes of several inputs and outputs, fed by earlier ones, graph inputs, constants and bound values at random."""
    g = Graph(threads=draw(st.sampled_from([0, 4])))
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    values: list[tuple[GraphValue, int]] = [(g.input(f"x{i}", n), n) for i, n in enumerate(sizes)]
    steps: list[Callable[[list[torch.Tensor]], list[torch.Tensor]]] = []
    ridges: list[Ridge] = []
    for _ in range(draw(st.integers(1, 5))):
        match draw(st.sampled_from(["ridge", "ridge", "ridge", "product", "sum", "concatenate", "split", "constant"])):
            case "ridge":
                _add_ridge(draw, g, values, steps, ridges)
            case "constant":
                value = np.array(draw(st.lists(st.floats(-1, 1), min_size=1, max_size=3)))
                values.append((g.constant(value=value), len(value)))
                steps.append(partial(_constant, torch.from_numpy(value)))
            case kind:
                _add_built_in(draw, kind, g, values, steps)
    unused = list(range(len(sizes)))
    _add_ridge(draw, g, values, steps, ridges, unused)  # every input feeds something
    later = range(len(sizes), len(values))
    chosen = draw(st.lists(st.sampled_from(later), min_size=1, max_size=3, unique=True))
    for i in chosen:
        g.output(values[i][0], f"y{i}")

    def whole(*x: torch.Tensor) -> list[torch.Tensor]:
        known = [*x]
        for step in steps:
            known += step(known)
        return [known[i] for i in chosen]

    return RandomGraph(g.build(), whole, ridges, sizes)


def _add_ridge(
    draw: st.DrawFn, g: Graph, values: list[Any], steps: list[Any], ridges: list[Ridge], must: list[int] | None = None
) -> None:
    picked = draw(st.lists(st.integers(0, len(values) - 1), min_size=1, max_size=3)) if must is None else must
    kinds = draw(st.lists(_KINDS, min_size=1, max_size=3))
    outputs = [draw(st.integers(1, 3)) for _ in kinds]
    bound = np.array([0.3, -0.2]) if draw(st.booleans()) else None
    inputs = [values[i][1] for i in picked] + ([2] if bound is not None else [])
    ridge = Ridge(inputs, outputs, kinds, draw(st.integers(0, 1000)))
    built = g.add(ridge, "ridge")(*(values[i][0] for i in picked), *([bound] if bound is not None else []))
    values += zip(built if isinstance(built, tuple) else (built,), outputs, strict=True)
    extra = [] if bound is None else [torch.from_numpy(bound)]
    steps.append(lambda known: ridge.by_torch([known[i] for i in picked] + extra))
    ridges.append(ridge)


def _add_built_in(draw: st.DrawFn, kind: str, g: Graph, values: list[Any], steps: list[Any]) -> None:
    i = draw(st.integers(0, len(values) - 1))
    same = [k for k, (_, n) in enumerate(values) if n == values[i][1]]
    j = draw(st.sampled_from(same))
    (a, n), (b, _) = values[i], values[j]
    match kind:
        case "product":
            values.append((a * b, n))
            steps.append(lambda known: [known[i] * known[j]])
        case "sum":
            values.append((2.0 * a - b, n))
            steps.append(lambda known: [2.0 * known[i] - known[j]])
        case "concatenate":
            values.append((g.concatenate(a, b), 2 * n))
            steps.append(lambda known: [torch.cat([known[i], known[j]])])
        case _:
            values += zip(g.split(g.concatenate(a, b), sizes=[1, 2 * n - 1]), [1, 2 * n - 1], strict=True)
            steps.append(lambda known: [*torch.split(torch.cat([known[i], known[j]]), [1, 2 * n - 1])])


def _constant(value: torch.Tensor, known: list[torch.Tensor]) -> list[torch.Tensor]:
    return [value]


def _near(actual: Any, expected: torch.Tensor) -> None:
    np.testing.assert_allclose(actual, expected.detach().numpy(), rtol=1e-9, atol=1e-9)


@settings(max_examples=60, deadline=None)
@given(graphs(), st.integers(0, 1000))
def test_derivatives_equal_those_of_torch(random_graph: RandomGraph, seed: int) -> None:
    graph, random = random_graph.graph, np.random.default_rng(seed)
    x = [random.normal(size=n) for n in random_graph.sizes]
    at = tuple(torch.from_numpy(v) for v in x)
    outputs = graph.output_sizes({})
    for actual, expected in zip(graph.evaluate(x, {}), random_graph.by_torch(*at), strict=True):
        _near(actual, expected)
    o, i, j = (int(random.integers(n)) for n in (len(outputs), len(x), len(x)))
    sens, vec = random.normal(size=outputs[o]), random.normal(size=random_graph.sizes[j])

    def output(*point: torch.Tensor) -> torch.Tensor:
        return random_graph.by_torch(*point)[o]

    def adjoint(*point: torch.Tensor) -> torch.Tensor:
        expected_gradient = torch.func.vjp(lambda *p: random_graph.by_torch(*p)[o], *point)[1](torch.from_numpy(sens))[
            i
        ]
        assert isinstance(expected_gradient, torch.Tensor)
        return expected_gradient

    directions = tuple(torch.from_numpy(vec) if k == j else torch.zeros_like(v) for k, v in enumerate(at))
    _near(graph.gradient(o, i, x, sens, {}), adjoint(*at))
    _near(
        graph.apply_jacobian(o, j, x, vec, {}),
        torch.func.jvp(lambda *p: random_graph.by_torch(*p)[o], at, directions)[1],
    )
    _near(graph.apply_hessian(o, i, j, x, sens, vec, {}), torch.func.jvp(adjoint, at, directions)[1])
    graph.close()


@settings(max_examples=60, deadline=None)
@given(graphs())
def test_no_step_is_planned_twice(random_graph: RandomGraph) -> None:
    graph = random_graph.graph
    x = [np.full(n, 0.4) for n in random_graph.sizes]
    sens, vec = np.ones(graph.output_sizes({})[0]), np.ones(random_graph.sizes[0])
    for call in (
        lambda: graph.evaluate(x, {}),
        lambda: graph.gradient(0, 0, x, sens, {}),
        lambda: graph.apply_jacobian(0, 0, x, vec, {}),
        lambda: graph.apply_hessian(0, 0, 0, x, sens, vec, {}),
    ):
        for ridge in random_graph.ridges:
            ridge.calls.clear()
        call()
        for ridge in random_graph.ridges:
            pairs = len(ridge.inputs) * len(ridge.outputs)
            assert ridge.calls["evaluate"] <= 1
            assert ridge.calls["apply_jacobian"] <= pairs
            assert ridge.calls["gradient"] <= 2 * pairs
            assert ridge.calls["apply_hessian"] <= pairs * len(ridge.inputs)
    graph.close()


def test_zero_seeds_call_no_node() -> None:
    ridge = Ridge([2], [2], ["sin"], 1)
    g = Graph()
    g.output(g.add(ridge)(g.input("x")))
    graph = g.build()
    result: Vector = graph.gradient(0, 0, [np.ones(2)], np.zeros(2), {})
    assert result.tolist() == [0, 0]
    assert ridge.calls["gradient"] == 0


@settings(max_examples=60, deadline=None)
@given(graphs(), st.sampled_from(ABILITIES[1:]), st.integers(0, 9))
def test_abilities_hold_for_all_inputs_and_outputs(random_graph: RandomGraph, missing: Ability, which: int) -> None:
    """One node loses an ability: the graph keeps those that it has for every input and output."""
    graph, ridge = random_graph.graph, random_graph.ridges[which % len(random_graph.ridges)]
    ridge.sources = lambda: {a: "author" for a in ABILITIES if a != missing}  # type: ignore[method-assign]
    built = GraphFunction(graph.wiring, threads=0)
    outputs, inputs = range(len(built.output_names)), range(len(random_graph.sizes))

    def requested(ability: Ability) -> bool:
        match ability:
            case "evaluate":
                plans = [plan.plan_evaluation(built.wiring)]
            case "gradient":
                plans = [plan.plan_gradient(built.wiring, o, i) for o in outputs for i in inputs]
            case "apply_jacobian":
                plans = [plan.plan_jacobian(built.wiring, o, i) for o in outputs for i in inputs]
            case _:
                plans = [plan.plan_hessian(built.wiring, o, i, j) for o in outputs for i in inputs for j in inputs]
        nodes = built.wiring.nodes
        return any(nodes[s.node].function is ridge and s.ability == missing for p in plans for s in p.steps)

    assert {a for a in ABILITIES if a not in built.sources()} == {a for a in ABILITIES if requested(a)}
    graph.close()
