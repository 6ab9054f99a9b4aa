"""How the nodes of a graph hang together: every input of every node has one source, and there is no circle."""

import graphlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from dragoman.core.errors import InvalidInput
from dragoman.core.tensor import NONE
from dragoman.core.vectors import Config, Vector, VectorFunction


@dataclass(frozen=True, slots=True)
class Port:
    """An output, or an input, of a node."""

    node: str
    index: int

    def __str__(self) -> str:
        return f"{self.node}.{self.index}"


@dataclass(frozen=True, slots=True)
class GraphInput:
    """The source of an input that the caller of the graph fills."""

    index: int


@dataclass(frozen=True, slots=True, eq=False)
class Bound:
    """The source of an input that never changes."""

    value: Vector


Source = Port | GraphInput | Bound


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Node:
    """A function at its place in a graph.

    `config` is fixed and goes before the caller's; of the caller's, `passes` names the keys that reach the node (None:
    all). `affine`: its second derivatives are zero and its first ones are the same everywhere. `cheap`: not worth a
    thread. `label` is what pictures say of its kind.
    """

    name: str
    function: VectorFunction
    config: Config = NONE
    passes: tuple[str, ...] | None = None
    affine: bool = False
    cheap: bool = False
    label: str = ""

    def configured(self, config: Config) -> Config:
        """What the node gets of the caller's config."""
        if not config:
            return self.config
        given = config if self.passes is None else {k: v for k, v in config.items() if k in self.passes}
        return {**given, **self.config} if self.config else given


@dataclass(frozen=True, slots=True, eq=False)
class Wiring:
    """A graph that makes sense: its nodes in an order in which each comes after those that it needs."""

    nodes: dict[str, Node]
    sources: Mapping[str, tuple[Source, ...]]
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    outputs: tuple[Port, ...]
    output_counts: Mapping[str, int]
    sizes: Mapping[str, int] = field(default_factory=dict)  # of graph inputs, where somebody said them

    consumers: Mapping[Port, tuple[Port, ...]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        found: dict[Port, list[Port]] = {}
        for name, sources in self.sources.items():
            for i, source in enumerate(sources):
                if isinstance(source, Port):
                    found.setdefault(source, []).append(Port(name, i))
        object.__setattr__(self, "consumers", {port: tuple(fed) for port, fed in found.items()})

    def fed_by(self, index: int) -> list[Port]:
        """The inputs of nodes that the graph's input `index` fills."""
        return [
            Port(name, i)
            for name, sources in self.sources.items()
            for i, source in enumerate(sources)
            if source == GraphInput(index)
        ]


def wire(
    nodes: Iterable[Node],
    edges: Iterable[tuple[tuple[str, str], tuple[str, str]]],
    inputs: Mapping[str, Sequence[tuple[str, str]]] | None = None,
    outputs: Mapping[str, tuple[str, str]] | None = None,
    bound: Mapping[tuple[str, str], Vector] | None = None,
    sizes: Mapping[str, int] | None = None,
) -> Wiring:
    """The graph of these parts. A port is a pair of a node's name and the name or number of an input or output; "" is
    the only one.

    edges: from outputs to inputs. inputs: the graph's own, with all that each feeds; None: every input that nothing
    else feeds, called `node` or `node.input`. outputs: the graph's own; None: every output that feeds nothing. bound:
    values of inputs. sizes: of the graph's inputs. Raises InvalidInput naming node and port: unknown ones, inputs fed
    twice or not at all, circles.
    """
    return _Wirer(nodes).wired(edges, inputs, outputs, bound or {}, sizes or {})


class _Wirer:
    """Puts the sources of a graph's inputs together, one after another."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        self.nodes: dict[str, Node] = {}
        for node in nodes:
            if node.name in self.nodes:
                raise InvalidInput(f"two nodes are called '{node.name}'; give one of them another name")
            self.nodes[node.name] = node
        if not self.nodes:
            raise InvalidInput("a graph needs at least one node, got none")
        self.counts = {n: _counts(node) for n, node in self.nodes.items()}
        self.sources: dict[str, list[Source | None]] = {n: [None] * c[0] for n, c in self.counts.items()}

    def wired(
        self,
        edges: Iterable[tuple[tuple[str, str], tuple[str, str]]],
        inputs: Mapping[str, Sequence[tuple[str, str]]] | None,
        outputs: Mapping[str, tuple[str, str]] | None,
        bound: Mapping[tuple[str, str], Vector],
        sizes: Mapping[str, int],
    ) -> Wiring:
        for start, end in edges:
            self._feed(self._port(end, "input"), self._port(start, "output"))
        for end, value in bound.items():
            self._feed(self._port(end, "input"), Bound(frozen(value)))
        for index, (name, ends) in enumerate((inputs or {}).items()):
            if not ends:
                raise InvalidInput(f"input '{name}' of the graph feeds nothing; name the inputs of nodes that it feeds")
            for end in ends:
                self._feed(self._port(end, "input"), GraphInput(index))
        input_names = tuple(inputs) if inputs is not None else self._open_inputs()
        whole = {name: self._complete(name) for name in self._order()}
        for name in sizes:
            if name not in input_names:
                raise InvalidInput(f"the graph has no input '{name}'; it has {_listed(input_names)}")
        named = self._outputs(outputs, whole)
        counts = {n: c[1] for n, c in self.counts.items()}
        ordered = {n: self.nodes[n] for n in whole}
        return Wiring(ordered, whole, input_names, tuple(named), tuple(named.values()), counts, sizes)

    def _feed(self, end: Port, source: Source) -> None:
        there = self.sources[end.node][end.index]
        if there is not None:
            raise InvalidInput(
                f"node '{end.node}', input {end.index}: it is fed by {told(there)} already, and by {told(source)} too; "
                "a node `sum` adds them up"
            )
        self.sources[end.node][end.index] = source

    def _port(self, given: tuple[str, str], what: str) -> Port:
        name, port = given
        node = self.nodes.get(name)
        if node is None:
            raise InvalidInput(f"there is no node '{name}'; there are {_listed(self.nodes)}")
        count = self.counts[name][what == "output"]
        names = node.function.input_names if what == "input" else node.function.output_names
        if not port and count == 1:
            return Port(name, 0)
        if port in names:
            return Port(name, names.index(port))
        if port.isdecimal() and int(port) < count:
            return Port(name, int(port))
        known = f": {_listed(names)}" if names else ""
        if not port:
            raise InvalidInput(f"node '{name}' has {count} {what}s{known}; say which, as '{name}.0'")
        raise InvalidInput(f"node '{name}' has no {what} '{port}'; it has {count}{known}, counted from 0")

    def _open_inputs(self) -> tuple[str, ...]:
        names: list[str] = []
        for name, sources in self.sources.items():
            for i, source in enumerate(sources):
                if source is None:
                    sources[i] = GraphInput(len(names))
                    named = self.nodes[name].function.input_names or range(len(sources))
                    names.append(name if len(sources) == 1 else f"{name}.{named[i]}")
        return tuple(names)

    def _complete(self, name: str) -> tuple[Source, ...]:
        sources = tuple(s for s in self.sources[name] if s is not None)
        if len(sources) < len(self.sources[name]):
            index = self.sources[name].index(None)
            raise InvalidInput(
                f"node '{name}', input {index}: nothing feeds it; lead an edge, an input of the graph or a bound value "
                "there"
            )
        return sources

    def _order(self) -> list[str]:
        needs = {
            name: dict.fromkeys(s.node for s in sources if isinstance(s, Port))
            for name, sources in self.sources.items()
        }
        try:
            return list(graphlib.TopologicalSorter(needs).static_order())
        except graphlib.CycleError as fault:
            raise InvalidInput(f"the graph has a circle: {' -> '.join(fault.args[1])}") from fault

    def _outputs(
        self, outputs: Mapping[str, tuple[str, str]] | None, whole: Mapping[str, tuple[Source, ...]]
    ) -> dict[str, Port]:
        if outputs is not None:
            found = {name: self._port(port, "output") for name, port in outputs.items()}
        else:
            used = {s for sources in whole.values() for s in sources if isinstance(s, Port)}
            free = [Port(n, o) for n in self.nodes for o in range(self.counts[n][1]) if Port(n, o) not in used]
            found = {p.node if self.counts[p.node][1] == 1 else str(p): p for p in free}
        if not found:
            raise InvalidInput("a graph needs at least one output, got none")
        return found


def _counts(node: Node) -> tuple[int, int]:
    """How many inputs and outputs a node has."""
    function, config = node.function, node.config
    try:
        return len(function.input_sizes(config)), len(function.output_sizes(config))
    except NotImplementedError as fault:
        raise InvalidInput(f"node '{node.name}': {type(function).__name__} does not tell its sizes") from fault


def told(source: Source) -> str:
    """A source in words."""
    match source:
        case Port():
            return f"'{source}'"
        case GraphInput():
            return f"the graph's input {source.index}"
        case _:
            return "a bound value"


def frozen(value: Vector) -> Vector:
    """A copy of a vector that nobody can change."""
    copy = np.array(value, np.float64).reshape(-1)
    copy.flags.writeable = False
    return copy


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"'{n}'" for n in names) or "none"
