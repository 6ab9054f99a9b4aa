"""Soak test: a mixed load with every response checked; memory, threads and files of the server must not grow.

usage: python -m benchmarks.soak [--minutes 10] [--idle 200]
"""

import argparse
import asyncio
import json
import random
import re
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import aiohttp
import grpc

from benchmarks import machine
from benchmarks.processes import RESULTS, ROOT, Process, dragoman, free_port, http_ready, run_process
from benchmarks.soak_kinds import KINDS, TOKEN, Client, Kind

MODELS = ROOT / "benchmarks" / "soak_models.py"
_NAMES = "Inline", "Thread", "Process", "Counting", "Simulator", "Repeater"
_MAX_SHOWN_ERRORS = 20
# Threads and files that may be added between two idle states, by pools that grow on demand.
_MAX_GROWTH = 8
# Growth of memory within a run that is tolerated: absolute and relative.
_MAX_MEMORY_GROWTH_MIB, _MAX_MEMORY_GROWTH_RATIO = 24.0, 0.1


@dataclass(slots=True)
class Sample:
    """The server at one moment. `active` are calls in flight."""

    at_s: float
    pss_mib: float
    rss_mib: float
    threads: int
    files: int
    active: int


@dataclass(slots=True)
class SoakResults:
    """Responses by kind, errors and samples so far."""

    responses: Counter[str] = field(default_factory=Counter)
    wrong_responses: list[str] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--idle", type=int, default=200, help="idle connections")
    options = parser.parse_args(arguments)
    print(machine.describe() + "\n")
    http, port = free_port(), free_port()
    with tempfile.TemporaryDirectory() as home:
        models = _folder(Path(home) / "models")
        command = dragoman([str(models)], http, port, "--control-token", TOKEN, "--log-level", "error")
        with run_process(command, Path(home) / "log") as server:
            server.wait_until(lambda: http_ready(http))
            results, quiet, after = asyncio.run(soak(server, http, port, 60 * options.minutes, options.idle))
        log = (Path(home) / "log").read_text(errors="replace")
    errors = find_errors(results, quiet, after)
    report = {"machine": machine.machine(), "responses": results.responses, "errors": errors}
    report |= {"quiet": asdict(quiet), "after": asdict(after), "samples": [asdict(s) for s in results.samples]}
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "soak.json").write_text(json.dumps(report, indent=2))
    print("\n".join(f"{name:12} {count:>9,}" for name, count in sorted(results.responses.items())))
    print(f"quiet before {quiet}\nquiet after  {after}")
    print("\n".join(errors) or "all responses were correct, and nothing grew")
    if errors:
        print(log[-5000:], file=sys.stderr)
    return 1 if errors else 0


def _folder(home: Path) -> Path:
    for name in (*_NAMES, "Guest"):
        (home / name).mkdir(parents=True)
        target = f"{MODELS}:{'Process' if name == 'Guest' else name}"
        placement = 'placement = "inline"\n' if name == "Simulator" else ""
        (home / name / "dragoman.toml").write_text(f'[model]\nruntime = "python"\nuri = "{target}"\n{placement}')
    return home


async def soak(server: Process, http: int, port: int, seconds: float, idle: int) -> tuple[SoakResults, Sample, Sample]:
    """Run a short load that fills every pool, then the long one. Return the results and the idle state after each."""
    warm = SoakResults()
    await _load(server, http, port, min(5.0, seconds / 4), idle, warm)
    quiet = await _quiet(server, http, None)
    results = SoakResults(wrong_responses=warm.wrong_responses)
    await _load(server, http, port, seconds, idle, results)
    return results, quiet, await _quiet(server, http, quiet)


async def _load(server: Process, http: int, port: int, seconds: float, idle: int, results: SoakResults) -> None:
    end_s = time.monotonic() + seconds
    waiting = [await asyncio.open_connection("127.0.0.1", http) for _ in range(idle)]
    timeout = aiohttp.ClientTimeout(total=120)
    async with (
        aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as grpc_channel,
        grpc.aio.insecure_channel(f"127.0.0.1:{http}") as http_port_channel,
    ):
        client_ids = [(kind, number) for kind, count in KINDS.items() for number in range(count)]
        clients = [
            (
                kind,
                Client(
                    http,
                    session,
                    (grpc_channel, http_port_channel)[number % 2],
                    random.Random(f"{kind.__name__} {number}"),
                ),
            )
            for kind, number in client_ids
        ]
        watching = asyncio.create_task(_watch(server, http, max(0.5, seconds / 120), results))
        await asyncio.gather(*(_run_client(kind, client, end_s, results) for kind, client in clients))
        watching.cancel()
    for _, writer in waiting:
        writer.close()


async def _run_client(kind: Kind, client: Client, end_s: float, results: SoakResults) -> None:
    name = kind.__name__
    while time.monotonic() < end_s:
        try:
            await kind(client)
        except Exception as error:
            if len(results.wrong_responses) < _MAX_SHOWN_ERRORS:
                results.wrong_responses.append(f"{name}: {type(error).__name__}: {str(error)[:500]}")
            results.responses[f"{name} WRONG"] += 1
            await asyncio.sleep(0.1)
        results.responses[name] += 1


# --- the server --------------------------------------------------------------------------------------------------


async def _watch(server: Process, http: int, every_s: float, results: SoakResults) -> None:
    while True:
        await asyncio.sleep(every_s)
        results.samples.append(await sample(server, http))


async def sample(server: Process, http: int) -> Sample:
    """Memory, threads and files of all processes of the server, and its calls in flight."""
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{http}/metrics") as response:
        text = await response.text()
    active = sum(float(n) for n in re.findall(r"^dragoman_calls_in_flight\{.*\} (\S+)", text, re.MULTILINE))
    threads = files = 0
    memory = {"pss_mib": 0.0, "rss_mib": 0.0}
    for _ in range(3):  # a worker may exit meanwhile
        try:
            memory = server.memory_mib()
            threads = sum(len(list(Path(f"/proc/{pid}/task").iterdir())) for pid in server.pids())
            files = sum(len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in server.pids())
            break
        except OSError:
            continue
    return Sample(round(time.monotonic(), 1), memory["pss_mib"], memory["rss_mib"], threads, files, int(active))


async def _quiet(server: Process, http: int, before: Sample | None, within_s: float = 20.0) -> Sample:
    """Return the state of the server when no call is in flight and files and threads no longer shrink."""
    end_s = time.monotonic() + within_s
    found = await sample(server, http)
    while time.monotonic() < end_s:
        await asyncio.sleep(0.5)
        last, found = found, await sample(server, http)
        baseline = before or last
        if not found.active and found.files <= baseline.files + 2 and found.threads <= baseline.threads + _MAX_GROWTH:
            break
    return found


def find_errors(results: SoakResults, quiet: Sample, after: Sample) -> list[str]:
    """Return wrong responses, missing responses and growth of the server, one message each."""
    errors = list(results.wrong_responses)
    errors += [f"no response to any client: {kind.__name__}" for kind in KINDS if not results.responses[kind.__name__]]
    for name in ("threads", "files", "active"):
        before, current = getattr(quiet, name), getattr(after, name)
        if current > before + (_MAX_GROWTH if name != "active" else 0):
            errors.append(f"{name} grew from {before} to {current}")
    size = len(results.samples)
    if size >= 20:
        early = statistics.median(s.pss_mib for s in results.samples[size * 3 // 10 : size // 2])
        late = statistics.median(s.pss_mib for s in results.samples[size * 8 // 10 :])
        if late > early * (1 + _MAX_MEMORY_GROWTH_RATIO) + _MAX_MEMORY_GROWTH_MIB:
            errors.append(f"memory grew from {early:.0f} to {late:.0f} MiB")
    return errors


if __name__ == "__main__":
    raise SystemExit(main())
