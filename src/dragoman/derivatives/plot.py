"""The errors of finite differences by their step, drawn: as lines of text, and as SVG."""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

# The exponents of ten that both axes go between, and the marks of curves.
_LEAST_ERROR, _MOST_ERROR = -14.0, 1.0
_MARKS = "●○■□▲△◆◇★☆abcdefghijklmnopqrstuvwxyz"
_COLOURS = ("#1b6ca8", "#c8553d", "#2a9d5c", "#8d5fb0", "#b8860b", "#4f6d7a", "#d1478c", "#3a3a3a")
_DASHES = ("", "6 3", "2 3")


@dataclass(frozen=True, slots=True)
class Curve:
    """A name, and pairs of a step and the error at it."""

    name: str
    points: tuple[tuple[float, float], ...]


def as_text(curves: Sequence[Curve]) -> str:
    """A chart of characters: a column a step, a row a power of ten of the error, a mark a curve."""
    steps = sorted({step for curve in curves for step, _ in curve.points}, reverse=True)
    marks = [_MARKS[i % len(_MARKS)] for i in range(len(curves))]
    cells: dict[tuple[int, float], str] = {}
    for mark, curve in zip(marks, curves, strict=True):
        cells |= {(round(_exponent(error)), step): mark for step, error in curve.points}
    used = [row for row, _ in cells] or [0]
    lines = [
        f"  {f'1e{row:+03d}':>6} ┤ " + "    ".join(cells.get((row, step), "·") for step in steps)
        for row in range(max(used), min(used) - 1, -1)
    ]
    lines.append("         └" + "─" * (5 * len(steps)))
    lines.append("    step   " + "".join(f"{math.log10(step):<5.2g}" for step in steps) + "(powers of ten)")
    return "\n".join([*lines, *(f"    {mark} {curve.name}" for mark, curve in zip(marks, curves, strict=True))])


def as_svg(curves: Sequence[Curve], title: str) -> str:
    """A drawing with both axes logarithmic, and a dashed line that falls as differences of order two do."""
    left, top, width, height = 62, 40, 520, 380
    exponents = [math.log10(step) for curve in curves for step, _ in curve.points] or [-1.0, -5.0]
    most, least = max(exponents), min(exponents)

    def place(step: float, error: float) -> tuple[float, float]:
        across = (most - math.log10(step)) / ((most - least) or 1.0)
        down = (_MOST_ERROR - _exponent(error)) / (_MOST_ERROR - _LEAST_ERROR)
        return left + across * width, top + down * height

    def path(points: Sequence[tuple[float, float]]) -> str:
        return " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in points))

    wide = left + width + 260
    tall = max(top + height + 60, top + 22 * len(curves) + 30)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{tall}" viewBox="0 0 {wide} {tall}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{left}" y="24" font-size="15">{html.escape(title)}</text>',
        *_grid(left, top, width, height, most, least),
    ]
    guide = ((10**most, 1.0), (10**least, 10 ** (2 * (least - most))))
    parts.append(f'<polyline points="{path(guide)}" fill="none" stroke="#bbb" stroke-dasharray="4 4"/>')
    for index, curve in enumerate(curves):
        parts += _line(path(curve.points), curve.name, index, left + width + 20, top + 12 + 22 * index)
    return "\n".join([*parts, "</svg>", ""])


def _line(points: str, name: str, index: int, x: float, y: float) -> list[str]:
    colour = _COLOURS[index % len(_COLOURS)]
    dash = _DASHES[index // len(_COLOURS) % len(_DASHES)]
    style = f'fill="none" stroke="{colour}" stroke-width="1.6" stroke-dasharray="{dash}"'
    dots = [f'<circle cx="{a}" cy="{b}" r="2.4" fill="{colour}"/>' for a, b in (p.split(",") for p in points.split())]
    legend = f'<polyline points="{x},{y} {x + 22},{y}" {style}/>'
    return [f'<polyline points="{points}" {style}/>', *dots, legend, _text(x + 28, y + 4, name)]


def _grid(left: float, top: float, width: float, height: float, most: float, least: float) -> list[str]:
    parts = [f'<rect x="{left}" y="{top}" width="{width}" height="{height}" fill="none" stroke="#888"/>']
    for exponent in range(int(_LEAST_ERROR), int(_MOST_ERROR) + 1, 3):
        y = top + (_MOST_ERROR - exponent) / (_MOST_ERROR - _LEAST_ERROR) * height
        parts.append(f'<line x1="{left}" x2="{left + width}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e4e4e4"/>')
        parts.append(_text(left - 44, y + 4, f"1e{exponent:+03d}"))
    for exponent in range(math.floor(most), math.ceil(least) - 1, -1):
        x = left + (most - exponent) / ((most - least) or 1.0) * width
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{top + height}" stroke="#e4e4e4"/>')
        parts.append(_text(x - 14, top + height + 18, f"1e{exponent:+03d}"))
    parts.append(_text(left + width / 2 - 90, top + height + 40, "step, by the largest number of the point"))
    parts.append(_text(left - 44, top - 8, "relative error"))
    return parts


def _text(x: float, y: float, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}">{html.escape(text)}</text>'


def _exponent(error: float) -> float:
    """Within the chart; what is not a number is at its top."""
    if not error <= 10**_MOST_ERROR:
        return _MOST_ERROR
    return max(_LEAST_ERROR, math.log10(error)) if error > 0 else _LEAST_ERROR
