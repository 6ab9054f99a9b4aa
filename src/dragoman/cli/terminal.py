"""Output on a terminal: aligned columns, colours, sizes, and text that cannot control the terminal."""

import logging
import os
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stderr
from typing import Self, TextIO

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


def state_code(state: str) -> str:
    """Return the ANSI code of a state of a model or worker, "" for an unknown one."""
    return _STATES.get(state.strip().lower(), "")


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
    code = "1" if is_header else state_code(cell)
    return colour_text(cell, code, stream) if code else cell


def format_bytes(count: int) -> str:
    """Return a size in decimal units, such as 1.2 GB; "" for 0."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} B" if count else ""


def is_interactive(stream: TextIO) -> bool:
    """Return whether a stream is a terminal that can move its cursor."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def terminal_columns(stream: TextIO) -> int:
    """Return the width of a terminal, 80 where it is not known."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):  # not a terminal, or closed
        return 80


class LiveLines:
    """Lines at the end of a terminal that are rewritten in place.

    While they are shown, `sys.stderr` and the handlers of the log write through them: whole lines of others, from any
    thread, appear above. The lines are erased at the end. Libraries in C, and worker processes, write past this: their
    lines begin where the last line does, and replace it until it is shown again below.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lock = threading.RLock()  # a signal handler may print within `write`
        self._lines: list[str] = []
        self._partial = ""  # written by others, without its line break yet
        self._restore = ExitStack()

    def __enter__(self) -> Self:
        self._restore.enter_context(redirect_stderr(self))
        for handler in logging.getLogger().handlers:
            if isinstance(handler, logging.StreamHandler) and handler.setStream(self) is not None:
                self._restore.callback(handler.setStream, self._stream)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore.close()
        self.update([])
        if self._partial:
            self._stream.write(self._partial + "\n")
            self._stream.flush()

    def update(self, lines: Sequence[str]) -> None:
        """Show other lines, without those shown before; each is cut at the width of the terminal."""
        columns = terminal_columns(self._stream)
        shown = [line[: columns - 1] for line in lines]
        with self._lock:
            if shown != self._lines:
                self._draw("", shown)

    def write(self, text: str) -> int:
        with self._lock:
            whole, newline, self._partial = (self._partial + text).rpartition("\n")
            if newline:
                self._draw(whole + newline, self._lines)
        return len(text)

    def flush(self) -> None:
        self._stream.flush()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def _draw(self, above: str, lines: list[str]) -> None:
        up = f"\x1b[{len(self._lines) - 1}A" if len(self._lines) > 1 else ""
        erase = f"\r{up}\x1b[J" if self._lines else ""
        # Without wrapping, so that a line of wide characters takes one row.
        shown = "\x1b[?7l" + "\n".join(lines) + "\x1b[?7h\r" if lines else ""
        self._lines = lines
        self._stream.write(erase + above + shown)
        self._stream.flush()
