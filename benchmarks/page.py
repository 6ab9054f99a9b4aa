"""Write the tables and pictures of benchmarks/results/performance.md and the summary of docs/performance.md.

usage: python -m benchmarks.page [--results FOLDER] [--page FILE]
"""

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.aims import AIMS
from benchmarks.plots import Bar, Group, chart
from benchmarks.processes import RESULTS, ROOT
from benchmarks.subjects import ECHOES, OURS

Result = Mapping[str, Any]
_QUIET_CORES = 0.2  # with more other load, CPU time is more reliable than throughput
PAGE = ROOT / "benchmarks" / "results" / "performance.md"
SUMMARY = ROOT / "docs" / "performance.md"
_MARKED = re.compile(r"(<!-- from results: ([\w ]+) -->\n).*?(<!-- end -->)", re.S)

# Key of a row, heading of its column, number format.
_COLUMNS = (
    ("workload", "workload", "{}"),
    ("models", "models", "{:,}"),
    ("connections", "connections", "{}"),
    ("server", "server", "{}"),
    ("streams", "streams", "{:,}"),
    ("tokens_per_s", "tokens/s", "{:,.0f}"),
    ("token_us", "CPU us/token", "{:.1f}"),
    ("gap_p50_ms", "gap p50 ms", "{:.1f}"),
    ("gap_p99_ms", "gap p99 ms", "{:.1f}"),
    ("capacity", "capacity/s", "{:,.0f}"),
    ("goodput", "in time/s", "{:,.0f}"),
    ("rate", "requests/s", "{:,.0f}"),
    ("p50_ms", "p50 ms", "{:.2f}"),
    ("p99_ms", "p99 ms", "{:.2f}"),
    ("p999_ms", "p99.9 ms", "{:.2f}"),
    ("tail_ratio", "p99.9 / p50", "{:.1f}"),
    ("rejected", "rejected %", "{:.1f}"),
    ("rejected_p99_ms", "p99 of rejections ms", "{:.2f}"),
    ("cpu_us", "CPU us/request", "{:,.0f}"),
    ("p50_beside_ms", "p50 ms with idle", "{:.2f}"),
    ("p99_beside_ms", "p99 ms with idle", "{:.2f}"),
    ("ratio", "ratio of p50", "{:.2f}"),
    ("kib_each", "KiB/connection", "{:.1f}"),
    ("ready_s", "start s", "{:.2f}"),
    ("ready_cpu_s", "start CPU s", "{:.2f}"),
    ("first_ms", "first call ms", "{:.2f}"),
    ("processes", "processes", "{:.0f}"),
    ("pss_mib", "PSS MiB", "{:,.0f}"),
    ("rss_mib", "RSS MiB", "{:,.0f}"),
    ("encode_ms", "encode ms", "{:.2f}"),
    ("decode_ms", "decode ms", "{:.2f}"),
    ("failed", "failed", "{}"),
)
_PICTURED = {
    "w7": ("ready_s", "s until ready, lower is better"),
    "w10": ("p50_beside_ms", "ms, median, lower is better"),
    "w11": ("p999_ms", "99.9th percentile in ms, lower is better"),
    "w12": ("token_us", "CPU time per token in us, lower is better"),
}
_OVERVIEW = (  # result, workload, connections, heading
    ("w1", "rest-json-small", 16, "W1: REST JSON, 16 numbers"),
    ("w2", "rest-json-large", 16, "W2: REST JSON, 150,528 numbers"),
    ("w3", "rest-binary-large", 16, "W3: REST binary, 600 KB"),
    ("w4", "grpc-raw-small", 16, "W4: gRPC, 16 numbers"),
    ("w5", "sklearn", 64, "W5: scikit-learn, with batching"),
    ("w6", "evaluate-4", 16, "W6: UM-Bridge, 4 numbers"),
)
# Result, workload, connections, what the line is about, and the other servers that it names.
_SUMMARY = (
    ("w1", "rest-json-small", 16, "Small JSON requests (W1, 16 numbers)", ("mlserver", "kserve", "triton")),
    ("w2", "rest-json-large", 16, "Large JSON requests (W2, 150,528 numbers)", ("mlserver", "triton")),
    ("w3", "rest-binary-large", 16, "Binary tensors (W3, 600 KB)", ("triton", "buffered echo")),
    ("w4", "grpc-raw-small", 16, "gRPC, 16 numbers (W4)", ("mlserver", "kserve", "triton")),
    ("w4", "grpc-raw-large", 16, "gRPC, 600 KB (W4)", ("mlserver", "kserve", "triton")),
    ("w5", "sklearn", 64, "scikit-learn, both with batching (W5)", ("mlserver",)),
    ("w6", "evaluate-4", 16, "UM-Bridge, 4 numbers (W6)", ("umbridge",)),
    ("w6", "evaluate-10000", 16, "UM-Bridge, 10,000 numbers (W6)", ("umbridge",)),
)
_NAMES = {"mlserver": "MLServer", "kserve": "KServe", "triton": "Triton's Python backend", "umbridge": "`umbridge`"}
_NAMES |= {"buffered echo": "a server that only copies the bytes"}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args(arguments)
    results = load_results(options.results)
    for page in (options.page, SUMMARY) if options.page == PAGE else (options.page,):
        page.write_text(fill(page.read_text(), results))
    folder = options.page.with_suffix("")
    folder.mkdir(exist_ok=True)
    for name, svg in pictures(results).items():
        (folder / f"{name}.svg").write_text(svg)


def load_results(folder: Path) -> dict[str, Result]:
    """Return the results in the folder by name of their workload."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("w*.json"))}


def fill(text: str, results: Mapping[str, Result]) -> str:
    """Return the page with its marked sections replaced; sections without results are unchanged."""

    def section(match: re.Match[str]) -> str:
        name = match[2]
        if name == "aims":
            body = targets(results)
        elif name == "summary":
            body = summary(results)
        elif name in results:
            body = f"{conditions(results[name])}\n\n{table(results[name])}"
        else:
            return match[0]
        return f"{match[1]}\n{body}\n\n{match[3]}"

    return _MARKED.sub(section, text)


def summary(results: Mapping[str, Result]) -> str:
    """Return a line for each main result: throughput relative to other servers, start, memory, idle connections."""
    lines = []
    for bench, workload, connections, heading, others in _SUMMARY:
        row = _row(results, bench, workload=workload, connections=connections, server=OURS)
        found = [f"{row['ratios'][n]:.2g} times {_NAMES[n]}" for n in others if n in row.get("ratios", ())]
        if found:
            lines.append(f"- **{heading}**: {', '.join(found)}.")
    start = _row(results, "w7", server=f"{OURS}, inline class")
    if start:
        memory = f"{start['pss_mib']:.0f} MiB of memory (PSS)"
        lines.append(f"- **Start (W7)**: ready after {start['ready_s']:.1f} s, with {memory}.")
    idle = _row(results, "w10", server=OURS)
    if idle:
        latency = f"a median latency of {idle['p50_beside_ms']:.2f} ms, {idle['p50_ms']:.2f} ms without them"
        lines.append(f"- **10,000 idle connections (W10)**: other requests have {latency}.")
    return "\n".join(lines)


def _row(results: Mapping[str, Result], bench: str, **values: Any) -> Mapping[str, Any]:
    """Return the row of a result that has these values; an empty one if there is none."""
    rows: Sequence[Mapping[str, Any]] = results.get(bench, {"rows": []})["rows"]
    return next((row for row in rows if all(row.get(key) == value for key, value in values.items())), {})


def conditions(result: Result) -> str:
    """Return the machine, date, rounds and other load of a measurement."""
    m, plan = result["machine"], result["plan"]
    line = f"{m['processor']}, {m['cores']} cores, Python {m['python']}, {m['when'][:16].replace('T', ' ')} UTC; "
    line += f"{plan['rounds']} rounds of {plan['seconds']:g} s" + (", quick" if plan["quick"] else "")
    line += f"; other load before: {result['others_busy_cores']:.1f} cores"
    return line + ("" if result["pinned"] else "; not pinned") + "."


def table(result: Result) -> str:
    """Return all rows; `times X` is the median over the rounds of the ratio to X, in brackets that by CPU time."""
    rows = result["rows"]
    columns = [c for c in _COLUMNS if any(c[0] in row for row in rows)]
    bases = list(dict.fromkeys(b for row in rows if _ours(row) for b in row.get("ratios", ()) if not _is_ours(b)))
    headings = [heading for _, heading, _ in columns] + [f"times {b} (by CPU)" for b in bases]
    lines = [f"| {' | '.join(headings)} |", "|" + "---|" * len(headings)]
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


def targets(results: Mapping[str, Result]) -> str:
    """Return a table of targets, judged by throughput, or by CPU time if the machine had other load."""
    lines = ["| | workload | target | measured | by CPU | met |", "|---|---|---|---:|---:|---|"]
    for aim in AIMS:
        result = results.get(aim.bench, {"rows": [], "others_busy_cores": 0.0})
        rate, cpu = aim.measured(result["rows"]), aim.measured_by_cpu(result["rows"])
        busy = result["others_busy_cores"] > _QUIET_CORES
        value = cpu if busy and cpu is not None else rate
        measured = "not measured" if rate is None else f"{rate:.2f}"
        met = "" if value is None else ("yes" if aim.is_met(value) else "no") + (", other load" if busy else "")
        by_cpu = "" if cpu is None else f"{cpu:.2f}"
        lines.append(f"| {aim.bench.upper()} | {aim.subject()} | {aim.describe()} | {measured} | {by_cpu} | {met} |")
    return "\n".join(lines)


def pictures(results: Mapping[str, Result]) -> dict[str, str]:
    """Return the SVG charts by name: one for each workload that has one, and `overview`."""
    charts = {name: picture(result) for name, result in results.items()} | {"overview": overview(results)}
    return {name: svg for name, svg in charts.items() if svg}


def overview(results: Mapping[str, Result]) -> str:
    """Return a chart of the throughput of other servers relative to ours; empty if no other server was measured."""
    groups = []
    for bench, workload, connections, heading in _OVERVIEW:
        rows = results.get(bench, {"rows": []})["rows"]
        ours = [r for r in rows if (r["workload"], r.get("connections"), r["server"]) == (workload, connections, OURS)]
        ratios = {n: r for row in ours for n, r in row["ratios"].items() if n not in ECHOES and "," not in n}
        if ratios:
            bars = [Bar(name, 1 / ratio, f"{1 / ratio:.2g}", "peer") for name, ratio in ratios.items()]
            groups.append(Group(heading, [Bar(OURS, 1.0, "1", "own"), *sorted(bars, key=lambda bar: -bar.length)]))
    return (
        chart("Throughput relative to Dragoman", "requests per second on one core, higher is better", groups)
        if groups
        else ""
    )


def picture(result: Result) -> str:
    """Return a chart of throughput, or of the main value of the workload; empty if it has none."""
    key, unit = _PICTURED.get(result["name"], ("rate", "requests per second, higher is better"))
    rows = [row for row in result["rows"] if key in row and row.get("connections", 16) in (16, 64)]
    groups = [
        Group(heading, [_bar(row, key) for row in rows if _heading(row) == heading])
        for heading in dict.fromkeys(map(_heading, rows))
    ]
    title = f"{result['name'].upper()}: {result['title']}"
    return chart(title, f"{unit}; {result['machine']['when'][:10]}", groups) if groups else ""


def _heading(row: Mapping[str, Any]) -> str:
    for key in ("connections", "streams"):
        if key in row:
            return f"{row['workload']}, {row[key]:,} {key}"
    return str(row["workload"])


def _bar(row: Mapping[str, Any], key: str) -> Bar:
    name = row["server"]
    kind = "own" if _is_ours(name) else "echo" if name in ECHOES else "peer"
    text = f"{row[key]:,.0f}" if row[key] >= 100 else f"{row[key]:.2f}"
    spread = row.get(f"{key}_spread")
    return Bar(name, row[key], text, kind, spread and tuple(spread))


if __name__ == "__main__":
    main()
