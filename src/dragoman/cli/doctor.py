"""`dragoman doctor FOLDER`: what of a folder of MLServer or LMI will be the same, different or missing."""

import argparse
import itertools
import json
import logging
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dragoman.compat.survey import Remark, survey
from dragoman.core.errors import InvalidInput
from dragoman.server import refusals
from dragoman.settings import from_environment

_EPILOG = """\
what the words mean:
  same        it does here what it did
  different   it is honoured, in a way that is worth knowing
  unused      it changes nothing here, and nothing is lost
  missing     what it asks for is not there; the rest works
  refused     the server will not start with it, or the model not be loaded

The exit status is 1 where something is missing or refused, else 0. No code of the folder is run and no model loaded.
"""


def add_to(commands: Any) -> None:
    """Add the subcommand to the command line."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "doctor",
        help="tell what will differ for a folder of MLServer or LMI",
        description="Tell what will be the same, different or missing when a folder of MLServer or LMI is served.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", metavar="FOLDER", help="the folder with their settings files")
    parser.add_argument("--json", action="store_true", help="write JSON: a list of remarks")
    parser.set_defaults(run=_run)


def _run(given: argparse.Namespace) -> int:
    folder = Path(given.folder)
    if not folder.is_dir():
        raise InvalidInput(f"'{given.folder}' is no folder")
    logging.getLogger("dragoman").addHandler(logging.NullHandler())  # the remarks tell it
    found = survey(folder)
    remarks = [*found, *_refused(folder, found)]
    bad = [r for r in remarks if r.effect in ("missing", "refused")]
    print(json.dumps([asdict(r) for r in remarks], indent=2) if given.json else _text(remarks, len(bad)))
    return 1 if bad else 0


def _refused(folder: Path, found: list[Remark]) -> Iterator[Remark]:
    """What `dragoman serve` would refuse, by its own checks, and the survey has not told yet."""
    known = [f"'{r.subject}'" for r in found if r.effect == "refused"]
    known += [r.told for r in found if r.effect == "refused"]
    for subject, told in refusals(str(folder), from_environment(os.environ)):
        if not any(each in told for each in known):
            yield Remark("dragoman serve", subject, "refused", told)


def _text(remarks: list[Remark], bad: int) -> str:
    lines: list[str] = []
    for place, group in itertools.groupby(remarks, key=lambda r: r.place):
        lines.append(place)
        lines += [f"  {r.effect:<9}  {r.subject}" + (f": {r.told}" if r.told else "") for r in group]
        lines.append("")
    lines.append("everything works" if not bad else f"not everything works: {bad} missing or refused, see above")
    return "\n".join(lines)
