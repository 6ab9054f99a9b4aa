"""Triton's extensions with its clients over REST and gRPC: statistics, model configuration, and who lists them."""

import json
import queue
import shutil
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from google.protobuf.json_format import MessageToDict
from tritonclient.utils import InferenceServerException

from e2e.server_process import MODELS, ServerProcess, running_server, wait_until

TOKEN = "open sesame"
CLIENTS = (triton_http, triton_grpc)
DURATIONS = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss")
PARTS = ("queue", "compute_input", "compute_infer", "compute_output")  # of "success"
ROWS = ("--placement", "process", "--max-batch-size", "8", "--max-batch-wait-s", "0.25")


@pytest.fixture(scope="module")
def plain() -> Iterator[ServerProcess]:
    """Models without batching; model control is off."""
    models = [f"{MODELS / 'shapes.py'}:{name}" for name in ("SumDiff", "Upper", "Count")]
    with running_server(*models, "--placement", "thread") as process:
        yield process


@pytest.fixture(scope="module")
def batched() -> Iterator[ServerProcess]:
    """A model with batching; model control is on."""
    with running_server(f"{MODELS / 'batched.py'}:Rows", *ROWS, "--control-token", TOKEN) as process:
        yield process


def connect(module: Any, process: ServerProcess) -> Any:
    if module is triton_http:
        return triton_http.InferenceServerClient(process.url, concurrency=4)
    return triton_grpc.InferenceServerClient(process.grpc_url)


def tensor(module: Any, name: str, array: Any, datatype: str) -> Any:
    tensor = module.InferInput(name, list(array.shape), datatype)
    tensor.set_data_from_numpy(array)
    return tensor


def statistics(client: Any, model: str = "", version: str = "") -> list[dict[str, Any]]:
    """Return the entries with all fields and numbers as int, whichever the wire."""
    response = client.get_inference_statistics(model, version)
    if not isinstance(response, dict):
        response = MessageToDict(response, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    return [as_numbers(entry) for entry in response["model_stats"]]


def as_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: v if k in ("name", "version") else as_numbers(v) for k, v in value.items()}
    if isinstance(value, list):
        return [as_numbers(each) for each in value]
    return int(value)


def configuration(client: Any, model: str) -> dict[str, Any]:
    if isinstance(client, triton_http.InferenceServerClient):
        return dict(client.get_model_config(model))
    return dict(client.get_model_config(model, as_json=True)["config"])


# --- statistics ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", CLIENTS)
def test_statistics_count_each_request_and_its_duration(plain: ServerProcess, module: Any) -> None:
    a, b = np.ones((3, 16), np.int32), np.ones((3, 16), np.int32)
    with connect(module, plain) as client:
        (before,) = statistics(client, "SumDiff")
        started_ms, started_s = time.time() * 1e3, time.monotonic()
        for _ in range(3):
            client.infer("SumDiff", [tensor(module, "INPUT0", a, "INT32"), tensor(module, "INPUT1", b, "INT32")])
        elapsed_ns = (time.monotonic() - started_s) * 1e9
        with pytest.raises(InferenceServerException):
            client.infer("SumDiff", [tensor(module, "INPUT0", a, "INT32")])
        (after,) = statistics(client, "SumDiff")
    assert (after["name"], after["version"]) == ("SumDiff", "1")
    assert after["inference_count"] - before["inference_count"] == 3
    assert after["execution_count"] - before["execution_count"] == 3
    stats, earlier = after["inference_stats"], before["inference_stats"]
    assert set(stats) == set(DURATIONS)
    counts = {name: stats[name]["count"] - earlier[name]["count"] for name in DURATIONS}
    assert counts == {**dict.fromkeys(DURATIONS, 3), "fail": 1, "cache_hit": 0, "cache_miss": 0}
    spent = {name: stats[name]["ns"] - earlier[name]["ns"] for name in DURATIONS}
    assert 0 < spent["success"] <= elapsed_ns
    assert 0 < spent["compute_infer"] < spent["success"]
    assert abs(spent["success"] - sum(spent[name] for name in PARTS)) <= len(PARTS)
    assert spent["queue"] < spent["success"]
    assert spent["fail"] > 0
    assert started_ms - 1 <= after["last_inference"] <= time.time() * 1e3 + 1
    (size,) = after["batch_stats"]
    assert (size["batch_size"], size["compute_infer"]["count"]) == (1, after["execution_count"])
    assert size["compute_infer"]["ns"] == stats["compute_infer"]["ns"]


def test_statistics_of_all_models_and_errors(plain: ServerProcess) -> None:
    for module in CLIENTS:
        with connect(module, plain) as client:
            assert [entry["name"] for entry in statistics(client)] == ["Count", "SumDiff", "Upper"]
            with pytest.raises(InferenceServerException, match="requested model 'nope' is not available"):
                statistics(client, "nope")
            with pytest.raises(InferenceServerException, match="model version is not available for model 'Upper'"):
                statistics(client, "Upper", "7")
    status, body, _ = plain.request("GET", "/v2/models/nope/stats")
    assert (status, body) == (400, {"error": "requested model 'nope' is not available"})
    status, body, _ = plain.request("GET", "/v2/models/Upper/stats")
    zero = {"count": 0, "ns": 0}
    unused = dict.fromkeys(DURATIONS, zero)
    assert status == 200
    assert body == {
        "model_stats": [
            {
                "name": "Upper",
                "version": "1",  # perf_analyzer aborts unless it is a number
                "last_inference": 0,
                "inference_count": 0,
                "execution_count": 0,
                "inference_stats": unused,
                "response_stats": {},
                "batch_stats": [],
                "memory_usage": [],
            }
        ]
    }


@pytest.mark.parametrize("module", CLIENTS)
def test_statistics_of_merged_requests(batched: ServerProcess, module: Any) -> None:
    def infer(x: Any) -> int:
        with connect(module, batched) as client:
            return int(client.infer("Rows", [tensor(module, "x", x, "FP64")]).as_numpy("together")[0])

    with connect(module, batched) as client:
        before = statistics(client, "Rows")[0]
        with ThreadPoolExecutor(2) as threads:  # 2 x 4 rows fill a batch
            assert list(threads.map(infer, [np.ones((4, 1))] * 2)) == [8, 8]
        with pytest.raises(InferenceServerException, match="no negative numbers"):
            infer(-np.ones((8, 1)))
        assert infer(np.ones((8, 1))) == 8
        after = statistics(client, "Rows")[0]
    assert after["inference_count"] - before["inference_count"] == 16
    assert after["execution_count"] - before["execution_count"] == 2
    stats, earlier = after["inference_stats"], before["inference_stats"]
    assert [stats[n]["count"] - earlier[n]["count"] for n in ("success", "queue", "fail")] == [3, 3, 1]
    spent = {name: stats[name]["ns"] - earlier[name]["ns"] for name in DURATIONS}
    assert spent["queue"] > 0
    # The model sleeps for 10 ms; each of three requests is charged the whole time of its batch.
    assert spent["compute_infer"] >= 30e6
    assert abs(spent["success"] - sum(spent[name] for name in PARTS)) <= len(PARTS)
    (size,) = after["batch_stats"]
    assert (size["batch_size"], size["compute_infer"]["count"]) == (8, after["execution_count"])
    executions = after["execution_count"]
    assert size["compute_infer"]["ns"] >= 10e6 * executions


# --- model configuration ---------------------------------------------------------------------------------


@pytest.mark.parametrize("module", CLIENTS)
def test_configuration_of_a_model_without_batching(plain: ServerProcess, module: Any) -> None:
    with connect(module, plain) as client:
        config = configuration(client, "SumDiff")
        with pytest.raises(InferenceServerException, match="Request for unknown model: 'nope' is not found"):
            configuration(client, "nope")
        streams = configuration(client, "Count")
    assert int(config.get("max_batch_size", 0)) == 0
    assert [(i["name"], i["data_type"], list(map(int, i["dims"]))) for i in config["input"]] == [
        ("INPUT0", "TYPE_INT32", [-1, 16]),
        ("INPUT1", "TYPE_INT32", [-1, 16]),
    ]
    assert "dynamic_batching" not in config
    assert "model_transaction_policy" not in config
    assert streams["model_transaction_policy"] == {"decoupled": True}


@pytest.mark.parametrize("module", CLIENTS)
def test_configuration_of_a_model_with_batching(batched: ServerProcess, module: Any) -> None:
    with connect(module, batched) as client:
        config = configuration(client, "Rows")
    assert config["max_batch_size"] == 8
    assert [(t["name"], t["data_type"], list(map(int, t["dims"]))) for t in config["input"]] == [
        ("x", "TYPE_FP64", [-1])
    ]
    batching = config["dynamic_batching"]
    assert batching["preferred_batch_size"] == [8]
    assert int(batching["max_queue_delay_microseconds"]) == 250_000
    assert "response_cache" not in config


def test_json_of_a_configuration(plain: ServerProcess) -> None:
    status, config, _ = plain.request("GET", "/v2/models/Upper/config")
    assert status == 200
    assert config == {
        "name": "Upper",
        "platform": "python",
        "backend": "python",
        "version_policy": {"latest": {"num_versions": 1}},
        "max_batch_size": 0,
        "input": [
            {
                "name": "text",
                "data_type": "TYPE_STRING",
                "format": "FORMAT_NONE",
                "dims": [-1],
                "is_shape_tensor": False,
                "allow_ragged_batch": False,
                "optional": False,
                "is_non_linear_format_io": False,
            }
        ],
        "output": [
            {
                "name": name,
                "data_type": data_type,
                "dims": [-1],
                "label_filename": "",
                "is_shape_tensor": False,
                "is_non_linear_format_io": False,
            }
            for name, data_type in (("upper", "TYPE_STRING"), ("length", "TYPE_INT64"))
        ],
        "instance_group": [
            {
                "name": "Upper",
                "count": 1,
                "gpus": [],
                "kind": "KIND_CPU",
                "profile": [],
                "passive": False,
                "secondary_devices": [],
                "host_policy": "",
            }
        ],
        "default_model_filename": "shapes.py",
        "cc_model_filenames": {},
        "metric_tags": {},
        "parameters": {},
        "model_warmup": [],
        "batch_input": [],
        "batch_output": [],
        "runtime": "",
        "optimization": {
            "priority": "PRIORITY_DEFAULT",
            "input_pinned_memory": {"enable": True},
            "output_pinned_memory": {"enable": True},
            "gather_kernel_buffer_threshold": 0,
            "eager_batching": False,
        },
    }


# --- the list of extensions ------------------------------------------------------------------------------


def test_only_extensions_that_are_on_are_listed(plain: ServerProcess, batched: ServerProcess) -> None:
    common = ["schedule_policy", "model_configuration", "binary_tensor_data", "parameters", "statistics"]
    control = ["model_repository", "model_repository(unload_dependents)"]
    for process, expected in (
        (plain, ["classification", "sequence", *common]),
        (batched, ["classification", "sequence", *control, *common, "trace", "logging"]),
    ):
        for module in CLIENTS:
            with connect(module, process) as client:
                metadata = client.get_server_metadata()
            found = metadata["extensions"] if isinstance(metadata, dict) else metadata.extensions
            assert list(found) == expected


# --- the sequence of calls of perf_analyzer --------------------------------------------------------------


@pytest.mark.skipif(shutil.which("perf_analyzer") is None, reason="needs a program of the package perf-analyzer")
@pytest.mark.parametrize("transport", ["http", "grpc"])
def test_perf_analyzer(plain: ServerProcess, transport: str) -> None:
    url = f"127.0.0.1:{plain.http_port if transport == 'http' else plain.grpc_port}"
    command = ["perf_analyzer", "-m", "SumDiff", "-i", transport, "-u", url, "--request-count", "50", "--shape"]
    result = subprocess.run(
        [*command, "INPUT0:1,16", "--shape", "INPUT1:1,16"], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Successful request count: 50" in result.stdout


@pytest.mark.parametrize("module", CLIENTS)
def test_the_calls_of_perf_analyzer(batched: ServerProcess, module: Any) -> None:
    with connect(module, batched) as client:
        metadata = client.get_model_metadata("Rows", **({"as_json": True} if module is triton_grpc else {}))
        config = configuration(client, "Rows")
        server = client.get_server_metadata(**({"as_json": True} if module is triton_grpc else {}))
        assert "statistics" in server["extensions"]
        names = {each["name"] for each in metadata["inputs"]}
        assert {each["name"] for each in config["input"]} <= names
        shape = [int(n) for n in metadata["inputs"][0]["shape"]]
        assert len(shape) == 1 + len(config["input"][0]["dims"])
        before = statistics(client, "Rows")[0]
        outputs = [module.InferRequestedOutput(each["name"]) for each in config["output"]]
        for number in range(4):
            x = tensor(module, "x", np.ones((8, 2)), "FP64")
            options: dict[str, Any] = {} if module is triton_http else {"parameters": {}}
            client.infer("Rows", [x], outputs=outputs, request_id=str(number), **options)
        after = statistics(client, "Rows")[0]
    assert after["inference_stats"]["success"]["count"] - before["inference_stats"]["success"]["count"] == 4
    assert after["inference_count"] - before["inference_count"] == 32


# --- error texts that clients compare ------------------------------------------------------------------------


def upper(module: Any, client: Any, model: str = "Upper", version: str = "") -> None:
    client.infer(model, [tensor(module, "text", np.array([b"a"], object), "BYTES")], model_version=version)


def sum_of(module: Any, client: Any, *names: str) -> None:
    client.infer("SumDiff", [tensor(module, name, np.ones((1, 16), np.int32), "INT32") for name in names])


TEXTS: dict[str, tuple[Any, str]] = {
    "unknown model": (
        lambda module, client: upper(module, client, "nope"),
        "Request for unknown model: 'nope' is not found",
    ),
    "unknown version": (
        lambda module, client: upper(module, client, version="7"),
        "Request for unknown model: 'Upper' version 7 is not found",
    ),
    "statistics": (
        lambda _, client: client.get_inference_statistics("nope"),
        "requested model 'nope' is not available",
    ),
    "statistics of a version": (
        lambda _, client: client.get_inference_statistics("Upper", "7"),
        "requested model version is not available for model 'Upper'",
    ),
    "number of inputs": (
        lambda module, client: sum_of(module, client, "INPUT0"),
        "expected 2 inputs but got 1 inputs for model 'SumDiff'",
    ),
}


@pytest.mark.parametrize("module", CLIENTS)
@pytest.mark.parametrize("name", TEXTS)
def test_error_texts(plain: ServerProcess, module: Any, name: str) -> None:
    call, text = TEXTS[name]
    with connect(module, plain) as client, pytest.raises(InferenceServerException) as caught:
        call(module, client)
    assert caught.value.message().startswith(text)


@pytest.mark.parametrize("module", CLIENTS)
def test_error_texts_of_batching_and_control(batched: ServerProcess, module: Any) -> None:
    headers = {"authorization": f"Bearer {TOKEN}"}
    with connect(module, batched) as client:
        with pytest.raises(InferenceServerException) as caught:
            client.load_model("nope", headers=headers)
        assert caught.value.message().startswith("failed to load 'nope', failed to poll from model repository")
        with pytest.raises(InferenceServerException) as caught:
            client.infer("Rows", [tensor(module, "x", np.ones((9, 1)), "FP64")])
        assert caught.value.message().startswith("inference request batch-size must be <= 8 for 'Rows'")
        if module is triton_grpc:  # the HTTP client does not quote the slash
            with pytest.raises(InferenceServerException, match="model name must not contain path traversal characters"):
                client.load_model("../x", headers=headers)
            for name in " ..", ".. ", "model/":
                with pytest.raises(InferenceServerException, match="must not contain path traversal characters"):
                    client.load_model(name, headers=headers)
            for name in "", " \t ":
                with pytest.raises(InferenceServerException, match="Model name cannot be empty"):
                    client.load_model(name, headers=headers)
            with pytest.raises(InferenceServerException, match=r"name '\.\./x' is not allowed"):
                client.unload_model("../x", headers=headers)
        with pytest.raises(InferenceServerException) as caught:
            client.load_model("...", headers=headers)
        assert caught.value.message().startswith("failed to load '...', failed to poll from model repository: model")


# --- classification ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """`Scores` with labels of its classes: the second is empty, the fourth missing; and a model without batch axis."""
    folder = tmp_path_factory.mktemp("labels")
    for name, labels in (("Scores", "cat\r\n\ndog ä"), ("Fixed", "one\n")):
        (folder / name).mkdir()
        (folder / name / "labels.txt").write_bytes(labels.encode())
        (folder / name / "dragoman.toml").write_text(
            f'[model]\nuri = "{MODELS / "shapes.py"}:{name}"\nlabels = {{scores = "labels.txt"}}\n'
        )
    (folder / "Cached").mkdir()
    (folder / "Cached" / "dragoman.toml").write_text(
        f'[model]\nuri = "{MODELS / "shapes.py"}:Scores"\nresponse_cache_bytes = 1000000\n'
    )
    with running_server(str(folder), "--placement", "thread") as process:
        yield process


def test_statistics_and_configuration_of_a_model_with_a_cache(labelled: ServerProcess) -> None:
    with connect(triton_http, labelled) as client:
        for _ in range(3):
            client.infer("Cached", [tensor(triton_http, "x", SCORES, "FP32")])
        assert configuration(client, "Cached")["response_cache"] == {"enable": True}
        assert "response_cache" not in configuration(client, "Scores")
        (entry,) = statistics(client, "Cached")
    stats = entry["inference_stats"]
    assert [stats[name]["count"] for name in ("success", "cache_hit", "cache_miss")] == [3, 2, 1]
    assert (entry["inference_count"], entry["execution_count"]) == (1, 1)


SCORES = np.array([[0.5, 0.25, 1.5, 0.125], [2, 4, 1, 3]], np.float32)
BEST = [[b"1.500000:2:dog \xc3\xa4", b"0.500000:0:cat"], [b"4.000000:1", b"3.000000:3"]]


def classes(client: Any, module: Any, model: str, x: Any, count: int) -> Any:
    outputs = [module.InferRequestedOutput("scores", class_count=count)]
    return client.infer(model, [tensor(module, "x", x, "FP32")], outputs=outputs).as_numpy("scores").tolist()


@pytest.mark.parametrize("module", CLIENTS)
def test_classes_have_labels(labelled: ServerProcess, module: Any) -> None:
    with connect(module, labelled) as client:
        assert classes(client, module, "Scores", SCORES, 2) == BEST
        assert classes(client, module, "Fixed", SCORES.reshape(1, 8, 1), 9)[:2] == [b"4.000000:5", b"3.000000:7"]
        assert classes(client, module, "Fixed", np.eye(1, 8, dtype=np.float32).reshape(1, 8, 1), 1) == [
            b"1.000000:0:one"
        ]
        assert configuration(client, "Scores")["output"][0]["label_filename"] == "labels.txt"
        with pytest.raises(InferenceServerException, match="Request for unknown model: 'nope' is not found"):
            classes(client, module, "nope", SCORES, 2)


def test_classes_of_a_stream(labelled: ServerProcess) -> None:
    received: queue.Queue[Any] = queue.Queue()
    with connect(triton_grpc, labelled) as client:
        client.start_stream(lambda result, error: received.put(error or result.as_numpy("scores").tolist()))
        outputs = [triton_grpc.InferRequestedOutput("scores", class_count=2)]
        client.async_stream_infer("Scores", [tensor(triton_grpc, "x", SCORES, "FP32")], outputs=outputs)
        assert received.get(timeout=60) == BEST


def test_classes_of_an_event_stream(labelled: ServerProcess) -> None:
    body = {
        "inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}],
        "outputs": [{"name": "scores", "parameters": {"classification": 1}}],
    }
    status, events, _ = labelled.request("POST", "/v2/models/Scores/infer_stream", body)
    assert status == 200
    assert json.loads(events.removeprefix(b"data: "))["outputs"][0]["data"] == ["4.000000:3"]


def test_a_model_whose_labels_cannot_be_read_is_not_loaded(start: Any, tmp_path: Path) -> None:
    (tmp_path / "dragoman.toml").write_text(
        f'[model]\nname = "m"\nuri = "{MODELS / "shapes.py"}:Scores"\nlabels = {{scores = "none.txt"}}\n'
    )
    process = start(str(tmp_path))
    text = "labels of output 'scores': 'none.txt' cannot be read: No such file"
    wait_until(lambda: text in process.log(), "the failure to load")


# --- contents of gRPC responses --------------------------------------------------------------------------------


def test_typed_requests_get_raw_contents_as_the_examples_of_triton_expect(plain: ServerProcess) -> None:
    pb = triton_grpc.service_pb2
    request = pb.ModelInferRequest(model_name="SumDiff")
    for name in ("INPUT0", "INPUT1"):
        request.inputs.add(name=name, datatype="INT32", shape=[1, 16]).contents.int_contents.extend(range(16))
    with grpc.insecure_channel(plain.grpc_url) as channel:
        stub = triton_grpc.service_pb2_grpc.GRPCInferenceServiceStub(channel)
        raw = stub.ModelInfer(request)
        typed = stub.ModelInfer(request, metadata=[("dragoman-output-contents", "typed")])
        assert not stub.ModelReady(pb.ModelReadyRequest(name="nope")).ready
    assert np.frombuffer(raw.raw_output_contents[0], "<i4").tolist() == [2 * i for i in range(16)]
    assert not typed.raw_output_contents
    assert list(typed.outputs[0].contents.int_contents) == [2 * i for i in range(16)]


def test_the_repository_service_of_mlserver(batched: ServerProcess) -> None:
    pb, bearer = triton_grpc.service_pb2, [("authorization", f"Bearer {TOKEN}")]
    with grpc.insecure_channel(batched.grpc_url) as channel:

        def call(method: str, request: Any, response: Any, **options: Any) -> Any:
            path = f"/inference.model_repository.ModelRepositoryService/{method}"
            return channel.unary_unary(path, response_deserializer=response.FromString)(
                request.SerializeToString(), timeout=60, **options
            )

        index = pb.RepositoryIndexRequest(), pb.RepositoryIndexResponse
        with pytest.raises(grpc.RpcError) as denied:
            call("RepositoryIndex", *index)
        assert denied.value.code() == grpc.StatusCode.UNAUTHENTICATED
        for verb, state in (("Unload", "UNAVAILABLE"), ("Load", "READY")):
            request = getattr(pb, f"RepositoryModel{verb}Request")(model_name="Rows")
            call(f"RepositoryModel{verb}", request, getattr(pb, f"RepositoryModel{verb}Response"), metadata=bearer)
            (model,) = call("RepositoryIndex", *index, metadata=bearer).models
            assert (model.name, model.state) == ("Rows", state)
        with pytest.raises(grpc.RpcError) as unknown:
            call("ModelInfer", pb.ModelInferRequest(), pb.ModelInferResponse)
        assert unknown.value.code() == grpc.StatusCode.UNIMPLEMENTED
