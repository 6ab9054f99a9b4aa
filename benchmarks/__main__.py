"""The whole suite, or the workloads that are named: each prints a table and writes benchmarks/results/wN.json.

usage: python -m benchmarks [w1 w4 ...] [--quick] [--peers mlserver,kserve] [--into FOLDER]
"""

import argparse
import json
import resource
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from benchmarks import load, machine, page, peers
from benchmarks.identity import Cores
from benchmarks.processes import RESULTS
from benchmarks.suite import SUITE
from benchmarks.turns import QUICK, Plan


def main(arguments: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    plan = _plan(given)
    wanted = peers.installed() if given.peers is None else [n for n in given.peers.split(",") if n]
    if missing := set(wanted) - set(peers.installed()):
        raise SystemExit(f"not installed: {sorted(missing)}; python -m benchmarks.peers install {' '.join(missing)}")
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # the servers inherit it, and some do not see to it
    given.into.mkdir(parents=True, exist_ok=True)
    print(machine.described())
    for name in given.names or SUITE:
        found = measured(name, plan, wanted)
        (given.into / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
        print(f"\n## {name.upper()}: {found['title']}\n\n{page.table(found)}", flush=True)
    return 0


def measured(name: str, plan: Plan, wanted: Sequence[str]) -> dict[str, Any]:
    """What is written down of a workload: on what, when, beside what else, how long, and its rows."""
    busy = machine.busy_cores()
    rows = SUITE[name].rows(plan, wanted)
    return {
        "name": name,
        "title": SUITE[name].title,
        "machine": machine.machine(),
        "versions": machine.versions() | {peer: peers.version(peer) for peer in wanted},
        "pinned": Cores.of_this_machine().server is not None,
        "generators": {wire: load.choose(wire, "auto").__name__ for wire in ("http", "grpc")},
        "others_busy_cores": busy,
        "plan": asdict(plan),
        "rows": rows,
    }


def _plan(given: argparse.Namespace) -> Plan:
    said = {f.name: value for f in fields(Plan) if f.name != "quick" and (value := getattr(given, f.name, None))}
    return replace(QUICK if given.quick else Plan(), **said)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"all of {', '.join(SUITE)} where none is named")
    parser.add_argument("--quick", action="store_true", help="one short run of each, to see that it works")
    parser.add_argument("--peers", default=None, metavar="NAMES", help="other servers beside; all that are installed")
    parser.add_argument("--into", type=Path, default=RESULTS, metavar="FOLDER", help="where results are written")
    parser.add_argument("--connections", type=lambda text: [int(n) for n in text.split(",")], default=None)
    parser.add_argument("--rounds", type=int, default=None, help="runs of each server, by turns (default 3)")
    parser.add_argument("--seconds", type=float, default=None, help="of each run (default 2)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
