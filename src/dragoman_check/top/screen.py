"""The display of `dragoman top`: a terminal that is redrawn, with keys."""

import os
import select
import sys
import termios
import threading
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from dragoman.cli.terminal import colour_text, printable
from dragoman.core.errors import DragomanError
from dragoman_check.top.view import SORT_KEYS, View, lines

# The keys, longest first: the first that fits is shown.
_HELPS = (
    "q quit  / filter  c e p 5 u f t n s sort  r reverse  w workers  j k scroll",
    "q quit  / filter  c e p sort  w workers",
    "q quit  / filter",
    "q quit",
)
_POLL_S = 0.1
_QUIT = ("q", "\x03", "\x04", "")


class Poller(threading.Thread):
    """Reads the server in the background, so that keys work while it does not answer."""

    def __init__(self, read: Callable[[], dict[str, Any]], interval_s: float) -> None:
        super().__init__(daemon=True)
        self._read = read
        self._interval_s = interval_s
        self._stopped = threading.Event()
        self.found: dict[str, Any] | None = None
        self.error = ""
        self.count = 0

    def run(self) -> None:
        while not self._stopped.wait(self._interval_s):
            try:
                self.found, self.error = self._read(), ""
            except DragomanError as error:
                self.error = error.message
            except Exception as error:  # of a server that answers something else
                self.error = f"the server's figures cannot be read: {error!r}"
            self.count += 1

    def stop(self) -> None:
        self._stopped.set()


def show(read: Callable[[], dict[str, Any]], first: dict[str, Any], view: View, interval_s: float) -> None:
    """Show the figures until the user quits."""
    poller = Poller(read, interval_s)
    poller.found = first
    poller.start()
    typed: str | None = None  # the filter while it is typed
    drawn: Any = None
    try:
        with _screen():
            while True:
                size = os.get_terminal_size(sys.stdout.fileno())
                state = (poller.count, view, typed, size)
                if repr(state) != drawn:
                    _draw(poller, view, typed, size)
                    drawn = repr(state)
                if not select.select([sys.stdin], [], [], _POLL_S)[0]:
                    continue
                for key in _keys():
                    if typed is not None:
                        typed = _edit(view, typed, key)
                    elif key in _QUIT:
                        return
                    elif key == "/":
                        typed, view.filter = view.filter, view.filter
                    else:
                        _press(view, key)
    except KeyboardInterrupt:
        return
    finally:
        poller.stop()


def _keys() -> list[str]:
    """Return the keys that were pressed; "" at the end of the input."""
    data = os.read(sys.stdin.fileno(), 64).decode(errors="replace")
    for sequence, key in (("\x1b[A", "k"), ("\x1b[B", "j"), ("\x1b[5~", "K"), ("\x1b[6~", "J")):
        data = data.replace(sequence, key)
    return list(data) or [""]


def _press(view: View, key: str) -> None:
    if key in SORT_KEYS:
        view.is_reversed = not view.is_reversed if view.sort == SORT_KEYS[key] else False
        view.sort = SORT_KEYS[key]
    elif key == "r":
        view.is_reversed = not view.is_reversed
    elif key == "w":
        view.shows_workers = not view.shows_workers
    elif key in "jkJK":
        view.scroll += {"j": 1, "k": -1, "J": 10, "K": -10}[key]


def _edit(view: View, typed: str, key: str) -> str | None:
    """Return the text of the filter after a key; None once it is finished."""
    if key in ("\r", "\n", ""):
        return None
    if key == "\x1b":
        view.filter = ""
        return None
    typed = typed[:-1] if key in ("\x7f", "\b") else typed + (key if key.isprintable() else "")
    view.filter, view.scroll = typed, 0
    return typed


def _draw(poller: Poller, view: View, typed: str | None, size: os.terminal_size) -> None:
    assert poller.found is not None
    foot = f"filter: {typed}_  Enter keeps, Esc clears"
    if typed is None:
        begin = f"filter '{view.filter}'  " if view.filter else ""
        foot = next((begin + each for each in _HELPS if len(begin + each) < size.columns), begin + _HELPS[-1])
    if poller.error:
        foot = f"{poller.error}; trying again"
    shown = lines(poller.found, view, size.columns, size.lines)
    body = [colour_text(text, code, sys.stdout) if code else text for text, code in shown]
    body += [""] * (size.lines - 1 - len(body))
    style = "31" if poller.error else "2"
    body.append(colour_text(printable(foot)[: size.columns - 1], style, sys.stdout))
    sys.stdout.write("\x1b[H" + "\x1b[K\n".join(body) + "\x1b[K")
    sys.stdout.flush()


@contextmanager
def _screen() -> Iterator[None]:
    """Show the other screen of the terminal, without its cursor; keys are read one by one and not shown."""
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    sys.stdout.write("\x1b[?1049h\x1b[?25l\x1b[2J")
    try:
        yield
    finally:
        sys.stdout.write("\x1b[?25h\x1b[?1049l")
        sys.stdout.flush()
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
