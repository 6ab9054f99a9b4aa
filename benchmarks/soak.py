"""A mixed load for as long as one likes: every answer is checked, and nothing of the server may grow.

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
from benchmarks.processes import RESULTS, ROOT, Process, dragoman, free_port, http_ready, started
from benchmarks.soak_kinds import KINDS, TOKEN, Client, Kind

MODELS = ROOT / "benchmarks" / "soak_models.py"
_NAMES = "Inline", "Thread", "Process", "Counting", "Simulator", "Speaker"
_MOST_SHOWN = 20
# What may differ between a quiet server and one that is quiet again: a thread or file of a pool that grows on demand.
_FEW = 8
# Growth of memory within a run that is none: so much, and such a share.
_MIB, _SHARE = 24.0, 0.1


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
class Seen:
    """What has come of it so far."""

    answers: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--idle", type=int, default=200, help="connections that are open and say nothing")
    given = parser.parse_args(arguments)
    print(machine.described() + "\n")
    http, port = free_port(), free_port()
    with tempfile.TemporaryDirectory() as home:
        models = _folder(Path(home) / "models")
        command = dragoman([str(models)], http, port, "--control-token", TOKEN, "--log-level", "error")
        with started(command, Path(home) / "log") as server:
            server.until(lambda: http_ready(http))
            seen, quiet, after = asyncio.run(soak(server, http, port, 60 * given.minutes, given.idle))
        said = (Path(home) / "log").read_text(errors="replace")
    faults = verdict(seen, quiet, after)
    results = {"machine": machine.machine(), "answers": seen.answers, "faults": faults}
    results |= {"quiet": asdict(quiet), "after": asdict(after), "samples": [asdict(s) for s in seen.samples]}
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "soak.json").write_text(json.dumps(results, indent=2))
    print("\n".join(f"{name:12} {count:>9,}" for name, count in sorted(seen.answers.items())))
    print(f"quiet before {quiet}\nquiet after  {after}")
    print("\n".join(faults) or "no wrong answer, and nothing grew")
    if faults:
        print(said[-5000:], file=sys.stderr)
    return 1 if faults else 0


def _folder(home: Path) -> Path:
    for name in (*_NAMES, "Guest"):
        (home / name).mkdir(parents=True)
        target = f"{MODELS}:{'Process' if name == 'Guest' else name}"
        placement = 'placement = "inline"\n' if name == "Simulator" else ""
        (home / name / "dragoman.toml").write_text(f'[model]\nruntime = "python"\nuri = "{target}"\n{placement}')
    return home


async def soak(server: Process, http: int, port: int, seconds: float, idle: int) -> tuple[Seen, Sample, Sample]:
    """A short load that fills every pool, the long one, and how quiet the server is after each."""
    warm = Seen()
    await _load(server, http, port, min(5.0, seconds / 4), idle, warm)
    quiet = await _quiet(server, http, None)
    seen = Seen(wrong=warm.wrong)
    await _load(server, http, port, seconds, idle, seen)
    return seen, quiet, await _quiet(server, http, quiet)


async def _load(server: Process, http: int, port: int, seconds: float, idle: int, seen: Seen) -> None:
    end_s = time.monotonic() + seconds
    waiting = [await asyncio.open_connection("127.0.0.1", http) for _ in range(idle)]
    patience = aiohttp.ClientTimeout(total=120)
    async with (
        aiohttp.ClientSession(timeout=patience, connector=aiohttp.TCPConnector(limit=0)) as session,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as apart,
        grpc.aio.insecure_channel(f"127.0.0.1:{http}") as beside,
    ):
        lots = [(kind, number) for kind, count in KINDS.items() for number in range(count)]
        clients = [
            (kind, Client(http, session, (apart, beside)[number % 2], random.Random(f"{kind.__name__} {number}")))
            for kind, number in lots
        ]
        watching = asyncio.create_task(_watch(server, http, max(0.5, seconds / 120), seen))
        await asyncio.gather(*(_ask(kind, client, end_s, seen) for kind, client in clients))
        watching.cancel()
    for _, writer in waiting:
        writer.close()


async def _ask(kind: Kind, client: Client, end_s: float, seen: Seen) -> None:
    name = kind.__name__
    while time.monotonic() < end_s:
        try:
            await kind(client)
        except Exception as fault:
            if len(seen.wrong) < _MOST_SHOWN:
                seen.wrong.append(f"{name}: {type(fault).__name__}: {str(fault)[:500]}")
            seen.answers[f"{name} WRONG"] += 1
            await asyncio.sleep(0.1)
        seen.answers[name] += 1


# --- the server --------------------------------------------------------------------------------------------------


async def _watch(server: Process, http: int, every_s: float, seen: Seen) -> None:
    while True:
        await asyncio.sleep(every_s)
        seen.samples.append(await sample(server, http))


async def sample(server: Process, http: int) -> Sample:
    """Memory, threads and files of all processes of the server, and its calls in flight."""
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{http}/metrics") as answer:
        text = await answer.text()
    active = sum(float(n) for n in re.findall(r"^dragoman_calls_in_flight\{.*\} (\S+)", text, re.MULTILINE))
    threads = files = 0
    memory = {"pss_mib": 0.0, "rss_mib": 0.0}
    for _ in range(3):  # a worker may end meanwhile
        try:
            memory = server.memory_mib()
            threads = sum(len(list(Path(f"/proc/{pid}/task").iterdir())) for pid in server.pids())
            files = sum(len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in server.pids())
            break
        except OSError:
            continue
    return Sample(round(time.monotonic(), 1), memory["pss_mib"], memory["rss_mib"], threads, files, int(active))


async def _quiet(server: Process, http: int, before: Sample | None, within_s: float = 20.0) -> Sample:
    """The server once it is at rest: nothing under way, and no more files and threads than before, or than a moment
    ago."""
    end_s = time.monotonic() + within_s
    found = await sample(server, http)
    while time.monotonic() < end_s:
        await asyncio.sleep(0.5)
        last, found = found, await sample(server, http)
        least = before or last
        if not found.active and found.files <= least.files + 2 and found.threads <= least.threads + _FEW:
            break
    return found


def verdict(seen: Seen, quiet: Sample, after: Sample) -> list[str]:
    """What was not as it has to be."""
    faults = list(seen.wrong)
    faults += [f"no response to any client: {kind.__name__}" for kind in KINDS if not seen.answers[kind.__name__]]
    for name in ("threads", "files", "active"):
        was, now = getattr(quiet, name), getattr(after, name)
        if now > was + (_FEW if name != "active" else 0):
            faults.append(f"{name} grew from {was} to {now}")
    size = len(seen.samples)
    if size >= 20:
        early = statistics.median(s.pss_mib for s in seen.samples[size * 3 // 10 : size // 2])
        late = statistics.median(s.pss_mib for s in seen.samples[size * 8 // 10 :])
        if late > early * (1 + _SHARE) + _MIB:
            faults.append(f"memory grew from {early:.0f} to {late:.0f} MiB")
    return faults


if __name__ == "__main__":
    raise SystemExit(main())
