"""The table of known differences: a TOML file with the request, what each server answers, and the verdict."""

import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

# First words of a verdict; `open` is a fault of Dragoman that is known.
KINDS = ("ours is right", "both are right", "peer's own fault", "decided", "open")


@dataclass(frozen=True, slots=True)
class Difference:
    """What both servers answer to a request, where this differs."""

    request: str
    peer: str
    dragoman: str


@dataclass(slots=True)
class Judgement:
    """Differences with their verdicts, and the faults of the table."""

    judged: list[tuple[Difference, str]] = field(default_factory=list)
    without_verdict: list[Difference] = field(default_factory=list)
    without_difference: list[str] = field(default_factory=list)

    @property
    def passes(self) -> bool:
        return not self.without_verdict and not self.without_difference


def read_verdicts(path: Path) -> dict[Difference, str]:
    """Return the verdicts by difference. Raises ValueError for an entry that is not complete, or is there twice."""
    found: dict[Difference, str] = {}
    if not path.exists():
        return found
    for entry in tomllib.loads(path.read_text(encoding="utf-8")).get("difference", []):
        if set(entry) != {"request", "peer", "dragoman", "verdict"}:
            raise ValueError(
                f"entry of {path.name}: expected 'request', 'peer', 'dragoman' and 'verdict', got {sorted(entry)}"
            )
        known = Difference(entry["request"], entry["peer"], entry["dragoman"])
        kind, _, reason = entry["verdict"].partition(":")
        if kind not in KINDS or not reason.strip():
            raise ValueError(
                f"verdict of {known.request!r}: expected one of {KINDS} and ': reason', got {entry['verdict']!r}"
            )
        if known.request in {each.request for each in found}:
            raise ValueError(f"{path.name}: expected one entry of {known.request!r}, got two")
        found[known] = entry["verdict"]
    return found


def judge(requests: Sequence[str], differences: Iterable[Difference], verdicts: Mapping[Difference, str]) -> Judgement:
    """Return the differences with their verdicts. A verdict is for the answers that it names, not for others.

    `requests`: the titles that were sent; verdicts on other ones are not looked at.
    """
    result = Judgement()
    found = list(differences)
    for each in found:
        if each in verdicts:
            result.judged.append((each, verdicts[each]))
        else:
            result.without_verdict.append(each)
    seen = {each.request for each in found}
    sent = set(requests)
    result.without_difference = [each.request for each in verdicts if each.request in sent and each.request not in seen]
    return result


def unknown_requests(titles: Iterable[str], verdicts: Mapping[Difference, str]) -> list[str]:
    """Return the requests of the table that are no longer made."""
    known = set(titles)
    return [each.request for each in verdicts if each.request not in known]


def entry(difference: Difference, verdict: str) -> str:
    """Return the entry of a difference for the table."""
    fields = {
        "request": difference.request,
        "peer": difference.peer,
        "dragoman": difference.dragoman,
        "verdict": verdict,
    }
    return "[[difference]]\n" + "".join(f"{name} = {_toml(value)}\n" for name, value in fields.items())


def _toml(value: str) -> str:
    """Return a literal string where it can be one, else a JSON string, which TOML reads too."""
    is_literal = '"' in value and "'" not in value and value.isprintable()
    return f"'{value}'" if is_literal else json.dumps(value, ensure_ascii=False)
