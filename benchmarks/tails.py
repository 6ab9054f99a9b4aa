"""Latency with arrivals that do not wait for responses, at shares of each server's own capacity."""

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks import load, peers
from benchmarks.checked_request import check_request
from benchmarks.identity import Cores
from benchmarks.peers import PeerConfig
from benchmarks.processes import ROOT, pin
from benchmarks.subjects import OURS, Subject, our_server, plain_json, with_id
from benchmarks.turns import Plan, Row
from benchmarks.workloads import Response, Workload, json_numbers

MODELS = ("Identity", "Slow", "Reloaded")
SIZES = {16: 0.90, 1000: 0.09, 10_000: 0.01}  # numbers of a request, and its share of all requests
_SHARES = (0.5, 0.8, 0.95, 1.1)
_LIMIT_S = "0.005"
_OURS = {OURS: (), f"{OURS}, max_loop_delay_s {_LIMIT_S}": ("--max-loop-delay-s", _LIMIT_S)}
_CONNECTIONS = 4000
_CLOSED = 64  # connections that find the capacity
_GOOD_MS = 100.0
_WARM_UP_S = 5.0
_SLOW_PER_S, _RELOADS_PER_S = 8.0, 2.0


@dataclass(frozen=True, slots=True)
class Request:
    """A request with its expected response. `beside_per_s` requests per second are sent beside the others."""

    sent: bytes
    response: bytes
    share: float = 0.0
    beside_per_s: float = 0.0


def measure(plan: Plan, peer_names: Sequence[str]) -> list[Row]:
    """W11: a row for each share of the capacity and server, with medians of the rounds."""
    cores = Cores.of_this_machine()
    found: dict[str, list[Row]] = {}
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        models = [f"{ROOT / 'benchmarks' / 'models.py'}:{model}" for model in MODELS]
        command = [*models, "--control-open"]
        servers = [
            stack.enter_context(our_server(cores.server, folder / f"log{number}", [*command, *options], name))
            for number, (name, options) in enumerate(_OURS.items())
        ]
        for peer in peer_names:
            config = PeerConfig(folder / peer, MODELS)
            servers.append(stack.enter_context(peers.run_peer(peer, config, cores.server)))
        requests = {server: requests_for(server) for server in servers}
        for server in servers:  # which load code when the first long array comes
            _run(server, _counted(requests[server]), 0.0, _WARM_UP_S * (not plan.quick) or plan.seconds, cores, folder)
        for _ in range(plan.rounds):
            capacities: dict[str, float] = {}  # with a limit, that of the same server without it
            for server in servers:
                known = capacities.get(OURS) if server.name in _OURS else None
                rows = _levels(server, requests[server], plan, cores, folder, known)
                capacities[server.name] = rows[0]["capacity"]
                found.setdefault(server.name, []).extend(rows)
    order = [(share, name) for share in _SHARES for name in found]
    return [_summary(name, share, [r for r in found[name] if r["share"] == share]) for share, name in order]


def _levels(
    server: Subject,
    requests: Sequence[Request],
    plan: Plan,
    cores: Cores,
    folder: Path,
    capacity: float | None = None,
) -> list[Row]:
    """Return a row for each share of the capacity, which is measured in a closed loop unless it is given."""
    seconds = plan.seconds if plan.quick else max(4.0, plan.seconds)
    if capacity is None:
        closed = _run(server, _counted(requests), 0.0, seconds / 2, cores, folder)
        capacity = closed["responses"] / closed["seconds"]
    return [
        {"share": share, "capacity": capacity, **_run(server, requests, share * capacity, seconds, cores, folder)}
        for share in _SHARES
    ]


def _counted(requests: Sequence[Request]) -> list[Request]:
    return [request for request in requests if request.share]


def _run(server: Subject, requests: Sequence[Request], rate: float, seconds: float, cores: Cores, folder: Path) -> Row:
    """Send requests at this rate, or in a closed loop if it is 0. Raises RuntimeError if a response was wrong."""
    for number, request in enumerate(requests):
        (folder / f"request{number}").write_bytes(request.sent)
        (folder / f"response{number}").write_bytes(request.response)
    beside = sum(request.beside_per_s for request in requests)
    weights = [r.share or -r.beside_per_s / max(rate, 1.0) for r in requests]
    plan = [server.ports["http"], _CONNECTIONS if rate else _CLOSED, seconds, folder, rate + beside * bool(rate)]
    command = [str(load.build_generator("open_load")), *map(str, [*plan, _GOOD_MS, *weights])]
    before_s = server.process.cpu_s()
    run = subprocess.run(command, preexec_fn=pin(cores.load), capture_output=True, text=True, timeout=seconds + 60)
    if run.returncode:
        raise RuntimeError(f"{server.name}: {run.stderr}")
    row: Row = json.loads(run.stdout)
    if row["errors"] or not row["responses"]:
        raise RuntimeError(f"{server.name}: {row['errors']} responses were wrong: {row}")
    row["cpu_us"] = (server.process.cpu_s() - before_s) / row["responses"] * 1e6
    print(f"{server.name:12} {rate:8.0f}/s {row}", file=sys.stderr, flush=True)
    return row


def requests_for(server: Subject) -> list[Request]:
    """Return the requests of the mix, those to the slow model, and the reloads that the server knows."""
    mix = [_checked(server, _identity("Identity", size), share=share) for size, share in SIZES.items()]
    slow = _identity("Slow", 16)
    if server.form != "plain":
        load_again = "/v2/repository/models/Reloaded/load"
        text = f"POST {load_again} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n\r\n{{}}".encode()
        body = check_request(_reload(load_again), server.ports["http"], echo=False).body
        beside = [_checked(server, slow, beside=_SLOW_PER_S), Request(text, body, beside_per_s=_RELOADS_PER_S)]
    elif server.name == "fastapi":
        beside = [_checked(server, slow, beside=_SLOW_PER_S, path="/slow")]
    else:
        beside = []  # serves one model
    return [*mix, *beside]


def _identity(model: str, size: int) -> Workload:
    array = np.random.default_rng(size).standard_normal((1, size)).astype(np.float32)
    return json_numbers(f"{size} numbers", model, array)


def _reload(path: str) -> Workload:
    def is_correct(response: Response) -> bool:
        return True  # its status is 200

    return Workload("reload", "http", path, {"content-type": "application/json"}, b"{}", is_correct)


def _checked(server: Subject, workload: Workload, share: float = 0.0, beside: float = 0.0, path: str = "") -> Request:
    adapted = plain_json(workload) if server.form == "plain" else with_id(workload)
    assert adapted is not None
    adapted = replace(adapted, path=path) if path else adapted
    checked = check_request(adapted, server.ports["http"], echo=False)
    return Request(adapted.http_request(), checked.sent, share, beside)


def _summary(name: str, share: float, rows: Sequence[Row]) -> Row:
    def middle(key: str) -> float:
        return float(f"{statistics.median(row[key] for row in rows):.4g}")

    row: Row = {"workload": f"{share:.0%} of capacity", "server": name}
    keys = ("capacity", "goodput", "p50_ms", "p99_ms", "p999_ms", "max_ms", "cpu_us", "late_p999_ms", "late_ms")
    row |= {key: middle(key) for key in keys}
    row["rejected"] = round(100 * statistics.median(r["rejected"] / r["arrivals"] for r in rows), 1)
    row["rejected_p99_ms"] = middle("rejected_p99_ms")
    row["lost"] = sum(r["lost"] for r in rows)
    row["tail_ratio"] = float(f"{statistics.median(r['p999_ms'] / r['p50_ms'] for r in rows):.3g}")
    row["p999_ms_spread"] = [float(f"{end(r['p999_ms'] for r in rows):.4g}") for end in (min, max)]
    return row


if __name__ == "__main__":
    sys.exit(f"run `python -m benchmarks w11` ({OURS} and the installed peers)")
