"""Streams of small chunks as server-sent events: chunks per second.

usage: python -m benchmarks.streams [--quick] [--connections 1,16] [--rounds 3] [--seconds 2]
"""

import argparse
import socket
import statistics
import subprocess
import tempfile
from contextlib import ExitStack
from pathlib import Path

from benchmarks import http, load, machine
from benchmarks.identity import Cores
from benchmarks.processes import RESULTS, dragoman, free_port, http_ready, pin, run_process

_CHUNKS = 200
_BODY = b'{"inputs":[{"name":"x","shape":[1],"datatype":"FP32","data":[1]}]}'
_HEAD = b"POST /v2/models/Chunks/infer_stream HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(_BODY)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--connections", default="")
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=0.0)
    options = parser.parse_args()
    rounds, seconds = options.rounds or (1 if options.quick else 3), options.seconds or (0.3 if options.quick else 2.0)
    print(machine.describe())
    print(f"{'server':>8} {'c':>3} {'chunks/s':>10} {'CPU us/chunk':>15}")
    core = Cores.of_this_machine().server
    with ExitStack() as stack:
        subjects = []
        port = free_port()
        command = dragoman(["benchmarks.models:Chunks"], port, -1)
        process = stack.enter_context(run_process(command, RESULTS / "logs" / "streams.log", core))
        process.wait_until(lambda: http_ready(port))
        subjects.append(http.Subject(http.SERVER, process, port, echo=False))
        for count in map(int, (options.connections or "1,16").split(",")):
            result = [{s.name: measure(s, count, seconds) for s in subjects} for _ in range(rounds)]
            for name in result[0]:
                rate, cpu = (statistics.median(t[name][k] for t in result) for k in ("rate", "cpu_us"))
                print(f"{name:>8} {count:>3} {rate:>10,.0f} {cpu:>15.1f}", flush=True)


def measure(subject: http.Subject, count: int, seconds: float) -> dict[str, float]:
    """Return chunks per second and CPU time per chunk. Raises RuntimeError if a stream differs from the first one."""
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "request").write_bytes(_HEAD + _BODY)
        (Path(name) / "response").write_bytes(_first(subject.port))
        command = [str(load.build_generator("http_load")), str(subject.port), str(count), str(seconds), name]
        began_s = subject.process.cpu_s()
        pinned = pin(Cores.of_this_machine().load)
        run = subprocess.run(command, preexec_fn=pinned, capture_output=True, text=True, check=True, timeout=120)
        cpu_s = subject.process.cpu_s() - began_s
    result = load.parse_result(run.stdout, subject.name)
    chunks = result["responses"] * _CHUNKS
    return {"rate": chunks / result["seconds"], "cpu_us": 1e6 * cpu_s / chunks}


def _first(port: int) -> bytes:
    """Return the body of one stream as received, with its chunk sizes, after a check of its number of events."""
    with socket.create_connection(("127.0.0.1", port), 30) as connection:
        connection.sendall(_HEAD + _BODY)
        text = b""
        while not text.endswith(b"\r\n0\r\n\r\n"):
            text += connection.recv(1 << 16)
    head, _, body = text.partition(b"\r\n\r\n")
    if b" 200 " not in head or body.count(b"data: ") != _CHUNKS:
        raise RuntimeError(f"unexpected stream: {text[:500]!r}")
    return body


if __name__ == "__main__":
    main()
