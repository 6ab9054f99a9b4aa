"""XGBoost and LightGBM boosters return exactly what the libraries return when they are called directly."""

import re
from pathlib import Path
from typing import Any

import lightgbm
import numpy as np
import pytest
import xgboost
from sklearn.datasets import load_breast_cancer, load_diabetes, load_iris

from dragoman.core.calls import Infer
from dragoman.core.datatypes import FP32, FP64, INT64, NUMERIC, datatype_of
from dragoman.core.errors import InvalidInput, ModelFailed
from dragoman.core.model import Model
from dragoman.core.signature import TensorSpec
from dragoman.core.spec import ModelSpec
from dragoman.core.tensor import Tensor
from dragoman.runtimes.lightgbm import LightGBMModel
from dragoman.runtimes.xgboost import XGBoostModel


def _load(kind: type[Model], path: Path) -> Model:
    model = kind(ModelSpec(name="m", uri=str(path)))
    model.load()
    return model


def _infer(model: Model, rows: Any, *outputs: str) -> dict[str, Any]:
    rows = rows.copy()
    rows.flags.writeable = False
    result = model.infer(Infer({"input": Tensor.of(rows)}, outputs))
    assert isinstance(result, dict)
    return result


@pytest.mark.parametrize("suffix", ["ubj", "json"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64, np.float16, np.bool_])
def test_xgboost_classifier(tmp_path: Path, suffix: str, dtype: Any) -> None:
    x, y = load_iris(return_X_y=True)
    classifier = xgboost.XGBClassifier(n_estimators=5).fit(x, y)
    classifier.save_model(tmp_path / f"model.{suffix}")
    model = _load(XGBoostModel, tmp_path / f"model.{suffix}")
    assert model.platform == f"xgboost_{suffix}"
    assert model.signature().inputs == (TensorSpec("input", FP32, (-1, 4), accepts=NUMERIC),)
    assert model.signature().outputs == (
        TensorSpec("predict", FP32, (-1, 3)),
        TensorSpec("margin", FP32, (-1, 3), optional=True),
        TensorSpec("label", INT64, (-1,), optional=True),
    )
    rows = x.astype(dtype)
    assert list(_infer(model, rows)) == ["predict"]
    result = _infer(model, rows, "predict", "label", "margin")
    np.testing.assert_array_equal(result["predict"], classifier.predict_proba(rows))
    np.testing.assert_array_equal(result["predict"], classifier.get_booster().predict(xgboost.DMatrix(rows)))
    np.testing.assert_array_equal(result["label"], classifier.predict(rows))
    np.testing.assert_array_equal(result["margin"], classifier.predict(rows, output_margin=True))


def test_xgboost_missing_values_and_feature_names(tmp_path: Path) -> None:
    data = load_breast_cancer(as_frame=True)
    classifier = xgboost.XGBClassifier(n_estimators=5).fit(data.data, data.target)
    classifier.save_model(tmp_path / "model.ubj")
    model = _load(XGBoostModel, tmp_path / "model.ubj")
    assert model.signature().outputs[0] == TensorSpec("predict", FP32, (-1,))
    holes = data.data.to_numpy(dtype=np.float32).copy()
    holes[::3, 1] = np.nan
    result = _infer(model, holes, "predict", "label")
    np.testing.assert_array_equal(result["predict"], classifier.predict_proba(holes)[:, 1])
    np.testing.assert_array_equal(result["label"], classifier.predict(holes))


def test_xgboost_rejects_numbers_that_fp32_cannot_represent(tmp_path: Path) -> None:
    x, y = load_iris(return_X_y=True)
    xgboost.XGBClassifier(n_estimators=2).fit(x, y).save_model(tmp_path / "model.ubj")
    model = _load(XGBoostModel, tmp_path / "model.ubj")
    refused = ((1e300, "1e+300"), (-(2**24) - 1, "-16777217"), (2**63 - 1, "9223372036854775807"))
    for number, shown in refused:
        with pytest.raises(InvalidInput, match=re.escape(f"input 'input': {shown} does not fit into FP32")):
            _infer(model, np.array([[1, 2, 3, number]]))
    for number in (3e38, 0.1, 1e-300, np.inf, np.nan, 2**24, 2**40, -(2**63)):
        rows = np.array([[1, 2, 3, number]])
        rounded = _infer(model, rows.astype(np.float32))["predict"]
        np.testing.assert_array_equal(_infer(model, rows)["predict"], rounded)
    frame = {name: Tensor.of([1.0]) for name in "abc"} | {"d": Tensor.of([1e300])}
    with pytest.raises(InvalidInput, match="input 'd': 1e\\+300 does not fit into FP32"):
        model.infer(Infer(frame, parameters={"content_type": "pd"}))


def test_xgboost_linear_booster(tmp_path: Path) -> None:
    data = load_diabetes(as_frame=True)
    regressor = xgboost.XGBRegressor(n_estimators=5, booster="gblinear").fit(data.data, data.target)
    regressor.save_model(tmp_path / "model.json")
    model = _load(XGBoostModel, tmp_path / "model.json")
    assert [spec.name for spec in model.signature().outputs] == ["predict", "margin"]
    rows = data.data.to_numpy(dtype=np.float32)
    np.testing.assert_array_equal(_infer(model, rows)["predict"], regressor.predict(data.data))


def _binary(**options: Any) -> Any:
    return xgboost.XGBClassifier(n_estimators=5, **options).fit(*load_breast_cancer(return_X_y=True))


def _early_stopped() -> Any:
    x, y = load_breast_cancer(return_X_y=True)
    stopped = xgboost.XGBClassifier(n_estimators=200, learning_rate=1.0, early_stopping_rounds=3)
    stopped.fit(x[::2], y[::2], eval_set=[(x[1::2], y[1::2])], verbose=False)
    assert stopped.get_booster().num_boosted_rounds() > stopped.best_iteration + 1
    return stopped


def _several_labels() -> Any:
    x, y = load_breast_cancer(return_X_y=True)
    return xgboost.XGBClassifier(n_estimators=5).fit(x, np.stack((y, x[:, 0] > 14), axis=1))


def _multi(**options: Any) -> Any:
    return xgboost.XGBClassifier(n_estimators=5, **options).fit(*load_iris(return_X_y=True))


def _by_classes() -> Any:
    """Train a Booster that predicts classes, saved by the scikit-learn interface."""
    x, y = load_iris(return_X_y=True)
    booster = xgboost.train({"objective": "multi:softmax", "num_class": 3}, xgboost.DMatrix(x, y), 5)
    booster.set_attr(scikit_learn='{"_estimator_type": "classifier"}')
    return booster


@pytest.mark.parametrize(
    ("make", "labels"),
    [
        (_binary, np.int64),
        (lambda: _binary(objective="binary:logitraw"), np.int64),
        (lambda: _binary(booster="gblinear"), np.int64),
        (_early_stopped, np.int64),
        (_several_labels, np.float64),
        (_multi, np.int64),
        (lambda: _multi(booster="dart"), np.int64),
        (_by_classes, np.int32),
    ],
)
def test_xgboost_outputs_of_the_scikit_learn_interface(tmp_path: Path, make: Any, labels: Any) -> None:
    path = tmp_path / "model.ubj"
    make().save_model(path)
    classifier = xgboost.XGBClassifier()
    classifier.load_model(path)
    model = XGBoostModel(ModelSpec(name="m", uri=str(path), parameters={"sklearn_api": True}))
    model.load()
    rows = (load_iris if classifier.n_features_in_ == 4 else load_breast_cancer)(return_X_y=True)[0].astype(np.float32)
    outputs = _infer(model, rows, "predict", "predict_proba", "margin")
    assert list(_infer(model, rows)) == ["predict"]
    for name, spec in zip(("predict", "margin", "predict_proba"), model.signature().outputs, strict=True):
        options = {"output_margin": True} if name == "margin" else {}
        expected = getattr(classifier, "predict" if name == "margin" else name)(rows, **options)
        assert outputs[name].dtype == expected.dtype
        np.testing.assert_allclose(outputs[name], expected, rtol=1e-6 if name == "predict_proba" else 0)
        assert (spec.name, spec.datatype, spec.optional) == (name, datatype_of(expected.dtype), name != "predict")
        assert spec.fits(outputs[name].shape)
    assert outputs["predict"].dtype == labels


def test_sklearn_api_keeps_the_outputs_of_boosters_and_regressors(tmp_path: Path) -> None:
    x, y = load_iris(return_X_y=True)
    booster = xgboost.train({"objective": "multi:softprob", "num_class": 3}, xgboost.DMatrix(x, y), 5)
    for saved, names in ((booster, ["predict", "margin", "label"]), (_regressor(), ["predict", "margin"])):
        saved.save_model(tmp_path / "model.ubj")
        plain = _load(XGBoostModel, tmp_path / "model.ubj")
        model = XGBoostModel(ModelSpec(name="m", uri=plain.spec.uri, parameters={"sklearn_api": True}))
        model.load()
        assert [spec.name for spec in model.signature().outputs] == names
        _, features = plain.signature().inputs[0].shape or (0, 0)
        rows = np.zeros((2, features))
        np.testing.assert_array_equal(_infer(model, rows)["predict"], _infer(plain, rows)["predict"])


def _regressor() -> Any:
    return xgboost.XGBRegressor(n_estimators=5).fit(*load_diabetes(return_X_y=True))


def test_lightgbm_classifiers(tmp_path: Path) -> None:
    for load, classes in ((load_iris, (3,)), (load_breast_cancer, ())):
        x, y = load(return_X_y=True)
        booster = lightgbm.train(
            {"objective": "multiclass" if classes else "binary", "num_class": 3 if classes else 1, "verbose": -1},
            lightgbm.Dataset(x, y),
            num_boost_round=5,
        )
        booster.save_model(tmp_path / "model.txt")
        model = _load(LightGBMModel, tmp_path / "model.txt")
        assert model.platform == "lightgbm_text"
        assert model.signature().inputs == (TensorSpec("input", FP64, (-1, x.shape[1]), accepts=NUMERIC),)
        assert model.signature().outputs == (
            TensorSpec("predict", FP64, (-1, *classes)),
            TensorSpec("raw_score", FP64, (-1, *classes), optional=True),
        )
        for rows in (x, x.astype(np.float32), x.astype(np.int64), np.where(x > 1, x, np.nan)):
            result = _infer(model, rows, "predict", "raw_score")
            np.testing.assert_array_equal(result["predict"], booster.predict(rows))
            np.testing.assert_array_equal(result["raw_score"], booster.predict(rows, raw_score=True))
        assert list(_infer(model, x)) == ["predict"]


def test_invalid_files_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "model.txt").write_text("hello")
    (tmp_path / "model.json").write_text("{}")
    (tmp_path / "model.ubj").write_bytes(b"\x00" * 64)
    with pytest.raises(ModelFailed, match="no LightGBM text model"):
        _load(LightGBMModel, tmp_path / "model.txt")
    for name in ("model.json", "model.ubj"):
        with pytest.raises(ModelFailed, match="no XGBoost model"):
            _load(XGBoostModel, tmp_path / name)
