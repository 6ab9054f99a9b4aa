"""What one request costs in process, from the bytes of its body to those of its answer, stage by stage.

Beside it stands the floor: the parsers and printers that Python has for the same bytes, with nothing checked.

usage: python -m benchmarks.hot_path [--quick] [--only NAME] [--profile]
"""

import argparse
import asyncio
import cProfile
import json
import pstats
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import numpy as np
import orjson

from benchmarks import machine, models, workloads
from benchmarks.processes import RESULTS
from benchmarks.workloads import Workload
from dragoman.engine.engine import Engine
from dragoman.formats.oip_messages import ModelInferRequest, ModelInferResponse
from dragoman.formats.policy import Policy
from dragoman.protocols.open_inference import grpc as oip_grpc
from dragoman.protocols.open_inference import rest as oip_rest
from dragoman.protocols.wire import GrpcMethod, GrpcRequest, HttpRequest
from dragoman.server import Server

STAGES = ("read", "engine", "write")
_BATCH_S = 0.02  # how long one stage runs at a time


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hot_path", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round, to see that it works")
    parser.add_argument("--only", default="", metavar="NAME", help="workloads with this in their name")
    parser.add_argument("--profile", action="store_true", help="show where the time goes")
    given = parser.parse_args(arguments)
    selected = [w for w in workloads.identity() if given.only in w.name]
    rows = asyncio.run(measured(selected, 1 if given.quick else 15, profile=given.profile))
    results = {"machine": machine.machine(), "versions": machine.versions(), "rows": rows}
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "hot_path.json").write_text(json.dumps(results, indent=2))
    print(machine.described() + "\n\n" + table(rows))


async def measured(selected: Sequence[Workload], rounds: int, *, profile: bool = False) -> list[dict[str, Any]]:
    """A row a workload: the median of the rounds for each stage and the floor, in us."""
    server = Server(models.Identity, models.IdentityImage)
    rows = []
    async with server.engine as engine:
        for workload in selected:
            path = Path.of(workload, engine)
            if profile:
                profiled(path)
            rows.append({"workload": workload.name} | timed(path, floor(workload), rounds))
    return rows


@dataclass(frozen=True, slots=True)
class Path:
    """The way of one request, in stages that each take what the one before gave."""

    read: Callable[[], Any]
    engine: Callable[[Any], Any]
    write: Callable[[Any, Any], Any]

    @classmethod
    def of(cls, workload: Workload, engine: Engine) -> "Path":
        """The way of a workload's request, once gone to the end: its answer is right."""

        def engined(exchange: Any) -> Any:
            return engine.begin(exchange.request)

        def written(exchange: Any, response: Any) -> Any:
            return exchange.format_response(response)

        path = cls(_reader(workload), engined, written)
        assert workload.right(_answer(workload, path.whole())), f"{workload.name}: a wrong answer"
        return path

    def whole(self) -> Any:
        exchange = self.read()
        return self.write(exchange, self.engine(exchange))


def _reader(workload: Workload) -> Callable[[], Any]:
    if workload.wire == "grpc":
        methods = {m.name: m for m in oip_grpc.protocol(Policy()).methods}
        method = methods["ModelInfer"]
        assert isinstance(method, GrpcMethod)
        return lambda: method.endpoint(GrpcRequest(workload.body, {}, None))
    table = oip_rest.protocol(Policy())
    endpoint = next(r.endpoint for r in table.routes if r.pattern == "/v2/models/{model}/infer")
    model = workload.path.split("/")[3]
    return lambda: endpoint(HttpRequest("POST", workload.path, {"model": model}, workload.headers, workload.body))


def _answer(workload: Workload, written: Any) -> workloads.Answer:
    if workload.wire == "grpc":
        parts = [written] if isinstance(written, bytes) else written
        return workloads.Answer({}, b"".join(parts))
    return workloads.Answer(dict(written.headers), b"".join(written.body))


# --- the floor -----------------------------------------------------------------------------------------------


class _Tensor(msgspec.Struct):
    name: str
    shape: list[int]
    datatype: str
    data: list[float] = []


class _Request(msgspec.Struct):
    inputs: list[_Tensor]


_DECODER = msgspec.json.Decoder(_Request)


def floor(workload: Workload) -> Callable[[], Any]:
    """The least that a program in Python does with such a request: parse, make the array, print."""
    if workload.wire == "grpc":
        return partial(_floor_grpc, workload.body)
    if "binary" in workload.name:
        return partial(_floor_binary, workload.body, int(workload.headers["inference-header-content-length"]))
    return partial(_floor_json, workload.body)


def _floor_json(body: bytes) -> bytes:
    tensor = _DECODER.decode(body).inputs[0]
    array = np.array(tensor.data, np.float32).reshape(tensor.shape)
    return orjson.dumps(_described(array.ravel(), tensor.shape), option=orjson.OPT_SERIALIZE_NUMPY)


def _floor_binary(body: bytes, length: int) -> tuple[bytes, memoryview]:
    view = memoryview(body)
    tensor = _DECODER.decode(view[:length]).inputs[0]
    array = np.frombuffer(view[length:], np.float32).reshape(tensor.shape)
    head = {"name": "OUTPUT0", "datatype": "FP32", "shape": array.shape}
    return orjson.dumps({"model_name": "Identity", "outputs": [head]}), array.data


def _described(data: Any, shape: list[int]) -> dict[str, Any]:
    return {
        "model_name": "Identity",
        "outputs": [{"name": "OUTPUT0", "datatype": "FP32", "shape": shape, "data": data}],
    }


def _floor_grpc(body: bytes) -> bytes:
    request = ModelInferRequest.FromString(body)
    tensor = request.inputs[0]
    answer = ModelInferResponse(model_name=request.model_name)
    output = answer.outputs.add(name="OUTPUT0", datatype="FP32", shape=tensor.shape)
    if request.raw_input_contents:
        array = np.frombuffer(request.raw_input_contents[0], np.float32).reshape(tensor.shape)
        answer.raw_output_contents.append(array.tobytes())
    else:
        array = np.array(tensor.contents.fp32_contents, np.float32).reshape(tensor.shape)
        output.contents.fp32_contents.extend(array.ravel().tolist())
    return bytes(answer.SerializeToString())


# --- the clock -----------------------------------------------------------------------------------------------


def timed(path: Path, least: Callable[[], Any], rounds: int) -> dict[str, float]:
    """Medians in us; the stages and the floor take turns."""
    exchange = path.read()
    response = path.engine(exchange)
    stages: dict[str, Callable[[], Any]] = {
        "read": path.read,
        "engine": lambda: path.engine(exchange),
        "write": lambda: path.write(exchange, response),
        "whole": path.whole,
        "floor": least,
    }
    counts = {name: _count(run) for name, run in stages.items()}
    found: dict[str, list[float]] = {name: [] for name in stages}
    for _ in range(rounds):
        for name, run in stages.items():
            found[name].append(_seconds(run, counts[name]) / counts[name] * 1e6)
    return {name: statistics.median(times) for name, times in found.items()}


def _count(run: Callable[[], Any]) -> int:
    """How often it is run at a time; a few tens of times at first, which also warms it up."""
    _seconds(run, 5)
    each = _seconds(run, 20) / 20
    return max(1, min(20_000, int(_BATCH_S / each)))


def _seconds(run: Callable[[], Any], count: int) -> float:
    began = time.perf_counter()
    for _ in range(count):
        run()
    return time.perf_counter() - began


def profiled(path: Path) -> None:
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(_count(path.whole)):
        path.whole()
    profile.disable()
    pstats.Stats(profile).sort_stats("tottime").print_stats(30)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A line a workload, in us; the last column is the whole in floors."""
    return "\n".join(_lines(rows))


def _lines(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield f"| us | {' | '.join(STAGES)} | whole | floor | whole / floor |"
    yield "|---|" + "---:|" * (len(STAGES) + 3)
    for row in rows:
        cells = [f"{row[name]:,.1f}" for name in (*STAGES, "whole", "floor")]
        yield f"| {row['workload']} | {' | '.join(cells)} | {row['whole'] / row['floor']:.1f} |"


if __name__ == "__main__":
    main()
