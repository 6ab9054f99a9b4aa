"""Layered layout of a picture: lines run downwards, are short and rarely cross.

(Source: Sugiyama, Tagawa and Toda, Methods for visual understanding of hierarchical system structures, 1981; positions
by isotonic regression.)
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dragoman.core.vectors import ABILITIES, Ability
from dragoman_simulators.graphs.function import GraphFunction
from dragoman_simulators.graphs.sizes import Sizes
from dragoman_simulators.graphs.wiring import GraphInput, Node, Port, Source, Wiring

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


def describe(graph: GraphFunction) -> dict[str, Any]:
    """Return a graph as JSON values: vectors with their sizes, nodes, edges, and why abilities are missing."""
    wiring, sizes = graph.wiring, graph.sizes({})
    steps = {ability: graph.missing_step(ability) for ability in ABILITIES}
    return {
        "inputs": _named_sizes(graph.input_names, sizes.inputs),
        "outputs": _named_sizes(graph.output_names, sizes.outputs),
        "abilities": dict(graph.sources()),
        "missing": {
            ability: {"node": step.node, "ability": step.ability} for ability, step in steps.items() if step is not None
        },
        "vectorised": graph.vectorised,
        "nodes": [
            {"name": name, "label": node.label or name, "abilities": dict(node.function.sources())}
            for name, node in wiring.nodes.items()
        ],
        "edges": [*_edges(wiring, sizes)],
    }


def _edges(wiring: Wiring, sizes: Sizes) -> Iterator[dict[str, Any]]:
    for name in wiring.nodes:
        for i, source in enumerate(wiring.sources[name]):
            match source:
                case Port():
                    start: dict[str, Any] = {"node": source.node, "output": source.index}
                case GraphInput():
                    start = {"input": wiring.input_names[source.index]}
                case _:
                    start = {"value": [*map(float, source.value)]}
            yield {"from": start, "to": {"node": name, "input": i}, "size": sizes.node_inputs[name][i]}
    for name, port, size in zip(wiring.output_names, wiring.outputs, sizes.outputs, strict=True):
        yield {"from": {"node": port.node, "output": port.index}, "to": {"output": name}, "size": size}


def _named_sizes(names: tuple[str, ...], sizes: tuple[int, ...]) -> list[dict[str, Any]]:
    return [{"name": name, "size": size} for name, size in zip(names, sizes, strict=True)]


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


_ORDER_SWEEPS = 8
_ALIGNMENT_SWEEPS = 21


@dataclass(frozen=True, slots=True)
class EdgeRoute:
    """A line and the keys that it passes: its first box, a point in each layer between, its last box."""

    line: Line
    stops: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """`layers`: keys of boxes and of points of lines, from the left. `center`, `width`: of each key, from 0."""

    boxes: Mapping[str, Box]
    layers: Sequence[Sequence[str]]
    routes: Sequence[EdgeRoute]
    center: Mapping[str, int]
    width: Mapping[str, int]

    @property
    def total(self) -> int:
        return max(self.center[k] + self.width[k] - self.width[k] // 2 for k in self.center)

    def output_x(self, key: str, output: int) -> int:
        return self._port_x(key, output, self.boxes[key].outputs if key in self.boxes else 1)

    def input_x(self, key: str, input: int) -> int:  # noqa: A002
        return self._port_x(key, input, self.boxes[key].inputs if key in self.boxes else 1)

    def _port_x(self, key: str, index: int, count: int) -> int:
        return self.center[key] - self.width[key] // 2 + (index + 1) * self.width[key] // (count + 1)

    def segments(self, layer: int) -> Iterator[tuple[int, int, EdgeRoute, int]]:
        """Yield the segments of lines from a layer to the next: start, end, route, and index of the stop it leaves."""
        keys = set(self.layers[layer])
        for route in self.routes:
            for i, (a, b) in enumerate(itertools.pairwise(route.stops)):
                if a in keys:
                    last = i == len(route.stops) - 2
                    yield (
                        self.output_x(a, route.line.output if not i else 0),
                        self.input_x(b, route.line.input if last else 0),
                        route,
                        i,
                    )


def layout(picture: Picture, width: Callable[[Box], int], pass_width: int, gap: int) -> Layout:
    """Lay out boxes of these widths, `gap` apart; a line that passes a layer takes `pass_width`."""
    boxes = {box.key: box for box in picture.boxes}
    level = _assign_layers(picture)
    layers: list[list[str]] = [[] for _ in range(max(level.values()) + 1)]
    for key in boxes:
        layers[level[key]].append(key)
    routes = [_route(i, line, level, layers) for i, line in enumerate(picture.lines)]
    links = [(a, b) for route in routes for a, b in itertools.pairwise(route.stops)]
    _order_layers(layers, links)
    widths = {key: width(boxes[key]) if key in boxes else pass_width for layer in layers for key in layer}
    center: dict[str, int] = {}
    for layer in layers:
        left = 0
        for key in layer:
            center[key] = left + widths[key] // 2
            left += widths[key] + gap
    placed = Layout(boxes, layers, routes, center, widths)
    for sweep in range(_ALIGNMENT_SWEEPS):
        downwards = sweep % 2 == 0
        for layer in layers if downwards else layers[::-1]:
            _align(layer, placed, center, gap, downwards=downwards)
    least = min(center[k] - widths[k] // 2 for k in center)
    for key in center:
        center[key] -= least
    return placed


def _assign_layers(picture: Picture) -> dict[str, int]:
    """Return the layer of each box, below its predecessors; inputs are just above their first consumer."""
    before: dict[str, list[str]] = {box.key: [] for box in picture.boxes}
    after: dict[str, list[str]] = {box.key: [] for box in picture.boxes}
    for line in picture.lines:
        before[line.end].append(line.start)
        after[line.start].append(line.end)
    level: dict[str, int] = {}
    for box in picture.boxes:
        level[box.key] = max((level[k] + 1 for k in before[box.key]), default=0)
    for box in reversed(picture.boxes):
        if not before[box.key] and after[box.key]:
            level[box.key] = min(level[k] for k in after[box.key]) - 1
    return level


def _route(number: int, line: Line, level: Mapping[str, int], layers: list[list[str]]) -> EdgeRoute:
    stops = [line.start]
    for between in range(level[line.start] + 1, level[line.end]):
        # Lines of one output share their points.
        key = f"pass {line.start}.{line.output} {between}"
        if key not in layers[between]:
            layers[between].append(key)
        stops.append(key)
    return EdgeRoute(line, (*stops, line.end))


def _order_layers(layers: list[list[str]], links: Sequence[tuple[str, str]]) -> None:
    """Order each layer by the mean position of its neighbours, in sweeps down and up."""
    near: dict[str, dict[bool, list[str]]] = {key: {True: [], False: []} for layer in layers for key in layer}
    for a, b in links:
        near[b][True].append(a)
        near[a][False].append(b)
    position = {key: i for layer in layers for i, key in enumerate(layer)}
    for sweep in range(_ORDER_SWEEPS):
        downwards = sweep % 2 == 0
        for layer in layers if downwards else layers[::-1]:
            mean = {}
            for key in layer:
                others = near[key][downwards]
                mean[key] = sum(position[k] for k in others) / len(others) if others else position[key]
            layer.sort(key=lambda key: mean[key])
            position |= {key: i for i, key in enumerate(layer)}


def _align(layer: Sequence[str], placed: Layout, center: dict[str, int], gap: int, *, downwards: bool) -> None:
    """Move the boxes of a layer so that lines from the previous layer are straight, as far as they fit."""
    targets: list[tuple[float, int]] = []
    for key in layer:
        forces = [*_forces(key, placed, downwards=downwards)]
        weight = sum(w for _, w in forces)
        targets.append((center[key] + sum(by * w for by, w in forces) / weight, weight) if weight else (center[key], 1))
    offsets = [0]
    for a, b in itertools.pairwise(layer):
        half = placed.width[a] - placed.width[a] // 2 + placed.width[b] // 2
        offsets.append(offsets[-1] + half + gap)
    aligned = _isotonic([(x - o, weight) for (x, weight), o in zip(targets, offsets, strict=True)])
    for key, z, offset in zip(layer, aligned, offsets, strict=True):
        center[key] = z + offset


def _forces(key: str, placed: Layout, *, downwards: bool) -> Iterator[tuple[int, int]]:
    """Yield the shift that each line from above or below wants for a box, and its weight; long lines weigh more."""
    for route in placed.routes:
        for i, (a, b) in enumerate(itertools.pairwise(route.stops)):
            if key == (b if downwards else a):
                start = placed.output_x(a, route.line.output if not i else 0)
                end = placed.input_x(b, route.line.input if i == len(route.stops) - 2 else 0)
                weight = 1 + 3 * sum(stop not in placed.boxes for stop in (a, b))
                yield (start - end if downwards else end - start), weight


def _isotonic(values: Sequence[tuple[float, int]]) -> list[int]:
    """Return the rounded weighted isotonic regression of values and weights, by pooling adjacent violators."""
    pools: list[tuple[float, int, int]] = []  # mean, weight, count
    for value, weight in values:
        pools.append((value, weight, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (b, m, k), (a, n, j) = pools.pop(), pools.pop()
            pools.append(((a * n + b * m) / (n + m), n + m, j + k))
    return [round(value) for value, _, count in pools for _ in range(count)]
