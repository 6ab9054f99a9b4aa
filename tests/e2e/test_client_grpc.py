"""gRPC with tritonclient, synchronous and asynchronous, with streams."""

import queue
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from tritonclient.utils import InferenceServerException

from e2e.conftest import SHAPES, TOKEN
from e2e.server_process import TIMEOUT_S, ServerProcess, wait_until

A = np.arange(32, dtype=np.int32).reshape(2, 16)
B = np.full((2, 16), 5, np.int32)


@pytest.fixture(scope="module")
def client(shapes: ServerProcess) -> Iterator[Any]:
    client = triton.InferenceServerClient(shapes.grpc_url)
    yield client
    client.close()


@pytest.fixture
async def aio(shapes: ServerProcess) -> AsyncIterator[Any]:
    async with triton_aio.InferenceServerClient(shapes.grpc_url) as client:
        yield client


def tensor(name: str, array: Any, datatype: str) -> Any:
    tensor = triton.InferInput(name, list(array.shape), datatype)
    tensor.set_data_from_numpy(array)
    return tensor


def operands() -> list[Any]:
    return [tensor("INPUT0", A, "INT32"), tensor("INPUT1", B, "INT32")]


def fingers(n: int) -> list[Any]:
    return [tensor("n", np.array([n], np.int32), "INT32")]


# --- plain calls -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("compression", [None, "gzip", "deflate"])
def test_infer(client: Any, compression: str | None) -> None:
    result = client.infer("SumDiff", operands(), request_id="seven", compression_algorithm=compression)
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), A + B)
    np.testing.assert_array_equal(result.as_numpy("OUTPUT1"), A - B)
    response = result.get_response()
    assert (response.id, response.model_name) == ("seven", "SumDiff")


def test_only_the_requested_output(client: Any) -> None:
    result = client.infer("SumDiff", operands(), outputs=[triton.InferRequestedOutput("OUTPUT1")])
    assert [o.name for o in result.get_response().outputs] == ["OUTPUT1"]
    np.testing.assert_array_equal(result.as_numpy("OUTPUT1"), A - B)


def test_classification(client: Any) -> None:
    scores = tensor("x", np.array([[0.1, 0.5, 0.25, 0.2]], np.float32), "FP32")
    outputs = [triton.InferRequestedOutput("scores", class_count=2)]
    result = client.infer("Scores", [scores], outputs=outputs)
    assert result.as_numpy("scores").tolist() == [[b"0.500000:1", b"0.250000:2"]]


def test_text_and_parameters(client: Any) -> None:
    texts = np.array(["straße", "", "日本"], dtype=object)
    result = client.infer("Upper", [tensor("text", texts, "BYTES")])
    assert [e.decode() for e in result.as_numpy("upper")] == ["STRASSE", "", "日本"]
    result = client.infer("Echo", [tensor("x", A, "INT32")], parameters={"count": 3, "name": "x", "flag": True})
    returned = result.get_response().parameters
    assert (returned["count"].int64_param, returned["name"].string_param, returned["flag"].bool_param) == (3, "x", True)


@pytest.mark.parametrize("datatype", ["BF16", "FP16", "BOOL", "UINT64", "INT8", "FP64"])
def test_datatypes_round_trip(client: Any, datatype: str) -> None:
    dtypes: dict[str, Any] = {
        "BF16": np.float32,
        "FP16": np.float16,
        "BOOL": np.bool_,
        "UINT64": np.uint64,
        "INT8": np.int8,
    }
    array: Any = np.array([[0, 1], [2, 100]]).astype(dtypes.get(datatype, np.float64))
    np.testing.assert_array_equal(client.infer("Echo", [tensor("x", array, datatype)]).as_numpy("x"), array)


def test_a_large_tensor(client: Any) -> None:
    large = np.arange(2_000_000, dtype=np.float64)
    np.testing.assert_array_equal(client.infer("Echo", [tensor("x", large, "FP64")]).as_numpy("x"), large)


def test_async_infer(client: Any) -> None:
    responses: queue.SimpleQueue[Any] = queue.SimpleQueue()
    for _ in range(8):
        client.async_infer("SumDiff", operands(), lambda result, error: responses.put((result, error)))
    for _ in range(8):
        result, error = responses.get(timeout=TIMEOUT_S)
        assert error is None
        np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), A + B)


async def test_the_asynchronous_client(aio: Any) -> None:
    assert await aio.is_server_live()
    assert await aio.is_model_ready("SumDiff")
    result = await aio.infer("SumDiff", operands(), request_id="8", compression_algorithm="gzip")
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), A + B)
    with pytest.raises(InferenceServerException, match="Request for unknown model: 'missing' is not found"):
        await aio.infer("missing", operands())


# --- health, metadata and control ------------------------------------------------------------------------


def bearer(token: str = TOKEN) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


def test_health_and_metadata(client: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("SumDiff")
    assert client.get_server_metadata().name == "dragoman"
    model = client.get_model_metadata("SumDiff")
    assert model.platform == "test"
    assert [(i.name, i.datatype, list(i.shape)) for i in model.inputs] == [
        ("INPUT0", "INT32", [-1, 16]),
        ("INPUT1", "INT32", [-1, 16]),
    ]
    assert not client.is_model_ready("missing")
    assert not client.is_model_ready("SumDiff", "7")


def test_model_control(client: Any) -> None:
    index = client.get_model_repository_index(headers=bearer()).models
    assert {m.name for m in index} == {path.rpartition(":")[2] for path in SHAPES}
    client.unload_model("Upper", headers=bearer())
    try:
        states = {m.name: m.state for m in client.get_model_repository_index(headers=bearer()).models}
        assert states["Upper"] == "UNAVAILABLE"
        with pytest.raises(InferenceServerException, match="Request for unknown model: 'Upper' is not found"):
            client.infer("Upper", [tensor("text", np.array(["a"], dtype=object), "BYTES")])
    finally:
        client.load_model("Upper", headers=bearer())
    assert client.is_model_ready("Upper")
    with pytest.raises(InferenceServerException, match="This API is restricted") as caught:
        client.unload_model("Upper", headers=bearer("guess"))
    assert caught.value.status() == "StatusCode.UNAUTHENTICATED"


def test_errors_are_reported(client: Any) -> None:
    with pytest.raises(InferenceServerException, match="unknown model") as caught:
        client.infer("missing", operands())
    assert caught.value.status() == "StatusCode.NOT_FOUND"
    with pytest.raises(
        InferenceServerException, match="expected 2 inputs but got 1 inputs for model 'SumDiff'"
    ) as caught:
        client.infer("SumDiff", operands()[:1])
    assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"
    with pytest.raises(InferenceServerException, match="unexpected inference output 'nothing' for model 'SumDiff'"):
        client.infer("SumDiff", operands(), outputs=[triton.InferRequestedOutput("nothing")])


def test_deadlines(client: Any) -> None:
    x = tensor("x", np.array([5.0]), "FP64")
    with pytest.raises(InferenceServerException) as caught:
        client.infer("Sleep", [x], client_timeout=0.1)
    assert caught.value.status() == "StatusCode.DEADLINE_EXCEEDED"
    with pytest.raises(InferenceServerException, match="Request timeout expired"):
        client.infer("Sleep", [x], timeout=50_000)


# --- streams ---------------------------------------------------------------------------------------------


class StreamResults:
    """Responses of a stream, in order."""

    def __init__(self) -> None:
        self._all: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()

    def __call__(self, result: Any, error: Any) -> None:
        self._all.put((result, error))

    def next(self) -> Any:
        """Return the number in the next response, or the next error."""
        result, error = self._all.get(timeout=TIMEOUT_S)
        return error if error is not None else int(result.as_numpy("i")[0])

    def next_response(self) -> Any:
        result, error = self._all.get(timeout=TIMEOUT_S)
        assert error is None
        return result.get_response()


@pytest.fixture
def results(shapes: ServerProcess) -> StreamResults:
    return StreamResults()


@pytest.fixture
def stream(shapes: ServerProcess, results: StreamResults) -> Iterator[Any]:
    """Return a new client with an open stream; a client has one at a time."""
    client = triton.InferenceServerClient(shapes.grpc_url)
    client.start_stream(results)
    yield client
    client.stop_stream()
    client.close()


def test_a_stream_with_several_responses_to_several_requests(stream: Any, results: StreamResults) -> None:
    for n in (3, 1, 0, 2):
        stream.async_stream_infer("Count", fingers(n), request_id=str(n))
    assert [results.next() for _ in range(6)] == [0, 1, 2, 0, 0, 1]


def test_the_final_response_is_marked_on_request(stream: Any, results: StreamResults) -> None:
    stream.async_stream_infer("Count", fingers(2), request_id="a", enable_empty_final_response=True)
    responses = [results.next_response() for _ in range(3)]
    assert [r.parameters["triton_final_response"].bool_param for r in responses] == [False, False, True]
    assert [r.id for r in responses] == ["a", "a", "a"]
    assert not responses[-1].outputs


def test_an_error_in_a_stream_does_not_end_it(stream: Any, results: StreamResults) -> None:
    stream.async_stream_infer("Count", fingers(-2))
    assert [results.next(), results.next()] == [0, 1]
    assert results.next().message() == "model 'Count' failed: ValueError: no more fingers"
    stream.async_stream_infer("missing", fingers(1))
    assert "Request for unknown model: 'missing' is not found" in results.next().message()
    stream.async_stream_infer("Count", fingers(1))
    assert results.next() == 0


def test_models_without_streaming_answer_in_streams(stream: Any, results: StreamResults) -> None:
    stream.async_stream_infer("SumDiff", operands())
    assert [o.name for o in results.next_response().outputs] == ["OUTPUT0", "OUTPUT1"]


def test_an_error_ends_the_stream_on_request(shapes: ServerProcess) -> None:
    results = StreamResults()
    client = triton.InferenceServerClient(shapes.grpc_url)
    client.start_stream(results, headers={"triton_grpc_error": "true"})
    client.async_stream_infer("missing", fingers(1))
    assert results.next().status() == "StatusCode.NOT_FOUND"
    client.stop_stream()
    client.close()


def test_cancelling_a_stream_stops_the_model(shapes: ServerProcess, tmp_path: Path) -> None:
    results = StreamResults()
    closed = tmp_path / "closed"
    client = triton.InferenceServerClient(shapes.grpc_url)
    client.start_stream(results)
    client.async_stream_infer("Ticks", [tensor("file", np.array([str(closed)], dtype=object), "BYTES")])
    assert results.next() == 0
    client.stop_stream(cancel_requests=True)
    client.close()
    wait_until(closed.exists, "the end of the model's generator", within_s=60)


def test_a_stream_that_takes_too_long(shapes: ServerProcess, tmp_path: Path) -> None:
    results = StreamResults()
    closed = tmp_path / "closed"
    client = triton.InferenceServerClient(shapes.grpc_url)
    client.start_stream(results, stream_timeout=0.5)
    client.async_stream_infer("Ticks", [tensor("file", np.array([str(closed)], dtype=object), "BYTES")])
    while isinstance(found := results.next(), int):
        pass
    # Server and client have the same deadline; the error of the server may arrive before the client times out.
    assert found.status() == "StatusCode.DEADLINE_EXCEEDED" or found.message() == "Request timeout expired"
    client.stop_stream()
    client.close()
    wait_until(closed.exists, "the end of the model's generator", within_s=60)


async def test_a_stream_with_the_asynchronous_client(aio: Any) -> None:
    async def requests() -> AsyncIterator[dict[str, Any]]:
        for n in (2, -1):
            yield {"model_name": "Count", "inputs": fingers(n)}

    found = []
    async for result, error in aio.stream_infer(requests()):
        found.append(error.message() if error is not None else int(result.as_numpy("i")[0]))
    assert found == [0, 1, 0, "model 'Count' failed: ValueError: no more fingers"]


async def test_cancelling_a_stream_of_the_asynchronous_client(aio: Any, tmp_path: Path) -> None:
    closed = tmp_path / "closed"

    async def requests() -> AsyncIterator[dict[str, Any]]:
        yield {"model_name": "Ticks", "inputs": [tensor("file", np.array([str(closed)], dtype=object), "BYTES")]}

    responses = aio.stream_infer(requests())
    result, error = await anext(responses)
    assert error is None
    assert result.as_numpy("i").tolist() == [0]
    responses.cancel()
    wait_until(closed.exists, "the end of the model's generator", within_s=60)
