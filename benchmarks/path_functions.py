"""Count the functions of Dragoman on the warm path of a request, and the bytecode instructions that they run.

The first says how much a newcomer has to read to follow a request. The second says what a change of Python code saves,
on a machine with any load: an instruction takes 4 to 9 ns.

Run `python -m benchmarks.path_functions`; `--list` prints them in the order of their first call. Each request is sent
twenty times before it is followed, three times: the fewest count, because a client may send a ping meanwhile. A
function counts once, however often it is called, and only if it is ours and runs in the server's process.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Self

import dragoman

# The largest numbers that one sitting allows.
LIMITS = {"REST, inline": 40, "gRPC, inline": 60, "ensemble of two": 90}
_WARM_UP = 20
_OURS = Path(dragoman.__file__).parents[1]
_CONFIG = """
platform: "ensemble"
input [{ name: "x" data_type: TYPE_FP32 dims: [ -1 ] }]
output [{ name: "y" data_type: TYPE_FP32 dims: [ -1 ] }]
ensemble_scheduling { step [
  { model_name: "First" model_version: -1 input_map { key: "x" value: "x" } output_map { key: "y" value: "between" } },
  { model_name: "Second" model_version: -1 input_map { key: "x" value: "between" } output_map { key: "y" value: "y" } }
] }
"""
_REQUEST = {"inputs": [{"name": "x", "shape": [3], "datatype": "FP32", "data": [1, 2, 3]}]}


class First(dragoman.Model):
    """Doubles numbers."""

    placement = "inline"
    inputs = (dragoman.TensorSpec("x", dragoman.FP32, (-1,)),)
    outputs = (dragoman.TensorSpec("y", dragoman.FP32, (-1,)),)

    def infer(self, call: dragoman.Infer) -> dict[str, Any]:
        return {"y": call.inputs["x"].data * 2}


class Second(First):
    """Doubles numbers, too."""


class Followed:
    """The functions that were called, with the instructions that each ran, in the order of their first call; and the
    threads that called them."""

    def __init__(self) -> None:
        self.functions: dict[CodeType, int] = {}
        self.threads: set[int] = set()

    def __call__(self, frame: FrameType, event: str, _argument: object) -> Self | None:
        code = frame.f_code
        if event == "opcode":
            self.functions[code] += 1
        elif event == "call":
            if not code.co_filename.startswith(str(_OURS)) or code.co_name[0] == "<":
                return None
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            self.functions.setdefault(code, 0)
            self.threads.add(threading.get_ident())
        return self

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Follow this thread, in which the event loop runs, and threads that start."""
        before = sys.gettrace()
        threading.settrace(self)  # those that start from now on; Python 3.11 cannot follow others
        sys.settrace(self)
        try:
            yield
        finally:
            sys.settrace(before)
            threading.settrace(before)

    def lines(self) -> list[str]:
        """Return a line for each function: its instructions and its name."""
        return [
            f"{count:5} {Path(code.co_filename).relative_to(_OURS).with_suffix('')}:{code.co_qualname}"
            for code, count in self.functions.items()
        ]


async def _rest(port: int, model: str) -> Callable[[], Awaitable[None]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps(_REQUEST).encode()
    head = f"POST /v2/models/{model}/infer HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()

    async def send() -> None:
        writer.write(head + body)
        line = await reader.readuntil(b"\r\n\r\n")
        assert line.startswith(b"HTTP/1.1 200"), line
        await reader.readexactly(int(line.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]))

    return send


async def _grpc(port: int) -> Callable[[], Awaitable[None]]:
    import grpc

    from dragoman.formats.grpc_messages import ModelInferRequest

    channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
    message = ModelInferRequest(model_name="First")
    tensor = message.inputs.add(name="x", datatype="FP32", shape=[3])
    tensor.contents.fp32_contents.extend([1, 2, 3])
    method = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
    data = message.SerializeToString()

    async def send() -> None:
        await method(data)

    return send


async def count() -> dict[str, Followed]:
    """Return what was called for each kind of request."""
    with tempfile.TemporaryDirectory() as folder:
        ensemble = Path(folder) / "both"
        (ensemble / "1").mkdir(parents=True)
        (ensemble / "config.pbtxt").write_text(_CONFIG)
        server = dragoman.Server(First, Second, str(folder), http_port=0, grpc_port=0, log_level="error")
        async with server:
            port = int(server.http_url.rpartition(":")[2])
            senders = {
                "REST, inline": await _rest(port, "First"),
                "gRPC, inline": await _grpc(server.grpc_port),
                "ensemble of two": await _rest(port, "both"),
            }
            found = {}
            for name, send in senders.items():
                for _ in range(_WARM_UP):
                    await send()
                attempts = [Followed() for _ in range(3)]
                for followed in attempts:
                    with followed.watching():
                        await send()
                found[name] = min(attempts, key=lambda attempt: sum(attempt.functions.values()))
            return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="print the functions, too")
    arguments = parser.parse_args()
    for name, followed in asyncio.run(count()).items():
        functions, instructions = len(followed.functions), sum(followed.functions.values())
        threads = f"{len(followed.threads)} thread(s)"
        print(f"{name}: {functions} functions, aim {LIMITS[name]}; {instructions} instructions, {threads}")
        if arguments.list:
            print(*followed.lines(), sep="\n")


if __name__ == "__main__":
    main()
