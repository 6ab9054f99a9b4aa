"""Run the suite, or the named workloads. Each prints a table and writes benchmarks/results/wN.json.

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
    options = _parser().parse_args(arguments)
    plan = _plan(options)
    peer_names = peers.installed_peers() if options.peers is None else [n for n in options.peers.split(",") if n]
    if missing := set(peer_names) - set(peers.installed_peers()):
        raise SystemExit(f"not installed: {sorted(missing)}; python -m benchmarks.peers install {' '.join(missing)}")
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))  # inherited by the servers; some do not raise it
    options.into.mkdir(parents=True, exist_ok=True)
    print(machine.describe())
    for name in options.names or SUITE:
        result = measure_workload(name, plan, peer_names)
        (options.into / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
        print(f"\n## {name.upper()}: {result['title']}\n\n{page.table(result)}", flush=True)
    return 0


def measure_workload(name: str, plan: Plan, peer_names: Sequence[str]) -> dict[str, Any]:
    """Return the results of a workload: machine, versions, other load, plan and rows."""
    busy = machine.busy_cores()
    rows = SUITE[name].rows(plan, peer_names)
    return {
        "name": name,
        "title": SUITE[name].title,
        "machine": machine.machine(),
        "versions": machine.versions() | {peer: peers.version(peer) for peer in peer_names},
        "pinned": Cores.of_this_machine().server is not None,
        "generators": {wire: load.choose(wire, "auto").__name__ for wire in ("http", "grpc")},
        "others_busy_cores": busy,
        "plan": asdict(plan),
        "rows": rows,
    }


def _plan(options: argparse.Namespace) -> Plan:
    overrides = {f.name: value for f in fields(Plan) if f.name != "quick" and (value := getattr(options, f.name, None))}
    return replace(QUICK if options.quick else Plan(), **overrides)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: all of {', '.join(SUITE)}")
    parser.add_argument("--quick", action="store_true", help="one short run of each, to check that it works")
    parser.add_argument(
        "--peers", default=None, metavar="NAMES", help="other servers to measure; default: all installed ones"
    )
    parser.add_argument("--into", type=Path, default=RESULTS, metavar="FOLDER", help="folder of the results")
    parser.add_argument("--connections", type=lambda text: [int(n) for n in text.split(",")], default=None)
    parser.add_argument("--rounds", type=int, default=None, help="rounds, in which the servers take turns (default 3)")
    parser.add_argument("--seconds", type=float, default=None, help="duration of each run (default 2)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
