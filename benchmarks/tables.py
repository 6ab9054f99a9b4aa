"""Markdown tables of the results of the identity benchmark."""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import machine

PEERS = json.loads(Path(__file__).with_name("peers.json").read_text())
_GENERATORS = {
    "wrk": "wrk (checks every status, and the bytes of a run)",
    "h2load": "h2load (checks every status, and the bytes of a run)",
    "c_generator": "our own in C (compares every response)",
    "python_generator": "our own in Python (compares every response; no faster than the echo, so read the CPU columns)",
}


def report(result: dict[str, Any]) -> str:
    """Return the report in Markdown."""
    generators = ", ".join(f"{wire}: {_GENERATORS[name]}" for wire, name in result["generators"].items())
    pinned = "server on one core, load on another" if result["pinned"] else "one core for server and load: NOT PINNED"
    errors, responses = (sum(row[key] for row in result["rows"]) for key in ("errors", "responses"))
    return "\n".join(
        [
            "# Identity",
            "",
            *machine.describe().splitlines(),
            "",
            f"{pinned}; load by {generators}.",
            f"The first response of each is compared in full. Responses: {responses:,}, wrong ones: {errors}.",
            "",
            "## In this run",
            "",
            *own_table(result["rows"]),
            "",
            "## Share of the echo, compared with other servers",
            "",
            f"Other servers: {PEERS['source']}. {PEERS['note']}.",
            "",
            *peer_table(result["rows"]),
            "",
        ]
    )


def own_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return medians of the rounds. `share` is the median of the ratios in each round, with minimum and maximum."""
    lines = ["| workload | c | server | responses/s | p50 ms | p99 ms | CPU us/response | share of echo | CPU share |"]
    lines += ["|---|---:|---|---:|---:|---:|---:|---|---:|"]
    for workload, count, server in _keys(rows):
        group = _group(rows, workload, count, server)
        shares, cpu = _shares(rows, workload, count, server, "rate"), _shares(rows, workload, count, server, "cpu_us")
        share = f"{_percent(shares)} ({_percent([min(shares)])} - {_percent([max(shares)])})"
        middle = {key: statistics.median(row[key] for row in group) for key in ("rate", "p50_ms", "p99_ms", "cpu_us")}
        cells = [workload, str(count), server, f"{middle['rate']:,.0f}", f"{middle['p50_ms']:.2f}"]
        cells += [f"{middle['p99_ms']:.2f}", f"{middle['cpu_us']:.0f}"]
        cells += ["", ""] if server == "echo" else [share, f"{100 / statistics.median(cpu):.0f} %" if all(cpu) else "-"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def peer_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return throughput relative to the echo: of this run, and of other servers on another machine."""
    ours = list(dict.fromkeys(row["server"] for row in rows if row["server"] != "echo"))
    others = list(dict.fromkeys(name for rates in PEERS["rates"].values() for name in rates if name != "echo"))
    lines = [
        "| workload | c | " + " | ".join([*(f"{name}, here" for name in ours), *others]) + " |",
        "|---|---:|" + "---:|" * len([*ours, *others]),
    ]
    for workload, count in dict.fromkeys((w, c) for w, c, _ in _keys(rows)):
        cells = [_percent(_shares(rows, workload, count, server, "rate")) for server in ours]
        cells += [_peer_share(workload, count, name) for name in others]
        lines.append(f"| {workload} | {count} | {' | '.join(cells)} |")
    return lines


def _peer_share(workload: str, count: int, name: str) -> str:
    rates = PEERS["rates"].get(workload, {})
    rate, echo = (rates.get(n, {}).get(str(count)) for n in (name, "echo"))
    return _percent([rate / echo] if rate and echo else [])


def _shares(rows: Sequence[dict[str, Any]], workload: str, count: int, server: str, key: str) -> list[float]:
    """Return the ratio in each round to the echo."""
    pairs = zip(_group(rows, workload, count, server), _group(rows, workload, count, "echo"), strict=False)
    return [row[key] / echo[key] for row, echo in pairs if echo[key]]


def _keys(rows: Sequence[dict[str, Any]]) -> list[tuple[str, int, str]]:
    return list(dict.fromkeys((row["workload"], row["connections"], row["server"]) for row in rows))


def _group(rows: Sequence[dict[str, Any]], *key: object) -> list[dict[str, Any]]:
    return [row for row in rows if (row["workload"], row["connections"], row["server"]) == key]


def _percent(shares: Sequence[float]) -> str:
    return f"{statistics.median(shares) * 100:.0f} %" if shares else "-"
