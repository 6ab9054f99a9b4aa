"""`dragoman doctor FOLDER`: report what will be the same, different or missing for a folder of models."""

import argparse
import itertools
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from msgspec import structs

from dragoman import hooks
from dragoman.core.errors import InvalidInput, ModelFailed
from dragoman.core.remarks import PICKLE_NOTE, Remark
from dragoman.core.runtime import lazy_function
from dragoman.engine_setup import load_errors
from dragoman.settings import from_environment
from dragoman.workers.probe import probe

_EPILOG = """\
effects:
  same        works as before
  different   works differently, as described
  unused      has no effect here
  missing     is not available; the rest works
  rejected    the server does not start with it, or the model is not loaded
  untried     nothing wrong was found, but the model was not loaded

Each model is loaded in a process of its own, which runs its code; with --dry-run files are read and nothing is run.

examples:
  dragoman doctor models/
  dragoman doctor models/ --dry-run --json
  dragoman doctor models/ --request iris=request.json

Exit status: 1 if something is missing or rejected, otherwise 0.
"""
_SERVE = "dragoman serve"
# Seconds that a model may take to load and to answer its requests.
_TIMEOUT_S = 600.0
_PICKLED = (".joblib", ".pkl", ".pickle")
_TRY_MODEL = lazy_function("dragoman.cli.trial:try_model")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Report what will be the same, different or missing when a folder of MLServer, Triton, LMI or other models is "
        "served, and load each model."
    )
    parser.epilog = _EPILOG
    parser.add_argument(
        "folder", metavar="FOLDER", help="the folder with models and settings files, or a script of KServe"
    )
    parser.add_argument("--json", action="store_true", help="write a JSON list of remarks")
    parser.add_argument("--dry-run", action="store_true", help="read files only: load no model and run no code")
    parser.add_argument(
        "--allow-pickle", action="store_true", help="load files that can run code when loaded (pickle, joblib)"
    )
    parser.add_argument(
        "--request",
        action="append",
        default=[],
        metavar="MODEL=FILE",
        help="answer the Open Inference request, or list of requests, in a JSON file; may be repeated",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command; return its exit status."""
    folder = Path(arguments.folder)
    is_script = folder.suffix == ".py" and folder.is_file()
    if not (folder.is_dir() or is_script):
        raise InvalidInput(f"'{arguments.folder}' is not a folder")
    requests = _parse_requests(arguments.request)
    logging.getLogger("dragoman").addHandler(logging.NullHandler())  # the remarks say the same
    survey_result = _survey(folder)
    names: list[str] = []
    remarks = [*survey_result, *_load_errors(folder, survey_result, names)]
    if unknown := sorted(requests.keys() - names):
        raise InvalidInput(f"--request: expected a model of {', '.join(names) or 'none'}, got '{unknown[0]}'")
    if arguments.dry_run:
        remarks += [Remark(_SERVE, f"model '{name}'", "untried", "not loaded: --dry-run") for name in names]
    else:
        for name in names:
            remarks += _try(folder, name, requests.get(name, ()), allow_pickle=arguments.allow_pickle)
    bad = [r for r in remarks if r.effect in ("missing", "rejected")]
    print(json.dumps([structs.asdict(r) for r in remarks], indent=2) if arguments.json else _text(remarks, len(bad)))
    return 1 if bad else 0


def _survey(path: Path) -> list[Remark]:
    """Return the remarks of all features on the files of a folder or on a script, by file."""
    remarks = [remark for survey in hooks.all_of("surveys").values() for remark in survey(path)]
    if path.is_dir() and not remarks:
        remarks = [
            Remark(".", "models", "same", "no settings of another server; models are recognized from their files")
        ]
        pickled = sorted(file for file in path.rglob("*") if file.suffix in _PICKLED)
        remarks += [Remark(str(file.relative_to(path)), "file", "different", PICKLE_NOTE) for file in pickled]
    locations = {remark.location: place for place, remark in reversed([*enumerate(remarks)])}
    return sorted(remarks, key=lambda remark: locations[remark.location])


def _parse_requests(given: Sequence[str]) -> dict[str, list[str]]:
    requests: dict[str, list[str]] = {}
    for each in given:
        name, _, file = each.partition("=")
        if not name or not file:
            raise InvalidInput(f"--request: expected MODEL=FILE, got '{each}'")
        requests.setdefault(name, []).append(os.path.abspath(file))
    return requests


def _try(folder: Path, name: str, files: Sequence[str], *, allow_pickle: bool) -> Iterator[Remark]:
    """Load a model and answer its example requests in another process; yield the result of each."""
    subject = f"model '{name}'"
    try:
        errors: Mapping[str, str] = probe(_TRY_MODEL, [os.path.abspath(folder), name, allow_pickle, files], _TIMEOUT_S)
    except ModelFailed as error:
        errors = {"loading": error.message}
    for what, message in errors.items():
        if what == "loading" and "--allow-pickle" in message and not allow_pickle:
            yield Remark(_SERVE, subject, "untried", f"{message}; dragoman doctor --allow-pickle loads it")
        elif what == "trial":
            yield Remark(_SERVE, subject, "different", f"loaded, but answered no example: {message}")
        else:
            yield Remark(_SERVE, f"{subject}, {what}", "rejected" if what == "loading" else "missing", message)
    if not errors:
        answered = f", and answered the requests in {', '.join(Path(file).name for file in files)}" if files else ""
        yield Remark(_SERVE, subject, "same", f"loaded{answered}")


def _load_errors(folder: Path, found: list[Remark], names: list[str]) -> Iterator[Remark]:
    """Yield the errors that `dragoman serve` would report and the survey has not found; add the other models."""
    known = [f"'{r.subject}'" for r in found if r.effect == "rejected"]
    known += [r.note for r in found if r.effect == "rejected"]
    for subject, message in load_errors(str(folder), from_environment(os.environ), names):
        if not any(each in message for each in known):
            yield Remark(_SERVE, subject, "rejected", message)


def _text(remarks: list[Remark], bad: int) -> str:
    lines: list[str] = []
    for location, group in itertools.groupby(remarks, key=lambda r: r.location):
        lines.append(location)
        lines += [f"  {r.effect:<9}  {r.subject}" + (f": {r.note}" if r.note else "") for r in group]
        lines.append("")
    lines.append(_summary(remarks, bad))
    return "\n".join(lines)


def _summary(remarks: list[Remark], bad: int) -> str:
    different, untried = (sum(r.effect == effect for r in remarks) for effect in ("different", "untried"))
    if bad:
        return f"not everything works: {bad} missing or rejected, see above"
    differences = f"; differences: {different}, see above" if different else ""
    if untried:
        return f"nothing missing was found; models not loaded: {untried}{differences}"
    return f"everything loads{differences}" if different else "everything works"
