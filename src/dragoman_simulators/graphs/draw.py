"""Draw a graph with characters for a terminal, or as SVG."""

from collections.abc import Iterator
from xml.sax.saxutils import escape

from dragoman_simulators.graphs.layout import Box, Layout, Picture, layout

# --- characters ------------------------------------------------------------------------------------------

_UP, _DOWN, _LEFT, _RIGHT = 1, 2, 4, 8
# The character of a cell by the directions of its lines, as bits.
_LINES = " │││─┘┐┤─└┌├─┴┬┼"
_BORDERS = {"node": "┌─┐│└┘", "input": "╭─╮│╰╯", "output": "╭─╮│╰╯", "bound": "╭─╮│╰╯"}


def draw_text(picture: Picture) -> str:
    """Return a drawing of characters for a terminal; edges run downwards."""
    placed = layout(
        picture, lambda box: max(map(len, box.texts)) + 4 + 2 * max(0, box.inputs - 1, box.outputs - 1), 1, 3
    )
    canvas = _Canvas()
    row = 0
    for number, layer in enumerate(placed.layers):
        height = max(len(placed.boxes[k].texts) + 2 for k in layer if k in placed.boxes)
        for key in layer:
            left = placed.center[key] - placed.width[key] // 2
            bottom = (
                row + canvas.draw_box(placed.boxes[key], left, row, placed.width[key]) if key in placed.boxes else row
            )
            outputs = placed.boxes[key].outputs if key in placed.boxes else 1
            for column in {placed.output_x(key, o) for o in range(outputs)}:
                canvas.draw_vertical(column, bottom, row + height - 1)
        row = _draw_channel(canvas, placed, number, row + height)
    return canvas.render()


def _draw_channel(canvas: "_Canvas", placed: Layout, layer: int, top: int) -> int:
    """Draw the lines between two layers; return the row of the next layer. Lines of one output bend in one row."""
    segments = [*placed.segments(layer)]
    if not segments:
        return top
    bends = _bend_rows([(start, end, f"{r.line.start}.{r.line.output}") for start, end, r, _ in segments])
    last = top + 1 + max([-1, *bends.values()]) + 1
    for start, end, route, i in segments:
        signal = f"{route.line.start}.{route.line.output}"
        if start == end:
            canvas.draw_vertical(start, top, last)
        else:
            row = top + 1 + bends[signal, start]
            canvas.draw_vertical(start, top, row, below=False)
            canvas.draw_horizontal(row, start, end)
            canvas.draw_vertical(end, row, last, above=False)
        if route.stops[i + 1] in placed.boxes:
            canvas.write(end, last, "▼")
        if i == 0:
            canvas.write(start + 1, top, str(route.line.size))
    return last + 1


def _bend_rows(segments: list[tuple[int, int, str]]) -> dict[tuple[str, int], int]:
    """Return the row of the bends of each signal: above signals that end where it starts, and crossed by no other."""
    signals: dict[tuple[str, int], list[int]] = {}
    for start, end, signal in segments:
        if start != end:
            signals.setdefault((signal, start), []).append(end)
    starts = {key: key[1] for key in signals}
    remaining = [*sorted(signals, key=lambda key: key[1])]
    rows: dict[tuple[str, int], int] = {}
    while remaining:
        # Next is a signal that ends in no column where a remaining one starts; in a cycle of such, any.
        free = [k for k in remaining if not any(starts[other] in signals[k] for other in remaining if other != k)]
        chosen = (free or remaining)[0]
        remaining.remove(chosen)
        span = _span(chosen, signals)
        row = 0
        while any(_overlap(span, _span(k, signals)) and r >= row for k, r in rows.items()):
            row += 1
        rows[chosen] = row
    return rows


def _span(key: tuple[str, int], signals: dict[tuple[str, int], list[int]]) -> tuple[int, int]:
    return min(key[1], *signals[key]), max(key[1], *signals[key])


def _overlap(a: tuple[int, int], b: tuple[int, int]) -> bool:
    return a[0] <= b[1] and b[0] <= a[1]


class _Canvas:
    """Cells by row and column: directions of lines, and characters on top of them."""

    def __init__(self) -> None:
        self._lines: dict[tuple[int, int], int] = {}
        self._characters: dict[tuple[int, int], str] = {}

    def draw_box(self, box: Box, left: int, top: int, width: int) -> int:
        a, across, b, side, c, d = (*_BORDERS[box.kind],)
        self.write(left, top, a + across * (width - 2) + b)
        for i, each in enumerate(box.texts, top + 1):
            self.write(left, i, f"{side}{each.center(width - 2)}{side}")
        self.write(left, top + 1 + len(box.texts), c + across * (width - 2) + d)
        return len(box.texts) + 2

    def write(self, column: int, row: int, characters: str) -> None:
        for i, character in enumerate(characters):
            self._characters[row, column + i] = character

    def draw_vertical(self, column: int, top: int, bottom: int, *, above: bool = True, below: bool = True) -> None:
        for row in range(top, bottom + 1):
            up = above or row > top
            down = below or row < bottom
            self._add(row, column, _UP * up | _DOWN * down)

    def draw_horizontal(self, row: int, start: int, end: int) -> None:
        low, high = min(start, end), max(start, end)
        for column in range(low, high + 1):
            self._add(row, column, _LEFT * (column > low) | _RIGHT * (column < high))

    def _add(self, row: int, column: int, directions: int) -> None:
        self._lines[row, column] = self._lines.get((row, column), 0) | directions

    def render(self) -> str:
        cells = {where: _LINES[directions] for where, directions in self._lines.items()} | self._characters
        rows: list[str] = []
        for row in range(max(r for r, _ in cells) + 1):
            columns = [c for r, c in cells if r == row]
            rows.append("".join(cells.get((row, c), " ") for c in range(max(columns, default=-1) + 1)).rstrip())
        return "\n".join(rows)


# --- SVG -------------------------------------------------------------------------------------------------

_CHARACTER, _LEADING, _PADDING = 8, 17, 12
_GAP, _CHANNEL, _MARGIN = 28, 56, 16
_COLOURS = {
    "node": ("#eaf1fb", "#3a6ea5"),
    "input": ("#f6f6f6", "#777777"),
    "output": ("#f6f6f6", "#777777"),
    "bound": ("#fff8e6", "#b08a2e"),
}


def draw_svg(picture: Picture, title: str = "") -> str:
    """Return a drawing as an SVG document; edges run downwards."""
    placed = layout(picture, _width, 2, _GAP)
    tops, height = _layer_tops(placed)
    width = placed.total + 2 * _MARGIN
    body = [*_draw_lines(placed, tops), *(line for box in picture.boxes for line in _draw_box(box, placed, tops))]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            'font-family="ui-monospace, Menlo, Consolas, monospace" font-size="13" text-anchor="middle">',
            f"<title>{escape(title)}</title>",
            f'<rect width="{width}" height="{height}" rx="8" fill="white"/>',
            '<marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
            '<path d="M0 0 L8 4 L0 8 z" fill="#555555"/></marker>',
            *body,
            "</svg>",
            "",
        ]
    )


def _width(box: Box) -> int:
    ports = 30 * max(box.inputs, box.outputs)
    return max(_CHARACTER * max(map(len, box.texts)) + 2 * _PADDING, ports)


def _height(box: Box) -> int:
    return _LEADING * len(box.texts) + _PADDING


def _layer_tops(placed: Layout) -> tuple[list[int], int]:
    tops, top = [], _MARGIN
    for layer in placed.layers:
        tops.append(top)
        top += max(_height(placed.boxes[k]) for k in layer if k in placed.boxes) + _CHANNEL
    return tops, top - _CHANNEL + _MARGIN


def _draw_box(box: Box, placed: Layout, tops: list[int]) -> Iterator[str]:
    layer = next(i for i, keys in enumerate(placed.layers) if box.key in keys)
    center, width = placed.center[box.key] + _MARGIN, placed.width[box.key]
    fill, stroke = _COLOURS[box.kind]
    corner = 4 if box.kind == "node" else 14
    yield (
        f'<rect x="{center - width // 2}" y="{tops[layer]}" width="{width}" height="{_height(box)}" rx="{corner}" '
        f'fill="{fill}" stroke="{stroke}"/>'
    )
    for i, each in enumerate(box.texts):
        y = tops[layer] + _PADDING // 2 + _LEADING * (i + 1) - 4
        weight = ' font-weight="bold"' if i == 0 and box.kind == "node" else ' fill="#555555"'
        yield f'<text x="{center}" y="{y}"{weight}>{escape(each)}</text>'


def _draw_lines(placed: Layout, tops: list[int]) -> Iterator[str]:
    level = {key: i for i, keys in enumerate(placed.layers) for key in keys}
    labelled: set[tuple[str, int]] = set()
    for route in placed.routes:
        line = route.line
        x = placed.output_x(line.start, line.output) + _MARGIN
        y = tops[level[line.start]] + _height(placed.boxes[line.start])
        if (line.start, line.output) not in labelled:
            labelled.add((line.start, line.output))
            yield f'<text x="{x + 5}" y="{y + 14}" fill="#777777" font-size="11" text-anchor="start">{line.size}</text>'
        path = f"M{x} {y}"
        for stop in route.stops[1:]:
            last = stop == line.end
            end_x = placed.input_x(stop, line.input if last else 0) + _MARGIN
            end_y = tops[level[stop]]
            middle = (y + end_y) // 2
            path += f" C{x} {middle} {end_x} {middle} {end_x} {end_y}"
            x, y = end_x, end_y
            if not last:
                y += max(_height(placed.boxes[k]) for k in placed.layers[level[stop]] if k in placed.boxes)
                path += f" L{x} {y}"
        yield f'<path d="{path}" fill="none" stroke="#555555" marker-end="url(#arrow)"/>'
