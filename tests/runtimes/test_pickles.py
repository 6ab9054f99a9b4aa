"""Pickles: objects of other runtimes than scikit-learn, and files that another version of scikit-learn has saved."""

import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pytest
import sklearn.base
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from dragoman import plugins
from dragoman.core.calls import Infer
from dragoman.core.datatypes import FP64
from dragoman.core.errors import InvalidInput, ModelFailed
from dragoman.core.model import Model
from dragoman.core.runtime import Runtime
from dragoman.core.signature import TensorSpec
from dragoman.core.spec import ModelSpec
from dragoman.engine_setup import open_engine
from dragoman.runtimes.sklearn.saved_version import saved_version

X = np.random.default_rng(1).random((40, 3))
Y = (X[:, 0] > 0.5).astype(int)


def xgboost_booster() -> tuple[Any, Callable[[Any], Any]]:
    xgboost = pytest.importorskip("xgboost")
    booster = xgboost.train({"objective": "binary:logistic", "seed": 1}, xgboost.DMatrix(X, Y), 3)
    return booster, lambda rows: booster.predict(xgboost.DMatrix(rows))


def lightgbm_booster() -> tuple[Any, Callable[[Any], Any]]:
    lightgbm = pytest.importorskip("lightgbm")
    data = lightgbm.Dataset(X, Y, params={"min_data_in_leaf": 2})
    booster = lightgbm.train({"objective": "binary", "verbose": -1}, data, 3)
    return booster, booster.predict


def catboost_model(kind: str) -> tuple[Any, Callable[[Any], Any]]:
    catboost = pytest.importorskip("catboost")
    options = {"iterations": 3, "verbose": 0, "allow_writing_files": False}
    if kind == "CatBoost":
        model = catboost.CatBoost({**options, "loss_function": "RMSE"})
    else:
        model = getattr(catboost, kind)(**options)
    model.fit(X, Y)
    return model, model.predict


BOOSTERS: dict[str, Callable[[], tuple[Any, Callable[[Any], Any]]]] = {
    "xgboost_pickle": xgboost_booster,
    "lightgbm_pickle": lightgbm_booster,
    "catboost_pickle CatBoost": partial(catboost_model, "CatBoost"),
    "catboost_pickle CatBoostClassifier": partial(catboost_model, "CatBoostClassifier"),
    "catboost_pickle CatBoostRegressor": partial(catboost_model, "CatBoostRegressor"),
}


@pytest.mark.parametrize("name", BOOSTERS)
@pytest.mark.parametrize("file", ["m.pkl", "m.joblib", "m.sav", "m.pkl.gz"])
async def test_a_booster_in_a_pickle_is_served_by_its_own_runtime(tmp_path: Path, name: str, file: str) -> None:
    booster, predict = BOOSTERS[name]()
    joblib.dump(booster, tmp_path / file)
    async with open_engine(tmp_path / file, allow_pickle=True) as engine:
        (deployment,) = engine.deployments()
        assert (deployment.platform, deployment.trial_error) == (name.split()[0], "")
        assert deployment.loaded.signature.inputs[0].shape == (-1, 3)
        result = await engine.infer(deployment.spec.name, {"input": X[:5].astype(np.float32)})
    np.testing.assert_array_equal(result["predict"], predict(X[:5].astype(np.float32)))


async def test_a_pickled_catboost_model_has_an_input_for_each_feature_if_some_are_categories(tmp_path: Path) -> None:
    catboost, pandas = pytest.importorskip("catboost"), pytest.importorskip("pandas")
    table = pandas.DataFrame({"size": X[:, 0], "colour": np.where(Y, "red", "blue")})
    model = catboost.CatBoostClassifier(iterations=3, verbose=0, allow_writing_files=False)
    model.fit(table, np.where(Y, "yes", "no"), cat_features=["colour"])
    (tmp_path / "m.pkl").write_bytes(pickle.dumps(model))
    async with open_engine(tmp_path / "m.pkl", allow_pickle=True) as engine:
        (deployment,) = engine.deployments()
        assert [spec.name for spec in deployment.loaded.signature.inputs] == ["size", "colour"]
        assert deployment.labels["predict_proba"].names == ("no", "yes")
        inputs = {"size": X[:4, 0], "colour": np.array(table["colour"][:4], object)}
        result = await engine.infer("m", inputs, outputs=["predict", "predict_proba"])
    assert result["predict"].tolist() == [each.encode() for each in model.predict(table[:4])]
    np.testing.assert_array_equal(result["predict_proba"], model.predict_proba(table[:4]))


async def test_a_catboost_model_that_was_not_fitted(tmp_path: Path) -> None:
    catboost = pytest.importorskip("catboost")
    joblib.dump(catboost.CatBoostRegressor(), tmp_path / "m.joblib")
    async with open_engine(tmp_path / "m.joblib", allow_pickle=True) as engine:
        assert "'m.joblib' holds a CatBoostRegressor that was not fitted" in engine.deployments()[0].reason


class Scorer:
    """An object of a framework without estimators, which has `predict`."""

    def predict(self, rows: Any) -> Any:
        raise TypeError("expected a ScorerMatrix")

    def score(self, rows: Any) -> Any:
        return rows.sum(axis=1)


class ScorerModel(Model):
    """Serves a Scorer."""

    platform = "scorer"
    inputs = (TensorSpec("rows", FP64, (-1, 2)),)
    outputs = (TensorSpec("score", FP64, (-1,)),)

    def infer(self, call: Infer) -> Any:
        return self.spec.target.score(call.inputs["rows"].data)


async def test_the_runtime_of_another_package_takes_its_objects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    joblib.dump(Scorer(), tmp_path / "m.pkl")
    runtime = Runtime(load=ScorerModel, objects=(f"{Scorer.__module__}.Scorer",))
    monkeypatch.setattr(plugins, "other_runtimes", lambda: {"scorer": runtime})
    async with open_engine(tmp_path / "m.pkl", allow_pickle=True) as engine:
        assert engine.deployments()[0].platform == "scorer"
        assert (await engine.infer("m", {"rows": np.array([[1.0, 2.0]])}))["score"].tolist() == [3.0]


# --- other versions of scikit-learn --------------------------------------------------------------------------


def save(path: Path, estimator: Any, version: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    """Save an estimator as another version of scikit-learn would."""
    with monkeypatch.context() as patch:
        patch.setattr(sklearn.base, "__version__", version)
        if "protocol" in options:
            path.write_bytes(pickle.dumps(estimator, **options))
        else:
            joblib.dump(estimator, path, **options)


@pytest.mark.parametrize("options", [*({"protocol": n} for n in range(6)), {}, {"compress": 3}, {"compress": "xz"}])
@pytest.mark.parametrize("version", ["0.23.1", "1.2.2", "1.5.dev0", "1.7.0rc1"])
def test_the_version_in_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], version: str
) -> None:
    estimator = make_pipeline(StandardScaler(), LogisticRegression()).fit(X, Y)
    save(tmp_path / "m", estimator, version, monkeypatch, **options)
    assert saved_version(tmp_path / "m") == version


def test_files_without_a_version(tmp_path: Path) -> None:
    for content in (b"", b"\x80\x04N.", b"x\x9cbroken", b"_sklearn_version"):
        (tmp_path / "m").write_bytes(content)
        assert saved_version(tmp_path / "m") == ""


ADVICE = (
    f"'m.joblib' was saved by scikit-learn 0.23.1, and {sklearn.__version__} is installed: pip install "
    "scikit-learn==0.23.1, or save it again, or as ONNX"
)


@pytest.mark.parametrize("options", [{}, {"compress": 3}])
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.InconsistentVersionWarning")
def test_a_file_that_cannot_be_read_names_the_version_that_saved_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    save(tmp_path / "m.joblib", LinearRegression().fit(X, Y), "0.23.1", monkeypatch, **options)

    def set_state(self: Any, state: Any) -> None:
        raise ValueError("incompatible dtype: expected " + "x" * 500 + "\ngot another")

    monkeypatch.setattr(LinearRegression, "__setstate__", set_state)
    with pytest.raises(ModelFailed) as raised:
        plugins.runtime("sklearn").load(
            ModelSpec(name="m", runtime="sklearn", uri=str(tmp_path / "m.joblib"), allow_pickle=True)
        )
    message = raised.value.message
    assert message.endswith(ADVICE)
    assert "cannot be read as a model saved by joblib: ValueError: incompatible dtype" in message
    assert len(message) < 400
    assert "\n" not in message


@pytest.mark.parametrize("options", [{}, {"compress": 3}, {"compress": "xz"}])
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.InconsistentVersionWarning")
async def test_an_estimator_that_lacks_attributes_names_the_version_that_saved_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, options: dict[str, Any]
) -> None:
    estimator = LinearRegression().fit(X, Y)
    del estimator.coef_
    save(tmp_path / "m.joblib", estimator, "0.23.1", monkeypatch, **options)
    async with open_engine(tmp_path / "m.joblib", allow_pickle=True) as engine:
        (deployment,) = engine.deployments()
        assert deployment.ready
        assert deployment.trial_error.endswith(ADVICE)
        assert "LinearRegression.predict raised AttributeError" in deployment.trial_error
        with pytest.raises(ModelFailed, match=r"pip install scikit-learn==0\.23\.1"):
            await engine.infer("m", {"input": X[:1]})
    assert ADVICE in caplog.text


async def test_an_estimator_of_this_version_is_not_blamed(tmp_path: Path) -> None:
    estimator = LinearRegression().fit(X, Y)
    del estimator.coef_
    joblib.dump(estimator, tmp_path / "m.joblib")
    async with open_engine(tmp_path / "m.joblib", allow_pickle=True) as engine:
        (deployment,) = engine.deployments()
        assert "AttributeError" in deployment.trial_error
        assert "saved by" not in deployment.trial_error


def test_a_file_with_the_suffix_of_pickles_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "survey.sav").write_bytes(b"$FL2@(#) SPSS DATA FILE")
    with pytest.raises(InvalidInput, match=r"'survey\.sav' is not a model: expected a pickle, such as joblib\.dump"):
        open_engine(tmp_path / "survey.sav")
