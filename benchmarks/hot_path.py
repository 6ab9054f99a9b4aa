"""Time of one request in process, from the bytes of its body to those of the response, stage by stage.

It is compared with `floor`: the parsers and serializers available in Python on the same bytes, without checks.

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
from dragoman.formats.grpc_messages import ModelInferRequest, ModelInferResponse
from dragoman.formats.policy import Policy
from dragoman.protocols.open_inference import grpc as oip_grpc
from dragoman.protocols.open_inference import rest as oip_rest
from dragoman.protocols.wire import GrpcMethod, GrpcRequest, HttpRequest
from dragoman.server import Server

STAGES = ("parse", "engine", "format")
_BATCH_S = 0.02  # how long one stage runs at a time


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hot_path", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round, to check that it works")
    parser.add_argument("--only", default="", metavar="NAME", help="workloads with this in their name")
    parser.add_argument("--profile", action="store_true", help="print a profile")
    options = parser.parse_args(arguments)
    selected = [w for w in workloads.identity() if options.only in w.name]
    rows = asyncio.run(measure_workloads(selected, 1 if options.quick else 15, profile=options.profile))
    results = {"machine": machine.machine(), "versions": machine.versions(), "rows": rows}
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "hot_path.json").write_text(json.dumps(results, indent=2))
    print(machine.describe() + "\n\n" + table(rows))


async def measure_workloads(
    selected: Sequence[Workload], rounds: int, *, profile: bool = False
) -> list[dict[str, Any]]:
    """Return a row for each workload: medians of the rounds for each stage and the floor, in us."""
    server = Server(models.Identity, models.IdentityImage)
    rows = []
    async with server.engine as engine:
        for workload in selected:
            path = RequestPath.of(workload, engine)
            if profile:
                print_profile(path)
            rows.append({"workload": workload.name} | time_stages(path, floor(workload), rounds))
    return rows


@dataclass(frozen=True, slots=True)
class RequestPath:
    """The stages of one request; each takes the result of the one before."""

    parse: Callable[[], Any]
    engine: Callable[[Any], Any]
    format: Callable[[Any, Any], Any]

    @classmethod
    def of(cls, workload: Workload, engine: Engine) -> "RequestPath":
        """Return the stages of a workload, after a check of the response."""

        def run_engine(exchange: Any) -> Any:
            return engine.begin(exchange.request)

        def format_response(exchange: Any, response: Any) -> Any:
            return exchange.format_response(response)

        path = cls(_reader(workload), run_engine, format_response)
        assert workload.is_correct(_to_response(workload, path.run())), f"{workload.name}: wrong response"
        return path

    def run(self) -> Any:
        exchange = self.parse()
        return self.format(exchange, self.engine(exchange))


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


def _to_response(workload: Workload, formatted: Any) -> workloads.Response:
    if workload.wire == "grpc":
        chunks = [formatted] if isinstance(formatted, bytes) else formatted
        return workloads.Response({}, b"".join(chunks))
    return workloads.Response(dict(formatted.headers), b"".join(formatted.body))


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
    """Return a function that only parses the request, creates the array and serializes it."""
    if workload.wire == "grpc":
        return partial(_floor_grpc, workload.body)
    if "binary" in workload.name:
        return partial(_floor_binary, workload.body, int(workload.headers["inference-header-content-length"]))
    return partial(_floor_json, workload.body)


def _floor_json(body: bytes) -> bytes:
    tensor = _DECODER.decode(body).inputs[0]
    array = np.array(tensor.data, np.float32).reshape(tensor.shape)
    return orjson.dumps(_describe(array.ravel(), tensor.shape), option=orjson.OPT_SERIALIZE_NUMPY)


def _floor_binary(body: bytes, length: int) -> tuple[bytes, memoryview]:
    view = memoryview(body)
    tensor = _DECODER.decode(view[:length]).inputs[0]
    array = np.frombuffer(view[length:], np.float32).reshape(tensor.shape)
    head = {"name": "OUTPUT0", "datatype": "FP32", "shape": array.shape}
    return orjson.dumps({"model_name": "Identity", "outputs": [head]}), array.data


def _describe(data: Any, shape: list[int]) -> dict[str, Any]:
    return {
        "model_name": "Identity",
        "outputs": [{"name": "OUTPUT0", "datatype": "FP32", "shape": shape, "data": data}],
    }


def _floor_grpc(body: bytes) -> bytes:
    request = ModelInferRequest.FromString(body)
    tensor = request.inputs[0]
    response = ModelInferResponse(model_name=request.model_name)
    output = response.outputs.add(name="OUTPUT0", datatype="FP32", shape=tensor.shape)
    if request.raw_input_contents:
        array = np.frombuffer(request.raw_input_contents[0], np.float32).reshape(tensor.shape)
        response.raw_output_contents.append(array.tobytes())
    else:
        array = np.array(tensor.contents.fp32_contents, np.float32).reshape(tensor.shape)
        output.contents.fp32_contents.extend(array.ravel().tolist())
    return bytes(response.SerializeToString())


# --- measurement -----------------------------------------------------------------------------------------------


def time_stages(path: RequestPath, run_floor: Callable[[], Any], rounds: int) -> dict[str, float]:
    """Return medians in us. The stages and the floor take turns."""
    exchange = path.parse()
    response = path.engine(exchange)
    stages: dict[str, Callable[[], Any]] = {
        "parse": path.parse,
        "engine": lambda: path.engine(exchange),
        "format": lambda: path.format(exchange, response),
        "total": path.run,
        "floor": run_floor,
    }
    counts = {name: _count(run) for name, run in stages.items()}
    found: dict[str, list[float]] = {name: [] for name in stages}
    for _ in range(rounds):
        for name, run in stages.items():
            found[name].append(_seconds(run, counts[name]) / counts[name] * 1e6)
    return {name: statistics.median(times) for name, times in found.items()}


def _count(run: Callable[[], Any]) -> int:
    """Return how many runs take about `_BATCH_S`, from 20 runs after a warm-up of 5."""
    _seconds(run, 5)
    each = _seconds(run, 20) / 20
    return max(1, min(20_000, int(_BATCH_S / each)))


def _seconds(run: Callable[[], Any], count: int) -> float:
    began = time.perf_counter()
    for _ in range(count):
        run()
    return time.perf_counter() - began


def print_profile(path: RequestPath) -> None:
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(_count(path.run)):
        path.run()
    profile.disable()
    pstats.Stats(profile).sort_stats("tottime").print_stats(30)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return a table with a line for each workload, in us."""
    return "\n".join(_lines(rows))


def _lines(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield f"| us | {' | '.join(STAGES)} | total | floor | total / floor |"
    yield "|---|" + "---:|" * (len(STAGES) + 3)
    for row in rows:
        cells = [f"{row[name]:,.1f}" for name in (*STAGES, "total", "floor")]
        yield f"| {row['workload']} | {' | '.join(cells)} | {row['total'] / row['floor']:.1f} |"


if __name__ == "__main__":
    main()
