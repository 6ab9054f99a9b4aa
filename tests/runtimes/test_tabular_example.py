"""The tabular example trains, and each of its models is recognised, loads and answers as the library does."""

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


def _loaded(folder: Path) -> Model:
    file = model_file(folder)
    assert file is not None
    made: Model = runtime(recognise(file) or "").load(ModelSpec(name="m", uri=str(file), allow_pickle=True))
    made.load()
    return made


def _answer(made: Model, rows: Any, *outputs: str) -> Any:
    name = made.signature().inputs[0].name
    call = bind(Infer({name: Tensor.of(rows)}, outputs), made.signature(), "m")
    return made.infer(call)


@pytest.mark.parametrize(
    ("folder", "data", "scale"),
    [("digits-onnx", "digits", 16), ("digits-torchscript", "digits", 16), ("digits-export", "digits", 16)],
)
def test_digits(models: Path, folder: str, data: str, scale: float) -> None:
    _, rows, _, labels = train.split(data)
    result = _answer(_loaded(models / folder), (rows / scale).astype(np.float32))
    guessed = result["label"] if isinstance(result, dict) else result[0].argmax(axis=1)
    assert (guessed == labels).mean() > 0.9


def test_breast_cancer(models: Path) -> None:
    _, rows, _, _ = train.split("breast_cancer")
    direct = joblib.load(models / "breast-cancer" / "model.joblib").predict_proba(rows)
    result = _answer(_loaded(models / "breast-cancer"), rows, "predict_proba")
    np.testing.assert_array_equal(result["predict_proba"], direct)
    classifier = xgboost.XGBClassifier()
    classifier.load_model(models / "breast-cancer-xgboost" / "model.ubj")
    result = _answer(_loaded(models / "breast-cancer-xgboost"), rows, "label")
    np.testing.assert_array_equal(result["label"], classifier.predict(rows))


def test_the_others_answer(models: Path) -> None:
    _, rows, _, _ = train.split("diabetes")
    assert _answer(_loaded(models / "diabetes-lightgbm"), rows)["predict"].shape == (len(rows),)
    _, rows, _, labels = train.split("wine")
    for version in ("1", "2"):
        result = _answer(_loaded(models / "wine" / version), rows)
        assert (result["predict"] == labels).mean() > 0.8


def test_the_python_model(models: Path) -> None:
    made = _loaded(models / "iris-centroid")
    result = _answer(made, np.array([[6.3, 3.3, 6.0, 2.5]], dtype=np.float32))
    assert result["kind"].data.tolist() == [b"virginica"]
    assert [(s.name, s.shape) for s in made.signature().outputs] == [("kind", (-1,)), ("distances", (-1, 3))]
    committed = (EXAMPLE / "models" / "iris-centroid" / "centroids.json").read_text()
    assert committed == (models / "iris-centroid" / "centroids.json").read_text()
