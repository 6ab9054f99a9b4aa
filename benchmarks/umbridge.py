"""UM-Bridge compared with the server of the `umbridge` package: same model, keep-alive connections, same run.

usage: python -m benchmarks.umbridge [--quick] [--only NAME] [--connections 1,16,64] [--generator python]
"""

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import machine
from benchmarks.identity import Cores, Plan, Row, Subject, _rows
from benchmarks.processes import RESULTS, ROOT, dragoman, free_port, http_ready, listens, run_process
from benchmarks.workloads import Response, Workload

MODELS = ROOT / "benchmarks" / "simulators.py"
OURS, UNCHANGED, THEIRS = "dragoman", "dragoman, their class", "umbridge"
VERIFIED = "dragoman, complex step verified in each call"


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    plan = Plan.of(options)
    cores = Cores.of_this_machine()
    checked = [w for w in workloads("Double") if options.only in w.name]
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as running:
        subjects = list(_subjects(running, cores, Path(folder)))
        rows = [row for w in checked for row in _rows(plan, w, _able(subjects, w), cores, Path(folder))]
    result = {"machine": machine.machine(), "versions": machine.versions(), "rows": rows}
    report = machine.describe() + "\n\n" + table(rows)
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "umbridge.json").write_text(json.dumps(result, indent=2))
    (RESULTS / "umbridge.md").write_text(report)
    print(report)
    return 1 if any(row["errors"] for row in rows) else 0


def workloads(model: str) -> list[Workload]:
    """Return requests for y = 2 x with a short and a long vector, and for a gradient."""
    numbers = np.random.default_rng(7)
    small, long = numbers.standard_normal(4).tolist(), numbers.standard_normal(10_000).tolist()
    where = {"outWrt": 0, "inWrt": 0, "sens": small}
    return [
        _workload("evaluate-4", "/Evaluate", {"name": model, "input": [small], "config": {}}, [_doubled(small)]),
        _workload("gradient-4", "/Gradient", {"name": model, **where, "input": [small], "config": {}}, _doubled(small)),
        _workload(
            "evaluate-10000",
            "/Evaluate",
            {"name": model, "input": [long], "config": {"n": 10_000}},
            [_doubled(long)],
        ),
    ]


def _doubled(values: list[float]) -> list[float]:
    return [2 * v for v in values]


def _workload(name: str, path: str, body: Any, output: Any) -> Workload:
    headers = {"content-type": "application/json"}
    return Workload(name, "http", path, headers, json.dumps(body).encode(), partial(_is_correct, output))


def _is_correct(output: Any, response: Response) -> bool:
    return bool(json.loads(response.body) == {"output": output})


def _subjects(running: contextlib.ExitStack, cores: Cores, folder: Path) -> Iterator[Subject]:
    """Start our server with each kind of simulator, and their server with a class of the umbridge package."""
    for name, model in ((OURS, "Double"), (UNCHANGED, "Theirs"), (VERIFIED, "doubled")):
        http, grpc, home = free_port(), free_port(), folder / model
        home.mkdir()
        (home / "Double").mkdir()
        (home / "Double" / "dragoman.toml").write_text(
            f'[model]\nruntime = "python"\nuri = "{MODELS}:{model}"\nplacement = "inline"\n'
        )
        command = dragoman([str(home)], http, grpc)
        process = running.enter_context(run_process(command, folder / f"{model}.log", cores.server))
        process.wait_until(partial(http_ready, http))
        yield Subject(name, {"http": (process, http)})
    port = free_port()
    command = [sys.executable, "-m", "benchmarks.simulators", str(port)]
    process = running.enter_context(run_process(command, folder / "umbridge.log", cores.server))
    process.wait_until(partial(listens, port))
    yield Subject(THEIRS, {"http": (process, port)})


def _able(subjects: Iterable[Subject], workload: Workload) -> list[Subject]:
    """Return the servers to measure: evaluations of the verified function are those of the class."""
    return [each for each in subjects if each.name != VERIFIED or workload.name.startswith("gradient")]


def table(rows: Sequence[Row]) -> str:
    """Return medians of the rounds, and of the ratios in each round to the server of the umbridge package."""
    lines = [
        "| workload | c | server | responses/s | p50 ms | p99 ms | CPU us/response | times umbridge | by CPU |",
        "|---|---:|---|---:|---:|---:|---:|---:|---:|",
    ]
    for key in dict.fromkeys((r["workload"], r["connections"], r["server"]) for r in rows):
        group = [r for r in rows if (r["workload"], r["connections"], r["server"]) == key]
        peers = {r["round"]: r for r in rows if (r["workload"], r["connections"], r["server"]) == (*key[:2], THEIRS)}
        rate, p50, p99, cpu = (statistics.median(r[k] for r in group) for k in ("rate", "p50_ms", "p99_ms", "cpu_us"))
        times, by_cpu = _ratio(group, peers, "rate"), _ratio(peers.values(), {r["round"]: r for r in group}, "cpu_us")
        ratios = ("", "") if key[2] == THEIRS else (times, by_cpu)
        cells = [*map(str, key), f"{rate:,.0f}", f"{p50:.2f}", f"{p99:.2f}", f"{cpu:.0f}", *ratios]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _ratio(rows: Iterable[Row], by: Mapping[int, Row], key: str) -> str:
    """Return the median of the ratios, over the rounds that both have."""
    ratios = [r[key] / by[r["round"]][key] for r in rows if r["round"] in by and by[r["round"]][key]]
    return f"{statistics.median(ratios):.2f}" if ratios else "-"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.umbridge", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one short run of each, to check that it works")
    parser.add_argument("--only", default="", metavar="NAME", help="workloads with this in their name")
    parser.add_argument("--connections", type=lambda text: [int(n) for n in text.split(",")], default=None)
    parser.add_argument("--rounds", type=int, default=None, help="rounds, in which the servers take turns (default 3)")
    parser.add_argument("--seconds", type=float, default=None, help="duration of each run (default 2)")
    parser.add_argument(
        "--generator", choices=("auto", "python"), default="auto", help="python: our generator in Python"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
