"""Writes the tables and pictures of docs/performance.md from the results of the suite.

usage: python -m benchmarks.page [--results FOLDER] [--page FILE]
"""

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.aims import AIMS, Most, Ratio
from benchmarks.plots import Bar, Group, chart
from benchmarks.processes import RESULTS, ROOT
from benchmarks.subjects import ECHOES, OURS

Result = Mapping[str, Any]
_QUIET_CORES = 0.2  # above it rates tell of others, too
PAGE = ROOT / "docs" / "performance.md"
_MARKED = re.compile(r"(<!-- from results: ([\w ]+) -->\n).*?(<!-- end -->)", re.S)

# Of a row: its key, the heading of its column, and how it is written.
_COLUMNS = (
    ("workload", "question", "{}"),
    ("models", "models", "{:,}"),
    ("connections", "c", "{}"),
    ("server", "server", "{}"),
    ("rate", "answers/s", "{:,.0f}"),
    ("p50_ms", "p50 ms", "{:.2f}"),
    ("p99_ms", "p99 ms", "{:.2f}"),
    ("cpu_us", "CPU us each", "{:,.0f}"),
    ("p50_beside_ms", "p50 ms beside", "{:.2f}"),
    ("p99_beside_ms", "p99 ms beside", "{:.2f}"),
    ("ratio", "ratio of p50", "{:.2f}"),
    ("kib_each", "KiB each", "{:.1f}"),
    ("ready_s", "ready after s", "{:.2f}"),
    ("processes", "processes", "{:.0f}"),
    ("pss_mib", "PSS MiB", "{:,.0f}"),
    ("rss_mib", "RSS MiB", "{:,.0f}"),
    ("encode_ms", "encode ms", "{:.2f}"),
    ("decode_ms", "decode ms", "{:.2f}"),
    ("failed", "failed", "{}"),
)
_PICTURED = {"w7": ("ready_s", "s until ready"), "w10": ("p50_beside_ms", "ms, median")}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGE)
    given = parser.parse_args(arguments)
    results = read(given.results)
    given.page.write_text(filled(given.page.read_text(), results))
    pictures = given.page.with_suffix("")
    pictures.mkdir(exist_ok=True)
    for name, found in results.items():
        if drawn := picture(found):
            (pictures / f"{name}.svg").write_text(drawn)


def read(folder: Path) -> dict[str, Result]:
    """The results that there are, by the name of the workload."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("w*.json"))}


def filled(text: str, results: Mapping[str, Result]) -> str:
    """The page with each marked part written anew; what has no results is left as it is."""

    def part(found: re.Match[str]) -> str:
        what = found[2]
        if what == "aims":
            body = aims(results)
        elif what in results:
            body = f"{circumstances(results[what])}\n\n{table(results[what])}"
        else:
            return found[0]
        return f"{found[1]}\n{body}\n\n{found[3]}"

    return _MARKED.sub(part, text)


def circumstances(found: Result) -> str:
    """When, on what, and how busy that was."""
    m, plan = found["machine"], found["plan"]
    line = f"{m['processor']}, {m['cores']} cores, Python {m['python']}, {m['when'][:16].replace('T', ' ')} UTC; "
    line += f"{plan['rounds']} x {plan['seconds']:g} s" + (", quick" if plan["quick"] else "")
    line += f"; cores busy with something else before: {found['others_busy_cores']:.1f}"
    return line + ("" if found["pinned"] else "; not pinned") + "."


def table(found: Result) -> str:
    """All rows; `of X` is the median of the rounds' own ratios of answers to those of X, `by CPU` that of CPU time."""
    rows = found["rows"]
    columns = [c for c in _COLUMNS if any(c[0] in row for row in rows)]
    bases = list(dict.fromkeys(b for row in rows if _ours(row) for b in row.get("ratios", ()) if not _is_ours(b)))
    heads = [head for _, head, _ in columns] + [f"of {b} (by CPU)" for b in bases]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for row in rows:
        cells = [form.format(row[key]) if key in row else "" for key, _, form in columns]
        cells += [_ratio(row, base) if _ours(row) else "" for base in bases]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _ours(row: Mapping[str, Any]) -> bool:
    return _is_ours(row["server"])


def _is_ours(name: str) -> bool:
    return name.startswith(OURS)


def _ratio(row: Mapping[str, Any], base: str) -> str:
    if base not in row.get("ratios", ()):
        return ""
    by_cpu = row["cpu_ratios"].get(base)
    return f"{row['ratios'][base]:.2f}" + ("" if by_cpu is None else f" ({by_cpu:.2f})")


def aims(results: Mapping[str, Result]) -> str:
    """Each aim with what was reached: by answers a second, or by CPU time where the machine did something else too."""
    lines = ["| | question | aim | reached | by CPU | |", "|---|---|---|---:|---:|---|"]
    for aim in AIMS:
        found = results.get(aim.bench, {"rows": [], "others_busy_cores": 0.0})
        rate, cpu = aim.reached(found["rows"]), aim.reached_by_cpu(found["rows"])
        busy = found["others_busy_cores"] > _QUIET_CORES
        counts = cpu if busy and cpu is not None else rate
        told = "not measured" if rate is None else f"{rate:.2f}"
        verdict = "" if counts is None else ("yes" if aim.met(counts) else "missed") + (", busy" if busy else "")
        by_cpu = "" if cpu is None else f"{cpu:.2f}"
        lines.append(f"| {aim.bench.upper()} | {_question(aim)} | {aim.told()} | {told} | {by_cpu} | {verdict} |")
    return "\n".join(lines)


def _question(aim: Ratio | Most) -> str:
    return f"{aim.workload}, c = {aim.connections}" if isinstance(aim, Ratio) else f"{aim.workload}, {aim.key}"


def picture(found: Result) -> str:
    """Answers a second of each server, or what else the workload is about; empty where it has no picture."""
    key, unit = _PICTURED.get(found["name"], ("rate", "answers a second"))
    rows = [row for row in found["rows"] if key in row and row.get("connections", 16) in (16, 64)]
    groups = [
        Group(heading, [_bar(row, key) for row in rows if _heading(row) == heading])
        for heading in dict.fromkeys(map(_heading, rows))
    ]
    title = f"{found['name'].upper()}: {found['title']}"
    return chart(title, f"{unit}; {found['machine']['when'][:10]}", groups) if groups else ""


def _heading(row: Mapping[str, Any]) -> str:
    connections = row.get("connections")
    return f"{row['workload']}" + (f", {connections} connections" if connections else "")


def _bar(row: Mapping[str, Any], key: str) -> Bar:
    name = row["server"]
    kind = "own" if _is_ours(name) else "echo" if name in ECHOES else "peer"
    return Bar(name, row[key], f"{row[key]:,.0f}" if row[key] >= 100 else f"{row[key]:.2f}", kind)


if __name__ == "__main__":
    main()
