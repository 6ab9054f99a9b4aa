"""Output on a terminal: aligned columns, colours, sizes, and text that cannot control the terminal."""

import os
import sys
from collections.abc import Sequence
from typing import Any, TextIO

# ANSI codes by word in a column of states.
_STATES = {
    "ready": "32", "idle": "32", "busy": "32", "unavailable": "31", "failed": "31", "not ready": "31", "hung": "31",
    "loading": "33", "unloading": "33", "waiting": "33", "skipped": "33",
}  # fmt: skip

# C0 and C1 controls, and those that change the direction of the text around them.
_CONTROLS = dict.fromkeys(
    (*(n for n in range(32) if chr(n) not in "\n\t"), *range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A)),
    "\ufffd",
)


def has_colours(stream: TextIO) -> bool:
    """Return whether a stream is a terminal that shows colours, and the user wants them (https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def colour_text(text: str, code: str, stream: TextIO) -> str:
    """Return a text in a colour or style, by its ANSI code, where the stream shows colours."""
    return f"\x1b[{code}m{text}\x1b[0m" if has_colours(stream) else text


def printable(text: str) -> str:
    """Return text of a model or server without terminal control characters; line breaks and tabs are kept."""
    return text.translate(_CONTROLS)


def escape_controls(text: str) -> str:
    """Return JSON with escapes for characters that control a terminal; its value is the same."""
    return text.translate({code: f"\\u{code:04x}" for code in _CONTROLS})


def table(rows: Sequence[Sequence[str]], stream: TextIO | None = None, indent: str = "") -> list[str]:
    """Return aligned lines; on a terminal the first row is bold, and states are coloured."""
    stream = stream or sys.stdout
    rows = [[printable(cell).replace("\n", " ") for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for number, row in enumerate(rows):
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        cells[-1] = cells[-1].rstrip()
        if has_colours(stream):
            cells = [_coloured_cell(cell, is_header=number == 0, stream=stream) for cell in cells]
        lines.append((indent + "  ".join(cells)).rstrip())
    return lines


def _coloured_cell(cell: str, *, is_header: bool, stream: TextIO) -> str:
    code = "1" if is_header else _STATES.get(cell.strip().lower(), "")
    return colour_text(cell, code, stream) if code else cell


def format_bytes(count: int) -> str:
    """Return a size in decimal units, such as 1.2 GB; "" for 0."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} B" if count else ""


def live_display(stream: TextIO) -> Any:
    """Return a `rich.live.Live` on a terminal; None elsewhere, or if rich is not installed."""
    if not has_colours(stream):
        return None
    try:
        from rich.console import Console
        from rich.live import Live
    except ImportError:
        return None
    return Live(console=Console(file=stream, highlight=False), refresh_per_second=4, transient=True)
