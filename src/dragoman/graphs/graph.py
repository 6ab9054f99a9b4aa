"""Graphs as one writes them in Python: functions are applied to values, and what comes of it is one function."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dragoman.core.errors import InvalidInput
from dragoman.core.tensor import NONE
from dragoman.core.vectors import Config, Vector, VectorFunction, carried_by
from dragoman.graphs.builtin import BUILT_IN, built_in
from dragoman.graphs.builtin_base import BuiltInNode, parse_numbers
from dragoman.graphs.function import GraphFunction
from dragoman.graphs.wiring import Bound, GraphInput, Node, Port, Source, wire
from dragoman.graphs.wrappers import ConcurrencyLimit, EvaluationCache

_NAME = re.compile(r"[A-Za-z_][\w-]*", re.ASCII)


class Graph:
    """Functions of vectors, coupled.

        g = Graph("posterior")
        m = g.input("m")
        field, beam = g.add(m2E), g.add(beam_model, config={"nx": 31})
        u = beam(field(m))
        g.output(g.gaussian_loglik(u, data=measured, cov=0.05) + g.gaussian_logpdf(m, dim=3))
        posterior = g.build()

    `g.NAME(values..., options...)` applies the built-in node of that name. `threads`: see `GraphFunction`.
    """

    def __init__(self, name: str = "graph", *, threads: int = 8) -> None:
        self.name = name
        self._threads = threads
        self._nodes: dict[str, Node] = {}
        self._sources: dict[tuple[str, str], Source] = {}
        self._inputs: dict[str, int | None] = {}
        self._outputs: dict[str, Port] = {}

    def input(self, name: str, size: int | None = None) -> "GraphValue":
        """A vector that the caller gives. Its size follows from what it feeds, unless it is said."""
        if name in self._inputs:
            raise InvalidInput(f"the graph has an input '{name}' already")
        self._inputs[name] = size
        return GraphValue(self, GraphInput(len(self._inputs) - 1))

    def add(
        self,
        function: Any,
        name: str = "",
        *,
        config: Config = NONE,
        passes: Sequence[str] | None = None,
        linear: bool = False,
        concurrency: int = 0,
        cache: int = 0,
    ) -> "BoundFunction":
        """A function that can be applied to values of this graph; each time it is, it becomes a node.

        function: a VectorFunction, or a function marked `@dragoman.vector_function`. config: is fixed, and goes before
        the caller's, of which `passes` names the keys that reach the node (None: all). linear: its second derivatives
        are zero, and its first ones the same everywhere, whether or not it tells so itself. concurrency: how many calls
        it gets at a time (0: any number). cache: how many of its last evaluations are kept (0: none).
        """
        known = vector_function(function)
        called = name or _called(function)
        told: dict[str, Any] = {"linear": linear, "concurrency": concurrency, "cache": cache}
        node = made_node(called, known, config=config, passes=passes, **told)
        return BoundFunction(self, node)

    def output(self, value: "GraphValue", name: str = "") -> None:
        """Make a value an output of the graph."""
        port = self._port(value)
        called = name or port.node
        if called in self._outputs:
            raise InvalidInput(f"the graph has an output '{called}' already; give this one another name")
        self._outputs[called] = port

    def build(self) -> GraphFunction:
        """The function that the graph computes. Raises InvalidInput where it makes no sense, naming node and port."""
        edges, bound = [], {}
        inputs: dict[str, list[tuple[str, str]]] = {name: [] for name in self._inputs}
        names = [*self._inputs]
        for end, source in self._sources.items():
            match source:
                case Port():
                    edges.append(((source.node, str(source.index)), end))
                case GraphInput():
                    inputs[names[source.index]].append(end)
                case Bound():
                    bound[end] = source.value
        outputs = {name: (port.node, str(port.index)) for name, port in self._outputs.items()}
        sizes = {name: size for name, size in self._inputs.items() if size is not None}
        wiring = wire(self._nodes.values(), edges, inputs, outputs, bound, sizes)
        return GraphFunction(wiring, name=self.name, threads=self._threads)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in BUILT_IN:
            raise AttributeError(f"a graph has no '{name}'; built-in nodes are {', '.join(BUILT_IN)}")

        def apply(*values: Any, **options: Any) -> Any:
            if name in ("sum", "product", "concatenate") and not options:
                options["n"] = len(values)
            return BoundFunction(self, made_node(name, built_in(name, options), label=name))(*values)

        return apply

    def _place(self, node: Node, sources: Sequence[Source]) -> "list[GraphValue]":
        """A new node, fed by these sources: its outputs."""
        name, count = node.name, 1
        while name in self._nodes:
            count += 1
            name = f"{node.name}_{count}"
        self._nodes[name] = replace(node, name=name)
        self._sources |= {(name, str(i)): source for i, source in enumerate(sources)}
        return [GraphValue(self, Port(name, o)) for o in range(len(node.function.output_sizes(node.config)))]

    def _port(self, value: "GraphValue") -> Port:
        if value.graph is not self:
            raise InvalidInput("this value belongs to another graph")
        if isinstance(value.source, Port):
            return value.source
        return self._port(self.identity(value))


class BoundFunction:
    """A function that a graph may hold: apply it to values, vectors or numbers, one for each input."""

    def __init__(self, graph: Graph, node: Node) -> None:
        self._graph = graph
        self._node = node

    def __call__(self, *values: Any) -> Any:
        """Its output, or a tuple of them where it has several. Raises InvalidInput where inputs are missing."""
        node = self._node
        wanted = len(node.function.input_sizes(node.config))
        if len(values) != wanted:
            raise InvalidInput(f"node '{node.name}': expected {wanted} inputs, got {len(values)}")
        sources = [self._source(value, i) for i, value in enumerate(values)]
        found = self._graph._place(node, sources)
        return found[0] if len(found) == 1 else tuple(found)

    def _source(self, value: Any, i: int) -> Source:
        if isinstance(value, GraphValue):
            if value.graph is not self._graph:
                raise InvalidInput(f"node '{self._node.name}', input {i}: this value belongs to another graph")
            return value.source
        return Bound(parse_numbers(value, f"node '{self._node.name}', input {i}").reshape(-1))


@dataclass(frozen=True, slots=True, eq=False)
class GraphValue:
    """A vector of a graph that is not computed yet: an input, or an output of a node."""

    graph: Graph
    source: Source

    # NumPy leaves operators to us.
    __array_ufunc__ = None

    def __add__(self, other: Any) -> "GraphValue":
        return self._affine(shift=other) if _plain(other) else _value(self.graph.sum(self, other))

    __radd__ = __add__

    def __sub__(self, other: Any) -> "GraphValue":
        if _plain(other):
            return self._affine(shift=-np.asarray(other, np.float64))
        return _value(self.graph.sum(self, other, weights=[1.0, -1.0]))

    def __rsub__(self, other: Any) -> "GraphValue":
        return self._affine(-1.0, other)

    def __neg__(self) -> "GraphValue":
        return self._affine(-1.0)

    def __mul__(self, other: Any) -> "GraphValue":
        return self._affine(other) if _plain(other) else _value(self.graph.product(self, other))

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> "GraphValue":
        if _plain(other):
            return self._affine(1 / np.asarray(other, np.float64))
        return self * _value(self.graph.reciprocal(other))

    def __rmatmul__(self, matrix: Any) -> "GraphValue":
        return _value(self.graph.linear(self, matrix=matrix))

    def __getitem__(self, places: Sequence[int] | Vector) -> "GraphValue":
        """The elements at these places, a list of whole numbers from 0."""
        return _value(self.graph.select(self, indices=[places] if isinstance(places, int) else places))

    def __iter__(self) -> Any:
        raise TypeError("a value of a graph has no members yet; value[[0, 2]] takes those at places, split cuts it")

    def _affine(self, factor: Any = 1.0, shift: Any = 0.0) -> "GraphValue":
        return _value(self.graph.scale(self, factor=factor, shift=shift))


def made_node(
    name: str,
    function: VectorFunction,
    *,
    config: Config = NONE,
    passes: Sequence[str] | None = None,
    linear: bool = False,
    concurrency: int = 0,
    cache: int = 0,
    label: str = "",
) -> Node:
    """A node, with what its function tells of itself and what `Graph.add` says of the rest.

    Raises InvalidInput where its name may not be one.
    """
    if not _NAME.fullmatch(name):
        raise InvalidInput(
            f"node name {name!r} is not allowed; expected letters, digits, '_' and '-', beginning with no digit"
        )
    affine = linear or getattr(function, "affine", False) or function.sources().get("apply_hessian") == "linear"
    is_built_in = isinstance(function, BuiltInNode)
    kind = type(function).__name__.lower()
    if concurrency and not is_built_in:
        function = ConcurrencyLimit(function, concurrency)
    if cache and not is_built_in:
        function = EvaluationCache(function, cache)
    return Node(
        name=name,
        function=function,
        config=config,
        passes=None if passes is None else tuple(passes),
        affine=affine,
        cheap=is_built_in,
        label=label or (kind if is_built_in else ""),
    )


def vector_function(function: Any) -> VectorFunction:
    """The VectorFunction that an object is, carries, or makes. Raises InvalidInput where there is none."""
    if isinstance(function, Graph):
        return function.build()
    if isinstance(function, type) and issubclass(function, VectorFunction):
        function = function()
    found = carried_by(function)
    if found is None:
        raise InvalidInput(
            f"{type(function).__name__} is no function of vectors; expected one marked @dragoman.vector_function, or a "
            "VectorFunction"
        )
    if found.derivatives is None:
        return found
    from dragoman.derivatives.decorator import build_vector_function  # only where derivatives are added

    return build_vector_function(found)


def _called(function: Any) -> str:
    name = getattr(function, "name", "") or getattr(function, "__name__", "") or type(function).__name__
    name = re.sub(r"[^\w-]", "_", str(name), flags=re.ASCII)
    return name if _NAME.fullmatch(name) else "node"


def _plain(value: Any) -> bool:
    """Whether it is a vector or number, not a value of a graph."""
    return not isinstance(value, GraphValue)


def _value(value: Any) -> GraphValue:
    assert isinstance(value, GraphValue)
    return value
