"""CPU profile of the server under load with perf: shares of the kernel, the interpreter and each library.

usage: python -m benchmarks.profile rest-json-small [--seconds 3] [--connections 16]
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from benchmarks import load, subjects, workloads
from benchmarks.identity import Cores

_LINE = re.compile(r"\s*([\d.]+)%\s+(\S+)\s+(\S+)\s+\[(.)\]\s+(.*)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=[w.name for w in workloads.identity()])
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--connections", type=int, default=16)
    options = parser.parse_args()
    (workload,) = (w for w in workloads.identity() if w.name == options.workload)
    cores = Cores.of_this_machine()
    with tempfile.TemporaryDirectory() as name, subjects.our_server(cores.server, Path(name) / "log") as subject:
        checked = subject.check(workload)
        assert checked is not None
        interval = load.Load(checked, options.connections, options.seconds, cores.load, Path(name))
        target = Path(name) / "perf.data"
        record = ["perf", "record", "-q", "-F", "997", "-o", str(target), "-p", str(subject.process.child.pid)]
        with subprocess.Popen(record, stderr=subprocess.DEVNULL) as recording:
            measured = load.choose(workload.wire, "auto")(interval)
            recording.terminate()
        report = ["perf", "report", "-i", str(target), "--stdio", "--sort", "comm,dso,symbol"]
        output = subprocess.run(report, capture_output=True, text=True).stdout
    print(f"{workload.name}, c = {options.connections}: {measured.rate:,.0f} responses/s\n")
    print(summarize(output))


def summarize(report: str) -> str:
    """Return shares by library, and the twelve functions with the largest shares."""
    found = [(float(m[1]), m[3], m[5].strip()) for m in map(_LINE.match, report.splitlines()) if m]
    if not found:
        sys.exit("perf recorded no samples: check kernel.perf_event_paranoid")
    places: Counter[str] = Counter()
    for share, place, _ in found:
        places[re.sub(r"\.cpython.*|\.so.*", "", place)] += share  # type: ignore[assignment]
    lines = [f"{share:6.1f} %  {place}" for place, share in places.most_common(10)]
    lines += ["", *(f"{share:6.1f} %  {name}  ({place})" for share, place, name in found[:12])]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
