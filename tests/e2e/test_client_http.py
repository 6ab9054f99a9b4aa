"""HTTP with tritonclient (synchronous and asynchronous), requests and curl."""

import gzip
import http.client
import json
import zlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest
import requests
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
from tritonclient.utils import InferenceServerException

from e2e.conftest import SHAPES, TOKEN
from e2e.server_process import ServerProcess

A = np.arange(32, dtype=np.int32).reshape(2, 16)
B = np.full((2, 16), 5, np.int32)

DTYPES: dict[str, Any] = {
    "BOOL": np.bool_,
    **{f"UINT{bits}": np.dtype(f"u{bits // 8}") for bits in (8, 16, 32, 64)},
    **{f"INT{bits}": np.dtype(f"i{bits // 8}") for bits in (8, 16, 32, 64)},
    **{f"FP{bits}": np.dtype(f"f{bits // 8}") for bits in (16, 32, 64)},
}


@pytest.fixture(scope="module")
def client(shapes: ServerProcess) -> Iterator[Any]:
    client = triton.InferenceServerClient(shapes.url, concurrency=8)
    yield client
    client.close()


@pytest.fixture
async def aio(shapes: ServerProcess) -> AsyncIterator[Any]:
    async with triton_aio.InferenceServerClient(shapes.url) as client:
        yield client


def tensor(name: str, array: Any, datatype: str, *, binary: bool = True) -> Any:
    tensor = triton.InferInput(name, list(array.shape), datatype)
    tensor.set_data_from_numpy(array, binary_data=binary)
    return tensor


def operands(*, binary: bool = True) -> list[Any]:
    return [tensor("INPUT0", A, "INT32", binary=binary), tensor("INPUT1", B, "INT32", binary=binary)]


def requested(name: str, *, binary: bool = True, classes: int = 0) -> Any:
    return triton.InferRequestedOutput(name, binary_data=binary, class_count=classes)


# --- inference -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False, None])
def test_infer(client: Any, binary_in: bool, binary_out: bool | None) -> None:
    outputs = None if binary_out is None else [requested(f"OUTPUT{i}", binary=binary_out) for i in (0, 1)]
    result = client.infer("SumDiff", operands(binary=binary_in), outputs=outputs, request_id="seven")
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), A + B)
    np.testing.assert_array_equal(result.as_numpy("OUTPUT1"), A - B)
    response = result.get_response()
    assert response["id"] == "seven"
    assert response["model_name"] == "SumDiff"
    assert ("binary_data_size" in result.get_output("OUTPUT0").get("parameters", {})) is (binary_out is not False)


def test_binary_and_json_tensors_in_one_request(client: Any) -> None:
    inputs = [operands(binary=True)[0], operands(binary=False)[1]]
    outputs = [requested("OUTPUT1", binary=True), requested("OUTPUT0", binary=False)]
    result = client.infer("SumDiff", inputs, outputs=outputs)
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), A + B)
    np.testing.assert_array_equal(result.as_numpy("OUTPUT1"), A - B)


@pytest.mark.parametrize("sent", [None, "gzip", "deflate"])
@pytest.mark.parametrize("received", [None, "gzip", "deflate"])
def test_compression(client: Any, sent: str | None, received: str | None) -> None:
    large = np.tile(np.arange(100, dtype=np.float64), 1000)
    result = client.infer(
        "Echo",
        [tensor("x", large, "FP64")],
        request_compression_algorithm=sent,
        response_compression_algorithm=received,
    )
    np.testing.assert_array_equal(result.as_numpy("x"), large)


def test_only_the_requested_output(client: Any) -> None:
    result = client.infer("SumDiff", operands(), outputs=[requested("OUTPUT1")])
    assert [o["name"] for o in result.get_response()["outputs"]] == ["OUTPUT1"]


@pytest.mark.parametrize("binary", [True, False])
def test_classification(client: Any, binary: bool) -> None:
    scores = np.array([[0.1, 0.5, 0.25, 0.2], [4, 3, 2, 1]], np.float32)
    result = client.infer(
        "Scores", [tensor("x", scores, "FP32")], outputs=[requested("scores", binary=binary, classes=2)]
    )
    best = [[e.decode() if isinstance(e, bytes) else e for e in row] for row in result.as_numpy("scores")]
    assert best == [["0.500000:1", "0.250000:2"], ["4.000000:0", "3.000000:1"]]


def test_parameters_round_trip(client: Any) -> None:
    sent = {"temperature": 0.5, "count": 3, "name": "x", "flag": True}
    result = client.infer("Echo", [tensor("x", A, "INT32")], parameters=sent)
    assert result.get_response()["parameters"] == sent


@pytest.mark.parametrize("datatype", DTYPES)
@pytest.mark.parametrize("binary", [True, False])
def test_datatypes_round_trip(client: Any, datatype: str, binary: bool) -> None:
    dtype = DTYPES[datatype]
    if datatype == "FP16" and not binary:
        pytest.skip("the client sends it in binary form only")
    array = np.array([[0, 1, 1], [1, 0, 1]]).astype(dtype)
    if datatype not in ("BOOL", "FP16"):
        limits: Any = np.finfo(dtype) if array.dtype.kind == "f" else np.iinfo(dtype)
        array[0] = [limits.min, limits.max, 7]
    outputs = [requested("x", binary=binary)]
    back = client.infer("Echo", [tensor("x", array, datatype, binary=binary)], outputs=outputs).as_numpy("x")
    np.testing.assert_array_equal(back, array)


@pytest.mark.parametrize("binary", [True, False])
def test_text(client: Any, binary: bool) -> None:
    texts = np.array(["straße", "", "日本", "a\nb"], dtype=object)
    outputs = [requested("upper", binary=binary), requested("length", binary=binary)]
    result = client.infer("Upper", [tensor("text", texts, "BYTES", binary=binary)], outputs=outputs)
    upper = [e.decode() if isinstance(e, bytes) else e for e in result.as_numpy("upper")]
    assert upper == ["STRASSE", "", "日本", "A\nB"]
    assert result.as_numpy("length").tolist() == [6, 0, 2, 3]


def test_async_infer(client: Any) -> None:
    pending = [client.async_infer("SumDiff", [tensor("INPUT0", A + i, "INT32"), operands()[1]]) for i in range(8)]
    for i, request in enumerate(pending):
        np.testing.assert_array_equal(request.get_result().as_numpy("OUTPUT0"), A + i + B)


async def test_infer_with_the_asynchronous_client(aio: Any) -> None:
    result = await aio.infer("SumDiff", operands(), request_id="8")
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), A + B)
    assert result.get_response()["id"] == "8"
    outputs = [requested("OUTPUT1", binary=False)]
    result = await aio.infer("SumDiff", operands(binary=False), outputs=outputs)
    np.testing.assert_array_equal(result.as_numpy("OUTPUT1"), A - B)
    with pytest.raises(InferenceServerException, match="Request for unknown model: 'missing' is not found"):
        await aio.infer("missing", operands())


async def test_health_and_metadata_with_the_asynchronous_client(aio: Any) -> None:
    assert await aio.is_server_live()
    assert await aio.is_server_ready()
    assert await aio.is_model_ready("SumDiff")
    assert (await aio.get_server_metadata())["name"] == "dragoman"
    assert (await aio.get_model_metadata("SumDiff"))["platform"] == "test"
    index = await aio.get_model_repository_index(headers=bearer())
    assert {"name": "Echo", "version": "", "state": "READY", "reason": ""} in index


# --- health, metadata and control ------------------------------------------------------------------------


def bearer(token: str = TOKEN) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def test_health(client: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("SumDiff")
    assert not client.is_model_ready("missing")


def test_metadata(client: Any) -> None:
    server = client.get_server_metadata()
    assert server["name"] == "dragoman"
    assert {"binary_tensor_data", "classification", "model_repository"} <= set(server["extensions"])
    model = client.get_model_metadata("SumDiff")
    assert model["platform"] == "test"
    assert model["inputs"] == [{"name": f"INPUT{i}", "datatype": "INT32", "shape": [-1, 16]} for i in (0, 1)]
    assert [o["name"] for o in model["outputs"]] == ["OUTPUT0", "OUTPUT1"]
    with pytest.raises(InferenceServerException, match="Request for unknown model: 'missing' is not found"):
        client.get_model_metadata("missing")


def test_model_control(client: Any) -> None:
    texts = [tensor("text", np.array(["a"], dtype=object), "BYTES")]
    names = {entry["name"] for entry in client.get_model_repository_index(headers=bearer())}
    assert names == {path.rpartition(":")[2] for path in SHAPES}
    client.unload_model("Upper", headers=bearer())
    try:
        assert not client.is_model_ready("Upper")
        index = {e["name"]: e for e in client.get_model_repository_index(headers=bearer())}
        assert index["Upper"]["state"] == "UNAVAILABLE"
        with pytest.raises(InferenceServerException, match="Request for unknown model: 'Upper' is not found"):
            client.infer("Upper", texts)
    finally:
        client.load_model("Upper", headers=bearer())
    assert client.is_model_ready("Upper")
    assert client.infer("Upper", texts).as_numpy("upper").tolist() == [b"A"]


def test_model_control_needs_the_token(client: Any) -> None:
    with pytest.raises(InferenceServerException, match="This API is restricted") as caught:
        client.get_model_repository_index()
    assert caught.value.status() == "401"
    with pytest.raises(InferenceServerException, match="This API is restricted"):
        client.unload_model("Echo", headers=bearer("guess"))
    with pytest.raises(InferenceServerException, match="failed to load 'missing'"):
        client.load_model("missing", headers=bearer())


def test_errors_are_reported(client: Any) -> None:
    with pytest.raises(
        InferenceServerException, match=r"expected 2 inputs but got 1 inputs for model 'SumDiff'"
    ) as caught:
        client.infer("SumDiff", operands()[:1])
    assert caught.value.status() == "400"
    with pytest.raises(InferenceServerException, match="unexpected inference output 'nothing' for model 'SumDiff'"):
        client.infer("SumDiff", operands(), outputs=[requested("nothing")])
    with pytest.raises(InferenceServerException, match=r"'INPUT0': expected shape \[-1, 16\], got \[2\]"):
        client.infer("SumDiff", [tensor("INPUT0", A[0, :2], "INT32"), operands()[1]])
    with pytest.raises(InferenceServerException, match="'INPUT0': expected datatype INT32, got INT64"):
        client.infer("SumDiff", [tensor("INPUT0", A.astype(np.int64), "INT64"), operands()[1]])
    with pytest.raises(InferenceServerException, match="version 3 is not found") as caught:
        client.infer("SumDiff", operands(), model_version="3")
    assert caught.value.status() == "404"


def test_the_deadline_of_a_request(client: Any) -> None:
    x = tensor("x", np.array([5.0]), "FP64")
    with pytest.raises(InferenceServerException, match="Request timeout expired") as caught:
        client.infer("Sleep", [x], timeout=50_000)
    assert caught.value.status() == "504"


# --- requests and the bare wire --------------------------------------------------------------------------


def json_body() -> dict[str, Any]:
    tensors = [
        {"name": "INPUT0", "datatype": "INT32", "shape": [2, 16], "data": A.tolist()},
        {"name": "INPUT1", "datatype": "INT32", "shape": [2, 16], "data": B.ravel().tolist()},
    ]
    return {"id": "q", "inputs": tensors}


def test_requests(shapes: ServerProcess) -> None:
    url = f"http://{shapes.url}/v2/models/SumDiff"
    with requests.Session() as session:
        assert session.get(f"{url}/ready", timeout=60).ok
        response = session.post(f"{url}/infer", json=json_body(), timeout=60).json()
        assert response["outputs"][0]["data"] == (A + B).ravel().tolist()
        assert response["id"] == "q"
        rejected = session.post(f"{url}/infer", data=b"{", timeout=60)
        assert rejected.status_code == 400
        assert "error" in rejected.json()
        assert session.get(f"{url}/infer", timeout=60).status_code == 405
        assert session.get(f"http://{shapes.url}/nothing", timeout=60).json().keys() == {"error"}


def test_requests_decompresses_a_response(shapes: ServerProcess) -> None:
    numbers = list(range(5000))
    tensor = {"name": "x", "datatype": "INT64", "shape": [5000], "data": numbers}
    response = requests.post(f"http://{shapes.url}/v2/models/Echo/infer", json={"inputs": [tensor]}, timeout=60)
    assert response.headers["content-encoding"] == "gzip"
    assert response.json()["outputs"][0]["data"] == numbers


@pytest.mark.parametrize("content_type", ["application/json", "application/x-www-form-urlencoded", None])
def test_curl(shapes: ServerProcess, content_type: str | None) -> None:
    headers = {"Content-Type": content_type} if content_type else {}
    status, response, _ = shapes.request("POST", "/v2/models/SumDiff/infer", json_body(), headers)
    assert status == 200
    assert response["outputs"][1]["data"] == (A - B).ravel().tolist()


def test_a_body_in_chunks(shapes: ServerProcess) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", shapes.http_port, timeout=60)
    text = json.dumps(json_body()).encode()
    chunks = (text[i : i + 100] for i in range(0, len(text), 100))
    connection.request("POST", "/v2/models/SumDiff/infer", chunks, encode_chunked=True)
    response = connection.getresponse()
    assert response.status == 200
    assert json.loads(response.read())["outputs"][0]["data"] == (A + B).ravel().tolist()
    connection.close()


@pytest.mark.parametrize(("encoding", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
def test_compressed_json(shapes: ServerProcess, encoding: str, pack: Any) -> None:
    body = pack(json.dumps(json_body()).encode())
    status, response, _ = shapes.request("POST", "/v2/models/SumDiff/infer", body, {"content-encoding": encoding})
    assert (status, response["id"]) == (200, "q")


def test_a_raw_body(shapes: ServerProcess) -> None:
    scores = np.array([[1, 2, 3, 4]], np.float32)
    headers = {"inference-header-content-length": "0", "content-type": "application/octet-stream"}
    status, content, found = shapes.request("POST", "/v2/models/Scores/infer", scores.tobytes(), headers)
    assert status == 200
    assert content[int(found["inference-header-content-length"]) :] == scores.tobytes()


def test_a_stream_of_events(shapes: ServerProcess) -> None:
    url = f"http://{shapes.url}/v2/models/Count/infer_stream"
    tensor = {"name": "n", "datatype": "INT32", "shape": [1], "data": [-3]}
    with requests.post(url, json={"inputs": [tensor]}, stream=True, timeout=60) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        events = [json.loads(line[6:]) for line in response.iter_lines() if line]
    assert [e["outputs"][0]["data"] for e in events[:-1]] == [[0], [1], [2]]
    assert events[-1] == {"error": "model 'Count' failed: ValueError: no more fingers"}


def test_head_and_trailing_slash(shapes: ServerProcess) -> None:
    assert shapes.request("HEAD", "/v2/health/live")[0] == 200
    assert shapes.request("GET", "/v2/models/SumDiff/")[0] == 200
    assert shapes.request("GET", "/v2/models")[1] == {"models": sorted(p.rpartition(":")[2] for p in SHAPES)}


def test_pipelined_requests_are_answered_in_order(shapes: ServerProcess) -> None:
    one = b"GET /v2/models/%s HTTP/1.1\r\nhost: x\r\n\r\n"
    connection = http.client.HTTPConnection("127.0.0.1", shapes.http_port, timeout=60)
    connection.connect()
    connection.sock.sendall(one % b"Echo" + one % b"SumDiff" + one % b"missing")
    text = b""
    while text.count(b"}") < 1 or b"missing" not in text:
        text += connection.sock.recv(65536)
    assert text.index(b'"Echo"') < text.index(b'"SumDiff"') < text.index(b"'missing'")
    connection.close()
