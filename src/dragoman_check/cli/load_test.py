"""Options and output of `dragoman bench`."""

import argparse
import asyncio
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dragoman._version import __version__
from dragoman.cli.connection import ServerConnection
from dragoman.cli.files import write_file
from dragoman.cli.terminal import LiveLines, is_interactive, table
from dragoman.core.documents import read_json
from dragoman.core.errors import InvalidInput, NotReady
from dragoman_check.conformance.http import checked_url
from dragoman_check.conformance.target import Target, server_target
from dragoman_check.load_test.compare import Difference, compare_runs
from dragoman_check.load_test.jobs import Options, RequestJob, make_job
from dragoman_check.load_test.loops import LoadLevel, run_load
from dragoman_check.load_test.measurements import Measurement, Recorder
from dragoman_check.load_test.repeats import combine

_CONCURRENCY = "1,4,16"
_CONNECTIONS = 256
_MAX_S = 1e6
# Share of requests without a response at the end from which a server does not keep up with an open loop.
_BEHIND = 0.1


def measure(arguments: argparse.Namespace) -> int:
    """Run the loads one after the other and print the results; return the exit status."""
    if not arguments.url or not arguments.model:
        raise InvalidInput("expected the address of a server and a model: dragoman bench URL MODEL")
    loads = _loads(arguments) * _positive("--repeat", arguments.repeat)
    connection = ServerConnection.of(arguments, checked_url(arguments.url))
    target = _target(arguments, connection)
    try:
        target.http.require_connection()
    except NotReady as error:
        raise NotReady(error.message + connection.grpc_hint("expected the port of HTTP; see --grpc")) from error
    options = Options(arguments.model, arguments.rows, max_tokens=arguments.max_tokens, file=arguments.input)
    try:
        job = make_job(target, arguments.protocol, replace(options, prompt=arguments.prompt or options.prompt))
    except InvalidInput as error:
        raise InvalidInput(error.message + connection.suggestion(arguments.model)) from error
    quiet = arguments.json == "-"
    measurements: list[Measurement] = []
    try:
        for load in loads:
            measurements.append(_run(job, load))
            if not quiet:
                print("\n".join(_rows(measurements)[-1:] if len(measurements) > 1 else _rows(measurements)), flush=True)
    except KeyboardInterrupt:
        print(f"dragoman: stopped after {len(measurements)} of {len(loads)} loads", file=sys.stderr)
        if measurements:
            _report(arguments, measurements)
        return 130
    _report(arguments, measurements)
    if not any(m.completed for m in measurements):
        if hint := connection.suggestion(arguments.model):
            print(f"dragoman: model {arguments.model!r} not found{hint}", file=sys.stderr)
        return 2
    return 1 if any(m.errors for m in measurements) else 0


def _report(arguments: argparse.Namespace, found: Sequence[Measurement]) -> None:
    """Print notes, or JSON with --json -, and write the file."""
    quiet = arguments.json == "-"
    run = _as_json(arguments, found)
    if not quiet:
        print("\n".join([*_repeats(run["measurements"]), *_notes(found)]))
    else:
        print(json.dumps(run, indent=2))
    if arguments.json and not quiet:
        write_file(arguments.json, json.dumps(run, indent=2))


def _run(job: RequestJob, load: LoadLevel) -> Measurement:
    """Run one load, with a live display on a terminal."""
    if not is_interactive(sys.stderr):
        return _run_in_loop(job, load, None)
    with LiveLines(sys.stderr) as live:
        return _run_in_loop(job, load, lambda recorder: live.update([_status(recorder, load)]))


def _run_in_loop(job: RequestJob, load: LoadLevel, show: Any) -> Measurement:
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(run_load(job, load, show))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        from uvloop import new_event_loop
    except ImportError:
        return asyncio.new_event_loop
    return new_event_loop


def _status(recorder: Recorder, load: LoadLevel) -> str:
    left_s = recorder.end_s - time.perf_counter()
    if left_s > load.seconds:
        return f"{load.label}: warm-up, {left_s - load.seconds:.0f} s left"
    recent = recorder.recent()
    latency = f", last p50 {recent['p50']:.3g} ms, p99 {recent['p99']:.3g} ms" if recent else ""
    errors = f", {sum(recorder.errors.values())} errors" if recorder.errors else ""
    waiting = f"{left_s:.0f} s left" if left_s > 0 else "waiting for the last responses"
    return f"{load.label}: {recorder.completed} responses{latency}{errors}, {waiting}"


def _loads(arguments: argparse.Namespace) -> list[LoadLevel]:
    if arguments.rate and arguments.concurrency:
        raise InvalidInput("expected --rate or --concurrency, got both")
    if arguments.connections is not None and not arguments.rate:
        raise InvalidInput("--connections is the limit of an open loop: expected --rate too, or --concurrency instead")
    load = LoadLevel(
        arrival=arguments.arrival,
        seconds=_seconds("--seconds", arguments.seconds),
        warmup_s=_seconds("--warmup-s", arguments.warmup_s, least=0),
        connections=_positive(
            "--connections", _CONNECTIONS if arguments.connections is None else arguments.connections
        ),
        timeout_s=arguments.timeout_s,
        seed=arguments.seed,
    )
    _positive("--rows", arguments.rows)
    _positive("--max-tokens", arguments.max_tokens)
    if arguments.rate:
        return [replace(load, rate=rate) for rate in _numbers("--rate", arguments.rate, float)]
    counts = _numbers("--concurrency", arguments.concurrency or _CONCURRENCY, int)
    return [replace(load, concurrency=count) for count in counts]


def _seconds(flag: str, value: float, least: float = 1e-6) -> float:
    if not least <= value <= _MAX_S:  # false for NaN
        raise InvalidInput(f"{flag}: expected seconds from {least:g} to {_MAX_S:g}, got {value:g}")
    return value


def _positive(flag: str, value: int) -> int:
    if value < 1:
        raise InvalidInput(f"{flag}: expected at least 1, got {value}")
    return value


def _numbers(flag: str, text: str, kind: type) -> list[Any]:
    try:
        numbers = [kind(each) for each in text.split(",")]
    except ValueError as error:
        raise InvalidInput(f"{flag}: expected numbers separated by commas, got '{text}'") from error
    if not all(0 < each < 1e7 for each in numbers):
        raise InvalidInput(f"{flag}: expected positive numbers, got '{text}'")
    return numbers


def _target(arguments: argparse.Namespace, connection: ServerConnection) -> Target:
    if connection.url.startswith("grpc:"):
        raise InvalidInput("expected the HTTP address as URL, and the gRPC address in --grpc HOST:PORT")
    return server_target(connection.url, arguments.grpc, connection.key, arguments.ca, arguments.timeout_s)


# --- output -----------------------------------------------------------------------------------------------


def _rows(measurements: Sequence[Measurement]) -> list[str]:
    streams = _stream_columns(measurements)
    columns = ("load", "requests", "errors", "requests/s", "p50 ms", "p90 ms", "p99 ms", "p99.9 ms", "max ms")
    rows = [(*columns, *streams), *(_row(m, streams) for m in measurements)]
    return table(_pad_columns(rows))


def _stream_columns(measurements: Sequence[Measurement]) -> tuple[str, ...]:
    """Return titles for streams: of chunks where the server does not report tokens, or sends several at a time."""
    streamed = [m for m in measurements if m.first_token_ms]
    if not streamed:
        return ()
    unit = "token" if all(m.tokens_per_s for m in streamed) else "chunk"
    gap = "tokens" if all(m.between_tokens_ms for m in streamed) else "chunks"
    return f"first {unit} p50", "p99", f"between {gap} p50", "p99", f"{unit}s/s"


def _pad_columns(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return rows whose columns have a common least width, so that rows printed later are aligned."""
    return [[cell.ljust(28 if i == 0 else 10) for i, cell in enumerate(row)] for row in rows]


def _row(m: Measurement, streams: Sequence[str]) -> tuple[str, ...]:
    latency = [_number(m.latency_ms, name) for name in ("p50", "p90", "p99", "p99.9", "max")]
    row = (m.label, str(m.sent), str(sum(m.errors.values())), f"{m.rate:.4g}", *latency)
    if not streams:
        return row
    tokens = [_number(m.first_token_ms, name) for name in ("p50", "p99")]
    gaps = [_number(m.between_chunks_ms, name) for name in ("p50", "p99")]
    return (*row, *tokens, *gaps, f"{m.tokens_per_s if 'tokens/s' in streams else m.chunks_per_s:.4g}")


def _number(values: Mapping[str, float], name: str) -> str:
    return f"{values[name]:.3g}" if name in values else "-"


def _repeats(measurements: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a table of medians and ranges, if loads were run several times."""
    rows = [m for m in combine(measurements) if m["runs"] > 1]
    if not rows:
        return []
    titles = ("median of runs, least to largest", "runs", "requests/s", "", "p50 ms", "", "p99 ms", "")
    return ["", *table([titles, *map(_repeats_row, rows)])]


def _repeats_row(m: Mapping[str, Any]) -> tuple[str, ...]:
    cells = [m["label"], str(m["runs"])]
    for name in ("rate", "p50", "p99"):
        value = m["rate"] if name == "rate" else m["latency_ms"].get(name)
        cells += ["-", ""] if value is None else [f"{value:.4g}", "{:.4g} to {:.4g}".format(*m["ranges"][name])]
    return tuple(cells)


def _notes(measurements: Sequence[Measurement]) -> list[str]:
    """Return lines about errors and about limits of the measurement."""
    lines = [""]
    for m in measurements:
        lines += [f"{m.label}: {count} requests failed: {kind}" for kind, count in m.errors.items()]
        if m.is_limited_by_client:
            lines.append(
                f"{m.label}: the client used {100 * m.client_cpu:.0f} % of a CPU core and limits the measurement: the "
                "server may do more requests per second, and its latencies may be shorter"
            )
        if m.load["rate"] and m.unfinished > _BEHIND * m.sent:
            lines.append(
                f"{m.label}: {m.unfinished} of {m.sent} requests waited when the last one was sent: more arrive than "
                "the server completes, and latencies grow with the length of the run"
            )
        if not m.sent:
            lines.append(f"{m.label}: no request began in the measured time; give more --seconds")
    few = {m.label: m.completed for m in sorted(measurements, key=lambda m: -m.completed) if 0 < m.completed < 1000}
    lines += [f"{label}: {count} responses are too few for p99.9" for label, count in few.items()]
    return lines


def _as_json(arguments: argparse.Namespace, measurements: Sequence[Measurement]) -> dict[str, Any]:
    return {
        "url": arguments.url,
        "model": arguments.model,
        "protocol": arguments.protocol,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "dragoman": __version__,
        "machine": {"system": platform.platform(), "cpus": os.cpu_count(), "python": platform.python_version()},
        "measurements": [
            {**m.as_json(), "limited_by_client": m.is_limited_by_client, "run": 1 + _count(measurements[:i], m.label)}
            for i, m in enumerate(measurements)
        ],
    }


def _count(measurements: Sequence[Measurement], label: str) -> int:
    return sum(each.label == label for each in measurements)


# --- comparison -------------------------------------------------------------------------------------------


def compare(arguments: argparse.Namespace) -> int:
    """Print the differences of two runs; return 1 if a value is worse by more than the spread."""
    first, second = map(_read, arguments.compare)
    differences = compare_runs(first, second)
    titles = ("load", "value", "A", "B", "change", "A, range", "B, range", "verdict")
    print("\n".join(table([titles, *map(_difference_row, differences)])))
    limited = [m["label"] for run in (first, second) for m in run["measurements"] if m.get("limited_by_client")]
    if limited:
        print(f"\nlimited by the client, not by the server: {', '.join(dict.fromkeys(limited))}")
    print(
        "\nA and B differ by more than the spread if all values of one lie above those of the other: the values of its "
        "runs, or of the parts of the only run. Use --repeat on an idle machine before you trust a small difference."
    )
    return 1 if any(each.verdict == "worse" for each in differences) else 0


def _difference_row(each: Difference) -> tuple[str, ...]:
    unit = "requests/s" if each.name == "rate" else f"{each.name} ms"
    ranges = ["{:.4g} to {:.4g}".format(*bounds) for bounds in (each.first_range, each.second_range)]
    return (
        each.label,
        unit,
        f"{each.first:.4g}",
        f"{each.second:.4g}",
        f"{100 * each.change:+.1f} %",
        *ranges,
        each.verdict,
    )


def _read(path: str) -> Mapping[str, Any]:
    try:
        value = read_json(Path(path))
    except (OSError, ValueError) as error:
        raise InvalidInput(f"--compare: '{path}' cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise InvalidInput(f"--compare: expected a file that --json wrote, got '{path}'")
    return value
