"""A model repository of Triton is served unchanged: ONNX, Python backend, calls of other models, and ensembles."""

import json
import queue
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

import dragoman
from e2e.server_process import ServerProcess, running_server
from features.triton.repository import NUMBER_HEAD, NUMBER_TENSORS, write, write_repository

A = np.arange(1, 9, dtype=np.int32).reshape(2, 4)
B = np.array([[1, 1, 1, 1], [2, 2, 2, 2]], np.int32)
CLIENTS = (triton_http, triton_grpc)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    root = tmp_path_factory.mktemp("repository")
    write_repository(root)
    with running_server(str(root)) as process:
        yield process


def connect(module: Any, process: ServerProcess) -> Any:
    if module is triton_http:
        return triton_http.InferenceServerClient(process.url, concurrency=8)
    return triton_grpc.InferenceServerClient(process.grpc_url)


def inputs(module: Any, a: Any = A, b: Any = B) -> list[Any]:
    tensors = []
    for name, array in (("INPUT0", a), ("INPUT1", b)):
        tensor = module.InferInput(name, list(array.shape), "INT32")
        tensor.set_data_from_numpy(array)
        tensors.append(tensor)
    return tensors


def infer(process: ServerProcess, model: str, a: Any = A, b: Any = B, module: Any = triton_http, **options: Any) -> Any:
    with connect(module, process) as client:
        return client.infer(model, inputs(module, a, b), **options)


@pytest.mark.parametrize("module", CLIENTS)
@pytest.mark.parametrize(
    ("model", "first", "second"),
    [
        ("simple", A + B, A - B),
        ("py", A + B, A - B),
        ("bls", 10 * (A + B), 10 * (A - B)),
        ("ensemble", 2 * A, 2 * (A + B)),
    ],
)
def test_models_compute(served: ServerProcess, module: Any, model: str, first: Any, second: Any) -> None:
    result = infer(served, model, module=module)
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), first, strict=True)
    np.testing.assert_array_equal(result.as_numpy("OUTPUT1"), second, strict=True)


def test_versions_and_labels(served: ServerProcess) -> None:
    _, metadata, _ = served.request("GET", "/v2/models/simple")
    assert (metadata["versions"], metadata["platform"]) == (["1", "3"], "onnxruntime_onnx")
    result = infer(served, "simple", outputs=[triton_http.InferRequestedOutput("OUTPUT0", class_count=1)])
    assert result.as_numpy("OUTPUT0").tolist() == [[b"5:3:three"], [b"10:3:three"]]


@pytest.mark.parametrize("model", ["simple", "py", "ensemble"])
def test_more_rows_than_max_batch_size(served: ServerProcess, model: str) -> None:
    rows = np.ones((9, 4), np.int32)
    with pytest.raises(InferenceServerException, match=f"request batch-size must be <= 8 for '{model}'"):
        infer(served, model, rows, rows)
    assert infer(served, model, rows[:8], rows[:8]).as_numpy("OUTPUT0").shape == (8, 4)


@pytest.mark.parametrize("model", ["simple", "py", "bls", "ensemble"])
def test_datatypes_and_dims_are_enforced(served: ServerProcess, model: str) -> None:
    with pytest.raises(InferenceServerException, match=r"input 'INPUT0': expected shape \[-1, 4\], got \[2, 3\]"):
        infer(served, model, np.ones((2, 3), np.int32), np.ones((2, 3), np.int32))
    tensor = {"name": "INPUT0", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}
    body = {"inputs": [tensor, {**tensor, "name": "INPUT1", "datatype": "INT32"}]}
    status, answer, _ = served.request("POST", f"/v2/models/{model}/infer", body)
    assert (status, answer["error"]) == (400, "input 'INPUT0': expected datatype INT32, got FP32")


def test_configuration_is_that_of_the_file(served: ServerProcess) -> None:
    _, config, _ = served.request("GET", "/v2/models/py/config")
    assert (config["max_batch_size"], config["backend"], config["default_model_filename"]) == (8, "python", "model.py")
    assert config["input"][0]["dims"] == [4]
    assert config["dynamic_batching"]["preferred_batch_size"] == [8]
    assert config["dynamic_batching"]["max_queue_delay_microseconds"] == 20000
    assert config["parameters"] == {"unit": {"string_value": "m"}}
    (group,) = config["instance_group"]
    assert (group["name"], group["count"]) == ("py", 1)
    with connect(triton_grpc, served) as client:
        config = client.get_model_config("ensemble", as_json=True)["config"]
    assert (config["platform"], len(config["ensemble_scheduling"]["step"])) == ("ensemble", 3)


def test_metadata_of_an_ensemble_has_its_graph(served: ServerProcess) -> None:
    _, metadata, _ = served.request("GET", "/v2/models/ensemble")
    graph = metadata["details"]["graph"]
    assert graph["nodes"] == {"py": {}, "simple (1)": {}, "simple (2)": {}}
    edges = [(e["tensor"], *e["from"].values(), "->", *e["to"].values()) for e in graph["edges"]]
    assert edges == [
        ("sum", "simple (1)", "OUTPUT0", "->", "py", "INPUT0"),
        ("difference", "simple (1)", "OUTPUT1", "->", "py", "INPUT1"),
        ("INPUT0", "INPUT0", "->", "simple (1)", "INPUT0"),
        ("INPUT1", "INPUT1", "->", "simple (1)", "INPUT1"),
        ("sum", "simple (1)", "OUTPUT0", "->", "simple (2)", "INPUT0"),
        ("sum", "simple (1)", "OUTPUT0", "->", "simple (2)", "INPUT1"),
        ("OUTPUT0", "py", "OUTPUT0", "->", "OUTPUT0"),
        ("OUTPUT1", "simple (2)", "OUTPUT0", "->", "OUTPUT1"),
    ]


# --- Python backend --------------------------------------------------------------------------------------


def test_a_python_model_sees_its_request_and_its_configuration(served: ServerProcess) -> None:
    result = infer(
        served,
        "py",
        request_id="r1",
        parameters={"unit": "km"},
        outputs=[triton_http.InferRequestedOutput("OUTPUT1")],
        timeout=30_000_000,
    ).get_response()
    assert [output["name"] for output in result["outputs"]] == ["OUTPUT1"]
    seen = result["parameters"]
    assert (seen["id"], seen["wanted"], seen["unit"], seen["dims"], seen["version"]) == ("r1", "OUTPUT1", "m", 4, "1")
    assert json.loads(seen["given"]) == {"unit": "km"}  # without the reserved `timeout`
    assert seen["warm"] == 2  # rows of the warm-up request


def test_a_python_model_completes_its_configuration(served: ServerProcess) -> None:
    _, config, _ = served.request("GET", "/v2/models/completed/config")
    assert (config["backend"], config["max_batch_size"], "dynamic_batching" in config) == ("python", 4, True)
    assert [(t["name"], t["data_type"], t["dims"]) for t in config["input"]] == [
        ("INPUT0", "TYPE_INT32", [4]),
        ("INPUT1", "TYPE_INT32", [4]),
    ]
    _, metadata, _ = served.request("GET", "/v2/models/completed")
    assert metadata["outputs"] == [{"name": "OUTPUT0", "datatype": "INT32", "shape": [-1, 4]}]
    assert not [key for key in metadata if "config" in key]
    np.testing.assert_array_equal(infer(served, "completed").as_numpy("OUTPUT0"), B, strict=True)


def test_requests_come_together_and_stay_apart(served: ServerProcess) -> None:
    rows = [np.full((1, 4), n, np.int32) for n in range(1, 25)]
    with ThreadPoolExecutor(8) as threads:
        results = list(threads.map(lambda a: infer(served, "py", a, a), rows))
    for a, result in zip(rows, results, strict=True):
        np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), 2 * a)
    counts = [result.get_response()["parameters"]["count"] for result in results]
    assert 1 < max(counts) <= 8


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (66, "Failed to process the request(s) for model 'py', message: TritonModelException: 66 is too much"),
        (77, "no 77"),
        (88, "model 'py' failed: output 'OUTPUT0': expected datatype INT32, got FP32"),
        (89, "output 'OUTPUT0': expected shape [-1, 4], got [1, 3]"),
        (90, "output 'OTHER' is not in 'config.pbtxt'"),
        (92, "output 'OUTPUT0': expected datatype INT32, got INT64"),
        (93, "Expect parameters values to have type bool/int/str, found type <class 'list'>"),
        (91, "Number of InferenceResponse objects do not match the number of InferenceRequest objects"),
    ],
)
def test_errors_of_a_python_model(served: ServerProcess, value: int, text: str) -> None:
    with pytest.raises(InferenceServerException) as error:
        infer(served, "py", np.full((1, 4), value, np.int32), B[:1])
    assert text in str(error.value)
    assert "Traceback" not in str(error.value)


def send_codes(process: ServerProcess, module: Any, *codes: str) -> None:
    tensor = module.InferInput("CODE", [len(codes), 1], "BYTES")
    tensor.set_data_from_numpy(np.array([[code] for code in codes], dtype=object))
    with connect(module, process) as client:
        client.infer("codes", [tensor])


@pytest.mark.parametrize(
    ("code", "grpc_status", "http_status"),
    [
        ("UNKNOWN", "UNKNOWN", "500"),
        ("INTERNAL", "INTERNAL", "500"),
        ("NOT_FOUND", "NOT_FOUND", "404"),
        ("INVALID_ARG", "INVALID_ARGUMENT", "400"),
        ("UNAVAILABLE", "UNAVAILABLE", "503"),
        ("UNSUPPORTED", "UNIMPLEMENTED", "501"),
        ("ALREADY_EXISTS", "ALREADY_EXISTS", "400"),
        ("CANCELLED", "CANCELLED", "500"),
    ],
)
def test_the_code_of_an_error_of_a_model(served: ServerProcess, code: str, grpc_status: str, http_status: str) -> None:
    for module, status in ((triton_grpc, f"StatusCode.{grpc_status}"), (triton_http, http_status)):
        with pytest.raises(InferenceServerException) as error:
            send_codes(served, module, code)
        assert (error.value.status(), error.value.message()) == (status, "no")


def test_statistics_count_rows_without_dynamic_batching(served: ServerProcess) -> None:
    def statistics() -> tuple[int, int, dict[int, int]]:
        model = httpx.get(f"http://{served.url}/v2/models/codes/stats").json()["model_stats"][0]
        sizes = {each["batch_size"]: each["compute_infer"]["count"] for each in model["batch_stats"]}
        return model["inference_count"], model["execution_count"], sizes

    send_codes(served, triton_http, "a")
    inferences, executions, sizes = statistics()
    send_codes(served, triton_http, "a", "b", "c")
    send_codes(served, triton_grpc, "a")
    with pytest.raises(InferenceServerException):
        send_codes(served, triton_http, "INTERNAL", "b")
    assert statistics() == (inferences + 4, executions + 2, {1: sizes[1] + 1, 3: sizes.get(3, 0) + 1})


def test_a_requested_output_that_a_python_model_lacks(served: ServerProcess) -> None:
    with pytest.raises(InferenceServerException, match=r"unexpected inference output 'NONE' for model 'py'"):
        infer(served, "py", outputs=[triton_http.InferRequestedOutput("NONE")])


def test_lists_have_requests_of_equal_shapes(served: ServerProcess) -> None:
    def widths(width: int) -> list[int]:
        tensor = triton_http.InferInput("INPUT0", [1, width], "INT32")
        tensor.set_data_from_numpy(np.zeros((1, width), np.int32))
        with connect(triton_http, served) as client:
            return client.infer("widths", [tensor]).as_numpy("WIDTHS")[0].tolist()  # type: ignore[no-any-return]

    longest = 0
    with ThreadPoolExecutor(8) as threads:
        for _ in range(50):  # on a busy machine calls may come one by one
            results = list(threads.map(widths, [2, 3] * 12))
            assert [set(found) for found in results] == [{2}, {3}] * 12
            longest = max(longest, *map(len, results))
            if longest > 1:
                break
    assert longest > 1


def test_errors_of_calls_between_models(served: ServerProcess) -> None:
    with pytest.raises(InferenceServerException, match="Request for unknown model: 'nowhere' is not found"):
        infer(served, "bls", np.full((1, 4), 44, np.int32), B[:1])
    with pytest.raises(InferenceServerException, match="model 'bls' called itself"):
        infer(served, "bls", np.full((1, 4), 55, np.int32), B[:1])
    with pytest.raises(InferenceServerException, match="in ensemble 'ensemble', no 77"):
        infer(served, "ensemble", np.full((1, 4), 70, np.int32), np.full((1, 4), 7, np.int32))


def stream(process: ServerProcess, model: str, name: str, values: list[int], count: int) -> list[Any]:
    """Return the first `count` responses of a decoupled model over gRPC, each the list of its output or an error."""
    responses: queue.Queue[Any] = queue.Queue()
    tensor = triton_grpc.InferInput(name, [len(values)], "INT32")
    tensor.set_data_from_numpy(np.array(values, np.int32))
    with connect(triton_grpc, process) as client:
        client.start_stream(lambda result, error: responses.put(error or result))
        client.async_stream_infer(model, [tensor])
        try:
            found = [responses.get(timeout=60) for _ in range(count)]
        finally:
            client.stop_stream(cancel_requests=True)
    return [
        each if isinstance(each, Exception) else each.as_numpy(each.get_response().outputs[0].name).tolist()
        for each in found
    ]


def test_a_decoupled_model_streams(served: ServerProcess) -> None:
    assert stream(served, "repeat", "IN", [4, 5, 6], 3) == [[4], [5], [6]]
    (error,) = stream(served, "repeat", "IN", [-1], 1)
    assert "Python model 'repeat_0_0' is using the decoupled mode and the execute function must" in str(error)
    _, config, _ = served.request("GET", "/v2/models/repeat/config")
    assert config["model_transaction_policy"] == {"decoupled": True}


PARAMETERS = """
class TritonPythonModel:
    def execute(self, requests):
        texts = [[name for name in json.loads(request.parameters())] for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array(each, object))]) for each in texts]
"""


async def test_forwarded_headers_are_parameters(tmp_path: Path) -> None:
    tensors = NUMBER_TENSORS.replace('"OUT" data_type: TYPE_INT32 dims: 1', '"OUT" data_type: TYPE_STRING dims: -1')
    write(tmp_path / "m" / "config.pbtxt", f'backend: "python"\n{tensors}')
    write(tmp_path / "m" / "1" / "model.py", NUMBER_HEAD + PARAMETERS)
    body = {"inputs": [{"name": "IN", "shape": [1], "datatype": "INT32", "data": [1]}], "parameters": {"a": 1}}
    server = dragoman.Server(tmp_path, http_port=0, grpc_port=-1, forward_headers="x-*,timeout,triton_*")
    async with server, httpx.AsyncClient() as client:
        url = f"{server.http_url}/v2/models/m/infer"
        response = await client.post(url, json=body, headers={"X-One": "1"})
        assert response.json()["outputs"][0]["data"] == ["a", "x-one"]
        for name in "timeout", "triton_x":
            response = await client.post(url, json=body, headers={name: "1"})
            error = f"Header '{name}' is reserved for Triton usage and cannot be forwarded."
            assert (response.status_code, response.json()) == (400, {"error": error})
