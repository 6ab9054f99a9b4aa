"""Reports of conformance checks: a verdict, JSON, JUnit and Markdown."""

import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Sequence
from typing import Any

from dragoman_check.conformance.clauses import ClauseResult, Outcome


def verdict(results: Sequence[ClauseResult]) -> str:
    """Return one sentence about all results."""
    counts = Counter(result.outcome for result in results)
    violated = sum(result.violates for result in results)
    advised = counts[Outcome.FAIL] - violated
    if not counts[Outcome.PASS] and not counts[Outcome.FAIL]:
        return "nothing could be checked"
    parts = [f"{violated} of {counts[Outcome.PASS] + counts[Outcome.FAIL]} clauses violated" if violated else
             f"all {counts[Outcome.PASS] + counts[Outcome.FAIL]} clauses that could be checked hold" if not advised else
             "no requirement violated"]  # fmt: skip
    if advised:
        parts.append(f"{advised} recommendation{'s' if advised > 1 else ''} not followed")
    return ", ".join(parts)


def as_json(url: str, server: dict[str, Any], results: Sequence[ClauseResult]) -> dict[str, Any]:
    """Return all results as a JSON object."""
    return {
        "url": url,
        "server": server,
        "summary": dict(Counter(str(result.outcome) for result in results)),
        "clauses": [
            {
                "id": result.clause.id,
                "protocol": result.protocol.name,
                "document": result.protocol.document,
                "section": result.clause.section,
                "requirement": result.clause.requirement,
                "level": result.clause.level,
                "outcome": str(result.outcome),
                "reason": result.reason,
                "exchanges": [{"sent": e.sent, "received": e.received} for e in result.exchanges],
            }
            for result in results
        ],
    }


def as_junit(url: str, results: Sequence[ClauseResult]) -> bytes:
    """Return the results as a JUnit XML document: a suite for each protocol. Recommendations count as skipped."""
    root = ET.Element("testsuites", name=f"dragoman check {url}")
    for name in dict.fromkeys(result.protocol.name for result in results):
        rows = [result for result in results if result.protocol.name == name]
        counts = Counter(row.outcome for row in rows)
        failures = sum(row.violates for row in rows)
        skipped = len(rows) - counts[Outcome.PASS] - failures
        attributes = {"tests": len(rows), "failures": failures, "skipped": skipped, "errors": 0}
        suite = ET.SubElement(root, "testsuite", {"name": name, **{k: str(v) for k, v in attributes.items()}})
        for row in rows:
            _add_case(suite, row)
    document: bytes = ET.tostring(root, encoding="utf-8", xml_declaration=True)
    return document


def _printable(text: str) -> str:
    """Return text without characters that XML does not allow."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _add_case(suite: ET.Element, row: ClauseResult) -> None:
    case = ET.SubElement(
        suite, "testcase", classname=row.protocol.name, name=f"{row.clause.id}: {row.clause.requirement}"
    )
    if row.outcome is Outcome.PASS:
        return
    kind = "failure" if row.violates else "skipped"
    outcome = "recommendation not followed" if row.outcome is Outcome.FAIL else row.outcome
    reason = row.reason if row.violates else f"{outcome}: {row.reason}"
    entry = ET.SubElement(case, kind, message=_printable(reason))
    entry.text = "\n".join(f"sent: {_printable(e.sent)}\nreceived: {_printable(e.received)}" for e in row.exchanges)


def as_markdown(columns: Sequence[tuple[str, Sequence[ClauseResult]]]) -> str:
    """Return a table of clauses with the outcomes of several servers."""
    outcomes = [{result.clause.id: result.outcome for result in results} for _, results in columns]
    lines = []
    for protocol in dict.fromkeys(r.protocol.title for _, results in columns for r in results):
        lines += ["", f"### {protocol}", "", "| clause | requirement |" + "".join(f" {name} |" for name, _ in columns)]
        lines.append("|---|---|" + "---|" * len(columns))
        clauses = {r.clause.id: r.clause for _, results in columns for r in results if r.protocol.title == protocol}
        for name, clause in clauses.items():
            level = " (recommended)" if clause.level == "should" else ""
            cells = "".join(f" {_cell(found.get(name))} |" for found in outcomes)
            lines.append(f"| `{name}` | {clause.requirement.replace('|', chr(92) + '|')}{level} |{cells}")
    return "\n".join(lines).strip() + "\n"


def _cell(outcome: Outcome | None) -> str:
    return "**fail**" if outcome is Outcome.FAIL else str(outcome or "-")
