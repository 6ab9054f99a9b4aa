"""A command on a pseudo terminal."""

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import termios
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from e2e.server_process import wait_until

_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """A command whose standard streams are a terminal of 100 columns; `text` is its output without escape sequences.

    handle: the other end of the terminal, for keys.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str] | None = None, folder: Path | None = None
    ) -> None:
        self.handle, child = pty.openpty()
        fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("DRAGOMAN_", "PYTEST_"))}
        env = {**clean, "TERM": "xterm", **(environment or {})}
        env.pop("NO_COLOR", None)
        self.popen = subprocess.Popen(
            command, stdin=child, stdout=child, stderr=child, env=env, cwd=folder, start_new_session=True
        )
        os.close(child)
        self._output = bytearray()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with suppress(OSError):  # the other end is closed
            while data := os.read(self.handle, 1 << 16):
                self._output += data

    @property
    def raw(self) -> str:
        return self._output.decode(errors="replace")

    @property
    def text(self) -> str:
        return _ESCAPE.sub("", self.raw).replace("\r", "")

    def wait_for(self, pattern: str) -> Self:
        """Wait until the text matches a regular expression."""
        wait_until(lambda: re.search(pattern, self.text) or self.popen.poll() is not None, f"{pattern!r}")
        wait_until(lambda: re.search(pattern, self.text), f"{pattern!r} in {self.text!r}", 60)
        return self

    def send(self, line: str) -> None:
        os.write(self.handle, line.encode() + b"\n")

    def wait_for_exit(self) -> int:
        return self.popen.wait(60)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGTERM)
            self.popen.wait(60)
        self._reader.join(10)
        os.close(self.handle)


def screen_of(raw: str) -> str:
    """Return what a terminal shows of an output that moves its cursor up and erases, with lines that do not wrap."""
    lines, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[\d*[A-Za-z]|\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07|\r|\n|[^\x1b\r\n]+", raw):
        if found := re.fullmatch(r"\x1b\[(\d*)A", part):
            row = max(0, row - int(found[1] or 1))
        elif part == "\x1b[J":
            lines[row:] = [""]
        elif part == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif part == "\r":
            column = 0
        elif not part.startswith("\x1b"):
            line = lines[row].ljust(column)
            lines[row] = line[:column] + part + line[column + len(part) :]
            column += len(part)
    return "\n".join(lines)
