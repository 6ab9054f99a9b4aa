"""Bar charts as SVG."""

from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

_WIDTH, _BAR, _GAP, _LABELS, _VALUES, _TOP = 720, 18, 6, 220, 90, 58
_COLOURS = {"own": "#2a6fb0", "echo": "#8a8f98", "peer": "#c9803a"}


@dataclass(frozen=True, slots=True)
class Bar:
    """The value of one server as a length and as text, and the kind of server (own, echo, peer).

    `spread` are the least and the greatest value of the rounds.
    """

    label: str
    length: float
    text: str
    kind: str
    spread: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class Group:
    """Bars on one scale with a heading."""

    heading: str
    bars: Sequence[Bar]


def chart(title: str, subtitle: str, groups: Sequence[Group]) -> str:
    """Return groups of horizontal bars; each group has its own scale."""
    lines, y = [], _TOP
    for group in groups:
        lines.append(_text(16, y + 4, group.heading, 13, "600"))
        y += 16
        longest = max(max((bar.length, *(bar.spread or ()))) for bar in group.bars)
        for bar in group.bars:
            lines += _draw(bar, y, longest)
            y += _BAR + _GAP
        y += 22
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {y}" width="{_WIDTH}" height="{y}" role="img"'
        ' font-family="system-ui, sans-serif">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{_WIDTH}" height="{y}" fill="#ffffff"/>',
        _text(16, 24, title, 16, "600"),
        _text(16, 42, subtitle, 12, "400", colour="#5c636e"),
    ]
    return "\n".join([*head, *lines, "</svg>", ""])


def _draw(bar: Bar, y: int, longest: float) -> list[str]:
    max_length = _WIDTH - _LABELS - _VALUES - 16
    length = max(1.0, max_length * bar.length / longest) if longest else 1.0
    middle = y + _BAR - 5
    ends = [_LABELS + max_length * value / longest for value in bar.spread or ()] if longest else []
    lines = [
        _text(_LABELS - 8, middle, bar.label, 12, "400", anchor="end"),
        f'<rect x="{_LABELS}" y="{y}" width="{length:.1f}" height="{_BAR}" rx="2" fill="{_COLOURS[bar.kind]}"/>',
        _text(max([_LABELS + length, *ends]) + 6, middle, bar.text, 12, "400"),
    ]
    if ends:
        at = y + _BAR / 2
        path = f"M{ends[0]:.1f} {at - 4}v8M{ends[0]:.1f} {at}H{ends[1]:.1f}M{ends[1]:.1f} {at - 4}v8"
        lines.append(f'<path d="{path}" stroke="#1d2128" fill="none"/>')
    return lines


def _text(x: float, y: float, text: str, size: int, weight: str, anchor: str = "start", colour: str = "#1d2128") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}" text-anchor="{anchor}"'
    return f'<text {place} fill="{colour}">{escape(text)}</text>'
