"""A graph drawn with characters, for a terminal."""

from dragoman.graphs.layout import Layout, layout
from dragoman.graphs.picture import Box, Picture

_UP, _DOWN, _LEFT, _RIGHT = 1, 2, 4, 8
# The character of a cell whose lines lead in these directions.
_LINES = " │││─┘┐┤─└┌├─┴┬┼"
_BORDERS = {"node": "┌─┐│└┘", "input": "╭─╮│╰╯", "output": "╭─╮│╰╯", "bound": "╭─╮│╰╯"}


def text(picture: Picture) -> str:
    """The drawing, with lines that lead downwards."""
    found = layout(
        picture, lambda box: max(map(len, box.texts)) + 4 + 2 * max(0, box.inputs - 1, box.outputs - 1), 1, 3
    )
    canvas = _Canvas()
    row = 0
    for number, layer in enumerate(found.layers):
        height = max(len(found.boxes[k].texts) + 2 for k in layer if k in found.boxes)
        for key in layer:
            left = found.center[key] - found.width[key] // 2
            bottom = row + canvas.box(found.boxes[key], left, row, found.width[key]) if key in found.boxes else row
            outputs = found.boxes[key].outputs if key in found.boxes else 1
            for column in {found.leaves(key, o) for o in range(outputs)}:
                canvas.vertical(column, bottom, row + height - 1)
        row = _channel(canvas, found, number, row + height)
    return canvas.text()


def _channel(canvas: "_Canvas", found: Layout, layer: int, top: int) -> int:
    """The lines between two layers, each bend on a row of its own signal; gives the row of the next layer."""
    pieces = [*found.segments(layer)]
    if not pieces:
        return top
    bends = _rows([(start, end, f"{r.line.start}.{r.line.output}") for start, end, r, _ in pieces])
    last = top + 1 + max([-1, *bends.values()]) + 1
    for start, end, route, i in pieces:
        signal = f"{route.line.start}.{route.line.output}"
        if start == end:
            canvas.vertical(start, top, last)
        else:
            row = top + 1 + bends[signal, start]
            canvas.vertical(start, top, row, below=False)
            canvas.horizontal(row, start, end)
            canvas.vertical(end, row, last, above=False)
        if route.stops[i + 1] in found.boxes:
            canvas.write(end, last, "▼")
        if i == 0:
            canvas.write(start + 1, top, str(route.line.size))
    return last + 1


def _rows(pieces: list[tuple[int, int, str]]) -> dict[tuple[str, int], int]:
    """The row of each signal's bends: above those that end where it begins, in a row that nobody else crosses."""
    signals: dict[tuple[str, int], list[int]] = {}
    for start, end, signal in pieces:
        if start != end:
            signals.setdefault((signal, start), []).append(end)
    starts = {key: key[1] for key in signals}
    left = [*sorted(signals, key=lambda key: key[1])]
    found: dict[tuple[str, int], int] = {}
    while left:
        # One whose column nobody who is still to come ends in may bend now; of a circle of such, any.
        free = [k for k in left if not any(starts[other] in signals[k] for other in left if other != k)]
        chosen = (free or left)[0]
        left.remove(chosen)
        span = _span(chosen, signals)
        row = 0
        while any(_overlap(span, _span(k, signals)) and r >= row for k, r in found.items()):
            row += 1
        found[chosen] = row
    return found


def _span(key: tuple[str, int], signals: dict[tuple[str, int], list[int]]) -> tuple[int, int]:
    return min(key[1], *signals[key]), max(key[1], *signals[key])


def _overlap(a: tuple[int, int], b: tuple[int, int]) -> bool:
    return a[0] <= b[1] and b[0] <= a[1]


class _Canvas:
    """Cells by row and column: lines by their directions, and characters over them."""

    def __init__(self) -> None:
        self._lines: dict[tuple[int, int], int] = {}
        self._written: dict[tuple[int, int], str] = {}

    def box(self, box: Box, left: int, top: int, width: int) -> int:
        """Draws a box and gives its height."""
        a, across, b, side, c, d = (*_BORDERS[box.kind],)
        self.write(left, top, a + across * (width - 2) + b)
        for i, each in enumerate(box.texts, top + 1):
            self.write(left, i, f"{side}{each.center(width - 2)}{side}")
        self.write(left, top + 1 + len(box.texts), c + across * (width - 2) + d)
        return len(box.texts) + 2

    def write(self, column: int, row: int, characters: str) -> None:
        for i, character in enumerate(characters):
            self._written[row, column + i] = character

    def vertical(self, column: int, top: int, bottom: int, *, above: bool = True, below: bool = True) -> None:
        for row in range(top, bottom + 1):
            up = above or row > top
            down = below or row < bottom
            self._add(row, column, _UP * up | _DOWN * down)

    def horizontal(self, row: int, start: int, end: int) -> None:
        low, high = min(start, end), max(start, end)
        for column in range(low, high + 1):
            self._add(row, column, _LEFT * (column > low) | _RIGHT * (column < high))

    def _add(self, row: int, column: int, directions: int) -> None:
        self._lines[row, column] = self._lines.get((row, column), 0) | directions

    def text(self) -> str:
        cells = {where: _LINES[directions] for where, directions in self._lines.items()} | self._written
        rows: list[str] = []
        for row in range(max(r for r, _ in cells) + 1):
            columns = [c for r, c in cells if r == row]
            rows.append("".join(cells.get((row, c), " ") for c in range(max(columns, default=-1) + 1)).rstrip())
        return "\n".join(rows)
