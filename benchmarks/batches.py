"""Torture of batches: the server is killed by SIGKILL again and again while it works on one.

    python -m benchmarks.batches        # 100,000 lines, killed ten times; writes benchmarks/results/batches.json
    python -m benchmarks.batches --lines 2000 --kills 3 --print

Lines for a small tensor model, which rejects some of them, go through a batch of a server that is not disturbed
and through one whose server is killed at random moments and started again. Both batches must have the same results:
each line once, in the order of the input, with the same bytes apart from the id of the batch.
"""

import argparse
import hashlib
import http.client
import json
import random
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

import dragoman

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks" / "results" / "batches.json"
MODEL = f"{ROOT / 'examples' / 'celsius.py'}:celsius"
PATH = "/v2/models/celsius/infer"
_START_S = 120.0


class BatchServer:
    """`dragoman serve` with a state folder, which can be killed and started again on the same port."""

    def __init__(self, folder: Path, *flags: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._command = [
            sys.executable, "-m", "dragoman", "serve", MODEL, "--http-port", str(self.port), "--grpc-port", "-1",
            "--state", str(folder), "--log-level", "error", "--placement", "inline", *flags,
        ]  # fmt: skip
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Return when it is live."""
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        end_s = time.monotonic() + _START_S
        while time.monotonic() < end_s:
            if self._process.poll() is not None:
                raise RuntimeError(f"the server ended with status {self._process.returncode}")
            with suppress(OSError):
                self.request("GET", "/v2/health/live")
                return
            time.sleep(0.02)
        raise RuntimeError("the server did not start")

    def stop(self, number: int = signal.SIGTERM) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait()
            self._process = None

    def request(
        self, method: str, path: str, body: bytes | None = None, content_type: str = "application/json"
    ) -> bytes:
        request = urllib.request.Request(self.url + path, body, {"content-type": content_type}, method=method)
        with urllib.request.urlopen(request, timeout=60) as response:
            data: bytes = response.read()
            return data

    def json(self, method: str, path: str, value: Any = None) -> Any:
        return json.loads(self.request(method, path, None if value is None else json.dumps(value).encode()))

    def upload(self, content: bytes) -> str:
        boundary = "b0undary"
        parts = [
            f'--{boundary}\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'.encode(),
            f'--{boundary}\r\ncontent-disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n'.encode(),
            content,
            f"\r\n--{boundary}--\r\n".encode(),
        ]
        answer = self.request("POST", "/v1/files", b"".join(parts), f"multipart/form-data; boundary={boundary}")
        return str(json.loads(answer)["id"])


def make_lines(count: int) -> bytes:
    """Return the input: every 17th line has a wrong shape, which is an error of that line."""
    return b"".join(_lines(count))


def _lines(count: int) -> Iterator[bytes]:
    for number in range(count):
        shape = [2] if number % 17 == 16 else [1]
        tensor = {"name": "fahrenheit", "shape": shape, "datatype": "FP64", "data": [number / 7]}
        line = {"custom_id": f"line-{number}", "method": "POST", "url": PATH, "body": {"inputs": [tensor]}}
        yield json.dumps(line).encode() + b"\n"


def run_batch(folder: Path, content: bytes, kills: int, seed: int) -> dict[str, Any]:
    """Run a batch with a server that is killed `kills` times; return its results and what was seen."""
    server, chance = BatchServer(folder), random.Random(seed)
    server.start()
    count, killed_at = content.count(b"\n"), list[int]()
    moments = sorted(chance.randrange(0, count * 3 // 4) for _ in range(kills))
    started_s = time.monotonic()
    try:
        body = {"input_file_id": server.upload(content), "endpoint": PATH, "completion_window": "24h"}
        batch = server.json("POST", "/v1/batches", body)
        while batch["status"] not in ("completed", "failed", "expired", "cancelled"):
            counts = batch["request_counts"]
            done = counts["completed"] + counts["failed"]
            if moments and done >= moments[0]:
                time.sleep(chance.random() * 0.1)
                server.stop(signal.SIGKILL)
                moments.pop(0)
                killed_at.append(done)
                server.start()
            time.sleep(0.01)
            batch = server.json("GET", f"/v1/batches/{batch['id']}")
        files = {
            name: server.request("GET", f"/v1/files/{batch[name]}/content") if batch[name] else b""
            for name in ("output_file_id", "error_file_id")
        }
    finally:
        server.stop()
    left = sorted(path.name for path in folder.rglob("*") if path.is_file() and "jobs" in path.parts)
    suffix = batch["id"].rpartition("_")[2].encode()
    return {
        "status": batch["status"],
        "counts": batch["request_counts"],
        "killed_at": killed_at,
        "elapsed_s": time.monotonic() - started_s,
        "output": files["output_file_id"].replace(suffix, b"BATCH"),
        "errors": files["error_file_id"].replace(suffix, b"BATCH"),
        "left": left,
    }


def compare(count: int, kills: int, seed: int = 1) -> dict[str, Any]:
    """Run an undisturbed batch and a disturbed one, and return what they have in common.

    Raises AssertionError if a line has not exactly one result, is out of order, or differs.
    """
    content = make_lines(count)
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        calm = run_batch(Path(first), content, 0, seed)
        torn = run_batch(Path(second), content, kills, seed)
    for run in (calm, torn):
        assert run["status"] == "completed", run["status"]
        assert run["left"] == [], run["left"]
        found = [[json.loads(line)["custom_id"] for line in run[name].splitlines()] for name in ("output", "errors")]
        expected = [f"line-{number}" for number in range(count)]
        assert found[0] == [name for number, name in enumerate(expected) if number % 17 != 16], "output"
        assert found[1] == [name for number, name in enumerate(expected) if number % 17 == 16], "errors"
    assert len(torn["killed_at"]) == kills, torn["killed_at"]
    for name in ("output", "errors"):
        assert calm[name] == torn[name], f"{name} differs"
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "lines": count,
        "kills": kills,
        "killed_at_line": torn["killed_at"],
        "answered_exactly_once": count,
        "counts": torn["counts"],
        "bit_equal": True,
        "sha256_output": hashlib.sha256(torn["output"]).hexdigest(),
        "sha256_errors": hashlib.sha256(torn["errors"]).hexdigest(),
        "elapsed_undisturbed_s": round(calm["elapsed_s"], 1),
        "elapsed_killed_s": round(torn["elapsed_s"], 1),
        "cpu_of_all_servers_s": round(usage.ru_utime + usage.ru_stime, 1),
    }


def give_way(turns: int = 4, seconds: float = 4.0) -> dict[str, Any]:
    """Return the latency of a client that sends one request after the other, alone and beside a batch, by turns.

    Both use a model that computes one request at a time, for 5 ms.
    """

    class Busy(dragoman.Model):
        placement = "thread"
        inputs = (dragoman.TensorSpec("x", dragoman.FP64, (-1,)),)
        outputs = (dragoman.TensorSpec("y", dragoman.FP64, (-1,)),)

        def infer(self, call: dragoman.Infer) -> Any:
            time.sleep(0.005)
            return {"y": call.inputs["x"].data}

    path = "/v2/models/Busy/infer"
    body = {"inputs": [{"name": "x", "shape": [1], "datatype": "FP64", "data": [1.0]}]}
    lines = ({"custom_id": f"{n}", "method": "POST", "url": path, "body": body} for n in range(20_000))
    content = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    alone, beside, rates = list[float](), list[float](), list[float]()
    with dragoman.Server(Busy, http_port=0, grpc_port=-1) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.http_ports[0])

        def send(path: str, value: Any) -> Any:
            connection.request("POST", path, json.dumps(value).encode(), {"content-type": "application/json"})
            return json.loads(connection.getresponse().read())

        def measure(times: list[float]) -> None:
            end_s = time.monotonic() + seconds
            while time.monotonic() < end_s:
                started_s = time.perf_counter()
                send(path, body)
                times.append(time.perf_counter() - started_s)

        other = BatchServer(Path())
        other.url = server.http_url
        for _ in range(turns):
            measure(alone)
            file_id = other.upload(content)
            batch = send("/v1/batches", {"input_file_id": file_id, "endpoint": path, "completion_window": "24h"})
            time.sleep(0.5)
            before = other.json("GET", f"/v1/batches/{batch['id']}")["request_counts"]["completed"]
            measure(beside)
            after = other.json("GET", f"/v1/batches/{batch['id']}")["request_counts"]["completed"]
            rates.append((after - before) / seconds)
            send(f"/v1/batches/{batch['id']}/cancel", {})
            time.sleep(0.5)
        connection.close()
    return {
        "latency_alone_ms": _percentiles(alone),
        "latency_beside_a_batch_ms": _percentiles(beside),
        "lines_per_s_beside": [round(rate) for rate in rates],
    }


def _percentiles(times_s: list[float]) -> dict[str, float]:
    return {f"p{p}": round(1000 * float(np.percentile(times_s, p)), 1) for p in (50, 90, 99)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=100_000)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--print", action="store_true", help="write no file")
    parser.add_argument("--give-way", action="store_true", help="only measure requests beside a batch, and print that")
    arguments = parser.parse_args()
    if arguments.give_way:
        print(json.dumps(give_way(), indent=2))
        return
    found = compare(arguments.lines, arguments.kills, arguments.seed)
    result = json.dumps({**found, "give_way": give_way()}, indent=2)
    print(result)
    if not arguments.print:
        RESULT.write_text(result + "\n")


if __name__ == "__main__":
    main()
