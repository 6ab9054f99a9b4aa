"""tritonclient: Open Inference over HTTP and gRPC, with JSON and binary tensors, and their errors."""

from typing import Any

import numpy as np
import pytest

from newest_clients.conftest import KEY

http: Any = pytest.importorskip("tritonclient.http")
grpc: Any = pytest.importorskip("tritonclient.grpc")
utils: Any = pytest.importorskip("tritonclient.utils")

pytestmark = pytest.mark.filterwarnings("ignore")
X = np.array([[1.5, -2], [0, 3]], np.float32)
S = np.array([b"a", "\N{LATIN SMALL LETTER E WITH ACUTE}".encode()], np.object_)


@pytest.fixture(params=["http", "grpc"])
def protocol(request: pytest.FixtureRequest) -> Any:
    return {"http": http, "grpc": grpc}[request.param]


@pytest.fixture
def client(protocol: Any, url: str, grpc_url: str) -> Any:
    with protocol.InferenceServerClient(url.removeprefix("http://") if protocol is http else grpc_url) as client:
        yield client


def inputs(protocol: Any, **options: Any) -> list[Any]:
    found = [protocol.InferInput("x", list(X.shape), "FP32"), protocol.InferInput("s", list(S.shape), "BYTES")]
    for each, values in zip(found, (X, S), strict=True):
        each.set_data_from_numpy(values, **options)
    return found


def check(result: Any) -> None:
    np.testing.assert_array_equal(result.as_numpy("y"), X * 2)
    assert [bytes(each) if isinstance(each, bytes) else each.encode() for each in result.as_numpy("t")] == [
        text * 2 for text in S
    ]


def test_health_and_metadata(client: Any, protocol: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("Doubler")
    server, model = client.get_server_metadata(), client.get_model_metadata("Doubler")
    if protocol is grpc:
        assert server.name == "dragoman"
        assert [each.name for each in model.inputs] == ["x", "s"]
    else:
        assert server["name"] == "dragoman"
        assert [each["name"] for each in model["inputs"]] == ["x", "s"]


def test_infer(client: Any, protocol: Any) -> None:
    check(client.infer("Doubler", inputs(protocol)))
    outputs = [protocol.InferRequestedOutput("y")]
    result = client.infer("Doubler", inputs(protocol), outputs=outputs, request_id="7")
    np.testing.assert_array_equal(result.as_numpy("y"), X * 2)
    assert result.as_numpy("t") is None
    response = result.get_response()
    assert (response.id if protocol is grpc else response["id"]) == "7"


@pytest.mark.parametrize("binary_in", [False, True])
@pytest.mark.parametrize("binary_out", [False, True])
def test_json_and_binary_tensors(url: str, binary_in: bool, binary_out: bool) -> None:
    with http.InferenceServerClient(url.removeprefix("http://")) as client:
        outputs = [http.InferRequestedOutput(name, binary_data=binary_out) for name in ("y", "t")]
        check(client.infer("Doubler", inputs(http, binary_data=binary_in), outputs=outputs))


@pytest.mark.parametrize("compression", ["gzip", "deflate"])
def test_compression(url: str, grpc_url: str, compression: str) -> None:
    with http.InferenceServerClient(url.removeprefix("http://")) as client:
        options = {"request_compression_algorithm": compression, "response_compression_algorithm": compression}
        check(client.infer("Doubler", inputs(http), **options))
    with grpc.InferenceServerClient(grpc_url) as client:
        check(client.infer("Doubler", inputs(grpc), compression_algorithm=compression))


def test_concurrent_calls(client: Any, protocol: Any) -> None:
    if protocol is http:
        for each in [client.async_infer("Doubler", inputs(http)) for _ in range(8)]:
            check(each.get_result())
        return
    found: list[Any] = []
    for _ in range(8):
        client.async_infer("Doubler", inputs(grpc), lambda result, error: found.append((result, error)))
    while len(found) < 8:
        pass
    for result, error in found:
        assert error is None
        check(result)


def test_grpc_stream(grpc_url: str) -> None:
    found: list[Any] = []
    with grpc.InferenceServerClient(grpc_url) as client:
        client.start_stream(lambda result, error: found.append((result, error)))
        for i in range(3):
            client.async_stream_infer("Doubler", inputs(grpc), request_id=str(i))
        client.stop_stream()
    assert [error for _, error in found] == [None] * 3
    assert [result.get_response().id for result, _ in found] == ["0", "1", "2"]
    for result, _ in found:
        check(result)


async def test_async_clients(url: str, grpc_url: str) -> None:
    aio_http: Any = pytest.importorskip("tritonclient.http.aio")
    aio_grpc: Any = pytest.importorskip("tritonclient.grpc.aio")
    async with aio_http.InferenceServerClient(url.removeprefix("http://")) as client:
        check(await client.infer("Doubler", inputs(http)))
    async with aio_grpc.InferenceServerClient(grpc_url) as client:
        check(await client.infer("Doubler", inputs(grpc)))


def test_repository_and_statistics(client: Any, protocol: Any) -> None:
    index = client.get_model_repository_index(headers={"authorization": f"Bearer {KEY}"})
    names = {each.name for each in index.models} if protocol is grpc else {each["name"] for each in index}
    assert {"Doubler", "Scripted", "tiny-llama"} <= names
    client.infer("Doubler", inputs(protocol))
    for name in ("Doubler", ""):
        statistics = client.get_inference_statistics(name)
        models = statistics.model_stats if protocol is grpc else statistics["model_stats"]
        assert models


def test_errors(client: Any, protocol: Any) -> None:
    with pytest.raises(utils.InferenceServerException, match="none"):
        client.infer("none", inputs(protocol))
    wrong = inputs(protocol)[:1]
    with pytest.raises(utils.InferenceServerException, match="s"):
        client.infer("Doubler", wrong)
    bad = protocol.InferInput("x", [1, 2], "INT64")
    bad.set_data_from_numpy(np.array([[1, 2]], np.int64))
    with pytest.raises(utils.InferenceServerException, match="FP32"):
        client.infer("Doubler", [bad, inputs(protocol)[1]])
    with pytest.raises(utils.InferenceServerException):
        client.get_model_metadata("none")
    assert not client.is_model_ready("none")
