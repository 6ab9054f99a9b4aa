"""A restart of the server under load, with joined workers that keep their models: calls lost, longest wait, loads.

usage: python -m benchmarks.cluster_restart [--workers 4] [--callers 8] [--restarts 3] [--kill]

Callers send one request after the other. One that is refused, or answered by 503, sends the same request again after
50 ms, as clients that retry do; with `--kill` also one whose connection ends, since the call may be repeated. Each
answer is compared with its request.
"""

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.processes import free_port

SECRET = "the secret of the benchmark"
MODEL = """
import os, time
from pathlib import Path
import dragoman

class Slow(dragoman.Model):
    inputs = outputs = (dragoman.TensorSpec("x", dragoman.FP64, (1,)),)

    def load(self):
        with Path(__file__).parents[1].joinpath("loads").open("a") as file:
            file.write(f"{os.getpid()}\\n")

    def infer(self, call):
        time.sleep(0.02)
        return {"x": call.inputs["x"].data}
"""
SETTINGS = """
[model]
uri = "slow.py:Slow"
idempotent = true
[model.placement]
launcher = "join"
replicas = %d
min_ready = 1
"""
_RETRY_S = 0.05


@dataclass
class Outcome:
    """What callers have seen."""

    right: int = 0
    wrong: int = 0
    errors: list[str] = field(default_factory=list)
    waits_s: list[float] = field(default_factory=list)


async def send(port: int, value: float) -> tuple[int, bytes]:
    """Return the status and the body of a response. Raises OSError, EOFError."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        body = json.dumps({"inputs": [{"name": "x", "shape": [1], "datatype": "FP64", "data": [value]}]}).encode()
        head = f"POST /v2/models/slow/infer HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(body)}"
        writer.write(head.encode() + b"\r\n\r\n" + body)
        response = await reader.read()
    finally:
        writer.close()
    headers, _, found = response.partition(b"\r\n\r\n")
    if not found:
        raise EOFError("the connection was closed without a response")
    return int(headers.split()[1]), found


async def caller(port: int, number: int, until_s: list[float], outcome: Outcome, *, repeats_lost: bool) -> None:
    value = float(number)
    while time.monotonic() < until_s[0]:
        value += 1000
        began_s = time.monotonic()
        while True:
            try:
                status, body = await send(port, value)
            except ConnectionRefusedError:
                status = 503
            except (OSError, EOFError) as error:
                if not repeats_lost:
                    outcome.errors.append(repr(error))
                    break
                status = 503
            if status == 200:
                is_right = json.loads(body)["outputs"][0]["data"] == [value]
                outcome.right, outcome.wrong = outcome.right + is_right, outcome.wrong + (not is_right)
                break
            if status != 503:
                outcome.errors.append(body.decode())
                break
            await asyncio.sleep(_RETRY_S)
        outcome.waits_s.append(time.monotonic() - began_s)


async def measure(folder: Path, workers: int, callers: int, restarts: int, *, kill: bool) -> dict[str, object]:
    (folder / "slow").mkdir()
    (folder / "slow" / "slow.py").write_text(MODEL)
    (folder / "slow" / "dragoman.toml").write_text(SETTINGS % workers)
    http, port = free_port(), free_port()
    environment = {**os.environ, "DRAGOMAN_WORKER_SECRET": SECRET}
    serve = [
        *(sys.executable, "-m", "dragoman", "serve", str(folder / "slow"), "--http-port", str(http)),
        *("--grpc-port", "-1", "--worker-port", str(port), "--state", str(folder), "--log-level", "error"),
    ]
    join = [sys.executable, "-m", "dragoman", "worker", "--join", f"127.0.0.1:{port}"]
    server = subprocess.Popen(serve, env=environment, stderr=subprocess.DEVNULL)
    joined = [subprocess.Popen(join, env=environment, stderr=subprocess.DEVNULL) for _ in range(workers)]
    gaps_s = []
    try:
        await _wait_for_answer(http, server)
        loads = folder / "loads"  # a file in the model's folder would be a change of the model
        while len(loads.read_text().split()) < workers:
            await asyncio.sleep(0.05)
        outcome, until_s = Outcome(), [float("inf")]
        tasks = [
            asyncio.create_task(caller(http, number, until_s, outcome, repeats_lost=kill)) for number in range(callers)
        ]
        for _ in range(restarts):
            await asyncio.sleep(2.0)
            server.send_signal(signal.SIGKILL if kill else signal.SIGTERM)
            await asyncio.to_thread(server.wait)
            began_s = time.monotonic()
            server = subprocess.Popen(serve, env=environment, stderr=subprocess.DEVNULL)
            await _wait_for_answer(http, server)
            gaps_s.append(time.monotonic() - began_s)
        await asyncio.sleep(2.0)
        until_s[0] = 0.0
        await asyncio.gather(*tasks)
        alive = sum(each.poll() is None for each in joined)
        return {
            "restarts": restarts, "signal": "SIGKILL" if kill else "SIGTERM", "workers alive": f"{alive} of {workers}",
            "right": outcome.right, "wrong": outcome.wrong, "lost": len(outcome.errors), "errors": outcome.errors[:3],
            "longest wait s": round(max(outcome.waits_s), 2),
            "start of the server until it answers s": [round(each, 2) for each in gaps_s],
            "model loads after the first ones": len(loads.read_text().split()) - workers,
        }  # fmt: skip
    finally:
        for process in [server, *joined]:
            process.kill()
            process.wait()


async def _wait_for_answer(port: int, server: "subprocess.Popen[bytes]") -> None:
    while server.poll() is None:
        with suppress(OSError, EOFError):
            if (await send(port, 0.0))[0] == 200:
                return
        await asyncio.sleep(0.02)
    raise SystemExit(f"the server has ended with {server.returncode}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("workers", 4), ("callers", 8), ("restarts", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--kill", action="store_true", help="kill the server instead of SIGTERM")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        counts = options.workers, options.callers, options.restarts
        result = asyncio.run(measure(Path(folder), *counts, kill=options.kill))
    print("\n".join(f"{name}: {value}" for name, value in result.items()))
    return 0 if not result["wrong"] and not result["lost"] and not result["model loads after the first ones"] else 1


if __name__ == "__main__":
    sys.exit(main())
