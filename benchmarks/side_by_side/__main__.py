"""Send the same requests to Dragoman and to another server, and compare the answers.

usage: ./scripts/side-by-side {triton,mlserver} [--only TEXT] [--verbose] [--write]

Installs the other server into an environment of its own below benchmarks/results/venvs, starts both on one folder of
models, and compares the status or code, outputs with names, datatypes, shapes, data and parameters, and ids; not the
order of keys, nulls, times, and texts of errors. Each difference needs a verdict in the table `differences.toml` beside
the requests. Exit status 1 if a difference has no verdict, or if a verdict has no difference.

If the other server ends or does not answer in time, it is started again and the request repeated once.
"""

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.processes import RESULTS, dragoman
from benchmarks.side_by_side.cases import Case, Pause, numbered
from benchmarks.side_by_side.exchange import NO_ANSWER, answers, difference, shown
from benchmarks.side_by_side.mlserver.peer import MLSERVER
from benchmarks.side_by_side.peer import Peer, Server
from benchmarks.side_by_side.triton.peer import TRITON
from benchmarks.side_by_side.verdicts import Difference, Judgement, entry, judge, read_verdicts, unknown_requests

PEERS = {"triton": TRITON, "mlserver": MLSERVER}


@dataclass(slots=True)
class Comparison:
    """The cases that were compared, their differences, and how often each server was started again."""

    cases: list[Case] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    restarts: Counter[str] = field(default_factory=Counter)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", choices=PEERS, help="the other server")
    parser.add_argument("--only", default="", help="send the requests whose title contains this text")
    parser.add_argument("--verbose", action="store_true", help="print both whole answers where they differ")
    parser.add_argument("--write", action="store_true", help="write the page of results, benchmarks/results")
    parser.add_argument("--python", type=Path, help="interpreter of an environment that has the other server")
    options = parser.parse_args(arguments)
    peer = PEERS[options.peer]
    cases = numbered(peer.cases())
    verdicts = read_verdicts(peer.differences)
    chosen = [case for case in cases if options.only in case.title]
    comparison = _compare(peer, options.python or peer.install(), chosen, options.verbose)
    result = judge([case.title for case in chosen], comparison.differences, verdicts)
    result.without_difference += unknown_requests((case.title for case in cases), verdicts)
    print(_report(peer, comparison, result))
    if options.write:
        page = RESULTS / f"side-by-side-{options.peer}.md"
        page.write_text(_page(peer, options.peer, comparison, result), encoding="utf-8")
    return 0 if result.passes else 1


def _compare(peer: Peer, python: Path, cases: Sequence[Case], verbose: bool) -> Comparison:
    comparison = Comparison()
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        models = home / "models"
        peer.write_models(models)
        flags = ("--host", "127.0.0.1", *peer.flags)
        with (
            Server(lambda ports: peer.command(python, models, ports), home / "peer", peer.ready) as theirs,
            Server(
                lambda ports: dragoman([str(models)], ports.http, ports.grpc, *flags), home / "dragoman", peer.ready
            ) as ours,
        ):
            for case in cases:
                their_answers = _peer_answers(theirs, case, peer, comparison)
                our_answers = answers(ours.ports, case, peer.deadline_s)
                if not ours.is_running:
                    comparison.restarts["Dragoman"] += 1
                    ours.start()
                comparison.cases.append(case)
                if their_answers != our_answers:
                    parts = difference(their_answers, our_answers)
                    found = Difference(case.title, shown(parts[0]), shown(parts[1]))
                    comparison.differences.append(found)
                    shows = (their_answers, our_answers) if verbose else (found.peer, found.dragoman)
                    lines = f"    {peer.name:8} {shows[0]}\n    Dragoman {shows[1]}"
                    print(f"differs  {case.title}\n{lines}", flush=True)
    return comparison


def _peer_answers(server: Server, case: Case, peer: Peer, comparison: Comparison) -> list[Any]:
    """Return the answers of the other server. If one is missing, start it again and repeat the case once."""
    for _ in range(2):
        found = answers(server.ports, case, peer.deadline_s)
        if NO_ANSWER not in found and server.is_running:
            break
        comparison.restarts[peer.name] += 1
        server.start()
    return found


def _counts(comparison: Comparison) -> list[tuple[str, int, int, int]]:
    """Return group, cases, requests in them, and cases with equal answers, for each group."""
    different = {each.request for each in comparison.differences}
    rows = []
    for group in dict.fromkeys(case.group for case in comparison.cases):
        cases = [case for case in comparison.cases if case.group == group]
        requests = sum(not isinstance(step, Pause) for case in cases for step in case.steps)
        rows.append((group, len(cases), requests, sum(case.title not in different for case in cases)))
    return rows


def _report(peer: Peer, comparison: Comparison, result: Judgement) -> str:
    lines = [""]
    for group, cases, requests, equal in _counts(comparison):
        lines.append(f"{group}: {cases} cases, {requests} requests; {equal} equal, {cases - equal} different")
    lines += [f"{name} was started again {count} times" for name, count in comparison.restarts.items()]
    kinds = Counter(verdict.partition(":")[0] for _, verdict in result.judged)
    lines += [f"{count} with the verdict '{kind}'" for kind, count in kinds.most_common()]
    if result.without_difference:
        lines.append(f"\nverdicts without a difference in {peer.differences.name}:")
        lines += [f"  {title}" for title in result.without_difference]
    if result.without_verdict:
        lines.append(
            f"\n{len(result.without_verdict)} differences without a verdict; entries for {peer.differences}:\n"
        )
        lines += [entry(each, "") for each in result.without_verdict]
    return "\n".join(lines)


def _page(peer: Peer, name: str, comparison: Comparison, result: Judgement) -> str:
    """Return the page of results."""
    date = time.strftime("%d %B %Y", time.gmtime())
    lines = [
        f"# Side by side with {peer.name}",
        "",
        f"Results of `./scripts/side-by-side {name} --write`, on {date}. Dragoman {version('dragoman')} and",
        f"{peer.name} {peer.release} answered the same requests on the same models. Compared are statuses, outputs,",
        "parameters and ids, not texts of errors, times and the order of keys. The table has the parts that differ.",
        "",
        "| protocol | cases | requests | equal | different |",
        "|---|---:|---:|---:|---:|",
    ]
    for group, cases, requests, equal in _counts(comparison):
        lines.append(f"| {group} | {cases} | {requests} | {equal} | {cases - equal} |")
    lines += ["", f"| request | {peer.name} | Dragoman | verdict |", "|---|---|---|---|"]
    for each, verdict in [*result.judged, *((each, "none") for each in result.without_verdict)]:
        cells = (each.request, f"`{each.peer}`", f"`{each.dragoman}`", verdict)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    if comparison.restarts:
        lines += ["", *(f"{n} was started again {count} times." for n, count in comparison.restarts.items())]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
