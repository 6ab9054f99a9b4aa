"""The tabular example, trained and served: over every protocol the values equal those of the library."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import joblib
import lightgbm
import numpy as np
import onnxruntime
import pytest
import torch
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
import xgboost
from sklearn import datasets

from e2e.server_process import ServerProcess, running_server

EXAMPLE = Path(__file__).parents[2] / "examples" / "tabular"
WIRES = ("json", "binary", "grpc")
DATATYPES = {"float64": "FP64", "float32": "FP32"}


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the example's folder with trained models."""
    folder = tmp_path_factory.mktemp("tabular")
    shutil.copytree(EXAMPLE, folder, dirs_exist_ok=True)
    subprocess.run([sys.executable, folder / "train.py"], check=True, capture_output=True, timeout=120)
    return folder / "models"


@pytest.fixture(scope="session")
def tabular(trained: Path) -> Iterator[ServerProcess]:
    (trained / "dragoman.toml").write_text('[models.wine]\nversion_policy = "all"\n')
    with running_server(str(trained), "--allow-pickle") as process:
        yield process


def rows(name: str) -> Any:
    return getattr(datasets, f"load_{name}")(return_X_y=True)[0]


def infer(
    process: ServerProcess, wire: str, model: str, array: Any, *outputs: str, version: str = ""
) -> Mapping[str, Any]:
    """Return the outputs of a model for an array, over JSON, binary data or gRPC."""
    triton = triton_grpc if wire == "grpc" else triton_http
    client = triton.InferenceServerClient(process.grpc_url if wire == "grpc" else process.url)
    tensor = triton.InferInput(input_of(process, model), list(array.shape), DATATYPES[array.dtype.name])
    options = {} if wire == "grpc" else {"binary_data": wire == "binary"}
    tensor.set_data_from_numpy(array, **options)
    requested = [triton.InferRequestedOutput(output, **options) for output in outputs]
    try:
        result = client.infer(model, [tensor], outputs=requested, model_version=version)
        return {output: result.as_numpy(output) for output in outputs}
    finally:
        client.close()


def input_of(process: ServerProcess, model: str) -> str:
    name: str = process.request("GET", f"/v2/models/{model}")[1]["inputs"][0]["name"]
    return name


@pytest.mark.parametrize("wire", WIRES)
def test_sklearn(tabular: ServerProcess, trained: Path, wire: str) -> None:
    x = rows("breast_cancer")[:200]
    direct = joblib.load(trained / "breast-cancer" / "model.joblib")
    response = infer(tabular, wire, "breast-cancer", x, "predict", "predict_proba", "decision_function")
    np.testing.assert_array_equal(response["predict"], direct.predict(x))
    np.testing.assert_array_equal(response["predict_proba"], direct.predict_proba(x))
    np.testing.assert_array_equal(response["decision_function"], direct.decision_function(x))


@pytest.mark.parametrize("wire", WIRES)
def test_xgboost(tabular: ServerProcess, trained: Path, wire: str) -> None:
    x = rows("breast_cancer")[:200].astype(np.float32)
    direct = xgboost.XGBClassifier()
    direct.load_model(trained / "breast-cancer-xgboost" / "model.ubj")
    response = infer(tabular, wire, "breast-cancer-xgboost", x, "predict", "label", "margin")
    np.testing.assert_array_equal(response["predict"], direct.predict_proba(x)[:, 1])
    np.testing.assert_array_equal(response["label"], direct.predict(x))
    np.testing.assert_array_equal(response["margin"], direct.predict(x, output_margin=True))


@pytest.mark.parametrize("wire", WIRES)
def test_lightgbm(tabular: ServerProcess, trained: Path, wire: str) -> None:
    x = rows("diabetes")[:200]
    direct = lightgbm.Booster(model_file=trained / "diabetes-lightgbm" / "model.txt")
    np.testing.assert_array_equal(
        infer(tabular, wire, "diabetes-lightgbm", x, "predict")["predict"], np.asarray(direct.predict(x))
    )


@pytest.mark.parametrize("wire", WIRES)
def test_onnx(tabular: ServerProcess, trained: Path, wire: str) -> None:
    x = (rows("digits")[:200] / 16).astype(np.float32)
    direct = onnxruntime.InferenceSession(trained / "digits-onnx" / "model.onnx")
    label, probabilities = direct.run(["label", "probabilities"], {"X": x})
    response = infer(tabular, wire, "digits-onnx", x, "label", "probabilities")
    np.testing.assert_array_equal(response["label"], label)
    np.testing.assert_array_equal(response["probabilities"], probabilities)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("wire", WIRES)
def test_torchscript(tabular: ServerProcess, trained: Path, wire: str) -> None:
    x = (rows("digits")[:64] / 16).astype(np.float32)
    direct: Any = torch.jit.load(trained / "digits-torchscript" / "model.pt")  # type: ignore[no-untyped-call]
    with torch.no_grad():
        expected = direct(torch.from_numpy(x)).numpy()
    response = infer(tabular, wire, "digits-torchscript", x, "output-0")
    np.testing.assert_array_equal(response["output-0"], expected)


@pytest.mark.parametrize("wire", WIRES)
def test_python(tabular: ServerProcess, trained: Path, wire: str) -> None:
    x = rows("iris")
    learned = json.loads((trained / "iris-centroid" / "centroids.json").read_text())
    distances = np.linalg.norm(x[:, None] - np.array(learned["centroids"]), axis=2)
    response = infer(tabular, wire, "iris-centroid", x, "kind", "distances")
    kinds = [kind.decode() if isinstance(kind, bytes) else kind for kind in response["kind"]]
    assert kinds == [learned["names"][i] for i in distances.argmin(axis=1)]
    np.testing.assert_array_equal(response["distances"], distances)


@pytest.mark.parametrize("wire", WIRES)
def test_versions(tabular: ServerProcess, trained: Path, wire: str) -> None:
    x = rows("wine")
    for version in ("1", "2", ""):
        direct = joblib.load(trained / "wine" / (version or "2") / "model.joblib")
        response = infer(tabular, wire, "wine", x, "predict_proba", version=version)
        np.testing.assert_array_equal(response["predict_proba"], direct.predict_proba(x))


def test_the_default_output_is_the_prediction(tabular: ServerProcess) -> None:
    x = rows("wine")[:3]
    tensor = {"name": "input", "datatype": "FP64", "shape": list(x.shape), "data": x.tolist()}
    _, body, _ = tabular.request("POST", "/v2/models/wine/infer", {"inputs": [tensor]})
    assert [o["name"] for o in body["outputs"]] == ["predict"]
    assert body["model_version"] == "2"


@pytest.mark.parametrize(
    ("model", "inputs", "outputs"),
    [
        ("breast-cancer", [("input", "FP64", [-1, 30])], ["predict", "predict_proba", "decision_function"]),
        ("breast-cancer-xgboost", [("input", "FP32", [-1, 30])], ["predict", "margin", "label"]),
        ("diabetes-lightgbm", [("input", "FP64", [-1, 10])], ["predict", "raw_score"]),
        ("digits-onnx", [("X", "FP32", [-1, 64])], ["label", "probabilities"]),
        ("digits-torchscript", [("input", "FP32", [-1, 64])], ["output-0"]),
        ("digits-export", [("input", "FP32", [-1, 64])], ["output-0"]),
        ("iris-centroid", [("flowers", "FP64", [-1, 4])], ["kind", "distances"]),
        ("wine", [("input", "FP64", [-1, 13])], ["predict", "predict_proba"]),
    ],
)
def test_metadata(tabular: ServerProcess, model: str, inputs: list[Any], outputs: list[str]) -> None:
    _, found, _ = tabular.request("GET", f"/v2/models/{model}")
    assert [(i["name"], i["datatype"], i["shape"]) for i in found["inputs"]] == inputs
    assert set(outputs) <= {o["name"] for o in found["outputs"]}
    assert found.get("versions") == (["1", "2"] if model == "wine" else None)


@pytest.mark.parametrize(
    "model", ["breast-cancer", "breast-cancer-xgboost", "diabetes-lightgbm", "digits-onnx", "wine"]
)
def test_a_wrong_number_of_columns_is_a_400(tabular: ServerProcess, model: str) -> None:
    name = input_of(tabular, model)
    tensor = {"name": name, "datatype": "FP32", "shape": [1, 3], "data": [1, 2, 3]}
    status, body, _ = tabular.request("POST", f"/v2/models/{model}/infer", {"inputs": [tensor]})
    assert status == 400
    assert f"input '{name}': expected shape" in body["error"]


@pytest.mark.parametrize(("policy", "there", "default"), [("latest", ["2"], "2"), ("1", ["1"], "1")])
def test_version_policies(trained: Path, policy: str, there: list[str], default: str) -> None:
    with running_server(str(trained / "wine"), "--allow-pickle", "--version-policy", policy) as process:
        assert process.request("GET", "/v2/models/wine")[1]["versions"] == there
        direct = joblib.load(trained / "wine" / default / "model.joblib")
        x = rows("wine")
        response = infer(process, "binary", "wine", x, "predict_proba")
        np.testing.assert_array_equal(response["predict_proba"], direct.predict_proba(x))
        for version in ("1", "2"):
            status = process.status(f"/v2/models/wine/versions/{version}/ready")
            assert status == (200 if version in there else 404)


@pytest.mark.parametrize("placement", ["thread", "process"])
def test_placements_return_the_same_values(trained: Path, placement: str) -> None:
    x = rows("wine")
    direct = joblib.load(trained / "wine" / "2" / "model.joblib")
    flags = ("--allow-pickle", "--placement", placement, "--replicas", "2", "--max-batch-size", "1000")
    with running_server(str(trained / "wine"), *flags) as process:
        for wire in WIRES:
            response = infer(process, wire, "wine", x, "predict_proba")
            np.testing.assert_array_equal(response["predict_proba"], direct.predict_proba(x))
