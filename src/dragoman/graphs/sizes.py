"""How long every vector in a graph is: what the nodes tell, and what follows along the edges."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dragoman.core.errors import InvalidInput
from dragoman.core.vectors import Config, VectorFunction
from dragoman.graphs.wiring import Bound, GraphInput, Node, Port, Wiring

Size = int | None  # None: not known (yet)


class Fitting(VectorFunction):
    """A function whose sizes follow, in part, from what it is connected to; what it does not know, it tells as -1."""

    def fit(self, inputs: Sequence[Size], outputs: Sequence[Size]) -> tuple[Sequence[Size], Sequence[Size]]:
        """The sizes that follow from those known. Raises InvalidInput where they cannot be."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a graph under one config: its inputs and outputs, and those of each node."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    node_inputs: dict[str, tuple[int, ...]]
    node_outputs: dict[str, tuple[int, ...]]


def infer(wiring: Wiring, config: Config) -> Sizes:
    """All sizes. Raises InvalidInput naming node and port where two do not fit, or one does not follow from others."""
    table = _Table(wiring, config)
    while table.changed:
        table.changed = False
        for name in wiring.nodes:
            table.visit(name)
        for name in reversed(wiring.nodes):
            table.visit(name)
    return table.whole()


class _Table:
    """The sizes known so far."""

    def __init__(self, wiring: Wiring, config: Config) -> None:
        self.wiring = wiring
        self.changed = True
        self.graph: list[Size] = [wiring.sizes.get(name) for name in wiring.input_names]
        self.inputs: dict[str, list[Size]] = {}
        self.outputs: dict[str, list[Size]] = {}
        for name, node in wiring.nodes.items():
            given = node.configured(config)
            self.inputs[name] = [*_told(node, node.function.input_sizes(given), len(wiring.sources[name]), "inputs")]
            counts = wiring.output_counts[name]
            self.outputs[name] = [*_told(node, node.function.output_sizes(given), counts, "outputs")]

    def visit(self, name: str) -> None:
        """Let sizes through one node and the edges that lead to it."""
        for i, source in enumerate(self.wiring.sources[name]):
            match source:
                case Port():
                    there = self.outputs[source.node]
                    self._join(self.inputs[name], i, there, source.index, f"from '{source}'", Port(name, i))
                case GraphInput():
                    called = f"from the graph's input '{self.wiring.input_names[source.index]}'"
                    self._join(self.inputs[name], i, self.graph, source.index, called, Port(name, i))
                case Bound():
                    self._join(self.inputs[name], i, [len(source.value)], 0, "bound to it", Port(name, i))
        function = self.wiring.nodes[name].function
        if isinstance(function, Fitting):
            self._fit(name, function)

    def _join(self, here: list[Size], i: int, there: list[Size], j: int, origin: str, end: Port) -> None:
        if here[i] == there[j]:
            return
        if here[i] is not None and there[j] is not None:
            raise InvalidInput(
                f"node '{end.node}', input {end.index}: expected a vector of {here[i]}, got {there[j]} {origin}"
            )
        here[i] = there[j] = here[i] if there[j] is None else there[j]
        self.changed = True

    def _fit(self, name: str, function: Fitting) -> None:
        try:
            inputs, outputs = function.fit(tuple(self.inputs[name]), tuple(self.outputs[name]))
        except InvalidInput as fault:
            raise InvalidInput(f"node '{name}': {fault.message}") from fault
        if [*inputs] != self.inputs[name] or [*outputs] != self.outputs[name]:
            self.inputs[name], self.outputs[name] = [*inputs], [*outputs]
            self.changed = True

    def whole(self) -> Sizes:
        for name in self.wiring.nodes:
            for what, sizes in (("input", self.inputs[name]), ("output", self.outputs[name])):
                if None in sizes:
                    raise InvalidInput(
                        f"node '{name}', {what} {sizes.index(None)}: its size follows from nothing; say the size of "
                        "the node, or of the graph's input that feeds it"
                    )
        outputs = tuple(self.outputs[p.node][p.index] or 0 for p in self.wiring.outputs)
        return Sizes(
            tuple(n or 0 for n in self.graph),
            outputs,
            {k: tuple(n or 0 for n in v) for k, v in self.inputs.items()},
            {k: tuple(n or 0 for n in v) for k, v in self.outputs.items()},
        )


def _told(node: Node, sizes: Sequence[int], count: int, what: str) -> Iterator[Size]:
    """What a node tells of its sizes, which may depend on its config; their number may not."""
    if len(sizes) != count:
        raise InvalidInput(f"node '{node.name}': expected {count} {what} under this config, got {len(sizes)}")
    for i, size in enumerate(sizes):
        if not isinstance(size, int) or isinstance(size, bool) or size < -1:
            raise InvalidInput(f"node '{node.name}', {what[:-1]} {i}: expected a size of 0 or more, got {size!r}")
        yield None if size == -1 else size
