"""Infer the size of every vector in a graph from the sizes that nodes declare."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dragoman.core.errors import InvalidInput
from dragoman.core.vectors import Config, VectorFunction
from dragoman_simulators.graphs.wiring import BoundValue, GraphInput, Node, Port, Wiring

Size = int | None  # None: not known (yet)


class FlexibleFunction(VectorFunction):
    """A function whose sizes depend on what it is connected to. Unknown sizes are declared as -1."""

    def fit_sizes(self, inputs: Sequence[Size], outputs: Sequence[Size]) -> tuple[Sequence[Size], Sequence[Size]]:
        """Return the sizes that follow from the known ones. Raises InvalidInput if they are inconsistent."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a graph for one config: its inputs and outputs, and those of each node."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    node_inputs: dict[str, tuple[int, ...]]
    node_outputs: dict[str, tuple[int, ...]]


def infer_sizes(wiring: Wiring, config: Config) -> Sizes:
    """Return all sizes.

    Raises InvalidInput naming node and port if two differ or one cannot be inferred, and naming an entry of the config
    that no node accepts.
    """
    for name in config:
        if not any(node.accepts(name) for node in wiring.nodes.values()):
            raise InvalidInput(f"config: unexpected entry '{name}': expected an entry that a node of the graph accepts")
    inference = _SizeInference(wiring, config)
    while inference.changed:
        inference.changed = False
        for name in (*wiring.nodes, *reversed(wiring.nodes)):
            inference.visit(name)
    return inference.result()


class _SizeInference:
    """The sizes known so far."""

    def __init__(self, wiring: Wiring, config: Config) -> None:
        self.wiring = wiring
        self.changed = True
        self.graph: list[Size] = [wiring.sizes.get(name) for name in wiring.input_names]
        self.inputs: dict[str, list[Size]] = {}
        self.outputs: dict[str, list[Size]] = {}
        for name, node in wiring.nodes.items():
            merged = node.merge_config(config)
            inputs, outputs = node.function.input_sizes(merged), node.function.output_sizes(merged)
            self.inputs[name] = [*_check_declared(node, inputs, len(wiring.sources[name]), "inputs")]
            self.outputs[name] = [*_check_declared(node, outputs, wiring.output_counts[name], "outputs")]

    def visit(self, name: str) -> None:
        """Propagate sizes through one node and its incoming edges."""
        for i, source in enumerate(self.wiring.sources[name]):
            match source:
                case Port():
                    sizes = self.outputs[source.node]
                    self._unify(Port(name, i), sizes, source.index, f"from '{source}'")
                case GraphInput():
                    origin = f"from the graph's input '{self.wiring.input_names[source.index]}'"
                    self._unify(Port(name, i), self.graph, source.index, origin)
                case BoundValue():
                    self._unify(Port(name, i), [len(source.value)], 0, "bound to it")
        function = self.wiring.nodes[name].function
        if isinstance(function, FlexibleFunction):
            self._fit(name, function)

    def _unify(self, end: Port, source_sizes: list[Size], j: int, origin: str) -> None:
        sizes, i = self.inputs[end.node], end.index
        size, source_size = sizes[i], source_sizes[j]
        if size == source_size:
            return
        if size is not None and source_size is not None:
            raise InvalidInput(f"node '{end.node}', input {i}: expected a vector of {size}, got {source_size} {origin}")
        sizes[i] = source_sizes[j] = size if source_size is None else source_size
        self.changed = True

    def _fit(self, name: str, function: FlexibleFunction) -> None:
        try:
            inputs, outputs = function.fit_sizes(tuple(self.inputs[name]), tuple(self.outputs[name]))
        except InvalidInput as error:
            raise InvalidInput(f"node '{name}': {error.message}") from error
        if [*inputs] != self.inputs[name] or [*outputs] != self.outputs[name]:
            self.inputs[name], self.outputs[name] = [*inputs], [*outputs]
            self.changed = True

    def result(self) -> Sizes:
        for name in self.wiring.nodes:
            for side, sizes in (("input", self.inputs[name]), ("output", self.outputs[name])):
                if None in sizes:
                    raise InvalidInput(
                        f"node '{name}', {side} {sizes.index(None)}: unknown size; declare the size of the node, or of "
                        "the graph's input that feeds it"
                    )
        outputs = tuple(self.outputs[p.node][p.index] or 0 for p in self.wiring.outputs)
        return Sizes(
            tuple(n or 0 for n in self.graph),
            outputs,
            {k: tuple(n or 0 for n in v) for k, v in self.inputs.items()},
            {k: tuple(n or 0 for n in v) for k, v in self.outputs.items()},
        )


def _check_declared(node: Node, sizes: Sequence[int], count: int, side: str) -> Iterator[Size]:
    """Yield the sizes that a node declares. They may depend on the config; their number may not."""
    if len(sizes) != count:
        raise InvalidInput(f"node '{node.name}': expected {count} {side} under this config, got {len(sizes)}")
    for i, size in enumerate(sizes):
        if not isinstance(size, int) or isinstance(size, bool) or size < -1:
            raise InvalidInput(f"node '{node.name}', {side[:-1]} {i}: expected a size of 0 or more, got {size!r}")
        yield None if size == -1 else size
