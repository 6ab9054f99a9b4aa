"""Where the boxes of a picture stand: in layers, so that lines lead downwards, and are short and cross little.

(Source: Sugiyama, Tagawa and Toda, Methods for visual understanding of hierarchical system structures, 1981; positions
by isotonic regression.)
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from dragoman.graphs.picture import Box, Line, Picture

_SWEEPS = 8
_SETTLINGS = 21


@dataclass(frozen=True, slots=True)
class EdgeRoute:
    """A line, with the places that it passes: its box, one in each layer between, its other box."""

    line: Line
    stops: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """`layers`: keys of boxes and of places that lines pass, from the left. `center`: where each is, from 0."""

    boxes: Mapping[str, Box]
    layers: Sequence[Sequence[str]]
    routes: Sequence[EdgeRoute]
    center: Mapping[str, int]
    width: Mapping[str, int]

    @property
    def total(self) -> int:
        return max(self.center[k] + self.width[k] - self.width[k] // 2 for k in self.center)

    def leaves(self, key: str, output: int) -> int:
        """Where a line leaves."""
        return self._port(key, output, self.boxes[key].outputs if key in self.boxes else 1)

    def enters(self, key: str, input: int) -> int:  # noqa: A002
        """Where a line comes in."""
        return self._port(key, input, self.boxes[key].inputs if key in self.boxes else 1)

    def _port(self, key: str, index: int, count: int) -> int:
        return self.center[key] - self.width[key] // 2 + (index + 1) * self.width[key] // (count + 1)

    def segments(self, layer: int) -> Iterator[tuple[int, int, EdgeRoute, int]]:
        """From this layer to the next: where a piece of a line begins and ends, its route, and which stop it leaves."""
        there = set(self.layers[layer])
        for route in self.routes:
            for i, (a, b) in enumerate(itertools.pairwise(route.stops)):
                if a in there:
                    last = i == len(route.stops) - 2
                    yield (
                        self.leaves(a, route.line.output if not i else 0),
                        self.enters(b, route.line.input if last else 0),
                        route,
                        i,
                    )


def layout(picture: Picture, width: Callable[[Box], int], pass_width: int, gap: int) -> Layout:
    """A layout with boxes so wide; lines that pass a layer take `pass_width`, and neighbours stand `gap` apart."""
    boxes = {box.key: box for box in picture.boxes}
    level = _levels(picture)
    layers: list[list[str]] = [[] for _ in range(max(level.values()) + 1)]
    for key in boxes:
        layers[level[key]].append(key)
    routes = [_route(i, line, level, layers) for i, line in enumerate(picture.lines)]
    links = [(a, b) for route in routes for a, b in itertools.pairwise(route.stops)]
    _untangle(layers, links)
    widths = {key: width(boxes[key]) if key in boxes else pass_width for layer in layers for key in layer}
    center: dict[str, int] = {}
    for layer in layers:
        left = 0
        for key in layer:
            center[key] = left + widths[key] // 2
            left += widths[key] + gap
    found = Layout(boxes, layers, routes, center, widths)
    for sweep in range(_SETTLINGS):
        downwards = sweep % 2 == 0
        for layer in layers if downwards else layers[::-1]:
            _settle(layer, found, center, gap, downwards=downwards)
    least = min(center[k] - widths[k] // 2 for k in center)
    for key in center:
        center[key] -= least
    return found


def _levels(picture: Picture) -> dict[str, int]:
    """Each box below those that lead to it; ends of the graph as near as can be to what they lead to."""
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
        # Pieces of one signal pass together.
        key = f"pass {line.start}.{line.output} {between}"
        if key not in layers[between]:
            layers[between].append(key)
        stops.append(key)
    return EdgeRoute(line, (*stops, line.end))


def _untangle(layers: list[list[str]], links: Sequence[tuple[str, str]]) -> None:
    """Order each layer by where its neighbours are, down and up by turns."""
    near: dict[str, dict[bool, list[str]]] = {key: {True: [], False: []} for layer in layers for key in layer}
    for a, b in links:
        near[b][True].append(a)
        near[a][False].append(b)
    place = {key: i for layer in layers for i, key in enumerate(layer)}
    for sweep in range(_SWEEPS):
        downwards = sweep % 2 == 0
        for layer in layers if downwards else layers[::-1]:
            mean = {}
            for key in layer:
                others = near[key][downwards]
                mean[key] = sum(place[k] for k in others) / len(others) if others else place[key]
            layer.sort(key=lambda key: mean[key])
            place |= {key: i for i, key in enumerate(layer)}


def _settle(layer: Sequence[str], found: Layout, center: dict[str, int], gap: int, *, downwards: bool) -> None:
    """Move the boxes of a layer to where the lines from the last layer are straight, as far as there is room."""
    wished: list[tuple[float, int]] = []
    for key in layer:
        pulls = [*_pulls(key, found, downwards=downwards)]
        weight = sum(w for _, w in pulls)
        wished.append((center[key] + sum(by * w for by, w in pulls) / weight, weight) if weight else (center[key], 1))
    offsets = [0]
    for a, b in itertools.pairwise(layer):
        half = found.width[a] - found.width[a] // 2 + found.width[b] // 2
        offsets.append(offsets[-1] + half + gap)
    settled = _isotonic([(wish - o, weight) for (wish, weight), o in zip(wished, offsets, strict=True)])
    for key, z, offset in zip(layer, settled, offsets, strict=True):
        center[key] = z + offset


def _pulls(key: str, found: Layout, *, downwards: bool) -> Iterator[tuple[int, int]]:
    """How far to the right each line from above, or from below, would have a box, and how strongly: long ones most."""
    for route in found.routes:
        for i, (a, b) in enumerate(itertools.pairwise(route.stops)):
            if key == (b if downwards else a):
                start = found.leaves(a, route.line.output if not i else 0)
                end = found.enters(b, route.line.input if i == len(route.stops) - 2 else 0)
                weight = 1 + 3 * sum(stop not in found.boxes for stop in (a, b))
                yield (start - end if downwards else end - start), weight


def _isotonic(values: Sequence[tuple[float, int]]) -> list[int]:
    """The numbers that never fall and are nearest to the given ones, in squares with weights, rounded.

    (Source: pooling of adjacent violators.)
    """
    pools: list[tuple[float, int, int]] = []  # mean, weight, count
    for value, weight in values:
        pools.append((value, weight, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (b, m, k), (a, n, j) = pools.pop(), pools.pop()
            pools.append(((a * n + b * m) / (n + m), n + m, j + k))
    return [round(value) for value, _, count in pools for _ in range(count)]
