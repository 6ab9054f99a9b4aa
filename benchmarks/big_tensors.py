"""Peak memory of the server while one large tensor is sent and returned, for each protocol and placement.

usage: python -m benchmarks.big_tensors [--quick] [--mib 1024] [--wires rest,grpc,rest-gzip,rest-gzip-zeros]
    [--placements inline,thread,process]
"""

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.big_client import WIRES
from benchmarks.processes import RESULTS, ROOT, dragoman, free_port, http_ready, peak_memory, peak_mib, run_process

Row = dict[str, Any]
MODELS = {"inline": "Numbers", "thread": "NumbersInThread", "process": "NumbersInProcess"}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="64 MiB, to check that it works")
    parser.add_argument("--mib", type=int, default=0)
    parser.add_argument("--wires", default=",".join(WIRES))
    parser.add_argument("--placements", default=",".join(MODELS))
    options = parser.parse_args(arguments)
    size = (options.mib or (64 if options.quick else 1024)) << 20
    print(machine.describe() + "\n")
    rows = []
    for placement in options.placements.split(","):
        for wire in options.wires.split(","):
            rows.append(measure_tensor(wire, placement, size))
            print(rows[-1], flush=True)
    found = {"machine": machine.machine(), "versions": machine.versions(), "rows": rows}
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "big_tensors.json").write_text(json.dumps(found, indent=2))
    print("\n" + table(rows))
    return 1 if size >= 1 << 30 and any(row["times"] >= 3 for row in rows) else 0


def measure_tensor(wire: str, placement: str, size: int) -> Row:
    """Send and receive one tensor, checked byte by byte, on a server that has just started."""
    http, grpc = free_port(), free_port()
    body_limit = str(size + (1 << 20))
    model = f"{ROOT / 'benchmarks' / 'models.py'}:{MODELS[placement]}"
    limits = ["--max-body-bytes", body_limit, "--max-bodies-bytes", str(4 * size)]
    with tempfile.TemporaryDirectory() as folder:
        command = dragoman([model], http, grpc, *limits, "--body-timeout-s", "120")
        with run_process(command, Path(folder) / "log") as server:
            server.wait_until(lambda: http_ready(http))
            before = server.memory_mib()["pss_mib"]
            with peak_memory(server, "pss_mib") as peak:
                began_s = time.monotonic()
                WIRES[wire](grpc if wire == "grpc" else http, MODELS[placement], size)
                durations_s = time.monotonic() - began_s
            largest = max(*peak, *map(peak_mib, server.pids()))  # at least the peak of one process
    mib = size / (1 << 20)
    row: Row = {"wire": wire, "placement": placement, "tensor_mib": mib, "idle_mib": before, "peak_mib": largest}
    return row | {"times": round(largest / mib, 3), "seconds": round(durations_s, 2)}


def table(rows: Sequence[Row]) -> str:
    lines = [
        "| wire | model | tensor MiB | idle MiB | peak MiB | times the tensor | s |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        cells = [row["wire"], row["placement"], f"{row['tensor_mib']:.0f}", f"{row['idle_mib']:.0f}"]
        cells += [f"{row['peak_mib']:.0f}", f"{row['times']:.2f}", f"{row['seconds']:.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
