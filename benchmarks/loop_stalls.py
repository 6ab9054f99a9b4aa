"""Longest iterations of the server's event loop by CPU time, alone and with other things beside.

usage: python -m benchmarks.loop_stalls [--seconds 6] [--rounds 3] [--rate 1500] [--only reloads,scrapes] [--models 0]

Latencies on a shared machine are mostly those of its other programs. Here the server itself measures the CPU time of
each iteration of its event loop, in its main thread. Other programs hardly change it, and medians of the rounds leave
out what a hypervisor has taken. An iteration that is longer than others delays all requests that arrive meanwhile,
whatever the machine.
"""

import argparse
import asyncio
import http.client
import json
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import load, machine, tails
from benchmarks.identity import Cores
from benchmarks.processes import ROOT, dragoman, free_port, http_ready, pin, run_process
from benchmarks.subjects import OURS, Subject

_RESULT = "LOOP_STALLS_RESULT"  # environment variable of the server: the file for what it has measured
_SERVER = "import sys; from benchmarks.loop_stalls import serve; serve(sys.argv[1:])"
_KEPT = 5  # longest iterations
# An iteration handles a request of each connection at most, so that few of them make it long when other programs have
# had the core.
_CONNECTIONS = "8"


# --- in the server ---------------------------------------------------------------------------------------------------


class Probe:
    """Measures each iteration of the running event loop: a callback of its own is always due, so it never sleeps."""

    def __init__(self, result: Path) -> None:
        self._result = result
        self._loop = asyncio.get_running_loop()
        self._longest: list[float] = []  # CPU seconds of iterations
        self._since_s = time.thread_time()
        self._next()
        self._watcher = asyncio.create_task(self._watch())

    def _next(self) -> None:
        self._longest.append(time.thread_time() - self._since_s)
        if len(self._longest) > 1000:
            self._longest = sorted(self._longest)[-_KEPT:]
        self._loop.call_soon(self._next)
        self._since_s = time.thread_time()

    async def _watch(self) -> None:
        """Write the result, and begin again, whenever the file is emptied."""
        while True:
            await asyncio.sleep(0.1)
            if not self._result.stat().st_size:
                longest, self._longest = sorted(self._longest)[-_KEPT:], []
                self._result.write_text(json.dumps(longest[::-1]))


def serve(arguments: list[str]) -> None:
    """Run `dragoman` with these arguments and a probe."""
    from dragoman.system import process

    collect_regularly, probes = process.collect_regularly, []

    async def probed(*args: Any) -> None:
        probes.append(Probe(Path(os.environ[_RESULT])))
        await collect_regularly(*args)

    process.collect_regularly = probed  # type: ignore[assignment]  # the first coroutine of the server's own loop
    sys.argv = ["dragoman", *arguments]
    runpy.run_module("dragoman", run_name="__main__")


# --- in the benchmark ------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rate", type=float, default=1500.0, help="requests per second")
    parser.add_argument("--only", default="", help="things beside, such as reloads,scrapes")
    parser.add_argument("--models", type=int, default=0, help="further models, each of which is called once")
    options = parser.parse_args()
    print(machine.describe())
    print(f"{'beside the requests':>22} {'number':>7} {'longest iterations, ms of CPU':>34} {'of all':>10}")
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder, cores = Path(name), Cores.of_this_machine()
        result, port = folder / "result", free_port()
        result.write_text("{}")
        models = [f"{ROOT / 'benchmarks' / 'models.py'}:{model}" for model in tails.MODELS]
        arguments = dragoman([*models, *_further(folder, options.models), "--control-open"], port, -1)
        arguments = arguments[arguments.index("serve") :]
        command = ["env", f"{_RESULT}={result}", sys.executable, "-c", _SERVER, *arguments]
        process = stack.enter_context(run_process(command, folder / "log", cores.server))
        ready_s = process.wait_until(lambda: http_ready(port))
        for number in range(options.models):
            _call(port, f"further{number}")
        requests = tails.requests_for(Subject(OURS, process, {"http": port}, "oip", ready_s))
        for number, request in enumerate(requests):
            (folder / f"request{number}").write_bytes(request.sent)
            (folder / f"response{number}").write_bytes(request.response)

        def ask() -> Any:
            result.write_text("")
            process.wait_until(lambda: bool(result.read_text()))
            return json.loads(result.read_text())

        wanted = options.only.split(",") if options.only else list(_BESIDE)
        for beside in wanted:
            _load(port, options.rate, 1.0, folder, beside, cores)  # which loads code
            count, rounds = 0, []
            for _ in range(options.rounds):
                ask()
                count += _load(port, options.rate, options.seconds, folder, beside, cores)
                rounds.append([1000 * each for each in ask()])
            longest = " ".join(f"{statistics.median(each):6.2f}" for each in zip(*rounds, strict=True))
            print(f"{beside:>22} {count:>7} {longest:>34} {max(each[0] for each in rounds):>10.2f}", flush=True)


def _load(port: int, rate: float, seconds: float, folder: Path, beside: str, cores: Cores) -> int:
    """Send requests at the rate, and something beside them; return how often that was sent."""
    send, interval_s = _BESIDE[beside]
    stop, sent = threading.Event(), 0

    def repeat() -> None:
        nonlocal sent
        while send is not None and not stop.wait(interval_s):
            send(port)
            sent += 1

    thread = threading.Thread(target=repeat)
    thread.start()
    command = [str(load.build_generator("open_load")), str(port), _CONNECTIONS, str(seconds), str(folder)]
    run = subprocess.run(
        [*command, str(rate), "100", *map(str, tails.SIZES.values())],
        preexec_fn=pin(cores.load),
        capture_output=True,
        text=True,
        check=True,
    )
    stop.set()
    thread.join()
    if (row := json.loads(run.stdout))["errors"]:
        raise RuntimeError(f"{beside}: {row['errors']} responses were wrong")
    return sent


def _send(port: int, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path, body, dict(headers or {}))
        response = connection.getresponse()
        response.read()
        if response.status != 200:
            raise RuntimeError(f"{method} {path}: status {response.status}")
    finally:
        connection.close()


def _call(port: int, model: str) -> None:
    text = json.dumps({"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 16], "data": [0.5] * 16}]})
    _send(port, "POST", f"/v2/models/{model}/infer", text.encode())


def _further(folder: Path, count: int) -> list[str]:
    """Return the folder of this number of models, in a list; an empty one for none."""
    for number in range(count):
        own = folder / "models" / f"further{number}"
        own.mkdir(parents=True)
        uri = f"{ROOT / 'benchmarks' / 'models.py'}:Identity"
        (own / "dragoman.toml").write_text(f'[model]\nuri = "{uri}"\nplacement = "inline"\n')
    return [str(folder / "models")] if count else []


def _slow(port: int) -> None:
    _call(port, "Slow")


def _json(port: int) -> None:
    _send(port, "POST", "/v2/models/Identity/infer", _JSON)


def _binary(port: int) -> None:
    headers = {"inference-header-content-length": str(len(_BINARY_HEADER))}
    _send(port, "POST", "/v2/models/Identity/infer", _BINARY_HEADER + bytes(_BINARY_BYTES), headers)


_BINARY_BYTES = 16_000_000
_BINARY_HEADER = json.dumps(
    {
        "inputs": [
            {
                "name": "INPUT0",
                "datatype": "FP32",
                "shape": [1, _BINARY_BYTES // 4],
                "parameters": {"binary_data_size": _BINARY_BYTES},
            }
        ],
        "parameters": {"binary_data_output": True},
    }
).encode()
_JSON = (
    b'{"inputs":[{"name":"INPUT0","datatype":"FP32","shape":[1,900000],"data":['
    + ",".join(f"{number:.14f}" for number in np.random.default_rng(1).random(900_000)).encode()
    + b"]}]}"
)
# What is sent beside the requests, and after how many seconds again.
_BESIDE: Mapping[str, tuple[Callable[[int], None] | None, float]] = {
    "nothing": (None, 0.0),
    "slow model": (_slow, 0.1),
    "reloads": (lambda port: _send(port, "POST", "/v2/repository/models/Reloaded/load", b"{}"), 0.5),
    "scrapes": (lambda port: _send(port, "GET", "/metrics", headers={"accept-encoding": "gzip"}), 0.3),
    "16 MB of binary": (_binary, 0.5),
    "15 MB of JSON": (_json, 0.5),
}

if __name__ == "__main__":
    main()
