"""`dragoman doctor FOLDER`: report what will be the same, different or missing for a folder of MLServer or LMI."""

import argparse
import itertools
import json
import logging
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from dragoman.compat.fields import Remark
from dragoman.compat.survey import survey
from dragoman.core.errors import InvalidInput
from dragoman.server import load_errors
from dragoman.settings import from_environment

_EPILOG = """\
effects:
  same        works as before
  different   works differently, as described
  unused      has no effect here
  missing     is not available; the rest works
  rejected    the server does not start with it, or the model is not loaded

Exit status: 1 if something is missing or rejected, otherwise 0. No code of the folder is run and no model is loaded.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Report what will be the same, different or missing when a folder of MLServer or LMI is served."
    )
    parser.epilog = _EPILOG
    parser.add_argument("folder", metavar="FOLDER", help="the folder with their settings files")
    parser.add_argument("--json", action="store_true", help="write a JSON list of remarks")


def run(arguments: argparse.Namespace) -> int:
    """Run the command; return its exit status."""
    folder = Path(arguments.folder)
    if not folder.is_dir():
        raise InvalidInput(f"'{arguments.folder}' is not a folder")
    logging.getLogger("dragoman").addHandler(logging.NullHandler())  # the remarks say the same
    found = survey(folder)
    remarks = [*found, *_load_errors(folder, found)]
    bad = [r for r in remarks if r.effect in ("missing", "rejected")]
    print(json.dumps([asdict(r) for r in remarks], indent=2) if arguments.json else _text(remarks, len(bad)))
    return 1 if bad else 0


def _load_errors(folder: Path, found: list[Remark]) -> Iterator[Remark]:
    """Yield the errors that `dragoman serve` would report and the survey has not found."""
    known = [f"'{r.subject}'" for r in found if r.effect == "rejected"]
    known += [r.note for r in found if r.effect == "rejected"]
    for subject, message in load_errors(str(folder), from_environment(os.environ)):
        if not any(each in message for each in known):
            yield Remark("dragoman serve", subject, "rejected", message)


def _text(remarks: list[Remark], bad: int) -> str:
    lines: list[str] = []
    for place, group in itertools.groupby(remarks, key=lambda r: r.place):
        lines.append(place)
        lines += [f"  {r.effect:<9}  {r.subject}" + (f": {r.note}" if r.note else "") for r in group]
        lines.append("")
    lines.append("everything works" if not bad else f"not everything works: {bad} missing or rejected, see above")
    return "\n".join(lines)
