"""Ray as a peer of `benchmarks.cluster`: calls of a plain actor, of a Serve handle, and Serve over HTTP.

usage: python ray_calls.py HTTP_PORT. Each line of the input is `KIND BYTES CALLERS SECONDS`; each line of the output
is a JSON object with the calls that were answered right in that time. KIND is `actor` or `handle`.
"""

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import ray
from ray import serve


class Doubling:
    def double(self, x: Any) -> Any:
        return x * 2


@serve.deployment(num_replicas=1, max_ongoing_requests=128, ray_actor_options={"num_cpus": 0})
class Served:
    async def __call__(self, request: Any) -> bytes:
        return (np.frombuffer(await request.body(), np.float32) * 2).tobytes()

    def double(self, x: Any) -> Any:
        return x * 2


async def main() -> None:
    # "local": a cluster of its own, not one that runs or has been left on this machine.
    ray.init("local", num_cpus=2, include_dashboard=False, configure_logging=False, object_store_memory=200 << 20)
    remote: Any = ray.remote(Doubling)
    actor = remote.options(num_cpus=0).remote()
    serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[1])})
    served: Any = Served
    handle = serve.run(served.bind(), route_prefix="/double")
    kinds: dict[str, Callable[[Any], Awaitable[Any]]] = {"actor": actor.double.remote, "handle": handle.double.remote}
    print("ready", flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        kind, size, callers, seconds = line.split()
        print(json.dumps(await measure(kinds[kind], int(size), int(callers), float(seconds))), flush=True)


async def measure(call: Callable[[Any], Awaitable[Any]], size: int, callers: int, seconds: float) -> dict[str, float]:
    x = np.arange(size // 4, dtype=np.float32)
    expected = x * 2
    calls, began_s = 0, time.monotonic()

    async def caller() -> None:
        nonlocal calls
        while time.monotonic() - began_s < seconds:
            if not np.array_equal(await call(x), expected):
                raise AssertionError("a wrong answer")
            calls += 1

    await asyncio.gather(*(caller() for _ in range(callers)))
    return {"calls": calls, "seconds": time.monotonic() - began_s}


asyncio.run(main())
