"""The tabular example: each trained model is recognised, loads and returns what the library returns."""

from pathlib import Path
from shutil import copy
from typing import Any

import joblib
import numpy as np
import pytest
import xgboost

from dragoman.core.binding import bind
from dragoman.core.calls import Infer
from dragoman.core.model import Model
from dragoman.core.spec import ModelSpec
from dragoman.core.tensor import Tensor
from dragoman.plugins import import_file, runtime
from dragoman.runtimes.recognise import model_file, recognise

EXAMPLE = Path(__file__).parents[2] / "examples" / "tabular"
train: Any = import_file(EXAMPLE / "train.py")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    (folder / "iris-centroid").mkdir()
    copy(EXAMPLE / "models" / "iris-centroid" / "model.py", folder / "iris-centroid")
    scores = train.train(folder)
    assert set(scores) == set(train.TRAINED)
    assert all(score > (0.2 if name == "diabetes-lightgbm" else 0.85) for name, score in scores.items())
    return folder


def _load(folder: Path) -> Model:
    file = model_file(folder)
    assert file is not None
    model: Model = runtime(recognise(file) or "").load(ModelSpec(name="m", uri=str(file), allow_pickle=True))
    model.load()
    return model


def _infer(model: Model, rows: Any, *outputs: str) -> Any:
    name = model.signature().inputs[0].name
    call = bind(Infer({name: Tensor.of(rows)}, outputs), model.signature(), "m")
    return model.infer(call)


@pytest.mark.parametrize(
    ("folder", "data", "scale"),
    [("digits-onnx", "digits", 16), ("digits-torchscript", "digits", 16), ("digits-export", "digits", 16)],
)
def test_digits(models: Path, folder: str, data: str, scale: float) -> None:
    _, rows, _, labels = train.split(data)
    result = _infer(_load(models / folder), (rows / scale).astype(np.float32))
    guessed = result["label"] if isinstance(result, dict) else result[0].argmax(axis=1)
    assert (guessed == labels).mean() > 0.9


def test_breast_cancer(models: Path) -> None:
    _, rows, _, _ = train.split("breast_cancer")
    direct = joblib.load(models / "breast-cancer" / "model.joblib").predict_proba(rows)
    result = _infer(_load(models / "breast-cancer"), rows, "predict_proba")
    np.testing.assert_array_equal(result["predict_proba"], direct)
    classifier = xgboost.XGBClassifier()
    classifier.load_model(models / "breast-cancer-xgboost" / "model.ubj")
    result = _infer(_load(models / "breast-cancer-xgboost"), rows, "label")
    np.testing.assert_array_equal(result["label"], classifier.predict(rows))


def test_other_models(models: Path) -> None:
    _, rows, _, _ = train.split("diabetes")
    assert _infer(_load(models / "diabetes-lightgbm"), rows)["predict"].shape == (len(rows),)
    _, rows, _, labels = train.split("wine")
    for version in ("1", "2"):
        result = _infer(_load(models / "wine" / version), rows)
        assert (result["predict"] == labels).mean() > 0.8


def test_the_python_model(models: Path) -> None:
    model = _load(models / "iris-centroid")
    result = _infer(model, np.array([[6.3, 3.3, 6.0, 2.5]], dtype=np.float32))
    assert result["kind"].data.tolist() == [b"virginica"]
    assert [(s.name, s.shape) for s in model.signature().outputs] == [("kind", (-1,)), ("distances", (-1, 3))]
    committed = (EXAMPLE / "models" / "iris-centroid" / "centroids.json").read_text()
    assert committed == (models / "iris-centroid" / "centroids.json").read_text()
