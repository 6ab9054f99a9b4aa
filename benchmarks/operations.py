"""CPU time per request that API keys, access log, metrics and tracing cost, measured by turns in one run.

usage: python -m benchmarks.operations [--only NAME] [--before CHECKOUT] [--connections 16] [--starts 5] [--rounds 6]
       [--seconds 0.5]

A server of each configuration runs, and each gets the load in turn. Ratios are those to the plain server in the same
round. `plain, again` is a second plain server: its ratio shows what the measurement cannot distinguish. With
`--before`, the plain server of another checkout takes part too, for example of one without tracing. Metrics are always
counted; their row adds a scrape in each turn.
"""

import argparse
import contextlib
import functools
import http.server
import statistics
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path

from benchmarks import load, machine, workloads
from benchmarks.checked_request import check_request
from benchmarks.compare import cpu_us, python_path
from benchmarks.identity import Cores
from benchmarks.processes import ROOT, Process, dragoman, free_port, http_ready, run_process
from benchmarks.workloads import Workload
from dragoman.settings import Settings

MODEL = f"{ROOT / 'benchmarks' / 'models.py'}:Identity"
WORKLOADS = {"rest-json-small": "W1", "grpc-raw-small": "W4"}
PLAIN = "plain"
Times = dict[str, list[float]]  # by configuration: CPU time per request in each round, in us


@dataclass(frozen=True, slots=True)
class Configuration:
    """A server: its options, what each of its requests carries, and the highest ratio to the plain server to aim at.

    source: the checkout that runs. scrapes: whether metrics are scraped in each turn.
    """

    name: str
    options: Sequence[str] = ()
    headers: Mapping[str, str] = field(default_factory=dict)
    aim: str = ""
    source: Path = ROOT
    scrapes: bool = False


@dataclass(frozen=True, slots=True)
class Running:
    """A running server."""

    configuration: Configuration
    process: Process
    ports: Mapping[str, int]

    def scrape(self) -> None:
        """Read the metrics once."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.ports['http']}/metrics", timeout=30) as response:
            assert b"dragoman_requests_total" in response.read()


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    cores, busy = Cores.of_this_machine(), machine.busy_cores()
    selected = [w for w in workloads.identity() if w.name in WORKLOADS and options.only in w.name]
    measured: dict[str, Times] = {workload.name: {} for workload in selected}
    with tempfile.TemporaryDirectory() as home, _collector() as collector:
        key = _create_key(Path(home) / "keys.toml")
        found = configurations(Path(home), key, collector, options.before)
        for number in range(options.starts):
            folder = Path(home) / str(number)
            folder.mkdir()
            with contextlib.ExitStack() as stack:
                servers = [_start(stack, configuration, folder, cores) for configuration in found]
                for workload in selected:
                    _measure(workload, servers, cores, folder, options, measured[workload.name])
    plan = (
        f"{options.starts} starts, {options.rounds} rounds each, {options.seconds} s, {options.connections} connections"
    )
    print(f"{machine.describe()}\n\n{plan}; cores that were busy before: {busy}.\n")
    print(table(measured, found))
    return 0


def configurations(folder: Path, key: str, collector: str, before: Path | None) -> list[Configuration]:
    """Return the configurations that this version of the server has."""
    header = {"authorization": f"Bearer {key}"}
    log = str(folder / "access.log")
    found = [
        Configuration(PLAIN),
        Configuration(f"{PLAIN}, again", aim="1.00"),
        Configuration("plain, requests with a key", headers=header),
        Configuration("keys", ("--api-keys", str(folder / "keys.toml")), header, "1.03"),
        Configuration("access log, text", ("--access-log", log), aim="1.05"),
        Configuration("access log, JSON", ("--access-log", log, "--access-log-format", "json"), aim="1.05"),
        Configuration("metrics, a scrape in each turn", scrapes=True),
    ]
    if before is not None:
        found.append(Configuration("plain, the other checkout", source=before.resolve()))
    if {"tracing_endpoint", "tracing_ratio"} <= {*Settings.__dataclass_fields__} and find_spec("opentelemetry"):
        traced = ("--tracing-endpoint", collector, "--tracing-ratio")
        found.append(Configuration("tracing, 1 % sampled", (*traced, "0.01"), aim="1.03"))
        found.append(Configuration("tracing, all sampled", (*traced, "1")))
    return found


def _create_key(path: Path) -> str:
    command = [sys.executable, "-m", "dragoman", "keys", "create", "benchmark", "--file", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@contextlib.contextmanager
def _collector() -> Iterator[str]:
    """Run a receiver of traces, which accepts everything. Its CPU time is not the server's."""

    class Accepting(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002 - the name of the base class
            """Log nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Accepting) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def _start(stack: contextlib.ExitStack, configuration: Configuration, folder: Path, cores: Cores) -> Running:
    ports = {"http": free_port(), "grpc": free_port()}
    command = dragoman([MODEL], ports["http"], ports["grpc"], *configuration.options)
    with python_path(configuration.source / "src"):
        log = folder / f"{ports['http']}.log"
        process = stack.enter_context(run_process(command, log, cores.server, configuration.source))
    process.wait_until(functools.partial(http_ready, ports["http"]))
    return Running(configuration, process, ports)


def _measure(
    workload: Workload,
    servers: Sequence[Running],
    cores: Cores,
    folder: Path,
    options: argparse.Namespace,
    times: Times,
) -> None:
    """Add the CPU time per request of each server in each round."""
    run = load.best_of_ours()
    turns = []
    for server in servers:
        request = replace(workload, headers={**workload.headers, **server.configuration.headers})
        checked = check_request(request, server.ports[workload.wire], echo=False)
        turn = load.Load(checked, options.connections, options.seconds, cores.load, folder, never_sleeps=True)
        run(turn)  # warm up
        turns.append((server, _scraping(run, server) if server.configuration.scrapes else run, turn))
    for number in range(options.rounds):
        for server, run_turn, turn in turns if number % 2 else turns[::-1]:
            times.setdefault(server.configuration.name, []).append(cpu_us(server.process, run_turn, turn))


def _scraping(run: Callable[[load.Load], load.Measurement], server: Running) -> Callable[[load.Load], load.Measurement]:
    def run_with_scrape(turn: load.Load) -> load.Measurement:
        scraper = threading.Timer(turn.seconds / 2, server.scrape)
        scraper.start()
        try:
            return run(turn)
        finally:
            scraper.join()

    return run_with_scrape


def table(measured: Mapping[str, Times], found: Sequence[Configuration]) -> str:
    """Return medians, and medians and quartiles of the ratios to the plain server in the same round."""
    lines = ["| workload | server | CPU us | ratio | quartiles | aim | options |", "|---|---|---:|---:|---:|---:|---|"]
    for workload, times in measured.items():
        for configuration in found:
            own = times[configuration.name]
            ratios = [mine / plain for mine, plain in zip(own, times[PLAIN], strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
            cells = [WORKLOADS[workload], configuration.name, f"{statistics.median(own):.1f}", f"{middle:.3f}"]
            cells += [f"{low:.3f} to {high:.3f}", configuration.aim, " ".join(map(_shorten, configuration.options))]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _shorten(option: str) -> str:
    return Path(option).name if option.startswith("/") else "URL" if option.startswith("http:") else option


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.operations", description=__doc__)
    parser.add_argument("--only", default="", metavar="NAME", help="workloads with this in their name: json or grpc")
    parser.add_argument(
        "--before", type=Path, metavar="CHECKOUT", help="another checkout, whose plain server is measured"
    )
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--starts", type=int, default=5, help="how often the servers are started")
    parser.add_argument("--rounds", type=int, default=6, help="turns of each server after a start, for each workload")
    parser.add_argument("--seconds", type=float, default=0.5, help="duration of one turn")
    return parser


if __name__ == "__main__":
    sys.exit(main())
