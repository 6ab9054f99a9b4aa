"""Workers of other machines, compared by turns with local ones, with Ray, and with UM-Bridge's load balancer.

usage: python -m benchmarks.cluster [--quick] [--only calls,http,ray,slurm,hosts] [--umbridge FOLDER] [--page]
"""

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from benchmarks import machine, peers
from benchmarks.cluster_hosts import Costs, chart_of, simulate_all
from benchmarks.cluster_slurm import compare_schedulers
from benchmarks.processes import RESULTS, ROOT, cpu_s, dragoman, free_port, http_ready, run_process
from dragoman.client.http_async import connect_transport
from dragoman.client.messages import Address, Deadline, RestRequest
from dragoman.core.calls import Infer, Request
from dragoman.core.spec import LaunchOptions, ModelSpec
from dragoman.core.tensor import Tensor
from dragoman.system import process
from dragoman.system.coroutines import complete
from dragoman.workers.process import ProcessPool
from dragoman_cluster.worker_port import WorkerPort, WorkerPortOptions

Row = dict[str, Any]
Measure = Callable[[int, int, float], Awaitable[tuple[int, float]]]

MODEL = f"{ROOT / 'benchmarks' / 'models.py'}:Doubling"
PAGE = ROOT / "benchmarks" / "results" / "cluster.md"
PICTURE = ROOT / "benchmarks" / "results" / "cluster-hosts.svg"
RESULT = RESULTS / "cluster.json"
SIZES = {"1 KB": 1_000, "600 KB": 600_000}
CALLERS = (1, 8)
LOCAL, JOINED, OTHER_HOST = "local process", "joined, same machine", "joined, no shared memory"
ACTOR, HANDLE, SERVE, SERVER = "Ray actor", "Ray Serve handle", "Ray Serve, HTTP", "dragoman, joined worker, REST"
SECRET = "the secret of the benchmark"
# A process namespace of its own hides the server's memory from a worker, as another machine does.
ISOLATED = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if options.page:
        write_page(json.loads(RESULT.read_text()))
        return 0
    process.keep_freed_memory()  # as a server does
    rounds, seconds = (1, 0.05) if options.quick else (3, 1.0)
    parts = options.only.split(",")
    result: dict[str, Any] = {"machine": machine.machine(), "others_busy_cores": machine.busy_cores()}
    with tempfile.TemporaryDirectory() as folder:
        if "calls" in parts or "http" in parts:
            result["calls"] = uvloop.run(_compare_calls(Path(folder), rounds, seconds, parts))
        if "slurm" in parts:
            result["slurm"] = compare_schedulers(Path(folder), options.umbridge, quick=options.quick)
    if "hosts" in parts:
        result["hosts"] = simulate_all(_costs(result.get("calls", [])))
    RESULTS.mkdir(parents=True, exist_ok=True)
    target = RESULTS / "cluster-quick.json" if options.quick or options.only != _ALL else RESULT
    target.write_text(json.dumps(result, indent=1) + "\n")
    print(report(result))
    return 0


# --- calls -------------------------------------------------------------------------------------------------------


async def _compare_calls(folder: Path, rounds: int, seconds: float, parts: Sequence[str]) -> list[Row]:
    """Measure by turns: each subject with each size and number of callers, in every round."""
    rows: list[Row] = []
    async with contextlib.AsyncExitStack() as running:
        subjects: dict[str, Measure] = {}
        if "calls" in parts:
            subjects |= await _pools(running)
        ray = await _start_ray(running, folder) if "ray" in parts else None
        if ray is not None and "calls" in parts:
            subjects |= {ACTOR: partial(ray.measure, "actor"), HANDLE: partial(ray.measure, "handle")}
        if "http" in parts:
            subjects[SERVER] = await _start_server(running, folder)
            if ray is not None:
                subjects[SERVE] = partial(_over_http, ray.http_port, "/double", _plain_body)
        for turn in range(-1, rounds):  # the first is a warm-up
            for size_name, size in SIZES.items():
                for callers in CALLERS:
                    for name, measure in subjects.items():
                        calls, took_s = await measure(size, callers, min(0.2, seconds) if turn < 0 else seconds)
                        row = {"subject": name, "bytes": size_name, "callers": callers, "round": turn}
                        rows.append(row | {"rate": calls / took_s, **_costs_of(measure, calls)})
    return [row for row in rows if row["round"] >= 0]


def _costs_of(measure: Measure, calls: int) -> Row:
    spent_s = getattr(measure, "spent_s", None)
    return {} if spent_s is None else {"server_us": 1e6 * spent_s / calls}


async def _pools(running: contextlib.AsyncExitStack) -> dict[str, Measure]:
    port = WorkerPort(WorkerPortOptions(host="127.0.0.1", port=0, secret=SECRET.encode(), timeout_s=60.0))
    await port.start()
    running.push_async_callback(port.close)
    worker = f"{sys.executable} -m dragoman worker --join {{address}}"
    commands = {LOCAL: "", JOINED: worker, OTHER_HOST: f"{' '.join(ISOLATED)} {worker}"}
    if subprocess.run([*ISOLATED, "true"], check=False, capture_output=True).returncode:
        del commands[OTHER_HOST]
    found: dict[str, Measure] = {}
    for name, command in commands.items():
        launch = LaunchOptions(launcher="command", command=command) if command else LaunchOptions()
        pool = ProcessPool(ModelSpec(name="m", runtime=MODEL, launch=launch, worker_port=port), lambda: None)
        await pool.start()
        running.push_async_callback(pool.close)
        found[name] = partial(_in_process, pool)
    return found


async def _in_process(pool: ProcessPool, size: int, callers: int, seconds: float) -> tuple[int, float]:
    x = np.arange(size // 4, dtype=np.float32)
    request, expected = Request(Infer({"x": Tensor.of(x)}), "m"), x * 2

    async def call() -> bool:
        response: Any = await complete(pool.call(request))
        return np.array_equal(response.outputs["y"].data, expected)

    return await _closed_loop(call, callers, seconds)


async def _closed_loop(call: Callable[[], Awaitable[bool]], callers: int, seconds: float) -> tuple[int, float]:
    calls, began_s = 0, time.monotonic()

    async def caller() -> None:
        nonlocal calls
        while time.monotonic() - began_s < seconds:
            if not await call():
                raise AssertionError("a wrong answer")
            calls += 1

    await asyncio.gather(*(caller() for _ in range(callers)))
    return calls, time.monotonic() - began_s


# --- HTTP --------------------------------------------------------------------------------------------------------


def _plain_body(x: bytes) -> tuple[tuple[tuple[str, str], ...], bytes]:
    return (("content-type", "application/octet-stream"),), x


def _binary_body(x: bytes) -> tuple[tuple[tuple[str, str], ...], bytes]:
    """Return an inference request in the binary form of Open Inference."""
    parameters = {"binary_data_output": True}
    tensor = {"name": "x", "datatype": "FP32", "shape": [len(x) // 4], "parameters": {"binary_data_size": len(x)}}
    head = json.dumps({"inputs": [tensor], "parameters": parameters}).encode()
    return (("inference-header-content-length", str(len(head))),), head + x


async def _over_http(
    port: int, path: str, body_of: Callable[[bytes], Any], size: int, callers: int, seconds: float
) -> tuple[int, float]:
    x = np.arange(size // 4, dtype=np.float32)
    headers, body = body_of(x.tobytes())
    request, expected = RestRequest("POST", path, headers, (body,)), (x * 2).tobytes()
    transport = connect_transport(Address(scheme="http", host="127.0.0.1", port=port))

    async def call() -> bool:
        response = await transport.send(request, Deadline.after(60))
        return response.status == 200 and bytes(response.body).endswith(expected)

    try:
        return await _closed_loop(call, callers, seconds)
    finally:
        await transport.close()


class _ServerCalls:
    """Calls of a server process with one joined worker; `spent_s` is its CPU time in the last interval."""

    def __init__(self, pid: int, port: int) -> None:
        self._pid, self._port, self.spent_s = pid, port, 0.0

    async def __call__(self, size: int, callers: int, seconds: float) -> tuple[int, float]:
        began_s = cpu_s(self._pid)
        found = await _over_http(self._port, "/v2/models/Doubling/infer", _binary_body, size, callers, seconds)
        self.spent_s = cpu_s(self._pid) - began_s
        return found


async def _start_server(running: contextlib.AsyncExitStack, folder: Path) -> Measure:
    home, secret, port = folder / "repository" / "Doubling", folder / "secret", free_port()
    home.mkdir(parents=True)
    secret.write_text(SECRET)
    secret.chmod(0o600)
    command = f"{sys.executable} -m dragoman worker --join {{address}}"
    (home / "dragoman.toml").write_text(
        f'[model]\nuri = "{MODEL}"\n[model.placement]\nlauncher = "command"\ncommand = "{command}"\n'
    )
    flags = ["--worker-port", str(free_port()), "--worker-host", "127.0.0.1", "--worker-secret-file", str(secret)]
    command_line = dragoman([str(home.parent)], port, -1, *flags)
    server = running.enter_context(run_process(command_line, folder / "server.log"))
    await asyncio.to_thread(server.wait_until, partial(http_ready, port))
    return _ServerCalls(server.child.pid, port)


# --- Ray ---------------------------------------------------------------------------------------------------------


class _Ray:
    """`peers/ray_calls.py` in the environment of Ray."""

    def __init__(self, process: asyncio.subprocess.Process, http_port: int) -> None:
        self._process, self.http_port = process, http_port

    async def measure(self, kind: str, size: int, callers: int, seconds: float) -> tuple[int, float]:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{kind} {size} {callers} {seconds}\n".encode())
        found = json.loads(await self.line(startswith=b"{"))
        return found["calls"], found["seconds"]

    async def line(self, startswith: bytes) -> bytes:
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            if line.startswith(startswith):
                return line
        raise RuntimeError("Ray has ended; see its log")


async def _start_ray(running: contextlib.AsyncExitStack, folder: Path) -> _Ray | None:
    """Start Ray, if `python -m benchmarks.peers install ray` has installed it."""
    if "ray" not in peers.installed_peers():
        print("without Ray: python -m benchmarks.peers install ray", file=sys.stderr)
        return None
    port = free_port()
    return await running.enter_async_context(_ray_process(folder, port))


@contextlib.asynccontextmanager
async def _ray_process(folder: Path, port: int) -> AsyncIterator[_Ray]:
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
    environment.pop("PYTHONPATH", None)
    command = [str(peers.python("ray")), str(peers.HERE / "ray_calls.py"), str(port)]
    with (folder / "ray.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment
        )
        try:
            found = _Ray(process, port)
            async with asyncio.timeout(120):
                await found.line(startswith=b"ready")
            yield found
        finally:
            assert process.stdin is not None
            process.stdin.close()  # it ends itself, and its cluster with it
            async with asyncio.timeout(60):
                await process.wait()


# --- report ------------------------------------------------------------------------------------------------------


def report(result: dict[str, Any]) -> str:
    """Return the tables, also those of benchmarks/results/cluster.md."""
    m = result["machine"]
    lines = [
        f"{m['processor']}, {m['cores']} cores, Python {m['python']}, {m['when'][:16].replace('T', ' ')} UTC; "
        f"other load before: {result['others_busy_cores']:.1f} cores. Medians of the rounds."
    ]
    if result.get("calls"):
        lines += ["", "| calls/s | callers | " + " | ".join(_subjects(result["calls"])) + " |"]
        lines += ["|---|---:|" + "---:|" * len(_subjects(result["calls"])), *_call_lines(result["calls"])]
        lines += ["", *_ratio_lines(result["calls"])]
    if result.get("slurm"):
        lines += [
            "",
            "| local SLURM | first answer s | calls/s, 1 caller | calls/s, 4 callers |",
            "|---|---:|---:|---:|",
        ]
        for row in result["slurm"]:
            lines.append(f"| {row['subject']} | {row['first_s']:.1f} | {row['rate_1']:,.2f} | {row['rate_4']:,.2f} |")
    if result.get("hosts"):
        lines += ["", "| hosts of 32 workers | " + " | ".join(_models(result["hosts"])) + " |"]
        lines += ["|---:|" + "---:|" * len(_models(result["hosts"])), *_host_lines(result["hosts"])]
    return "\n".join(lines)


def _subjects(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["subject"] for row in rows))


def _models(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["model"] for row in rows))


def _median(rows: Sequence[Row], subject: str, size: str, callers: int) -> float:
    key = (subject, size, callers)
    return float(statistics.median(r["rate"] for r in rows if (r["subject"], r["bytes"], r["callers"]) == key))


def _call_lines(rows: Sequence[Row]) -> Iterator[str]:
    for size in SIZES:
        for callers in CALLERS:
            rates = [f"{_median(rows, subject, size, callers):,.0f}" for subject in _subjects(rows)]
            yield f"| {size} | {callers} | {' | '.join(rates)} |"


# Subject, its base, and the least ratio that is aimed at for each size.
_AIMS = (
    (JOINED, LOCAL, {"1 KB": 0.8, "600 KB": 0.5}),
    (OTHER_HOST, LOCAL, {"1 KB": 0.8, "600 KB": 0.5}),
    (JOINED, ACTOR, dict.fromkeys(SIZES, 10.0)),
    (OTHER_HOST, ACTOR, dict.fromkeys(SIZES, 10.0)),
    (JOINED, HANDLE, dict.fromkeys(SIZES, 10.0)),
    (SERVER, SERVE, dict.fromkeys(SIZES, 10.0)),
)


def _ratio_lines(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a table of the medians of the ratios within each round."""
    yield "| | compared with | bytes | callers | ratio | aim |"
    yield "|---|---|---|---:|---:|---:|"
    for subject, base, aims in _AIMS:
        for size in SIZES:
            for callers in CALLERS:
                if {subject, base} <= set(_subjects(rows)):
                    ratio = ratio_of(rows, subject, base, size, callers)
                    yield f"| {subject} | {base} | {size} | {callers} | {ratio:.2f} | {aims[size]:g} |"


def ratio_of(rows: Sequence[Row], subject: str, base: str, size: str, callers: int) -> float:
    """Return the median over the rounds of the ratio of two subjects."""
    rates = {(r["subject"], r["round"]): r["rate"] for r in rows if (r["bytes"], r["callers"]) == (size, callers)}
    return float(statistics.median(rates[subject, turn] / rates[base, turn] for name, turn in rates if name == base))


def _host_lines(rows: Sequence[Row]) -> Iterator[str]:
    for hosts in dict.fromkeys(row["hosts"] for row in rows):
        cells = [f"{row['rate']:,.0f} ({row['share']:.0%})" for row in rows if row["hosts"] == hosts]
        yield f"| {hosts} | {' | '.join(cells)} |"


def _costs(rows: Sequence[Row]) -> Costs:
    """Return what one call costs the server, from the measured CPU time with eight callers."""
    found = {
        size: statistics.median(
            r["server_us"] for r in rows if (r["subject"], r["bytes"], r["callers"]) == (SERVER, size, 8)
        )
        for size in SIZES
        if any(r["subject"] == SERVER for r in rows)
    }
    if not found:
        raise SystemExit("--only hosts needs http too, which measures the cost of a call")
    return Costs(small_us=found["1 KB"], large_us=found["600 KB"])


_MARKS = ("<!-- from benchmarks.cluster -->\n", "<!-- end -->")


def write_page(result: dict[str, Any]) -> None:
    PAGE.write_text(page_with(PAGE.read_text(), result))
    PICTURE.write_text(chart_of(result["hosts"]))


def page_with(text: str, result: dict[str, Any]) -> str:
    """Return the text of the page with the tables of a result between its marks."""
    before, _, rest = text.partition(_MARKS[0])
    _, _, after = rest.partition(_MARKS[1])
    return f"{before}{_MARKS[0]}\n{report(result)}\n\n{_MARKS[1]}{after}"


_ALL = "calls,http,ray,slurm,hosts"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cluster", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--quick", action="store_true", help="one short run of each, to check that it works")
    parser.add_argument("--only", default=_ALL, metavar="PARTS", help=f"some of {_ALL}")
    parser.add_argument(
        "--umbridge", type=Path, default=RESULTS / "umbridge", metavar="FOLDER", help="checkout of UM-Bridge/umbridge"
    )
    parser.add_argument("--page", action="store_true", help="write its page from the last complete result")
    return parser


if __name__ == "__main__":
    sys.exit(main())
