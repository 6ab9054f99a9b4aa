"""Lines that are rewritten at the end of a terminal, while others write above them."""

import subprocess
import sys
from pathlib import Path

from cli.terminals import Terminal, screen_of

PROGRAM = """
import logging, os, sys, threading, warnings
from dragoman.cli.terminal import LiveLines

handler = logging.StreamHandler()
logging.getLogger().addHandler(handler)
with LiveLines(sys.stderr) as live:
    live.update(["first line", "second line" * 50])
    print("above", file=sys.stderr)
    sys.stderr.write("in ")
    live.update(["third line"])
    os.write(2, b"a line of a library in C\\n")
    sys.stderr.write("parts\\nrest")
    logging.warning("logged")
    threads = [threading.Thread(target=lambda n=n: print(f"thread {n}", file=sys.stderr)) for n in range(3)]
    [each.start() for each in threads]
    [each.join() for each in threads]
    live.update(["last line"])
    if len(sys.argv) > 1:
        raise SystemExit(live.update(["failed"]))
print("after", file=sys.stderr)
logging.warning("logged after")
"""


def test_lines_of_others_stand_above_and_the_last_is_erased(tmp_path: Path) -> None:
    with Terminal([sys.executable, "-c", PROGRAM], folder=tmp_path) as terminal:
        assert terminal.wait_for_exit() == 0
        terminal.wait_for("logged after\n")
        raw = terminal.raw
    lines = [line for line in screen_of(raw).splitlines() if line]
    assert lines[:3] == ["above", "a line of a library in C", "in parts"]
    assert sorted(lines[3:7]) == ["restlogged", "thread 0", "thread 1", "thread 2"]
    assert lines[7:] == ["after", "logged after"]
    assert max(map(len, raw.replace("\x1b[?7l", "\n").replace("\x1b[?7h", "\n").split("\n"))) < 100
    with Terminal([sys.executable, "-c", PROGRAM, "fail"], folder=tmp_path) as terminal:
        terminal.wait_for("failed")
        assert terminal.wait_for_exit() == 0
        terminal.wait_for("failed")
        assert "failed" not in screen_of(terminal.raw)


def test_a_log_in_a_file_has_no_control_codes() -> None:
    command = [sys.executable, "-m", "dragoman", "bench", "http://127.0.0.1:1", "m"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "\x1b" not in done.stdout + done.stderr
