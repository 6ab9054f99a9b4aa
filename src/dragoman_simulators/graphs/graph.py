"""Build graphs in Python: apply functions to symbolic values, and get one function."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dragoman.core.errors import InvalidInput
from dragoman.core.tensor import NONE
from dragoman.core.vectors import Config, Vector, VectorFunction, find_vector_function
from dragoman_simulators.graphs.builtin import BUILT_IN, built_in
from dragoman_simulators.graphs.builtin_affine import BuiltInNode, parse_numbers
from dragoman_simulators.graphs.function import GraphFunction
from dragoman_simulators.graphs.wiring import BoundValue, GraphInput, Node, Port, Source, wire
from dragoman_simulators.graphs.wrappers import ConcurrencyLimit, EvaluationCache

_NAME = re.compile(r"[A-Za-z_][\w-]*", re.ASCII)


class Graph:
    """A graph of functions of vectors.

        g = Graph("posterior")
        m = g.input("m")
        field, beam = g.add(m2E), g.add(beam_model, config={"nx": 31})
        u = beam(field(m))
        g.output(g.gaussian_loglik(u, data=measured, cov=0.05) + g.gaussian_logpdf(m, dim=3))
        posterior = g.build()

    `g.NAME(values..., options...)` applies the built-in node NAME. `threads`: see `GraphFunction`.
    """

    def __init__(self, name: str = "graph", *, threads: int = 8) -> None:
        self.name = name
        self._threads = threads
        self._nodes: dict[str, Node] = {}
        self._sources: dict[tuple[str, str], Source] = {}
        self._inputs: dict[str, int | None] = {}
        self._outputs: dict[str, Port] = {}

    def input(self, name: str, size: int | None = None) -> "GraphValue":
        """Add an input of the graph. Without a size, it is inferred from the nodes that the input feeds."""
        if name in self._inputs:
            raise InvalidInput(f"duplicate input '{name}'")
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
        """Return a function that can be applied to values of this graph; every application is a node.

        Parameters
        ----------
        function : a VectorFunction, or a function marked with `@dragoman.vector_function`.
        config : fixed entries, which override those of the caller.
        passes : the keys of the caller's config that the node gets; None for those that the function accepts.
        linear : declares that second derivatives are zero and first ones the same everywhere.
        concurrency : maximum number of concurrent calls; 0 for no limit.
        cache : number of evaluations to cache; 0 for none.
        """
        node = make_node(
            name or _default_name(function),
            vector_function(function),
            config=config,
            passes=passes,
            linear=linear,
            concurrency=concurrency,
            cache=cache,
        )
        return BoundFunction(self, node)

    def output(self, value: "GraphValue", name: str = "") -> None:
        port = self._port(value)
        name = name or port.node
        if name in self._outputs:
            raise InvalidInput(f"duplicate output '{name}'")
        self._outputs[name] = port

    def build(self) -> GraphFunction:
        """Return the function that the graph computes. Raises InvalidInput naming node and port."""
        edges, bound = [], {}
        inputs: dict[str, list[tuple[str, str]]] = {name: [] for name in self._inputs}
        names = [*self._inputs]
        for end, source in self._sources.items():
            match source:
                case Port():
                    edges.append(((source.node, str(source.index)), end))
                case GraphInput():
                    inputs[names[source.index]].append(end)
                case BoundValue():
                    bound[end] = source.value
        outputs = {name: (port.node, str(port.index)) for name, port in self._outputs.items()}
        sizes = {name: size for name, size in self._inputs.items() if size is not None}
        wiring = wire(self._nodes.values(), edges, inputs, outputs, bound, sizes)
        return GraphFunction(wiring, name=self.name, threads=self._threads)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in BUILT_IN:
            raise AttributeError(f"unknown built-in node '{name}': expected one of {', '.join(BUILT_IN)}")

        def apply(*values: Any, **options: Any) -> Any:
            if name in ("sum", "product", "concatenate") and not options:
                options["n"] = len(values)
            return BoundFunction(self, make_node(name, built_in(name, options), label=name))(*values)

        return apply

    def _add_node(self, node: Node, sources: Sequence[Source]) -> "list[GraphValue]":
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
    """A function that becomes a node of a graph when it is applied to values, vectors or numbers, one per input."""

    def __init__(self, graph: Graph, node: Node) -> None:
        self._graph = graph
        self._node = node

    def __call__(self, *values: Any) -> Any:
        """Return the output, or a tuple of several. Raises InvalidInput if the number of inputs is wrong."""
        node = self._node
        expected = len(node.function.input_sizes(node.config))
        if len(values) != expected:
            raise InvalidInput(f"node '{node.name}': expected {expected} inputs, got {len(values)}")
        outputs = self._graph._add_node(node, [self._source(value, i) for i, value in enumerate(values)])
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def _source(self, value: Any, i: int) -> Source:
        if isinstance(value, GraphValue):
            if value.graph is not self._graph:
                raise InvalidInput(f"node '{self._node.name}', input {i}: this value belongs to another graph")
            return value.source
        return BoundValue(parse_numbers(value, f"node '{self._node.name}', input {i}").reshape(-1))


@dataclass(frozen=True, slots=True, eq=False)
class GraphValue:
    """A symbolic vector of a graph: an input, or an output of a node."""

    graph: Graph
    source: Source

    # NumPy arrays leave binary operators to this class.
    __array_ufunc__ = None

    def __add__(self, other: Any) -> "GraphValue":
        return self._affine(shift=other) if _is_constant(other) else _value(self.graph.sum(self, other))

    __radd__ = __add__

    def __sub__(self, other: Any) -> "GraphValue":
        if _is_constant(other):
            return self._affine(shift=-np.asarray(other, np.float64))
        return _value(self.graph.sum(self, other, weights=[1.0, -1.0]))

    def __rsub__(self, other: Any) -> "GraphValue":
        return self._affine(-1.0, other)

    def __neg__(self) -> "GraphValue":
        return self._affine(-1.0)

    def __mul__(self, other: Any) -> "GraphValue":
        return self._affine(other) if _is_constant(other) else _value(self.graph.product(self, other))

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> "GraphValue":
        if _is_constant(other):
            return self._affine(1 / np.asarray(other, np.float64))
        return self * _value(self.graph.reciprocal(other))

    def __rmatmul__(self, matrix: Any) -> "GraphValue":
        return _value(self.graph.linear(self, matrix=matrix))

    def __getitem__(self, indices: int | Sequence[int] | Vector) -> "GraphValue":
        """Select elements by their indices, integers from 0."""
        return _value(self.graph.select(self, indices=[indices] if isinstance(indices, int) else indices))

    def __iter__(self) -> Any:
        raise TypeError("a graph value cannot be iterated: select elements with value[[0, 2]], or use split")

    def _affine(self, factor: Any = 1.0, shift: Any = 0.0) -> "GraphValue":
        return _value(self.graph.scale(self, factor=factor, shift=shift))


def make_node(
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
    """Return a node; the parameters are those of `Graph.add`. Raises InvalidInput if the name is invalid."""
    if not _NAME.fullmatch(name):
        raise InvalidInput(
            f"invalid node name {name!r}: expected letters, digits, '_' and '-', beginning with a letter or '_'"
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
    """Return the VectorFunction that an object is, carries or builds. Raises InvalidInput if there is none."""
    if isinstance(function, Graph):
        return function.build()
    if isinstance(function, type) and issubclass(function, VectorFunction):
        function = function()
    result = find_vector_function(function)
    if result is None:
        raise InvalidInput(
            f"{type(function).__name__} is not a vector function: expected a VectorFunction, or a function marked with "
            "@dragoman.vector_function"
        )
    if isinstance(result, BuiltInNode | GraphFunction):
        return result
    from dragoman_simulators.derivatives.decorator import build_vector_function  # imported only for functions of users

    return build_vector_function(result)


def _default_name(function: Any) -> str:
    name = getattr(function, "name", "") or getattr(function, "__name__", "") or type(function).__name__
    name = re.sub(r"[^\w-]", "_", str(name), flags=re.ASCII)
    return name if _NAME.fullmatch(name) else "node"


def _is_constant(value: Any) -> bool:
    return not isinstance(value, GraphValue)


def _value(value: Any) -> GraphValue:
    assert isinstance(value, GraphValue)
    return value
