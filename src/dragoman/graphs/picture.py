"""The content of a drawing of a graph: boxes for nodes, inputs and outputs, lines between them, and a summary."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from dragoman.core.vectors import ABILITIES, Ability
from dragoman.graphs.function import GraphFunction
from dragoman.graphs.sizes import Sizes
from dragoman.graphs.wiring import GraphInput, Node, Port, Source, Wiring

Kind = Literal["input", "node", "output", "bound"]

# The letter of each ability.
LETTERS: Mapping[Ability, str] = dict(zip(ABILITIES, "EGJH", strict=True))


@dataclass(frozen=True, slots=True)
class Box:
    """A node, or an input or output of the graph; `texts` are its lines, the name first."""

    key: str
    kind: Kind
    texts: tuple[str, ...]
    inputs: int
    outputs: int


@dataclass(frozen=True, slots=True)
class Line:
    """From an output of a box to an input of another; `size` is the size of the vector."""

    start: str
    output: int
    end: str
    input: int
    size: int


@dataclass(frozen=True, slots=True)
class Picture:
    boxes: tuple[Box, ...]
    lines: tuple[Line, ...]


def make_picture(graph: GraphFunction) -> Picture:
    """Return the boxes and lines of a graph, boxes in topological order."""
    wiring, sizes = graph.wiring, graph.sizes({})
    boxes = [Box(f"in {name}", "input", (name,), 0, 1) for name in wiring.input_names]
    lines: list[Line] = []
    for name, node in wiring.nodes.items():
        for i, source in enumerate(wiring.sources[name]):
            start, output, box = _origin(source, Port(name, i), wiring)
            boxes += [box] if box is not None else []
            lines.append(Line(start, output, name, i, sizes.node_inputs[name][i]))
        counts = len(wiring.sources[name]), wiring.output_counts[name]
        boxes.append(Box(name, "node", _texts(node), *counts))
    for name, port, size in zip(wiring.output_names, wiring.outputs, sizes.outputs, strict=True):
        boxes.append(Box(f"out {name}", "output", (name,), 1, 0))
        lines.append(Line(port.node, port.index, f"out {name}", 0, size))
    return Picture(tuple(boxes), tuple(lines))


def summarize(graph: GraphFunction) -> list[str]:
    """Return lines about inputs, outputs, abilities, and the nodes that prevent further abilities."""
    sizes: Sizes = graph.sizes({})
    lines = [
        f"inputs   {_join_sizes(graph.input_names, sizes.inputs)}",
        f"outputs  {_join_sizes(graph.output_names, sizes.outputs)}",
        f"can do   {', '.join(graph.sources())}" + ("; many points in one call" if graph.vectorised else ""),
    ]
    for ability in ABILITIES:
        step = graph.missing_step(ability)
        if step is not None:
            lines.append(f"no {ability}: node '{step.node}' has no {step.ability}")
    letters = ", ".join(f"{letter} {ability}" for ability, letter in LETTERS.items())
    return [*lines, f"nodes    {letters}, - missing"]


def _origin(source: Source, end: Port, wiring: Wiring) -> tuple[str, int, Box | None]:
    """Return the box and output where a line starts, and a new box if it is a bound value."""
    match source:
        case Port():
            return source.node, source.index, None
        case GraphInput():
            return f"in {wiring.input_names[source.index]}", 0, None
        case _:
            key = f"bound {end}"
            shown = ", ".join(f"{v:g}" for v in source.value[:3]) + (", ..." if len(source.value) > 3 else "")
            return key, 0, Box(key, "bound", (f"= {shown}",), 0, 1)


def _texts(node: Node) -> tuple[str, ...]:
    sources = node.function.sources()
    letters = " ".join(
        letter if ability in sources or (node.affine and ability == "apply_hessian") else "-"
        for ability, letter in LETTERS.items()
    )
    label = (node.label,) if node.label and node.label != node.name else ()
    return (node.name, *label, letters)


def _join_sizes(names: tuple[str, ...], sizes: tuple[int, ...]) -> str:
    return ", ".join(f"{name} [{size}]" for name, size in zip(names, sizes, strict=True)) or "none"
