"""Plots of the errors of finite differences against their step, as text and as SVG."""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

# Range of the error axis (exponents of ten).
_MIN_EXPONENT, _MAX_EXPONENT = -14.0, 1.0
_MARKERS = "●○■□▲△◆◇★☆abcdefghijklmnopqrstuvwxyz"
_COLOURS = ("#1b6ca8", "#c8553d", "#2a9d5c", "#8d5fb0", "#b8860b", "#4f6d7a", "#d1478c", "#3a3a3a")
_DASHES = ("", "6 3", "2 3")


@dataclass(frozen=True, slots=True)
class ErrorCurve:
    """A named curve; `points` are pairs of step and error."""

    name: str
    points: tuple[tuple[float, float], ...]


def text_plot(curves: Sequence[ErrorCurve]) -> str:
    """Return a text plot with one column for each step, one row for each power of ten, one marker for each curve."""
    steps = sorted({step for curve in curves for step, _ in curve.points}, reverse=True)
    markers = [_MARKERS[i % len(_MARKERS)] for i in range(len(curves))]
    cells: dict[tuple[int, float], str] = {}
    for marker, curve in zip(markers, curves, strict=True):
        cells |= {(round(_exponent(error)), step): marker for step, error in curve.points}
    used = [row for row, _ in cells] or [0]
    lines = [
        f"  {f'1e{row:+03d}':>6} ┤ " + "    ".join(cells.get((row, step), "·") for step in steps)
        for row in range(max(used), min(used) - 1, -1)
    ]
    lines.append("         └" + "─" * (5 * len(steps)))
    lines.append("    step   " + "".join(f"{math.log10(step):<5.2g}" for step in steps) + "(powers of ten)")
    return "\n".join([*lines, *(f"    {marker} {curve.name}" for marker, curve in zip(markers, curves, strict=True))])


def svg_plot(curves: Sequence[ErrorCurve], title: str) -> str:
    """Return an SVG with logarithmic axes, and a dashed line with the slope of differences of order two."""
    left, top, width, height = 62, 40, 520, 380
    exponents = [math.log10(step) for curve in curves for step, _ in curve.points] or [-1.0, -5.0]
    largest, smallest = max(exponents), min(exponents)

    def position(step: float, error: float) -> tuple[float, float]:
        across = (largest - math.log10(step)) / ((largest - smallest) or 1.0)
        down = (_MAX_EXPONENT - _exponent(error)) / (_MAX_EXPONENT - _MIN_EXPONENT)
        return left + across * width, top + down * height

    def path(points: Sequence[tuple[float, float]]) -> str:
        return " ".join(f"{x:.1f},{y:.1f}" for x, y in (position(*point) for point in points))

    w = left + width + 260
    h = max(top + height + 60, top + 22 * len(curves) + 30)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{w}" height="{h}" viewBox="0 0 {w} {h}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{left}" y="24" font-size="15">{html.escape(title)}</text>',
        *_grid(left, top, width, height, largest, smallest),
    ]
    guide = ((10**largest, 1.0), (10**smallest, 10 ** (2 * (smallest - largest))))
    parts.append(f'<polyline points="{path(guide)}" fill="none" stroke="#bbb" stroke-dasharray="4 4"/>')
    for index, curve in enumerate(curves):
        parts += _curve(path(curve.points), curve.name, index, left + width + 20, top + 12 + 22 * index)
    return "\n".join([*parts, "</svg>", ""])


def _curve(points: str, name: str, index: int, x: float, y: float) -> list[str]:
    colour = _COLOURS[index % len(_COLOURS)]
    dash = _DASHES[index // len(_COLOURS) % len(_DASHES)]
    style = f'fill="none" stroke="{colour}" stroke-width="1.6" stroke-dasharray="{dash}"'
    dots = [f'<circle cx="{a}" cy="{b}" r="2.4" fill="{colour}"/>' for a, b in (p.split(",") for p in points.split())]
    legend = f'<polyline points="{x},{y} {x + 22},{y}" {style}/>'
    return [f'<polyline points="{points}" {style}/>', *dots, legend, _text(x + 28, y + 4, name)]


def _grid(left: float, top: float, width: float, height: float, largest: float, smallest: float) -> list[str]:
    parts = [f'<rect x="{left}" y="{top}" width="{width}" height="{height}" fill="none" stroke="#888"/>']
    for exponent in range(int(_MIN_EXPONENT), int(_MAX_EXPONENT) + 1, 3):
        y = top + (_MAX_EXPONENT - exponent) / (_MAX_EXPONENT - _MIN_EXPONENT) * height
        parts.append(f'<line x1="{left}" x2="{left + width}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e4e4e4"/>')
        parts.append(_text(left - 44, y + 4, f"1e{exponent:+03d}"))
    for exponent in range(math.floor(largest), math.ceil(smallest) - 1, -1):
        x = left + (largest - exponent) / ((largest - smallest) or 1.0) * width
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{top + height}" stroke="#e4e4e4"/>')
        parts.append(_text(x - 14, top + height + 18, f"1e{exponent:+03d}"))
    parts.append(_text(left + width / 2 - 90, top + height + 40, "step, relative to the magnitude of each input"))
    parts.append(_text(left - 44, top - 8, "relative error"))
    return parts


def _text(x: float, y: float, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}">{html.escape(text)}</text>'


def _exponent(error: float) -> float:
    """Return the power of ten of an error, limited to the plot; the maximum for NaN."""
    if not error <= 10**_MAX_EXPONENT:
        return _MAX_EXPONENT
    return max(_MIN_EXPONENT, math.log10(error)) if error > 0 else _MIN_EXPONENT
