"""`dragoman audit verify`: check the chain of hashes of an audit log."""

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from dragoman.cli.terminal import printable
from dragoman.core.documents import parse_json
from dragoman.core.errors import InvalidInput

_EPILOG = """\
Each line has the hash of the line before it, and so has the first line of a file that follows a rotated one: give the
oldest file first. Lines that were removed at the end, and a chain that was written anew, cannot be found: keep copies,
or the last hash, on another machine.

examples:
  dragoman audit verify /var/log/dragoman/audit.log
  dragoman audit verify audit.log.1 audit.log

Exit status: 0 if every line is there as it was written, 1 if not, 2 if a file cannot be read.
"""


class Report(msgspec.Struct):
    """What was found in the files. errors: where the chain is broken; notes: what is unusual; last: hash of the last
    line."""

    lines: int = 0
    errors: list[str] = []
    notes: list[str] = []
    last: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.description = "Check that no line of an audit log was changed, added or removed between others."
    parser.epilog = _EPILOG
    parser.add_argument("action", choices=("verify",), help="what to do")
    parser.add_argument("files", nargs="+", metavar="FILE", help="file of `--audit-log`, rotated ones before it")
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def run(arguments: argparse.Namespace) -> int:
    """Run the command; return its exit status."""
    report = verify(arguments.files)
    if arguments.json:
        print(json.dumps(msgspec.to_builtins(report), indent=2))
    else:
        for text in (*report.notes, *report.errors):
            print(printable(text), file=sys.stderr)
        print(f"lines={report.lines} errors={len(report.errors)} last={report.last}")
    return 1 if report.errors else 0


def verify(files: Sequence[str]) -> Report:
    """Check files, the oldest first. Raises InvalidInput if one cannot be read."""
    report, known = Report(), False
    for file in files:
        for number, line in enumerate(_lines(file), 1):
            where = f"{file}:{number}"
            if not line.endswith(b"\n"):
                report.notes.append(f"{where}: the line is cut: the server could not write its end")
                break
            report.lines += 1
            prev = _prev(line)
            if prev is None:
                report.notes.append(f"{where}: expected a line of the audit log, got another one")
            elif number == 1 and not known:
                if prev:
                    report.notes.append(f"{where}: it continues an older file")
            elif number == 1 and not prev:
                report.notes.append(f"{where}: it does not continue the file before")
            elif prev != report.last:
                report.errors.append(f"{where}: a line before it was changed, added or removed")
            report.last, known = hashlib.sha256(line[:-1]).hexdigest(), True
    return report


def _lines(file: str) -> Iterator[bytes]:
    try:
        with open(file, "rb") as opened:
            yield from opened
    except OSError as error:
        raise InvalidInput(f"'{file}' cannot be read: {error.strerror or error}") from error


def _prev(line: bytes) -> str | None:
    """Return the hash of the line before, None for what is not a line of an audit log."""
    try:
        parsed: Any = parse_json(line)
    except ValueError:
        return None
    prev = parsed.get("prev") if isinstance(parsed, dict) else None
    return prev if isinstance(prev, str) else None
