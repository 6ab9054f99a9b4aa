"""Plot of latency against throughput, as SVG."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from dragoman_check.load_test.repeats import combine

_WIDTH, _HEIGHT = 720, 440
_LEFT, _RIGHT, _TOP, _BOTTOM = 72, 24, 48, 56
# Colours that differ for readers who confuse red and green, and line styles that differ in print.
_SERIES = {"p50": ("#0072b2", ""), "p90": ("#009e73", "6 3"), "p99": ("#d55e00", "2 3")}
_OUTLINE = "paint-order='stroke' stroke='white' stroke-width='4'"
_FONT = "font-family='sans-serif' font-size='12' fill='#333'"


def svg_plot(measurements: Sequence[Mapping[str, Any]], title: str) -> str:
    """Return an SVG of p50, p90 and p99 in milliseconds (logarithmic) by completed requests per second.

    Of loads that were run several times it has the medians, and bars from the least to the largest value.
    """
    rows = [m for m in combine(measurements) if m["latency_ms"]]
    ranges = [m["ranges"] for m in rows if m["runs"] > 1]
    rates = [*(m["rate"] for m in rows), *(each["rate"][1] for each in ranges)]
    values = [m["latency_ms"][name] for m in rows for name in _SERIES]
    values += [value for each in ranges for name in _SERIES for value in each[name]]
    right = _round_up(max(rates, default=1.0))
    low, high = _decades(values or [1.0])
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {_WIDTH} {_HEIGHT}' role='img'>",
        f"<title>{escape(title)}</title>",
        f"<rect width='{_WIDTH}' height='{_HEIGHT}' fill='white'/>",
        f"<text x='{_LEFT}' y='24' {_FONT} font-weight='bold'>{escape(title)}</text>",
        *_axes(right, low, high),
    ]
    for name, (colour, dashes) in _SERIES.items():
        points = [(_x(m["rate"], right), _y(m["latency_ms"][name], low, high)) for m in rows]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(
            f"<polyline points='{line}' fill='none' stroke='{colour}' stroke-width='2' stroke-dasharray='{dashes}'/>"
        )
        parts += [bar for m in rows if m["runs"] > 1 for bar in _bars(m, name, colour, right, low, high)]
        parts += [f"<circle cx='{x:.1f}' cy='{y:.1f}' r='3.5' fill='{colour}'/>" for x, y in points]
    parts += [*_labels(rows, right, low, high), *_legend(), "</svg>"]
    return "\n".join(parts) + "\n"


def _bars(m: Mapping[str, Any], name: str, colour: str, right: float, low: int, high: int) -> list[str]:
    """Return the ranges of the latency and of the rate at a point."""
    x, y = _x(m["rate"], right), _y(m["latency_ms"][name], low, high)
    left, end = (_x(rate, right) for rate in m["ranges"]["rate"])
    bottom, top = (_y(value, low, high) for value in m["ranges"][name])
    style = f"stroke='{colour}' stroke-width='1'"
    return [
        f"<line x1='{x:.1f}' x2='{x:.1f}' y1='{bottom:.1f}' y2='{top:.1f}' {style}/>",
        f"<line x1='{left:.1f}' x2='{end:.1f}' y1='{y:.1f}' y2='{y:.1f}' {style}/>",
    ]


def _axes(right: float, low: int, high: int) -> list[str]:
    bottom = _HEIGHT - _BOTTOM
    parts = []
    for exponent in range(low, high + 1):
        y = _y(10.0**exponent, low, high)
        parts.append(f"<line x1='{_LEFT}' x2='{_WIDTH - _RIGHT}' y1='{y:.1f}' y2='{y:.1f}' stroke='#ddd'/>")
        parts.append(f"<text x='{_LEFT - 8}' y='{y + 4:.1f}' {_FONT} text-anchor='end'>{10.0**exponent:g}</text>")
    for i in range(5):
        x = _x(right * i / 4, right)
        parts.append(f"<line x1='{x:.1f}' x2='{x:.1f}' y1='{_TOP}' y2='{bottom}' stroke='#eee'/>")
        label = f"{right * i / 4:g}"
        parts.append(f"<text x='{x:.1f}' y='{bottom + 18}' {_FONT} text-anchor='middle'>{label}</text>")
    middle = (_TOP + bottom) / 2
    return [
        *parts,
        f"<text x='{(_LEFT + _WIDTH - _RIGHT) / 2}' y='{_HEIGHT - 12}' {_FONT} text-anchor='middle'>"
        "completed requests per second</text>",
        f"<text x='16' y='{middle}' {_FONT} text-anchor='middle' transform='rotate(-90 16 {middle})'>"
        "latency (ms)</text>",
    ]


def _labels(rows: Sequence[Mapping[str, Any]], right: float, low: int, high: int) -> list[str]:
    """Return the load of each point, below its lowest line."""
    labels = []
    for m in rows:
        load = m["load"]
        text = f"{load['rate']:g}/s" if load.get("rate") else f"c={load['concurrency']}"
        x, y = _x(m["rate"], right), _y(m["latency_ms"]["p50"], low, high)
        labels.append(f"<text x='{x:.1f}' y='{y + 18:.1f}' {_FONT} {_OUTLINE} text-anchor='middle'>{text}</text>")
    return labels


def _legend() -> list[str]:
    parts = []
    for i, (name, (colour, dashes)) in enumerate(_SERIES.items()):
        x = _WIDTH - _RIGHT - 70 * (len(_SERIES) - i)
        style = f"stroke='{colour}' stroke-width='2' stroke-dasharray='{dashes}'"
        parts.append(f"<line x1='{x}' x2='{x + 28}' y1='36' y2='36' {style}/>")
        parts.append(f"<text x='{x + 34}' y='40' {_FONT}>{name}</text>")
    return parts


def _x(rate: float, right: float) -> float:
    return _LEFT + (_WIDTH - _LEFT - _RIGHT) * rate / right


def _y(value_ms: float, low: int, high: int) -> float:
    share = (math.log10(max(value_ms, 10.0**low)) - low) / (high - low)
    return (_HEIGHT - _BOTTOM) - (_HEIGHT - _BOTTOM - _TOP) * share


def _decades(values: Sequence[float]) -> tuple[int, int]:
    """Return the exponents of the powers of ten around the values, with room for labels below."""
    smallest, largest = max(min(values), 1e-6), max(*values, 1e-6)
    low = math.floor(math.log10(smallest) - 0.15)
    return low, max(low + 1, math.ceil(math.log10(largest)))


def _round_up(value: float) -> float:
    """Return the next of 1, 2, 4, 6, 8 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(max(value, 1e-9)))
    return next(step * power for step in (1, 2, 4, 6, 8, 10) if step * power >= value)
