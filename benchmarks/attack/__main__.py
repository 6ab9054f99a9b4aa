"""Run the attack suite: a fresh server for each attack, a well-behaved client beside it, and a table.

usage: python -m benchmarks.attack [NAME...] [--list] [--report-only]

NAME is the name of an attack, or a prefix of several names. Exit status 1 if an aim is missed.
"""

import argparse
import json
import sys
from collections.abc import Sequence

from benchmarks import machine
from benchmarks.attack.catalogue import all_attacks, select_attacks
from benchmarks.attack.measure import Result, measure
from benchmarks.processes import RESULTS

_HEAD = (
    "| attack | health HTTP, gRPC (ms) | infer (ms) | memory before, peak, after (MiB) | verdict |\n"
    "|---|---:|---:|---:|---|"
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="name or prefix; default: all")
    parser.add_argument("--list", action="store_true", help="list the attacks")
    parser.add_argument("--report-only", action="store_true", help="exit with 0 even if an aim is missed")
    options = parser.parse_args(arguments)
    if options.list:
        print("\n".join(f"{name:32} {attack.about}" for name, attack in all_attacks().items()))
        return 0
    try:
        attacks = select_attacks(options.names)
    except ValueError as error:
        parser.error(str(error))
    print(f"{machine.describe()}\nbusy cores before: {machine.busy_cores()}\n\n{_HEAD}", flush=True)
    results = []
    for attack in attacks:
        results.append(measure(attack))
        print(row(results[-1]), flush=True)
    (RESULTS / "attack.json").write_text(json.dumps([r.as_dict() for r in results], indent=1))
    missed = [r.name for r in results if r.missed]
    print(f"\n{len(results) - len(missed)} of {len(results)} attacks within the aims", end="")
    print(f"; missed: {', '.join(missed)}" if missed else "")
    return 1 if missed and not options.report_only else 0


def row(result: Result) -> str:
    """Return a row of the table."""
    memory = ", ".join(f"{mib:.0f}" for mib in (result.memory_before, result.memory_peak, result.memory_after))
    verdict = f"MISSED: {'; '.join(result.missed)}" if result.missed else "ok"
    note = f" ({result.note}; {result.took_s:.1f} s)" if result.note else ""
    times = f"{result.health_http_ms:.0f}, {result.health_grpc_ms:.0f} | {result.infer_ms:.0f}"
    return f"| {result.name}: {result.about}{note} | {times} | {memory} | {verdict} |"


if __name__ == "__main__":
    sys.exit(main())
