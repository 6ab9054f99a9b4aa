"""MLServer's runtimes of libraries: answers, metadata and codecs as with MLServer."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import requests

from dragoman import plugins
from dragoman.core.errors import ModelFailed
from dragoman.core.spec import ModelSpec
from dragoman.engine.model_files import model_settings
from dragoman.formats.grpc_messages import (
    ModelInferRequest,
    ModelInferResponse,
    ModelMetadataRequest,
    ModelMetadataResponse,
)
from e2e.server_process import ServerProcess, running_server

DERIVED = """
from mlserver.codecs import NumpyCodec, StringCodec
from mlserver.types import InferenceResponse
from mlserver_sklearn import SKLearnModel
from mlserver_sklearn.sklearn import SKLearnModel as Same


class Rounded(SKLearnModel):
    async def load(self):
        assert Same is SKLearnModel
        return await super().load()

    async def predict(self, payload):
        response = await super().predict(payload)
        response.parameters = {"rounded": True}
        return response


class Seen(SKLearnModel):
    async def load(self):
        return True

    async def predict(self, payload):
        texts = [repr(self.decode(each, default_codec=StringCodec)) for each in payload.inputs]
        assert payload.parameters.headers["Ce-Modelid"] == self.name == "seen"
        return InferenceResponse(model_name=self.name, outputs=[StringCodec.encode_output("seen", texts)])


class Requested(SKLearnModel):
    async def load(self):
        return True

    async def predict(self, payload):
        outputs = [self.encode(["x"], each, default_codec=StringCodec) for each in payload.outputs]
        return InferenceResponse(model_name=self.name, outputs=outputs)


class Counted(SKLearnModel):
    async def load(self):
        return True

    async def predict(self, payload):
        return InferenceResponse(
            model_name=self.name,
            outputs=[{"name": "text", "shape": [4], "datatype": "BYTES", "data": ["four"]}],
        )
"""

NATIVE = """
import dragoman


@dragoman.model(placement="thread")
def infer(x: list[str]) -> list[str]:
    return x
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    from joblib import dump
    from sklearn.datasets import load_iris
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    folder = tmp_path_factory.mktemp("runtimes")
    (folder / "settings.json").write_text('{"parallel_workers": 0, "host": "127.0.0.1"}')

    def home(name: str, implementation: str, **fields: Any) -> Path:
        place = folder / name
        place.mkdir()
        settings = {"name": name, "implementation": implementation, **fields}
        (place / "model-settings.json").write_text(json.dumps(settings))
        return place

    x, y = load_iris(return_X_y=True)
    sklearn = "mlserver_sklearn.SKLearnModel"
    rows = {"name": "rows", "datatype": "FP32", "shape": [-1, 4], "parameters": {"content_type": "np"}}
    outputs = [{"name": "predict_proba", "datatype": "FP64", "shape": [-1, 3]}]
    parameters = {"uri": "./model.joblib", "content_type": "np"}
    classifier = LogisticRegression(max_iter=1000).fit(x, np.array(["a", "b", "c"])[y])
    place = home("iris", sklearn, inputs=[rows], outputs=outputs, parameters=parameters)
    dump(classifier, place / "model.joblib")
    words = make_pipeline(OneHotEncoder(handle_unknown="ignore"), LogisticRegression())
    place = home("words", sklearn)
    dump(words.fit(np.array([["red"], ["green"], ["blue"], ["red"]]), [0, 1, 1, 0]), place / "model.joblib")
    place = home("scaled", sklearn, parameters={"uri": ".", "extra": {"predict_fn": "transform"}})
    dump(StandardScaler().fit(x), place / "model.joblib")
    for name in ("Rounded", "Seen", "Requested", "Counted"):
        place = home(name.lower(), f"derived.{name}", parameters={"uri": str(folder / "iris" / "model.joblib")})
        (place / "derived.py").write_text(DERIVED)
    (folder / "native").mkdir()
    (folder / "native" / "model.py").write_text(NATIVE)
    with running_server(str(folder), "--allow-pickle") as process:
        yield process


def infer(server: ServerProcess, model: str, *inputs: dict[str, Any], **fields: Any) -> Any:
    body = {"inputs": list(inputs), **fields}
    return requests.post(f"http://{server.url}/v2/models/{model}/infer", json=body, timeout=60)


def tensor(name: str, datatype: str, shape: list[int], data: list[Any], **parameters: Any) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": shape, "data": data, "parameters": parameters}


ROW = tensor("any", "FP32", [1, 4], [5.1, 3.5, 1.4, 0.2])


def test_labels_and_probabilities(server: ServerProcess) -> None:
    (labels,) = infer(server, "iris", ROW).json()["outputs"]
    assert labels == {
        "name": "predict",
        "datatype": "BYTES",
        "shape": [1, 1],
        "parameters": {"content_type": "np"},
        "data": ["a"],
    }
    both = infer(server, "iris", ROW, outputs=[{"name": "predict_proba"}, {"name": "predict"}]).json()["outputs"]
    assert [(each["name"], each["shape"]) for each in both] == [("predict_proba", [1, 3]), ("predict", [1, 1])]
    assert sum(both[0]["data"]) == pytest.approx(1)


def test_the_default_output_is_a_parameter(server: ServerProcess) -> None:
    (output,) = infer(server, "scaled", ROW).json()["outputs"]
    assert (output["name"], output["shape"]) == ("transform", [1, 4])


@pytest.mark.parametrize(
    ("model", "given", "outputs", "message"),
    [
        ("iris", ROW, ["margin"], "unknown output 'margin': expected one of 'predict', 'predict_proba', 'transform'"),
        ("scaled", ROW, ["predict_proba"], "StandardScaler does not support 'predict_proba'"),
        ("iris", tensor("x", "FP32", [1, 3], [1, 2, 3]), [], "X has 3 features"),
    ],
)
def test_invalid_requests(server: ServerProcess, model: str, given: Any, outputs: list[str], message: str) -> None:
    response = infer(server, model, given, outputs=[{"name": name} for name in outputs])
    assert response.status_code == 400
    assert message in response.json()["error"]


def test_metadata_has_content_types(server: ServerProcess) -> None:
    found = requests.get(f"http://{server.url}/v2/models/iris", timeout=60).json()
    (rows,) = found["inputs"]
    assert rows == {"name": "rows", "datatype": "FP32", "shape": [-1, 4], "parameters": {"content_type": "np"}}
    assert found["parameters"] == {"content_type": "np"}
    with grpc.insecure_channel(server.grpc_url) as channel:
        call = channel.unary_unary(
            "/inference.GRPCInferenceService/ModelMetadata",
            ModelMetadataRequest.SerializeToString,
            ModelMetadataResponse.FromString,
        )
        (rows,) = call(ModelMetadataRequest(name="iris"), timeout=60).inputs
    assert rows.parameters["content_type"].string_param == "np"


def test_text_is_an_array_of_str(server: ServerProcess) -> None:
    given = tensor("x", "BYTES", [2, 1], ["red", "green"])
    assert infer(server, "words", given).json()["outputs"][0]["data"] == [0, 1]


def test_a_derived_class(server: ServerProcess) -> None:
    found = infer(server, "rounded", ROW).json()
    assert found["parameters"] == {"rounded": True}
    assert found["outputs"][0]["data"] == ["a"]


def test_null_in_text_is_none(server: ServerProcess) -> None:
    given = tensor("x", "BYTES", [2], ["a", None], content_type="str")
    assert infer(server, "seen", given).json()["outputs"][0]["data"] == ["['a', None]"]
    many = tensor("x", "BYTES", [4097], [None] * 4097)
    assert infer(server, "seen", many).status_code == 400
    assert infer(server, "unknown", given).status_code == 404


@pytest.mark.parametrize("given", [tensor("x", "BYTES", [2], ["a", None]), tensor("x", "BYTES", [2], ["ab"])])
def test_other_models_reject_what_only_mlserver_accepts(server: ServerProcess, given: dict[str, Any]) -> None:
    assert infer(server, "seen", given).status_code == 200
    assert infer(server, "native", given).status_code == 400


def test_the_model_encodes_a_requested_content_type(server: ServerProcess) -> None:
    wanted = {"name": "y", "parameters": {"content_type": "base64"}}
    (output,) = infer(server, "requested", ROW, outputs=[wanted]).json()["outputs"]
    assert (output["data"], output["parameters"]) == (["eA=="], {"content_type": "base64"})


def test_a_model_may_ignore_a_requested_content_type(server: ServerProcess) -> None:
    wanted = {"name": "seen", "parameters": {"content_type": "base64"}}
    given = tensor("x", "BYTES", [1], ["a"])
    (output,) = infer(server, "seen", given, outputs=[wanted]).json()["outputs"]
    assert (output["data"], output["parameters"]) == (["['a']"], {"content_type": "str"})


def test_a_shape_that_is_the_length_of_a_text(server: ServerProcess) -> None:
    """The request and the response of MLServer's example custom-json."""
    given = tensor("x", "BYTES", [5], ["fünf!"], content_type="str")
    assert infer(server, "seen", given).json()["outputs"][0]["data"] == ["['fünf!']"]
    assert infer(server, "seen", tensor("x", "BYTES", [6], ["fünf!"])).status_code == 200
    assert infer(server, "seen", tensor("x", "BYTES", [4], ["fünf!"])).status_code == 400
    # MLServer's example content-type: a text without an array, whose shape may be wrong.
    whole: Any = "fünf!"
    for shape in ([1], [11]):
        answer = infer(server, "seen", tensor("x", "BYTES", shape, whole, content_type="str")).json()
        assert answer["outputs"][0]["data"] == ["['fünf!']"]
    assert infer(server, "native", tensor("x", "BYTES", [1], whole)).status_code == 400
    (output,) = infer(server, "counted", ROW).json()["outputs"]
    assert (output["shape"], output["data"]) == ([1], ["four"])


def test_a_shape_that_is_the_length_of_a_text_over_grpc(server: ServerProcess) -> None:
    def ask(size: int) -> Any:
        request = ModelInferRequest(model_name="seen")
        given = request.inputs.add(name="x", datatype="BYTES", shape=[size])
        given.contents.bytes_contents.append("fünf!".encode())
        given.parameters["content_type"].string_param = "str"
        with grpc.insecure_channel(server.grpc_url) as channel:
            method = channel.unary_unary(
                "/inference.GRPCInferenceService/ModelInfer",
                request_serializer=ModelInferRequest.SerializeToString,
                response_deserializer=ModelInferResponse.FromString,
            )
            return method(request)

    for size in 1, 6:
        assert list(ask(size).outputs[0].contents.bytes_contents) == [b"['f\xc3\xbcnf!']"]
    with pytest.raises(grpc.RpcError, match=r"shape \[4\] needs 4 elements, got 1"):
        ask(4)


def test_a_pickle_is_loaded_only_if_it_is_allowed(tmp_path: Path) -> None:
    (tmp_path / "model.joblib").write_bytes(b"\x80\x04N.")
    (tmp_path / "model-settings.json").write_text('{"implementation": "mlserver_sklearn.SKLearnModel", "name": "m"}')
    settings = model_settings(tmp_path) or {}
    spec = ModelSpec(**{**settings, "uri": str(tmp_path / settings["uri"])})
    with pytest.raises(ModelFailed, match="start with --allow-pickle"):
        plugins.runtime("mlserver").load(spec)
