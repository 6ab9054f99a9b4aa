"""Answers as Markdown on a terminal, by the package rich.

Text arrives in chunks. A paragraph, list or block of code that is complete is rendered and stays; the rest is shown as
it is, and rewritten when more arrives.
"""

import re
import sys

from rich.cells import chop_cells
from rich.console import Console
from rich.markdown import Markdown

_FENCE = re.compile(r" {0,3}(```+|~~~+)")


class MarkdownWriter:
    """Shows one answer."""

    def __init__(self) -> None:
        self._console = Console(file=sys.stdout, highlight=False)
        self._pending = ""
        self._rows = 0  # of the pending text on the screen
        self._has_blocks = False

    def write(self, text: str) -> None:
        self._pending += text
        complete, self._pending = split_blocks(self._pending)
        self._erase()
        self._render(complete)
        width, height = self._console.size
        rows = [row for line in self._pending.split("\n") for row in chop_cells(line, max(1, width - 1)) or [""]]
        shown = rows[-max(1, height - 1) :]  # what has left the screen cannot be rewritten
        self._rows = len(shown)
        sys.stdout.write("\n".join(shown))
        sys.stdout.flush()

    def end(self) -> None:
        self._erase()
        self._render(self._pending)
        self._pending = ""

    def _erase(self) -> None:
        if self._rows:
            sys.stdout.write(f"\r\x1b[{self._rows - 1}A\x1b[J" if self._rows > 1 else "\r\x1b[J")
        self._rows = 0

    def _render(self, text: str) -> None:
        if text.strip():
            if self._has_blocks:
                self._console.print()
            self._has_blocks = True
            self._console.print(Markdown(text, hyperlinks=False))


def split_blocks(text: str) -> tuple[str, str]:
    """Return the complete blocks of a text and the rest, which begins with a line of its own.

    A block ends with the last line of a fence of code, or with an empty line before a line that is not indented.
    """
    fence, end, at = "", 0, 0
    lines = text.splitlines(keepends=True)
    for number, line in enumerate(lines):
        at += len(line)
        found = _FENCE.match(line)
        if found and not fence:
            fence = found[1]
        elif found and found[1].startswith(fence) and not line.strip(" `~\n"):
            fence = ""
            if line.endswith("\n"):
                end = at
            continue
        if fence or line.strip() or not line.endswith("\n"):
            continue
        following = lines[number + 1] if number + 1 < len(lines) else ""
        if following.strip() and not following.startswith((" ", "\t")):
            end = at
    return text[:end], text[end:]
