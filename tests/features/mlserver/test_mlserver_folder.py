"""Custom models of MLServer return the same responses as there: the literals were recorded from MLServer."""

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import requests
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from prometheus_client.parser import text_string_to_metric_families
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException

from dragoman.assembly import load_protocols, protocol_policy
from dragoman.core.calls import DescribeModels
from dragoman.core.errors import InvalidInput, InvalidOutput
from dragoman.engine_setup import settings_for
from dragoman.protocols.custom_handlers import check_headers
from dragoman.protocols.wire import HttpRequest, PreliminaryCall
from dragoman.settings import parse_settings
from dragoman_mlserver.mlserver.grpc import (
    GRPCInferenceServiceStub,
    ModelInferRequestConverter,
    ModelInferResponseConverter,
    ModelMetadataRequest,
    ModelMetadataResponseConverter,
)
from dragoman_mlserver.mlserver.types import InferenceRequest
from e2e.server_process import ServerProcess, running_server

FOLDER = Path(__file__).parent / "folder"


def tensor(name: str, datatype: str, shape: list[int], data: list[Any], **more: Any) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": shape, "data": data, **more}


NAMES = tensor("names", "BYTES", [2], ["Ada", "Bob"])
TIMES = tensor("times", "INT32", [2], [1, 2])
SENTENCE = tensor("t", "BYTES", [1], ["to be or"])

# Written by MLServer 1.7.1 for these models and requests. Its random ids and headers are taken off by `plain`.
RESPONSES = [
    (
        "row-sums/infer",
        {"id": "7", "inputs": [tensor("x", "FP32", [2, 3], [1, 2, 3, 4, 5, 6.5])]},
        b'{"model_name":"row-sums","model_version":"v1.2","id":"7","parameters":{},"outputs":[{"name":"total",'
        b'"shape":[2,1],"datatype":"FP32","parameters":{"content_type":"np"},"data":[6.0,15.5]}]}',
    ),
    (
        "row-sums/versions/v1.2/infer",
        {"inputs": [tensor("x", "INT64", [2, 2], [1, 2, 3, 4])]},
        b'{"model_name":"row-sums","model_version":"v1.2","parameters":{},"outputs":[{"name":"total","shape":[2,1],'
        b'"datatype":"INT64","parameters":{"content_type":"np"},"data":[3,7]}]}',
    ),
    (
        "row-sums/infer",
        {"id": "8", "inputs": [tensor("x", "FP64", [1, 2], [1, None])]},
        b'{"model_name":"row-sums","model_version":"v1.2","id":"8","parameters":{},"outputs":[{"name":"total",'
        b'"shape":[1,1],"datatype":"FP64","parameters":{"content_type":"np"},"data":[null]}]}',
    ),
    (
        "greetings/infer",
        {"id": "1", "inputs": [NAMES, TIMES]},
        b'{"model_name":"greetings","id":"1","parameters":{},"outputs":[{"name":"output-0","shape":[2,1],'
        b'"datatype":"BYTES","parameters":{"content_type":"str"},"data":["Hello Ada!","Hello Hello Bob!"]}]}',
    ),
    (
        "words/infer",
        {"inputs": [SENTENCE]},
        b'{"model_name":"words","parameters":{},"outputs":[{"name":"output","shape":[1],"datatype":"BYTES",'
        b'"data":["TO BE OR"]}]}',
    ),
    (
        "numpy-sum/infer",
        {"inputs": [tensor("a", "FP32", [2], [1, 2]), tensor("b", "FP32", [2], [3, 4])]},
        b'{"model_name":"numpy-sum","parameters":{},"outputs":[{"name":"sum","shape":[2,1],"datatype":"FP32",'
        b'"parameters":{"content_type":"np"},"data":[4.0,6.0]}]}',
    ),
    (
        "numpy-sum/infer",
        {"inputs": [tensor("a", "FP32", [2], [1, 2])], "outputs": [{"name": "mine"}]},
        b'{"model_name":"numpy-sum","parameters":{},"outputs":[{"name":"mine","shape":[1,1],"datatype":"FP32",'
        b'"parameters":{"content_type":"np"},"data":[3.0]}]}',
    ),
    (
        "tables/infer",
        {
            "inputs": [
                tensor("First Name", "BYTES", [2], ["Joanne", "Michael"]),
                tensor("Age", "INT32", [2], [34, 22]),
            ]
        },
        b'{"model_name":"tables","parameters":{"content_type":"pd"},"outputs":[{"name":"name","shape":[2,1],'
        b'"datatype":"BYTES","parameters":{"content_type":"str"},"data":["Joanne","Michael"]},{"name":"age",'
        b'"shape":[2,1],"datatype":"INT32","data":[35,23]}]}',
    ),
]


def plain(answer: dict[str, Any]) -> dict[str, Any]:
    """An answer without what says nothing: empty parameters, and what only our own codecs read."""
    outputs = []
    for output in answer["outputs"]:
        parameters = {k: v for k, v in output.get("parameters", {}).items() if k != "pandas_dtype"}
        bare = {k: v for k, v in output.items() if k != "parameters"}
        outputs.append({**bare, **({"parameters": parameters} if parameters else {})})
    parameters = {k: v for k, v in answer.get("parameters", {}).items() if k != "headers"}
    bare = {k: v for k, v in answer.items() if k not in ("parameters", "outputs")}
    return {**bare, **({"parameters": parameters} if parameters else {}), "outputs": outputs}


def infer(process: ServerProcess, path: str, body: Any, **options: Any) -> requests.Response:
    model, _, rest = path.partition("/")
    return requests.post(f"http://{process.url}/v2/models/{model}/{rest}", json=body, timeout=60, **options)


@pytest.mark.parametrize(("path", "body", "expected"), RESPONSES)
def test_responses_are_those_of_mlserver(served_folder: ServerProcess, path: str, body: Any, expected: bytes) -> None:
    response = infer(served_folder, path, body)
    assert response.status_code == 200, response.text
    assert plain(response.json()) == plain(json.loads(expected))


def test_a_model_may_stream_on_request(served_folder: ServerProcess) -> None:
    text = infer(served_folder, "words/infer_stream", {"inputs": [SENTENCE]}).text
    chunks = [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n") if line]
    # MLServer: three such events, with headers of its own among their parameters.
    want = [{"name": "output", "shape": [1], "datatype": "BYTES", "data": [word]} for word in ("to", "be", "or")]
    assert [chunk["outputs"] for chunk in chunks] == [[each] for each in want]


def test_requests_written_by_the_types_of_mlserver(served_folder: ServerProcess) -> None:
    # `InferenceRequest(...).dict()` of the real package, with a null for each field that is not set.
    nulls = {"content_type": "np", "headers": None}
    x = tensor("x", "FP32", [1, 2], [1, 2], parameters=nulls)
    response = infer(served_folder, "row-sums/infer", {"id": None, "parameters": nulls, "inputs": [x], "outputs": None})
    assert response.json()["outputs"][0]["data"] == [3.0]


@pytest.mark.parametrize(
    ("path", "inputs", "message"),
    [
        ("greetings/infer", [NAMES], "input 'times' is missing: expected inputs 'names', 'times'"),
        # MLServer's own words.
        ("greetings/infer", [NAMES, TIMES, {**TIMES, "name": "more"}], "Input 'more' was not found. Available inputs"),
        (
            "row-sums/infer",
            [tensor("x", "FP32", [1], [1], parameters={"content_type": "nope"})],
            "input 'x': unknown content type 'nope'",
        ),
        ("numpy-sum/infer", [tensor("a", "FP32", [2, 2], [1, 2])], "shape [2, 2] needs 4 elements"),
    ],
)
def test_invalid_requests_are_400(served_folder: ServerProcess, path: str, inputs: list[Any], message: str) -> None:
    response = infer(served_folder, path, {"inputs": inputs})
    assert response.status_code == 400
    assert message in response.json()["error"]


@pytest.mark.parametrize(
    ("method", "path", "body", "answer"),
    [
        ("POST", "/my-custom-endpoint", "[1, 2, 3]", b"6"),
        ("POST", "/request-body?unit=m", "[1, 2, 3]", b'["POST","m",6]'),
        ("POST", "/length", "2000", b"2000"),
        ("POST", "/marked", '{"rows": [1, 2, 3, 4]}', b'[[1,2,3],"application/json","{m"]'),
        ("POST", "/marked?max=1&unit=km", '{"rows": [1, 2]}', b'[[1],"application/json","{km"]'),
        ("GET", "/scores/ada%20l/3", None, b'{"name":"ada l","score":3.0}'),
        ("GET", "/scores/ada/3?factor=0.5&shout=yes", None, b'{"name":"ADA","score":1.5}'),
        (
            "PUT",
            "/mixed?unit=km",
            '{"rows": [1, 2], "options": {"b": 1, "a": 2}}',
            b'{"rows":2,"options":["a","b"],"unit":"km"}',
        ),
        # Paths of other protocols than MLServer's.
        ("POST", "/generate", "3", b"[0,1,2]"),
        ("GET", "/version", None, b'"tallies 1"'),
        ("POST", "/health", "5", b"5"),
    ],
)
def test_custom_handlers_serve_their_paths(
    served_folder: ServerProcess, method: str, path: str, body: str | None, answer: bytes
) -> None:
    # As FastAPI writes it, which serves these methods there.
    headers = {"content-type": "application/json"} if body else {}
    response = requests.request(method, f"http://{served_folder.url}{path}", data=body, headers=headers, timeout=60)
    assert (response.status_code, response.content) == (200, answer)
    assert response.headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "message"),
    [
        ("POST", "/my-custom-endpoint", "{", 400, "the request body is not valid JSON"),
        ("POST", "/my-custom-endpoint", f"[{'1,' * (1 << 19)}1]", 400, "too many values in JSON"),
        ("POST", "/my-custom-endpoint", "[" * 1000 + "]" * 1000, 400, "JSON nests too deep"),
        ("POST", "/request-body?unit=m", f"[{'1,' * (1 << 19)}1]", 400, "too many values in JSON"),
        ("POST", "/my-custom-endpoint", "", 400, "'payload' is missing; expected list"),
        ("POST", "/my-custom-endpoint", '{"a": 1}', 400, "'payload': expected list"),
        ("POST", "/length", "", 400, "'length' is missing; expected int"),
        ("POST", "/length", '"x"', 400, "'length': expected int"),
        ("POST", "/length", "3.7", 400, "'length': expected int, got '3.7'"),
        ("POST", "/marked?max=3.0", '{"rows": []}', 400, "'limit': expected int, got '3.0'"),
        ("POST", "/marked", "[1]", 400, "'rows' is missing; expected list"),
        ("POST", "/marked?max=x", '{"rows": []}', 400, "'limit': expected int, got 'x'"),
        ("GET", "/scores/ada/three", None, 400, "'turn': expected int, got 'three'"),
        ("POST", "/scores/ada/3", None, 404, "no such path: /scores/ada/3"),
        ("GET", "/scores/ada", None, 404, "no such path: /scores/ada"),
        ("POST", "/broken", '{"zero": 0}', 500, "model 'tallies' failed: ZeroDivisionError"),
    ],
)
def test_errors_of_custom_handlers(
    served_folder: ServerProcess, method: str, path: str, body: str | None, status: int, message: str
) -> None:
    response = requests.request(method, f"http://{served_folder.url}{path}", data=body, timeout=60)
    assert response.status_code == status
    assert message in response.json()["error"]


def test_paths_without_a_custom_handler_are_those_of_the_protocols(served_folder: ServerProcess) -> None:
    base = f"http://{served_folder.url}"
    assert requests.get(f"{base}/v2", timeout=60).json()["name"] == "our-folder"
    assert requests.get(f"{base}/health", timeout=60).status_code == 200
    assert requests.get(f"{base}/v1/models", timeout=60).json()["object"] == "list"
    # The routes of another protocol at the same path.
    error = requests.post(f"{base}/v1/models/nobody:predict", json={"instances": []}, timeout=60)
    assert (error.status_code, error.json()) == (404, {"error": "Model nobody not found"})
    refused = requests.delete(f"{base}/generate", timeout=60)
    assert (refused.status_code, refused.headers["allow"]) == (405, "OPTIONS, POST")
    assert "method DELETE is not allowed here; expected one of OPTIONS, POST" in refused.text


@pytest.mark.parametrize(("key", "is_changed"), [("", True), ("k" * 24, False)])
def test_custom_handlers_need_the_role_infer(key: str, is_changed: bool) -> None:
    protocols, _ = load_protocols(parse_settings({"responses_as": "mlserver", **({"api_key": key} if key else {})}))
    routes = {f"{route.method} {route.pattern}": route for protocol in protocols for route in protocol.routes}
    request = HttpRequest("GET", "/version", {}, {}, b"")
    lists_models = [
        isinstance(found := routes[name].endpoint(request), PreliminaryCall)
        and isinstance(found.request.call, DescribeModels)
        for name in ("GET /version", "GET /ping")
    ]
    assert lists_models == [is_changed, False]
    assert (routes["POST /version"].role, routes["POST /generate"].role) == ("infer", "infer")


def test_metrics_of_models_are_exported(served_folder: ServerProcess) -> None:
    def samples() -> dict[str, float]:
        text = requests.get(f"http://{served_folder.url}/metrics", timeout=60).text
        found = [s for f in text_string_to_metric_families(text) for s in f.samples]
        mine = {"model_name": "tallies", "model_version": ""}
        return {s.name: s.value for s in found if s.name.startswith("tally_size") and "le" not in s.labels} | {
            "labels": float(all(s.labels.items() >= mine.items() for s in found if s.name.startswith("tally_size")))
        }

    before = samples()
    requests.post(f"http://{served_folder.url}/my-custom-endpoint", json=[1, 2, 3], timeout=60)
    after = samples()
    assert after["labels"] == 1
    assert after["tally_size_count"] - before.get("tally_size_count", 0) == 1
    assert after["tally_size_sum"] - before.get("tally_size_sum", 0) == 3


def test_metadata_come_from_the_settings(served_folder: ServerProcess) -> None:
    response = requests.get(f"http://{served_folder.url}/v2/models/numpy-sum", timeout=60).json()
    assert (response["platform"], response["versions"]) == ("our-own", [])
    assert [(i["name"], i["datatype"], i["shape"]) for i in response["inputs"]] == [("a", "FP32", [-1])]
    assert requests.get(f"http://{served_folder.url}/v2", timeout=60).json()["name"] == "our-folder"


def test_binary_tensors_over_http(served_folder: ServerProcess) -> None:
    client = triton_http.InferenceServerClient(served_folder.url)
    rows = np.arange(6, dtype=np.float32).reshape(2, 3)
    tensor = triton_http.InferInput("x", [2, 3], "FP32")
    tensor.set_data_from_numpy(rows)
    output = client.infer("row-sums", [tensor]).as_numpy("total")
    np.testing.assert_array_equal(output, rows.sum(axis=1, keepdims=True))
    client.close()


def test_text_over_grpc(served_folder: ServerProcess) -> None:
    client = triton_grpc.InferenceServerClient(served_folder.grpc_url)
    names, times = triton_grpc.InferInput("names", [2], "BYTES"), triton_grpc.InferInput("times", [2], "INT32")
    names.set_data_from_numpy(np.array([b"Ada", "Bö".encode()], dtype=object))
    times.set_data_from_numpy(np.array([1, 2], dtype=np.int32))
    output = client.infer("greetings", [names, times]).as_numpy("output-0")
    assert [e.decode() for e in output.ravel()] == ["Hello Ada!", "Hello Hello Bö!"]
    client.close()


def test_two_folders_of_one_name_are_its_versions(tmp_path: Path) -> None:
    for version, factor in (("2", 1), ("10", 10)):
        folder = tmp_path / f"sums-{version}"
        shutil.copytree(FOLDER / "row_sums", folder)
        (folder / "summing.py").write_text(
            (folder / "summing.py").read_text().replace("self.factor = 1", f"self.factor = {factor}")
        )
        settings = {"name": "sums", "implementation": "summing.RowSums", "parameters": {"version": version}}
        (folder / "model-settings.json").write_text(json.dumps(settings))
    with running_server(str(tmp_path)) as process:
        body = {"inputs": [tensor("x", "INT64", [1, 2], [1, 2])]}
        newest, old = infer(process, "sums/infer", body).json(), infer(process, "sums/versions/2/infer", body).json()
    assert (newest["model_version"], newest["outputs"][0]["data"]) == ("10", [30])
    assert (old["model_version"], old["outputs"][0]["data"]) == ("2", [3])


def test_the_environment_alone_may_describe_a_model(tmp_path: Path) -> None:
    shutil.copy(FOLDER / "row_sums" / "summing.py", tmp_path)
    (tmp_path / ".env").write_text("MLSERVER_MODEL_NAME=named-in-a-file\nMLSERVER_SERVER_NAME='theirs'\n")
    variables = {
        "MLSERVER_MODEL_NAME": "sums",
        "MLSERVER_MODEL_IMPLEMENTATION": "summing.RowSums",
        "MLSERVER_MODEL_VERSION": "v3",
        "MLSERVER_PARALLEL_WORKERS": "0",
    }
    with running_server(str(tmp_path), environment=variables) as process:
        response = infer(process, "sums/infer", {"inputs": [tensor("x", "INT64", [1, 2], [1, 2])]}).json()
        assert (response["model_version"], response["outputs"][0]["data"]) == ("v3", [3])
        assert requests.get(f"http://{process.url}/v2", timeout=60).json()["name"] == "theirs"


def test_runtimes_of_mlserver_accept_any_input_name(tmp_path: Path) -> None:
    from joblib import dump
    from sklearn.linear_model import LinearRegression

    dump(LinearRegression().fit(np.eye(3), [1.0, 2.0, 3.0]), tmp_path / "model.joblib")
    settings = {"name": "line", "implementation": "mlserver_sklearn.SKLearnModel", "parameters": {"uri": "."}}
    (tmp_path / "model-settings.json").write_text(json.dumps(settings))
    with running_server(str(tmp_path), "--allow-pickle") as process:
        response = infer(process, "line/infer", {"inputs": [tensor("predict-it", "FP32", [1, 3], [0, 1, 0])]}).json()
    assert response["outputs"][0]["name"] == "predict"
    assert response["outputs"][0]["data"] == pytest.approx([2.0])


def test_an_xgboost_classifier_returns_labels(tmp_path: Path) -> None:
    import xgboost
    from sklearn.datasets import load_iris

    x, y = load_iris(return_X_y=True)
    classifier = xgboost.XGBClassifier(n_estimators=5).fit(x[:100], y[:100])
    classifier.save_model(tmp_path / "model.json")
    settings = {"name": "iris", "implementation": "mlserver_xgboost.XGBoostModel", "parameters": {"uri": "."}}
    (tmp_path / "model-settings.json").write_text(json.dumps(settings))
    rows = tensor("predict", "FP32", [2, 4], x[[0, 99]].reshape(-1).tolist())
    with running_server(str(tmp_path)) as process:
        (labels,) = infer(process, "iris/infer", {"inputs": [rows]}).json()["outputs"]
        wanted = [{"name": "predict_proba"}]
        (chances,) = infer(process, "iris/infer", {"inputs": [rows], "outputs": wanted}).json()["outputs"]
    assert (labels["name"], labels["datatype"], labels["data"]) == ("predict", "INT64", [0, 1])
    assert (chances["name"], chances["datatype"], chances["shape"]) == ("predict_proba", "FP32", [2, 2])
    expected = classifier.predict_proba(x[[0, 99]].astype(np.float32))
    assert np.float32(chances["data"]).tolist() == expected.reshape(-1).tolist()


KINDS = """
from mlserver import MLModel
from mlserver.codecs import StringCodec
from mlserver.types import InferenceResponse


class Kinds(MLModel):
    async def predict(self, payload):
        (given,) = payload.inputs
        kinds = ["str" if isinstance(each, str) else type(each).__name__ for each in given.data]
        return InferenceResponse(model_name=self.name, outputs=[StringCodec.encode_output("kinds", kinds)])
"""


@pytest.fixture(scope="module", params=[0, 32])
def kinds(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("kinds")
    (folder / "kinds.py").write_text(KINDS)
    settings = {"name": "kinds", "implementation": "kinds.Kinds", "max_batch_size": request.param}
    (folder / "model-settings.json").write_text(json.dumps(settings))
    with running_server(str(folder)) as process:
        yield process


@pytest.mark.parametrize(
    "elements", [[b"P2 1 1 255 7"], [b"\xff\xd8abc"], [b"a", b"\xff"], [b"ab"] * 20, [b"a\0"] * 20]
)
def test_bytes_are_bytes_whatever_their_content(kinds: ServerProcess, elements: list[bytes]) -> None:
    tensor = triton_grpc.InferInput("x", [len(elements)], "BYTES")
    tensor.set_data_from_numpy(np.array(elements, object))
    over_http = triton_http.InferInput("x", [len(elements)], "BYTES")
    over_http.set_data_from_numpy(np.array(elements, object), binary_data=True)
    with (
        triton_grpc.InferenceServerClient(kinds.grpc_url) as grpc,
        triton_http.InferenceServerClient(kinds.url) as http,
    ):
        for found in (grpc.infer("kinds", [tensor]), http.infer("kinds", [over_http])):
            assert found.as_numpy("kinds").ravel().tolist() == [b"bytes"] * len(elements)


@pytest.mark.parametrize("shape", [[2], [2, 1]])
def test_json_text_is_text(kinds: ServerProcess, shape: list[int]) -> None:
    data: list[Any] = ["a", "\xff"] if len(shape) == 1 else [["a"], ["b"]]
    response = infer(kinds, "kinds/infer", {"inputs": [tensor("x", "BYTES", shape, data)]}).json()
    assert response["outputs"][0]["data"] == ["str", "str"]


CALLERS = """
from mlserver import MLModel
from mlserver.codecs import StringCodec
from mlserver.types import InferenceResponse


class Callers(MLModel):
    async def predict(self, payload):
        headers = (payload.parameters.headers or {}) if payload.parameters else {}
        seen = [payload.id, *(f"{k}={v}" for k, v in sorted(headers.items()))]
        return InferenceResponse(model_name=self.name, outputs=[StringCodec.encode_output("seen", seen)])
"""


@pytest.mark.parametrize("batch", [0, 8])
def test_a_model_gets_the_forwarded_headers(tmp_path: Path, batch: int) -> None:
    (tmp_path / "calling.py").write_text(CALLERS)
    settings = {"name": "callers", "implementation": "calling.Callers", "max_batch_size": batch}
    (tmp_path / "model-settings.json").write_text(json.dumps(settings))
    body = {"id": "7", "inputs": [tensor("x", "FP32", [1], [1])]}
    with running_server(str(tmp_path), "--forward-headers", "X-User,x-trace-*,*o[kr]i*") as process:

        def headers_seen(user: str) -> list[str]:
            headers = {"x-user": user, "X-Trace-Id": "t", "x-other": "o", "authorization": "Bearer s", "cookie": "c"}
            found: list[str] = infer(process, "callers/infer", body, headers=headers).json()["outputs"][0]["data"]
            return [each for each in found if not each.startswith("Ce-")]

        users = [f"user-{n}" for n in range(16)]
        with ThreadPoolExecutor(16) as pool:
            assert list(pool.map(headers_seen, users)) == [["7", "x-trace-id=t", f"x-user={user}"] for user in users]


EVENT = {
    "Ce-Specversion": "0.3",
    "Ce-Source": "io.seldon.serving.deployment.our-folder",
    "Ce-Type": "io.seldon.serving.inference.response",
    "Ce-Modelid": "row-sums",
    "Ce-Inferenceservicename": "our-folder",
    "Ce-Endpoint": "row-sums",
    "Ce-Id": "7",
    "Ce-Requestid": "7",
}


def test_headers_of_cloud_events(served_folder: ServerProcess) -> None:
    body = {"id": "7", "inputs": [tensor("x", "FP32", [1, 2], [1, 2])]}
    # The model returns the headers that begin with x-; its folder forwards all of them.
    response = infer(served_folder, "row-sums/infer", body, headers={"x-foo": "bar"})
    found = {name: response.headers.get(name) for name in EVENT}
    assert (found, response.headers["x-foo"]) == (EVENT, "bar")
    client = triton_grpc.InferenceServerClient(served_folder.grpc_url)
    rows = service_pb2.ModelInferRequest.InferInputTensor(name="x", datatype="FP32", shape=[1, 2])
    rows.contents.fp32_contents.extend([1, 2])
    request = service_pb2.ModelInferRequest(model_name="row-sums", id="7", inputs=[rows])
    answer, call = client._client_stub.ModelInfer.with_call(request, metadata=(("x-foo", "bar"),))
    trailing = dict(call.trailing_metadata())
    assert {name: trailing.get(name.lower()) for name in EVENT} == EVENT
    assert trailing["x-foo"] == "bar"
    assert list(answer.outputs[0].contents.fp32_contents) == [3.0]  # typed, as the request
    client.close()


@pytest.mark.parametrize("id_", ["é", "a\n", "a\u007f"])
def test_ids_that_a_header_cannot_have(served_folder: ServerProcess, id_: str) -> None:
    body = {"id": id_, "inputs": [tensor("x", "FP32", [1, 2], [1, 2])]}
    response = infer(served_folder, "row-sums/infer", body)
    assert (response.status_code, response.json()["id"]) == (200, id_)
    assert response.headers["Ce-Modelid"] == EVENT["Ce-Modelid"]
    assert not {"Ce-Id", "Ce-Requestid"} & {*response.headers}


def test_errors_and_versions_read_as_in_mlserver(served_folder: ServerProcess) -> None:
    body = {"inputs": [tensor("x", "FP32", [1, 2], [1, 2])]}
    response = infer(served_folder, "nobody/versions/v0/infer", body)
    assert (response.status_code, response.json()) == (404, {"error": "Model nobody with version v0 not found"})
    response = infer(served_folder, "row-sums/versions/v0/infer", body)
    assert (response.status_code, response.json()) == (404, {"error": "Model row-sums with version v0 not found"})
    metadata = requests.get(f"http://{served_folder.url}/v2/models/row-sums", timeout=60).json()
    fields = [metadata["platform"], metadata["versions"], "details" in metadata]
    assert fields == ["", ["row-sums/v1.2"], False]  # the settings give no platform
    client = triton_grpc.InferenceServerClient(served_folder.grpc_url)
    found = client.get_model_metadata("row-sums")
    assert (found.platform, found.versions) == ("", ["row-sums/v1.2"])
    assert client.is_model_ready("row-sums", "v1.2")
    with pytest.raises(InferenceServerException, match="Model nobody not found") as error:
        client.get_model_metadata("nobody")
    assert error.value.status() == "StatusCode.NOT_FOUND"
    client.close()


@pytest.mark.parametrize("shape", ["", "bare", "triton"])
def test_a_stream_has_the_messages_of_the_client(served_folder: ServerProcess, shape: str) -> None:
    """Clients of MLServer send typed contents and read ModelInferResponse, those of Triton send raw ones."""

    def stream(request: Any) -> list[bytes]:
        with grpc.insecure_channel(served_folder.grpc_url) as channel:
            call = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
            metadata = (("dragoman-stream-shape", shape),) if shape else ()
            return list(call(iter([request.SerializeToString()]), metadata=metadata, timeout=60))

    text = service_pb2.ModelInferRequest.InferInputTensor(name="text", datatype="BYTES", shape=[1])
    typed = service_pb2.ModelInferRequest(model_name="words", inputs=[text])
    typed.inputs[0].contents.bytes_contents.append(b"to be")
    raw = service_pb2.ModelInferRequest(model_name="words", inputs=[text], raw_input_contents=[b"\5\0\0\0to be"])
    for request, is_bare in ((typed, shape != "triton"), (raw, shape == "bare")):
        found = stream(request)
        if is_bare:
            answers = [service_pb2.ModelInferResponse.FromString(each) for each in found]
        else:
            answers = [service_pb2.ModelStreamInferResponse.FromString(each).infer_response for each in found]
        assert [answer.model_name for answer in answers] == ["words", "words"]
        assert len(answers[0].outputs) == 1
    typed.model_name = "nobody"
    if shape != "triton":
        with pytest.raises(grpc.RpcError) as error:
            stream(typed)
        assert (error.value.code(), error.value.details()) == (grpc.StatusCode.NOT_FOUND, "Model nobody not found")


@pytest.mark.parametrize("names", ["authorization", "x-user, Cookie"])
def test_credentials_are_not_forwarded(names: str) -> None:
    with pytest.raises(InvalidInput, match="name only other headers"):
        protocol_policy(settings_for([], {"forward_headers": names}))


def test_all_headers_but_credentials_are_forwarded() -> None:
    headers = {"x-user": "u", "authorization": "Bearer s", "cookie": "c", "proxy-authorization": "p", "x-api-key": "k"}
    policy = protocol_policy(settings_for([str(FOLDER)]))
    assert policy.forwarded_headers({**headers, "host": "h"}) == {"x-user": "u", "host": "h"}


def test_headers_of_a_response_reach_its_client(tmp_path: Path) -> None:
    shutil.copytree(FOLDER / "row_sums", tmp_path / "m")
    settings = {"name": "row-sums", "implementation": "summing.RowSums", "max_batch_size": 4}
    (tmp_path / "m" / "model-settings.json").write_text(json.dumps(settings))
    body = {"inputs": [tensor("x", "FP32", [1, 2], [1, 2])]}
    with running_server(str(tmp_path), "--forward-headers", "x-*") as process:

        def echoed(user: str) -> tuple[str, str | None]:
            response = infer(process, "row-sums/infer", body, headers={"X-User": user})
            return response.headers["x-user"], response.headers.get("x-other")

        with ThreadPoolExecutor(8) as pool:
            users = [f"user-{n}" for n in range(16)]
            assert list(pool.map(echoed, users)) == [(user, None) for user in users]
        assert "x-user" not in infer(process, "row-sums/infer", body).headers


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("x-a", "1\r\nset-cookie: s"),
        ("x-a", "1\n2"),
        ("x\r\ny", "1"),
        ("Content-Length", "1"),
        ("x a", "1"),
        ("x", "\0"),
    ],
)
def test_headers_of_a_model_are_checked(name: str, value: str) -> None:
    with pytest.raises(InvalidOutput, match="the model set the header"):
        check_headers({name: value})


def test_the_clients_of_mlserver_over_grpc(served_folder: ServerProcess) -> None:
    greeting, sentence = InferenceRequest(inputs=[NAMES, TIMES]), InferenceRequest(inputs=[SENTENCE])
    request = ModelInferRequestConverter.from_types(greeting, model_name="greetings")
    with grpc.insecure_channel(served_folder.grpc_url) as channel:
        stub: Any = GRPCInferenceServiceStub(channel)
        response = ModelInferResponseConverter.to_types(stub.ModelInfer(request))
        assert [list(each.data) for each in response.outputs] == [[b"Hello Ada!", b"Hello Hello Bob!"]]
        metadata = stub.ModelMetadata(ModelMetadataRequest(name="numpy-sum"))
        inputs = ModelMetadataResponseConverter.to_types(metadata).inputs
        assert [(each.name, each.datatype, each.shape) for each in inputs or ()] == [("a", "FP32", [-1])]
        stream = stub.ModelStreamInfer(iter([ModelInferRequestConverter.from_types(sentence, model_name="words")]))
        words = [list(ModelInferResponseConverter.to_types(each).outputs[0].data) for each in stream]
    assert words == [[b"to"], [b"be"], [b"or"]]
