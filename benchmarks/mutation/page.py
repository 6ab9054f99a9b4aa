"""Write the mutation scores and the accepted survivors into `benchmarks/results/mutation.md`."""

import re
import tomllib
from pathlib import Path

from benchmarks.mutation.results import Result, Results
from benchmarks.mutation.targets import ROOT

PAGE = ROOT / "benchmarks" / "results" / "mutation.md"
ACCEPTED = Path(__file__).parent / "accepted.toml"
_SECTION = re.compile(r"(<!-- from the results of \./scripts/mutation -->\n).*?(<!-- end -->)", re.S)


def reasons() -> dict[tuple[str, str, str], str]:
    """Return the reasons why mutants may survive, by module, line before and line after."""
    entries = tomllib.loads(ACCEPTED.read_text())["survivor"]
    return {(entry["module"], entry["before"], entry["after"]): entry["reason"] for entry in entries}


def section(results: Results) -> str:
    """Return the scores and the survivors with their reasons."""
    known = reasons()
    rows = [_row(survivor, known) for survivor in results.survivors()]
    head = ["| survivor | why it is accepted |", "|---|---|"]
    return "\n".join(["", results.table(), "", *head, *sorted(rows), "", ""])


def _row(survivor: Result, known: dict[tuple[str, str, str], str]) -> str:
    before, after = (text.replace("|", "\\|") for text in (survivor.before, survivor.after))
    reason = known.get((survivor.module, survivor.before, survivor.after), "")
    module = survivor.module.partition("/")[2].removesuffix(".py")
    return f"| {module}: `{before}` → `{after}` | {reason} |"


def write(results: Results) -> None:
    """Replace the section of the page."""
    text = PAGE.read_text()
    PAGE.write_text(_SECTION.sub(lambda found: found[1] + section(results) + found[2], text))
