"""Figures of a server as lines for a terminal: sorted, filtered and as wide as it is."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dragoman.cli.terminal import format_bytes, printable, state_code

# Columns of models: key, title, whether it is sorted from the largest, and the order in which they are left out where
# there is no room.
_COLUMNS = {
    "name": ("model", False, 0),
    "state": ("state", False, 2),
    "calls_per_s": ("calls/s", True, 1),
    "errors_per_s": ("err/s", True, 3),
    "p50_ms": ("p50", True, 7),
    "p99_ms": ("p99", True, 4),
    "queued": ("queue", True, 8),
    "in_flight": ("flight", True, 5),
    "tokens_per_s": ("tokens/s", True, 6),
}
# Columns that are left out if they have no value: of models without batches, and without text.
_OPTIONAL = ("queued", "tokens_per_s")
# Keys that choose the column to sort by.
SORT_KEYS = {
    "n": "name",
    "s": "state",
    "c": "calls_per_s",
    "e": "errors_per_s",
    "5": "p50_ms",
    "p": "p99_ms",
    "u": "queued",
    "f": "in_flight",
    "t": "tokens_per_s",
}
_LEAST_NAME = 12
_LEAST_CELL = 6


@dataclass
class View:
    """What the user has chosen to see. scroll: models above the first one that is shown."""

    sort: str = "calls_per_s"
    is_reversed: bool = False
    filter: str = ""
    shows_workers: bool = True
    scroll: int = 0

    def models(self, found: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Return the models that the filter leaves, in order."""
        kept = [model for model in found["models"] if self.filter.lower() in model["name"].lower()]
        kept.sort(key=lambda model: (model["name"], model["version"]))
        descends = _COLUMNS[self.sort][1]
        empty = -1 if descends else ""
        kept.sort(key=lambda m: empty if m[self.sort] is None else m[self.sort], reverse=descends != self.is_reversed)
        return kept


def lines(found: Mapping[str, Any], view: View, columns: int, rows: int | None = None) -> list[tuple[str, str]]:
    """Return lines with the ANSI code of their style; `rows` is the height of the terminal, None without a limit."""
    models = view.models(found)
    top = _summary(found, columns)
    workers = _worker_rows(found, view) if view.shows_workers else []
    # Of the lines of the terminal: the last one is left to the caller, others are a blank line, titles and the range.
    below = min(len(workers) + 1, (rows or 0) // 3) + 1 if workers else 0
    room = len(models) if rows is None else max(1, rows - len(top) - 4 - below)
    view.scroll = max(0, min(view.scroll, len(models) - room))
    shown = models[view.scroll : view.scroll + room]
    result = [*top, ("", ""), *_table(shown, view, columns)]
    if not models:
        result.append((f"no model contains '{printable(view.filter)}'" if view.filter else "no models", "2"))
    elif len(shown) < len(models):
        result.append((f"models {view.scroll + 1} to {view.scroll + len(shown)} of {len(models)}", "2"))
    if workers:
        result += [("", ""), *_worker_table(workers, columns)]
    cut = [(_cut(text, columns), code) for text, code in result]
    return cut if rows is None else cut[: rows - 1]


def _summary(found: Mapping[str, Any], columns: int) -> list[tuple[str, str]]:
    """Return the state of the server: its figures are on further lines where one is too narrow."""
    state = "ready" if found["ready"] else "not ready"
    memory = format_bytes(found["memory_bytes"])
    tokens = "" if found["tokens_per_s"] is None else f", {_rate(found['tokens_per_s'])} tokens/s"
    first = f"{found['url']}  {state}"
    clock = time.strftime("  %H:%M:%S")
    calls = f"{_rate(found['calls_per_s'])} calls/s, {_rate(found['errors_per_s'])} err/s{tokens}"
    process = f"server process: CPU {found['cpu_percent']:.0f} %{f', {memory}' if memory else ''}"  # without workers
    figures: list[str] = []
    for part in (calls, process, f"status in {found['answer_ms']:.3g} ms"):
        if figures and len(figures[-1]) + 2 + len(part) <= columns:
            figures[-1] += f"; {part}"
        else:
            figures.append(part)
    code = "31" if found["errors_per_s"] else ""
    return [(first + clock if len(first + clock) <= columns else first, "1"), *((text, code) for text in figures)]


def _table(models: Sequence[Mapping[str, Any]], view: View, columns: int) -> list[tuple[str, str]]:
    keys = [key for key in _COLUMNS if key not in _OPTIONAL or any(m[key] is not None for m in models)]
    cells = {key: [_cell(key, model) for model in models] for key in keys}
    titles = {key: _COLUMNS[key][0] + ("*" if key == view.sort else "") for key in keys}
    widths = {key: max(len(titles[key]), *map(len, cells[key]), 0) for key in keys}
    while (
        len(keys) > 2
        and sum(widths[k] for k in keys[1:]) + 2 * (len(keys) - 1) + min(widths["name"], _LEAST_NAME) > columns
    ):
        keys.remove(max(keys, key=lambda key: _COLUMNS[key][2]))
    room = columns - sum(widths[k] for k in keys[1:]) - 2 * (len(keys) - 1)
    widths["name"] = max(1, min(widths["name"], room))
    result = [("  ".join(_pad(titles[key], widths[key], key) for key in keys), "1")]
    for i, model in enumerate(models):
        text = "  ".join(_pad(_cut(cells[key][i], widths[key]), widths[key], key) for key in keys)
        code = "31" if model["errors_per_s"] else "" if model["state"] == "ready" else state_code(model["state"])
        result.append((text, code))
    return result


def _pad(text: str, width: int, key: str) -> str:
    return text.ljust(width) if key in ("name", "state") else text.rjust(width)


def _cut(text: str, columns: int) -> str:
    return text if len(text) <= columns else text[: max(0, columns - 1)] + "\u2026"


def _cell(key: str, model: Mapping[str, Any]) -> str:
    value = model[key]
    if key == "name":
        return printable(f"{value} {model['version']}".rstrip())
    if value is None:
        return "-"
    if key in ("p50_ms", "p99_ms"):
        return _time(value)
    return _rate(value) if key.endswith("_per_s") else printable(str(value))


def _rate(value: float) -> str:
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _time(milliseconds: float) -> str:
    return f"{milliseconds:.3g} ms" if milliseconds < 1000 else f"{milliseconds / 1000:.3g} s"


def _worker_rows(found: Mapping[str, Any], view: View) -> list[Mapping[str, Any]]:
    workers = [each for each in found["workers"] if view.filter.lower() in each["model"].lower()]
    return sorted(workers, key=lambda each: (each["state"] == "idle", each["host"], each["model"]))


def _worker_table(workers: Sequence[Mapping[str, Any]], columns: int) -> list[tuple[str, str]]:
    """Return the titles and the rows. Without room the figures stay, and the name of the process is cut."""
    rows: list[tuple[str, ...]] = [("worker", "model", "state", "in flight", "time/call")]
    for each in workers:
        host = f"{each['host']} " if each["host"] else ""
        mean = "-" if each["mean_ms"] is None else _time(each["mean_ms"])
        cells = (host + each["process"], each["model"], each["state"], str(each["in_flight"]), mean)
        rows.append(tuple(map(printable, cells)))
    if _width_of(rows) > columns:
        shorter: list[tuple[str, ...]] = [
            (row[0].replace("worker process ", "", 1), *row[1:3], row[3].replace("in flight", "flight"), row[4])
            for row in rows
        ]
        rows = shorter if _width_of(shorter) <= columns else [(*row[:2], row[2], row[4]) for row in shorter]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    over = _width_of(rows) - columns
    for i in (1, 0):  # names are cut, the model's first
        cut = max(0, min(over, widths[i] - _LEAST_CELL))
        widths[i], over = widths[i] - cut, over - cut
    texts = [
        "  ".join(_cut(cell, width).ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    codes = ["1", *(state_code(each["state"]) if each["state"] != "idle" else "2" for each in workers)]
    return list(zip(texts, codes, strict=True))


def _width_of(rows: Sequence[Sequence[str]]) -> int:
    return sum(max(map(len, column)) for column in zip(*rows, strict=True)) + 2 * (len(rows[0]) - 1)
