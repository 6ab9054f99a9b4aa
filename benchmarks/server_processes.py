"""One process compared with several that have copies of the models, by CPU time per response.

usage: python -m benchmarks.server_processes [--quick] [--connections 16] [--only small] [--page]

The server runs on one core and the load generator on another one, so that throughput is that of one core in each case.
What several processes add is CPU time per response. From it follows what more cores can answer: see `model`.
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.checked_request import check_request
from benchmarks.load import Load, c_generator
from benchmarks.processes import RESULTS, ROOT, Process, cpu_s, dragoman, free_port, http_ready, run_process
from benchmarks.workloads import Workload, identity

MODELS = ROOT / "benchmarks" / "models.py"
PAGE = ROOT / "benchmarks" / "results" / "processes.md"
RESULT = RESULTS / "server_processes.json"
WORKLOADS = {"rest-json-small": "JSON, 16 numbers", "rest-json-large": "JSON, 150,528 numbers"}
ONE, COPIES = "one process", "2 processes"
COUNT = 2
FLAGS = {ONE: (), COPIES: ("--processes", str(COUNT))}
CORES = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True, slots=True)
class Row:
    """One interval: responses per second, and CPU time per response of the engine's process and of all others."""

    workload: str
    subject: str
    round: int
    rate: float
    p50_ms: float
    engine_us: float
    others_us: float
    errors: int

    @property
    def cpu_us(self) -> float:
        return self.engine_us + self.others_us


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if options.page:
        PAGE.write_text(page_with(PAGE.read_text(), json.loads(RESULT.read_text())))
        return 0
    rounds, seconds = (1, 0.3) if options.quick else (options.rounds, options.seconds)
    rows: list[Row] = []
    result: dict[str, Any] = {"machine": machine.machine(), "others_busy_cores": machine.busy_cores()}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as running:
        servers = {subject: _start_server(running, Path(folder), subject) for subject in FLAGS}
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # also of the load generator
        for workload in identity():
            if workload.name not in WORKLOADS or options.only not in workload.name:
                continue
            for number in range(rounds + 1):  # the first one is a warm-up
                for subject in list(servers)[:: 1 if number % 2 else -1]:
                    connections = options.connections * (1 if subject == ONE else COUNT)
                    row = _row(workload, subject, number, servers[subject], connections, seconds, Path(folder))
                    rows += [row] * (number > 0)
    result["rows"] = [asdict(row) for row in rows]
    RESULTS.mkdir(parents=True, exist_ok=True)
    target = RESULTS / "server_processes-quick.json" if options.quick or options.only else RESULT
    target.write_text(json.dumps(result, indent=1) + "\n")
    print(report(result))
    return 1 if any(row.errors for row in rows) else 0


def _start_server(running: contextlib.ExitStack, folder: Path, subject: str) -> tuple[Process, int]:
    port = free_port()
    models = [f"{MODELS}:{name}" for name in ("Identity", "IdentityImage")]
    command = dragoman(models, port, -1, *FLAGS[subject])
    process = running.enter_context(run_process(command, folder / f"{subject}.log"))
    process.wait_until(partial(http_ready, port))
    while subject == COPIES and _copies(port) < len(models) * COUNT:
        time.sleep(0.1)
    for pid in process.pids():
        os.sched_setaffinity(pid, {min(os.sched_getaffinity(0))})
    return process, port


def _copies(port: int) -> float:
    """Return the number of models in all processes."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as response:
        lines = response.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("dragoman_server_process_models{"))


def _row(
    workload: Workload,
    subject: str,
    number: int,
    server: tuple[Process, int],
    connections: int,
    seconds: float,
    folder: Path,
) -> Row:
    process, port = server
    checked = check_request(workload, port, echo=False)
    pids = process.pids()
    before_s = [*map(cpu_s, pids)]
    measured = c_generator(Load(checked, connections, seconds, None, folder))
    used_us = [1e6 * (cpu_s(pid) - s) / max(1, measured.responses) for pid, s in zip(pids, before_s, strict=True)]
    costs = used_us[0], sum(used_us[1:])
    return Row(workload.name, subject, number, measured.rate, measured.p50_ms, *costs, measured.errors)


# --- report ------------------------------------------------------------------------------------------------------


def report(result: dict[str, Any]) -> str:
    """Return the tables, also those of benchmarks/results/processes.md."""
    m, rows = result["machine"], [Row(**row) for row in result["rows"]]
    first = (
        f"{m['processor']}, {m['cores']} cores, Python {m['python']}, {m['when'][:16].replace('T', ' ')} UTC; "
        f"other load before: {result['others_busy_cores']:.1f} cores. Medians of the rounds."
    )
    small = [row for row in rows if row.workload == "rest-json-small"]
    return "\n".join([first, "", *_cost_lines(rows), *(["", *_model_lines(small)] if small else [])])


def _cost_lines(rows: Sequence[Row]) -> Iterator[str]:
    """Yield medians of the rounds, the spread of CPU times, and medians of the ratios in each round to one process."""
    yield "| request | server | CPU us per response | least to most | of these in the engine's process | times one |"
    yield "|---|---|---:|---:|---:|---:|"
    for name in dict.fromkeys(row.workload for row in rows):
        of_workload = [r for r in rows if r.workload == name]
        for subject in FLAGS:
            group = [r for r in of_workload if r.subject == subject]
            cpu_us, engine_us = (statistics.median(getattr(r, k) for r in group) for k in ("cpu_us", "engine_us"))
            least, most = (f(r.cpu_us for r in group) for f in (min, max))
            ratio = _ratio(of_workload, subject)
            cells = f"{cpu_us:,.1f} | {least:,.1f} to {most:,.1f} | {engine_us:,.1f} | {ratio:.2f}"
            yield f"| {WORKLOADS[name]} | {subject} | {cells} |"


def model(rows: Sequence[Row], cores: int) -> tuple[float, float]:
    """Return the responses per second of so many cores: if they were linear, and with a process for each.

    Each core answers its share; the engine's process takes from it what it was measured to take for each process.
    """
    one_us = statistics.median(row.cpu_us for row in rows if row.subject == ONE)
    linear = cores * 1e6 / one_us
    return linear, linear / _ratio(rows, COPIES)


def _ratio(rows: Sequence[Row], subject: str) -> float:
    """Return the median over the rounds of the CPU time, compared with the CPU time of one process."""
    one = {row.round: row.cpu_us for row in rows if row.subject == ONE}
    ratios = (row.cpu_us / one[row.round] for row in rows if row.subject == subject)
    return float(statistics.median(ratios))


def _model_lines(rows: Sequence[Row]) -> Iterator[str]:
    yield "| cores | responses/s | share of linear |"
    yield "|---:|---:|---:|"
    for cores in CORES:
        linear, copies = model(rows, cores)
        yield f"| {cores} | {copies:,.0f} | {copies / linear:.2f} |"


_MARKS = ("<!-- from benchmarks.server_processes -->\n", "<!-- end -->")


def page_with(text: str, result: dict[str, Any]) -> str:
    """Return the text of the page with the tables of a result between its marks."""
    before, _, rest = text.partition(_MARKS[0])
    _, _, after = rest.partition(_MARKS[1])
    return f"{before}{_MARKS[0]}\n{report(result)}\n\n{_MARKS[1]}{after}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.server_processes", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--quick", action="store_true", help="one short run of each, to check that it works")
    parser.add_argument("--only", default="", help="workloads with this in their name: small or large")
    parser.add_argument("--connections", type=int, default=16, help="for each process")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--page", action="store_true", help="write its page from the last complete result")
    return parser


if __name__ == "__main__":
    sys.exit(main())
