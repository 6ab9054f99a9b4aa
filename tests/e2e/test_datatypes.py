"""Every datatype in every placement and encoding: values are unchanged in both directions."""

import http.client
import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import grpc
import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tritonclient.grpc import service_pb2, service_pb2_grpc

import dragoman
from dragoman.core.datatypes import BF16, BYTES, DATATYPES, FP32, Datatype
from dragoman.core.tensor import Tensor, object_array
from e2e.server_process import MODELS, TIMEOUT_S, ServerProcess, running_server, wait_until

PLACEMENTS = ("Inline", "Thread", "Process")
FIELDS = {
    "BOOL": "bool_contents",
    "INT64": "int64_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
    **{f"INT{bits}": "int_contents" for bits in (8, 16, 32)},
    **{f"UINT{bits}": "uint_contents" for bits in (8, 16, 32)},
}
LARGE = 50_000  # elements; arrays of 64 KiB and more are in memory shared by server and worker


class Servers(NamedTuple):
    """A server process and clients of it."""

    process: ServerProcess
    http: dragoman.Client
    grpc: dragoman.Client
    channel: grpc.Channel


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    names = ("Echo", "Twice")
    models = [f"{place}{name}" for place in PLACEMENTS for name in names]
    models += [f"{place.lower()}_squared" for place in PLACEMENTS]
    with (
        running_server(*[f"{MODELS / 'datatypes.py'}:{model}" for model in (*models, "Bits")]) as process,
        dragoman.Client(f"http://{process.url}") as over_http,
        dragoman.Client(f"grpc://{process.grpc_url}", retries=5) as over_grpc,
        grpc.insecure_channel(process.grpc_url, [("grpc.max_receive_message_length", -1)]) as channel,
    ):
        grpc.channel_ready_future(channel).result(TIMEOUT_S)
        wait_until(over_grpc.live, "a connection of the client over gRPC")
        yield Servers(process, over_http, over_grpc, channel)


# --- encodings: an array is sent and returned ----------------------------------------------------------------------

Encoding = Callable[[Servers, str, Datatype, Any, Mapping[str, float]], tuple[str, Any]]


def _dtype(datatype: str) -> Any:
    """Return the dtype of a datatype, defined independently of the code."""
    named = {"BOOL": "?", "BYTES": "O", "BF16": ml_dtypes.bfloat16, "FP16": "<f2", "FP32": "<f4", "FP64": "<f8"}
    return np.dtype(named.get(datatype) or datatype.lower())


def _raw(datatype: Datatype, array: Any) -> bytes:
    if datatype is BYTES:
        return b"".join(len(e).to_bytes(4, "little") + e for e in array.flat)
    return bytes(array.tobytes())


def _from_raw(datatype: str, shape: Any, raw: bytes) -> Any:
    if datatype != "BYTES":
        return np.frombuffer(raw, _dtype(datatype)).reshape(shape)
    found, at = [], 0
    while at < len(raw):
        end = at + 4 + int.from_bytes(raw[at : at + 4], "little")
        found.append(raw[at + 4 : end])
        at = end
    return object_array(found, tuple(shape))


def over_json(servers: Servers, model: str, datatype: Datatype, array: Any, parameters: Any) -> tuple[str, Any]:
    flat = [e.decode() for e in array.flat] if datatype is BYTES else array.reshape(-1).tolist()
    data = [None if v != v else v for v in flat]
    sent = {"name": "x", "datatype": datatype.name, "shape": array.shape, "data": data}
    status, body, _ = servers.process.request(
        "POST", f"/v2/models/{model}/infer", {"inputs": [sent], "parameters": dict(parameters)}
    )
    assert status == 200, body
    (output,) = body["outputs"]
    back: list[Any] = [math.nan if v is None else v for v in output["data"]]
    elements = object_array([e.encode() for e in back], (len(back),)) if output["datatype"] == "BYTES" else back
    return output["datatype"], np.array(elements, _dtype(output["datatype"])).reshape(output["shape"])


def over_binary(servers: Servers, model: str, datatype: Datatype, array: Any, parameters: Any) -> tuple[str, Any]:
    raw = _raw(datatype, array)
    sent = {"name": "x", "datatype": datatype.name, "shape": array.shape, "parameters": {"binary_data_size": len(raw)}}
    headers = json.dumps({"inputs": [sent], "parameters": {"binary_data_output": True, **parameters}}).encode()
    connection = http.client.HTTPConnection(servers.process.url, timeout=TIMEOUT_S)
    connection.request(
        "POST", f"/v2/models/{model}/infer", headers + raw, {"Inference-Header-Content-Length": str(len(headers))}
    )
    response = connection.getresponse()
    content = response.read()
    connection.close()
    assert response.status == 200, content
    size = int(response.headers.get("Inference-Header-Content-Length", len(content)))
    (output,) = json.loads(content[:size])["outputs"]
    return output["datatype"], _from_raw(output["datatype"], output["shape"], content[size:])


def _over_grpc(servers: Servers, model: str, datatype: Datatype, array: Any, parameters: Any, typed: bool) -> Any:
    request = service_pb2.ModelInferRequest(model_name=model)
    for name, value in parameters.items():
        request.parameters[name].double_param = value
    sent = request.inputs.add(name="x", datatype=datatype.name, shape=array.shape)
    if typed:
        getattr(sent.contents, FIELDS[datatype.name]).extend(array.reshape(-1).tolist())
    else:
        request.raw_input_contents.append(_raw(datatype, array))
    response = service_pb2_grpc.GRPCInferenceServiceStub(servers.channel).ModelInfer(request, timeout=TIMEOUT_S)
    (output,) = response.outputs
    if response.raw_output_contents:
        return output.datatype, _from_raw(output.datatype, output.shape, response.raw_output_contents[0])
    listed = list(getattr(output.contents, FIELDS[output.datatype]))
    elements = object_array(listed, (len(listed),)) if output.datatype == "BYTES" else listed
    return output.datatype, np.array(elements, _dtype(output.datatype)).reshape(list(output.shape))


def over_grpc_raw(servers: Servers, model: str, datatype: Datatype, array: Any, parameters: Any) -> tuple[str, Any]:
    found: tuple[str, Any] = _over_grpc(servers, model, datatype, array, parameters, typed=False)
    return found


def over_grpc_typed(servers: Servers, model: str, datatype: Datatype, array: Any, parameters: Any) -> tuple[str, Any]:
    if datatype.name not in FIELDS:  # OIP: FP16 and BF16 have no typed contents
        return over_grpc_raw(servers, model, datatype, array, parameters)
    found: tuple[str, Any] = _over_grpc(servers, model, datatype, array, parameters, typed=True)
    return found


def _by_client(client: dragoman.Client, model: str, array: Any, parameters: Any) -> tuple[str, Any]:
    result = client.infer(model, {"x": array}, parameters=parameters)
    (name,) = result
    return result.response.tensors[name].datatype.name, result[name]


def by_client_http(servers: Servers, model: str, datatype: Datatype, array: Any, parameters: Any) -> tuple[str, Any]:
    return _by_client(servers.http, model, array, parameters)


def by_client_grpc(servers: Servers, model: str, datatype: Datatype, array: Any, parameters: Any) -> tuple[str, Any]:
    return _by_client(servers.grpc, model, array, parameters)


ENCODINGS: list[Encoding] = [over_json, over_binary, over_grpc_raw, over_grpc_typed, by_client_http, by_client_grpc]
everywhere = pytest.mark.parametrize("place", PLACEMENTS)
encoded = pytest.mark.parametrize("encoding", ENCODINGS, ids=lambda e: e.__name__)
few = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))


# --- properties ------------------------------------------------------------------------------------------------------


@st.composite
def arrays(draw: st.DrawFn) -> tuple[Datatype, Any]:
    """A datatype and an array of arbitrary bits."""
    datatype = draw(st.sampled_from(list(DATATYPES.values())))
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3))
    count = math.prod(shape)
    if datatype is BYTES:
        return datatype, object_array(draw(st.lists(st.binary(max_size=6), min_size=count, max_size=count)), shape)
    most = 1 if datatype.kind == "bool" else (1 << 8 * datatype.size) - 1
    bits = draw(st.lists(st.integers(0, most), min_size=count, max_size=count))
    raw = b"".join(b.to_bytes(datatype.size, "little") for b in bits)
    return datatype, np.frombuffer(raw, _dtype(datatype.name)).reshape(shape)


def _fits_json(datatype: Datatype, array: Any) -> bool:
    if datatype is BYTES:
        return all(e.decode(errors="replace").encode() == e for e in array.flat)
    with np.errstate(invalid="ignore"):
        return datatype.kind != "float" or not np.isinf(array).any()


def _twice(datatype: Datatype, array: Any) -> Any:
    """Return x + x computed with Python's exact numbers."""
    if datatype is BYTES:
        return object_array([e + e for e in array.flat], array.shape)
    if datatype.kind == "bool":
        return array
    if datatype.kind == "float":
        largest = float(ml_dtypes.finfo(array.dtype).max)  # type: ignore[no-untyped-call]
        exact = [math.copysign(math.inf, v) if abs(v) > largest / 2 else 2 * v for v in array.reshape(-1).tolist()]
    else:
        bits = 8 * datatype.size
        low = 0 if datatype.kind == "uint" else 1 << (bits - 1)
        exact = [(2 * v + low) % (1 << bits) - low for v in array.reshape(-1).tolist()]
    return np.array(exact, array.dtype).reshape(array.shape)


def _same(one: Any, other: Any) -> bool:
    """Return whether arrays are bitwise equal, except for the payload of NaN."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if one.dtype == object:
        return list(one.flat) == list(other.flat)
    with np.errstate(invalid="ignore"):
        nan = [a != a for a in (one, other)]
    bits = [np.where(n, 0, a.view(f"u{a.dtype.itemsize}")) for a, n in zip((one, other), nan, strict=True)]
    return bool((nan[0] == nan[1]).all() and (bits[0] == bits[1]).all())


@everywhere
@encoded
@few
@given(found=arrays())
def test_values_round_trip(servers: Servers, place: str, encoding: Encoding, found: tuple[Datatype, Any]) -> None:
    datatype, array = found
    assume(encoding is not over_json or _fits_json(datatype, array))
    name, back = encoding(servers, f"{place}Echo", datatype, array, {})
    assert name == datatype.name
    assert _same(back, array)


@everywhere
@encoded
@few
@given(found=arrays())
def test_a_model_computes_with_the_numbers(
    servers: Servers, place: str, encoding: Encoding, found: tuple[Datatype, Any]
) -> None:
    datatype, array = found
    expected = _twice(datatype, array)
    assume(encoding is not over_json or (_fits_json(datatype, array) and _fits_json(datatype, expected)))
    name, back = encoding(servers, f"{place}Twice", datatype, array, {})
    assert name == datatype.name
    assert _same(back, expected)


@everywhere
@pytest.mark.parametrize("encoding", [over_binary, by_client_grpc], ids=lambda e: e.__name__)
@pytest.mark.parametrize("datatype", DATATYPES.values(), ids=str)
def test_large_arrays(servers: Servers, place: str, encoding: Encoding, datatype: Datatype) -> None:
    count = np.arange(LARGE) % 100
    array = (
        object_array([b"%d" % n for n in count], (LARGE,)) if datatype is BYTES else count.astype(_dtype(str(datatype)))
    )
    name, back = encoding(servers, f"{place}Twice", datatype, array, {})
    assert (name, _same(back, _twice(datatype, array))) == (datatype.name, True)


@everywhere
@encoded
def test_bfloat16_and_float32_make_float32(servers: Servers, place: str, encoding: Encoding) -> None:
    array = np.array([1.5, -2.0, 1e38], ml_dtypes.bfloat16)
    name, back = encoding(servers, f"{place}Twice", BF16, array, {"factor": 2.0})
    assert name == "FP32"
    assert back.tolist() == [3.0, -4.0, 2 * float(array[2])]


# --- annotated with bfloat16 --------------------------------------------------------------------------------------


@everywhere
@encoded
def test_functions_annotated_with_bfloat16(servers: Servers, place: str, encoding: Encoding) -> None:
    array = np.array([1.5, -3.0, 2.0**60], ml_dtypes.bfloat16)
    name, back = encoding(servers, f"{place.lower()}_squared", BF16, array, {})
    assert (name, back.dtype) == ("BF16", array.dtype)
    assert back.tolist() == [2.25, 9.0, 2.0**120]


@everywhere
@pytest.mark.parametrize("binary", [False, True])
def test_overflow_of_bfloat16_is_an_error(servers: Servers, place: str, binary: bool) -> None:
    inputs = [
        {"name": "x", "datatype": "BF16", "shape": [1], "data": [1.5]},
        {"name": "scale", "datatype": "FP64", "shape": [1], "data": [1e300]},
    ]
    body = {"inputs": inputs, "parameters": {"binary_data_output": binary}}
    status, response, _ = servers.process.request("POST", f"/v2/models/{place.lower()}_squared/infer", body)
    assert status == 500
    assert "output 'output-0': " in response["error"]
    assert "does not fit into BF16" in response["error"]


def test_bits_are_not_bfloat16(servers: Servers) -> None:
    inputs = [{"name": "x", "datatype": "BF16", "shape": [1], "data": [1.5]}]
    status, response, _ = servers.process.request("POST", "/v2/models/Bits/infer", {"inputs": inputs})
    assert status == 500
    assert "output 'y': a tensor of datatype BF16 needs data of dtype bfloat16, got uint16" in response["error"]


@pytest.mark.parametrize("wire", ["http", "grpc"])
def test_the_client_rejects_tensors_with_another_dtype(servers: Servers, wire: str) -> None:
    client = servers.http if wire == "http" else servers.grpc
    with pytest.raises(dragoman.errors.InvalidInput, match=r"'x'.* BF16 needs data of dtype bfloat16, got uint16"):
        client.infer("InlineEcho", {"x": Tensor(np.zeros(2, np.uint16), BF16)})
    with pytest.raises(dragoman.errors.InvalidInput, match=r"FP32 needs data of dtype float32, got float64"):
        client.infer("InlineEcho", {"x": Tensor(np.zeros(2), FP32)})
    swapped = client.infer("InlineEcho", {"x": Tensor(np.array([1.5, 2.5], ">f4"), FP32)})
    assert swapped["y"].tolist() == [1.5, 2.5]
