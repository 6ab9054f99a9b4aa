"""Simulation of one server with workers on many hosts: which part is saturated first."""

import heapq
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.plots import Bar, Group, chart

HOSTS = (1, 2, 4, 8, 64)
WORKERS_PER_HOST = 32
ROUND_TRIP_S = 200e-6  # two hosts of one Ethernet
BYTES_PER_S = 10e9 / 8  # a network interface of 10 Gbit/s, each way
_CALLS = 20_000


@dataclass(frozen=True, slots=True)
class Costs:
    """Measured CPU time of the server for one call with 1 KB and with 600 KB each way, in microseconds."""

    small_us: float
    large_us: float


@dataclass(frozen=True, slots=True)
class Load:
    """Calls of a model: its time, the bytes each way and the CPU time of the server."""

    model: str
    model_s: float
    size: int
    server_s: float


@dataclass(frozen=True, slots=True)
class Simulated:
    """Throughput of a number of hosts, its share of what the workers could do, and the busiest part."""

    model: str
    hosts: int
    rate: float
    share: float
    limit: str


def simulate_all(costs: Costs) -> list[dict[str, Any]]:
    """Return a row for each load and number of hosts."""
    loads = [Load(f"{t:g} ms, 1 KB", t / 1000, 1_000, costs.small_us / 1e6) for t in (1, 10, 100)]
    loads.append(Load("100 ms, 600 KB", 0.1, 600_000, costs.large_us / 1e6))
    return [asdict(simulate(load, hosts)) for load in loads for hosts in HOSTS]


def simulate(load: Load, hosts: int, seed: int = 1) -> Simulated:
    """Simulate a closed loop with twice as many callers as workers, after a warm-up of a fifth of the calls.

    A call waits for the server's thread, the link to the workers and a worker, which computes for an exponentially
    distributed time, and then for the link from the workers and the server's thread again. Each is a queue, first come
    first served; half of the CPU time of a call is spent before and half after it.
    """
    randoms, workers = random.Random(seed), hosts * WORKERS_PER_HOST
    free = [0.0] * workers
    free_at = {"server": 0.0, "link out": 0.0, "link back": 0.0}
    busy = dict.fromkeys(free_at, 0.0)

    def use(part: str, now_s: float, took_s: float) -> float:
        free_at[part] = max(free_at[part], now_s) + took_s
        busy[part] += took_s
        return free_at[part]

    # Events in the order of time: (time, number, stage). Each stage is reached in that order, so queues are fair.
    events = [(0.0, number, 0) for number in range(2 * workers)]
    calls = _CALLS + 10 * workers
    done, warm_up, began_s, now_s = 0, calls // 5, 0.0, 0.0
    while done < calls:
        now_s, number, stage = heapq.heappop(events)
        if stage == 0:
            sent_s = use("server", now_s, load.server_s / 2)
            event = (use("link out", sent_s, load.size / BYTES_PER_S) + ROUND_TRIP_S / 2, number, 1)
        elif stage == 1:
            started_s = max(heapq.heappop(free), now_s)
            computed_s = started_s + randoms.expovariate(1 / load.model_s)
            heapq.heappush(free, computed_s)
            event = (computed_s, number, 2)
        elif stage == 2:
            event = (use("link back", now_s, load.size / BYTES_PER_S) + ROUND_TRIP_S / 2, number, 3)
        elif stage == 3:
            event = (use("server", now_s, load.server_s / 2), number, 4)
        else:
            done += 1
            if done == warm_up:
                began_s = now_s
                busy = dict.fromkeys(busy, 0.0)
            event = (now_s, number, 0)
        heapq.heappush(events, event)
    rate = (done - warm_up) / (now_s - began_s)
    share = rate * load.model_s / workers
    limit = "workers" if share > 0.9 else max(busy, key=lambda name: busy[name])
    return Simulated(load.model, hosts, rate, share, limit)


def chart_of(rows: Sequence[dict[str, Any]]) -> str:
    """Return the picture: the share of the workers' time that one server can use."""
    names = dict.fromkeys(row["model"] for row in rows)
    groups = [Group(f"model of {name}", tuple(_bars(rows, name))) for name in names]
    subtitle = f"share of the time of {WORKERS_PER_HOST} workers on each host that is used; calls per second"
    return chart("One server, workers on many hosts (simulated with measured costs)", subtitle, groups)


def _bars(rows: Sequence[dict[str, Any]], name: str) -> Iterator[Bar]:
    for row in rows:
        if row["model"] == name:
            label = f"{row['hosts']} host{'s' if row['hosts'] > 1 else ''}"
            text = f"{row['share']:.0%}, {row['rate']:,.0f}/s"
            yield Bar(label, row["share"], text, "own" if row["limit"] == "workers" else "peer")
