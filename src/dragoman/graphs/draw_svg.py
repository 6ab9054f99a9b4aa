"""A graph drawn as SVG, for pages and papers."""

from collections.abc import Iterator
from xml.sax.saxutils import escape

from dragoman.graphs.layout import Layout, layout
from dragoman.graphs.picture import Box, Picture

_CHARACTER, _LEADING, _PADDING = 8, 17, 12
_GAP, _CHANNEL, _MARGIN = 28, 56, 16
_COLOURS = {
    "node": ("#eaf1fb", "#3a6ea5"),
    "input": ("#f6f6f6", "#777777"),
    "output": ("#f6f6f6", "#777777"),
    "bound": ("#fff8e6", "#b08a2e"),
}


def svg(picture: Picture, title: str = "") -> str:
    """A document of its own, with lines that lead downwards."""
    found = layout(picture, _width, 2, _GAP)
    tops, height = _tops(found)
    width = found.total + 2 * _MARGIN
    body = [*_lines(found, tops), *(line for box in picture.boxes for line in _box(box, found, tops))]
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


def _tops(found: Layout) -> tuple[list[int], int]:
    """Where each layer begins, and the height of the whole."""
    tops, top = [], _MARGIN
    for layer in found.layers:
        tops.append(top)
        top += max(_height(found.boxes[k]) for k in layer if k in found.boxes) + _CHANNEL
    return tops, top - _CHANNEL + _MARGIN


def _box(box: Box, found: Layout, tops: list[int]) -> Iterator[str]:
    layer = next(i for i, keys in enumerate(found.layers) if box.key in keys)
    center, width = found.center[box.key] + _MARGIN, found.width[box.key]
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


def _lines(found: Layout, tops: list[int]) -> Iterator[str]:
    level = {key: i for i, keys in enumerate(found.layers) for key in keys}
    told: set[tuple[str, int]] = set()
    for route in found.routes:
        line = route.line
        x = found.leaves(line.start, line.output) + _MARGIN
        y = tops[level[line.start]] + _height(found.boxes[line.start])
        if (line.start, line.output) not in told:
            told.add((line.start, line.output))
            yield f'<text x="{x + 5}" y="{y + 14}" fill="#777777" font-size="11" text-anchor="start">{line.size}</text>'
        path = f"M{x} {y}"
        for stop in route.stops[1:]:
            last = stop == line.end
            end_x = found.enters(stop, line.input if last else 0) + _MARGIN
            end_y = tops[level[stop]]
            middle = (y + end_y) // 2
            path += f" C{x} {middle} {end_x} {middle} {end_x} {end_y}"
            x, y = end_x, end_y
            if not last:
                y += max(_height(found.boxes[k]) for k in found.layers[level[stop]] if k in found.boxes)
                path += f" L{x} {y}"
        yield f'<path d="{path}" fill="none" stroke="#555555" marker-end="url(#arrow)"/>'
