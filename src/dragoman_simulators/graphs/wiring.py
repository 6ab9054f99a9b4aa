"""Connect the nodes of a graph: every input of every node has exactly one source, and there is no cycle."""

import graphlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from dragoman.core.errors import InvalidInput
from dragoman.core.tensor import NONE
from dragoman.core.vectors import Config, Vector, VectorFunction
from dragoman_simulators.graphs.document import PortName


@dataclass(frozen=True, slots=True)
class Port:
    """An output or an input of a node."""

    node: str
    index: int

    def __str__(self) -> str:
        return f"{self.node}.{self.index}"


@dataclass(frozen=True, slots=True)
class GraphInput:
    """An input of the graph, as the source of an input of a node."""

    index: int


@dataclass(frozen=True, slots=True, eq=False)
class BoundValue:
    """A constant, as the source of an input of a node."""

    value: Vector


Source = Port | GraphInput | BoundValue


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Node:
    """A function in a graph.

    Parameters
    ----------
    config : fixed entries, which override those of the caller.
    passes : the keys of the caller's config that the node gets; None for those that the function accepts.
    affine : the second derivatives are zero, and the first ones the same everywhere.
    cheap : too fast to be worth a thread.
    label : the kind of the node, for drawings.
    """

    name: str
    function: VectorFunction
    config: Config = NONE
    passes: tuple[str, ...] | None = None
    affine: bool = False
    cheap: bool = False
    label: str = ""

    def merge_config(self, config: Config) -> Config:
        """Return the config of this node for the config of a call."""
        if not config:
            return self.config
        passed = {key: value for key, value in config.items() if self.accepts(key)}
        return {**passed, **self.config}

    def accepts(self, name: str) -> bool:
        """Return whether the node gets an entry of this name from the caller's config."""
        return self.function.accepts(name) if self.passes is None else name in self.passes


@dataclass(frozen=True, slots=True, eq=False)
class Wiring:
    """A valid graph: its nodes in topological order, and the source of each of their inputs."""

    nodes: dict[str, Node]
    sources: Mapping[str, tuple[Source, ...]]
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    outputs: tuple[Port, ...]
    output_counts: Mapping[str, int]
    sizes: Mapping[str, int] = field(default_factory=dict)  # of inputs of the graph, if declared

    consumers: Mapping[Port, tuple[Port, ...]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        consumers: dict[Port, list[Port]] = {}
        for name, sources in self.sources.items():
            for i, source in enumerate(sources):
                if isinstance(source, Port):
                    consumers.setdefault(source, []).append(Port(name, i))
        object.__setattr__(self, "consumers", {port: tuple(ends) for port, ends in consumers.items()})

    def input_consumers(self, index: int) -> list[Port]:
        """Return the inputs of nodes that an input of the graph feeds."""
        return [
            Port(name, i)
            for name, sources in self.sources.items()
            for i, source in enumerate(sources)
            if source == GraphInput(index)
        ]


def wire(
    nodes: Iterable[Node],
    edges: Iterable[tuple[PortName, PortName]],
    inputs: Mapping[str, Sequence[PortName]] | None = None,
    outputs: Mapping[str, PortName] | None = None,
    bound: Mapping[PortName, Vector] | None = None,
    sizes: Mapping[str, int] | None = None,
) -> Wiring:
    """Connect nodes. Raises InvalidInput naming node and port if one is unknown, an input has two sources or none, or
    there is a cycle.

    Parameters
    ----------
    edges : from outputs to inputs.
    inputs : the inputs of the graph, each with the ports that it feeds. None: every input of a node without another
        source, called `node` or `node.input`.
    outputs : the outputs of the graph. None: every output of a node that feeds nothing.
    bound : constant values of inputs of nodes.
    sizes : declared sizes of inputs of the graph.
    """
    return _WiringBuilder(nodes).build(edges, inputs, outputs, bound or {}, sizes or {})


class _WiringBuilder:
    """Collects the sources of the inputs of nodes."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        self.nodes: dict[str, Node] = {}
        for node in nodes:
            if node.name in self.nodes:
                raise InvalidInput(f"duplicate node name '{node.name}'")
            self.nodes[node.name] = node
        if not self.nodes:
            raise InvalidInput("a graph needs at least one node, got none")
        self.counts = {name: _port_counts(node) for name, node in self.nodes.items()}
        self.sources: dict[str, list[Source | None]] = {n: [None] * c[0] for n, c in self.counts.items()}

    def build(
        self,
        edges: Iterable[tuple[PortName, PortName]],
        inputs: Mapping[str, Sequence[PortName]] | None,
        outputs: Mapping[str, PortName] | None,
        bound: Mapping[PortName, Vector],
        sizes: Mapping[str, int],
    ) -> Wiring:
        for start, end in edges:
            self._connect(self._find_port(end, "input"), self._find_port(start, "output"))
        for end, value in bound.items():
            self._connect(self._find_port(end, "input"), BoundValue(_read_only_copy(value)))
        for index, (name, ends) in enumerate((inputs or {}).items()):
            if not ends:
                raise InvalidInput(f"input '{name}' of the graph: expected at least one input of a node, got none")
            for end in ends:
                self._connect(self._find_port(end, "input"), GraphInput(index))
        input_names = tuple(inputs) if inputs is not None else self._add_open_inputs()
        sources = {name: self._complete_sources(name) for name in self._sort()}
        for name in sizes:
            if name not in input_names:
                raise InvalidInput(f"unknown input '{name}' of the graph: expected one of {_quote_all(input_names)}")
        ports = self._find_outputs(outputs, sources)
        counts = {name: c[1] for name, c in self.counts.items()}
        ordered = {name: self.nodes[name] for name in sources}
        return Wiring(ordered, sources, input_names, tuple(ports), tuple(ports.values()), counts, sizes)

    def _connect(self, end: Port, source: Source) -> None:
        present = self.sources[end.node][end.index]
        if present is not None:
            raise InvalidInput(
                f"node '{end.node}', input {end.index}: expected one source, got {describe_source(present)} and "
                f"{describe_source(source)}; a `sum` node adds them"
            )
        self.sources[end.node][end.index] = source

    def _find_port(self, port_name: PortName, side: str) -> Port:
        name, port = port_name
        node = self.nodes.get(name)
        if node is None:
            raise InvalidInput(f"unknown node '{name}': expected one of {_quote_all(self.nodes)}")
        count = self.counts[name][side == "output"]
        names = node.function.input_names if side == "input" else node.function.output_names
        if not port and count == 1:
            return Port(name, 0)
        if port in names:
            return Port(name, names.index(port))
        if port.isdecimal() and int(port) < count:
            return Port(name, int(port))
        known = f"; its {side}s are {_quote_all(names)}" if names else ""
        if not port:
            raise InvalidInput(f"node '{name}': expected one of its {count} {side}s, such as '{name}.0'{known}")
        raise InvalidInput(f"node '{name}': expected the index of an {side} below {count}, got '{port}'{known}")

    def _add_open_inputs(self) -> tuple[str, ...]:
        names: list[str] = []
        for name, sources in self.sources.items():
            for i, source in enumerate(sources):
                if source is None:
                    sources[i] = GraphInput(len(names))
                    input_names = self.nodes[name].function.input_names or range(len(sources))
                    names.append(name if len(sources) == 1 else f"{name}.{input_names[i]}")
        return tuple(names)

    def _complete_sources(self, name: str) -> tuple[Source, ...]:
        sources = tuple(s for s in self.sources[name] if s is not None)
        if len(sources) < len(self.sources[name]):
            index = self.sources[name].index(None)
            raise InvalidInput(
                f"node '{name}', input {index}: expected an edge, an input of the graph or a bound value, got no source"
            )
        return sources

    def _sort(self) -> list[str]:
        predecessors = {
            name: dict.fromkeys(s.node for s in sources if isinstance(s, Port))
            for name, sources in self.sources.items()
        }
        try:
            return list(graphlib.TopologicalSorter(predecessors).static_order())
        except graphlib.CycleError as error:
            raise InvalidInput(f"the graph has a cycle: {' -> '.join(error.args[1])}") from error

    def _find_outputs(
        self, outputs: Mapping[str, PortName] | None, sources: Mapping[str, tuple[Source, ...]]
    ) -> dict[str, Port]:
        if outputs is not None:
            ports = {name: self._find_port(port, "output") for name, port in outputs.items()}
        else:
            used = {s for each in sources.values() for s in each if isinstance(s, Port)}
            free = [Port(n, o) for n in self.nodes for o in range(self.counts[n][1]) if Port(n, o) not in used]
            ports = {p.node if self.counts[p.node][1] == 1 else str(p): p for p in free}
        if not ports:
            raise InvalidInput("a graph needs at least one output, got none")
        return ports


def _port_counts(node: Node) -> tuple[int, int]:
    """Return the numbers of inputs and outputs of a node."""
    function, config = node.function, node.config
    try:
        return len(function.input_sizes(config)), len(function.output_sizes(config))
    except NotImplementedError as error:
        kind = type(function).__name__
        raise InvalidInput(f"node '{node.name}': {kind} does not implement input_sizes and output_sizes") from error


def describe_source(source: Source) -> str:
    match source:
        case Port():
            return f"'{source}'"
        case GraphInput():
            return f"the graph's input {source.index}"
        case _:
            return "a bound value"


def _read_only_copy(value: Vector) -> Vector:
    copy = np.array(value, np.float64).reshape(-1)
    copy.flags.writeable = False
    return copy


def _quote_all(names: Iterable[str]) -> str:
    return ", ".join(f"'{n}'" for n in names) or "none"
