"""CatBoost models return exactly what the library returns when it is called directly."""

from pathlib import Path
from typing import Any

import catboost
import numpy as np
import pandas
import pytest
from sklearn.datasets import load_breast_cancer, load_diabetes, load_iris

from dragoman.codecs import PandasCodec
from dragoman.core.binding import bind
from dragoman.core.calls import Infer
from dragoman.core.datatypes import BOOL, BYTES, FP32, FP64, INT64, NUMERIC
from dragoman.core.errors import InvalidInput, ModelFailed
from dragoman.core.signature import TensorSpec
from dragoman.core.spec import ModelSpec
from dragoman.core.tensor import Tensor
from dragoman.runtimes.catboost import CatBoostModel

QUICK: dict[str, Any] = {"iterations": 5, "verbose": False, "allow_writing_files": False, "thread_count": 2}


def _load(trained: Any, folder: Path, name: str = "model.cbm") -> CatBoostModel:
    trained.save_model(folder / name)
    model = CatBoostModel(ModelSpec(name="m", uri=str(folder / name)))
    model.load()
    return model


def _infer(model: CatBoostModel, *outputs: str, **arrays: Any) -> dict[str, Any]:
    tensors = {name: Tensor.of(array) for name, array in arrays.items()}
    for tensor in tensors.values():
        tensor.data.flags.writeable = False
    result = model.infer(bind(Infer(tensors, outputs), model.signature(), "m"))
    assert isinstance(result, dict)
    return result


def _passengers() -> tuple[pandas.DataFrame, list[int]]:
    frame = pandas.DataFrame(
        {
            "port": ["S", "C", "Q", "S", "C", "S"] * 4,
            "age": [22.0, 38.0, np.nan, 35.0, 35.0, 54.0] * 4,
            "class": [3, 1, 3, 1, 3, 1] * 4,
            "note": ["good film", "bad play", "good play", "bad film", "good day", "bad day"] * 4,
        }
    )
    return frame, [0, 1, 1, 1, 0, 0] * 4


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64, np.uint8, np.float16, np.bool_])
def test_classifier_of_several_classes(tmp_path: Path, dtype: Any) -> None:
    data = load_iris(as_frame=True)
    trained = catboost.CatBoostClassifier(**QUICK).fit(data.data, data.target)
    model = _load(trained, tmp_path)
    assert model.platform == "catboost_cbm"
    columns = tuple(data.data.columns)
    assert model.signature().inputs == (TensorSpec("input", FP32, (-1, 4), accepts=NUMERIC, columns=columns),)
    assert model.signature().outputs == (
        TensorSpec("predict", INT64, (-1, 1)),
        TensorSpec("predict_proba", FP64, (-1, 3), optional=True),
        TensorSpec("raw", FP64, (-1, 3), optional=True),
    )
    assert model.signature().batched
    rows = data.data.to_numpy().astype(dtype)
    assert list(_infer(model, input=rows)) == ["predict"]
    result = _infer(model, "predict", "predict_proba", "raw", input=rows)
    np.testing.assert_array_equal(result["predict"], trained.predict(rows))
    np.testing.assert_array_equal(result["predict_proba"], trained.predict_proba(rows))
    np.testing.assert_array_equal(result["raw"], trained.predict(rows, prediction_type="RawFormulaVal"))
    assert _infer(model, "predict_proba", input=rows[:0])["predict_proba"].shape == (0, 3)


def test_labels_of_the_training_data(tmp_path: Path) -> None:
    x, y = load_breast_cancer(return_X_y=True)
    x = np.where(x > 1, x, np.nan)
    for labels, datatype in ((y, INT64), (y.astype(bool), BOOL), (y.astype(float), FP64), (y.astype(str), BYTES)):
        trained = catboost.CatBoostClassifier(**QUICK).fit(x, labels)
        model = _load(trained, tmp_path, "model.catboost")
        assert model.signature().outputs[0] == TensorSpec("predict", datatype, (-1,))
        np.testing.assert_array_equal(_infer(model, input=x)["predict"], trained.predict(x))


@pytest.mark.parametrize("loss", ["RMSE", "Poisson", "MultiRMSE", "RMSEWithUncertainty"])
def test_regressors(tmp_path: Path, loss: str) -> None:
    x, y = load_diabetes(return_X_y=True)
    if loss == "MultiRMSE":
        y = np.stack([y, -y], axis=1)
    trained = catboost.CatBoostRegressor(loss_function=loss, **QUICK).fit(x, y)
    model = _load(trained, tmp_path)
    assert [spec.name for spec in model.signature().outputs] == ["predict", "raw"]
    result = _infer(model, "predict", "raw", input=x)
    np.testing.assert_array_equal(result["predict"], trained.predict(x))
    np.testing.assert_array_equal(result["raw"], trained.predict(x, prediction_type="RawFormulaVal"))


def test_rankers(tmp_path: Path) -> None:
    x, y = load_iris(return_X_y=True)
    trained = catboost.CatBoostRanker(**QUICK).fit(x, y, group_id=np.repeat(np.arange(10), 15))
    np.testing.assert_array_equal(_infer(_load(trained, tmp_path), input=x)["predict"], trained.predict(x))


def test_categories_and_texts_make_each_feature_an_input(tmp_path: Path) -> None:
    frame, y = _passengers()
    trained = catboost.CatBoostClassifier(cat_features=["port", "class"], text_features=["note"], **QUICK)
    trained.fit(frame, y)
    model = _load(trained, tmp_path)
    integers = frozenset(d for d in NUMERIC if d.kind != "float")
    assert model.signature().inputs == (
        TensorSpec("port", BYTES, (-1,), accepts=integers),
        TensorSpec("age", FP64, (-1,), accepts=NUMERIC),
        TensorSpec("class", BYTES, (-1,), accepts=integers),
        TensorSpec("note", BYTES, (-1,)),
    )
    texts = {"note": frame["note"].to_list(), "port": frame["port"].to_list()}
    for ranks in (frame["class"].to_numpy(), frame["class"].astype(str).to_list()):
        result = _infer(model, "predict", "predict_proba", age=frame["age"].to_numpy(), **{"class": ranks}, **texts)
        np.testing.assert_array_equal(result["predict"], trained.predict(frame))
        np.testing.assert_array_equal(result["predict_proba"], trained.predict_proba(frame))
    with pytest.raises(InvalidInput, match=r"input 'age': 1e\+300 does not fit into FP32"):
        _infer(model, age=np.full(len(frame), 1e300), **{"class": frame["class"].to_numpy()}, **texts)
    with pytest.raises(InvalidInput, match=r"input 'class': expected datatype BYTES, got FP64"):
        _infer(model, age=frame["age"].to_numpy(), **{"class": frame["age"].to_numpy()}, **texts)
    with pytest.raises(InvalidInput, match=r"input 'port': expected UTF-8 text"):
        _infer(model, age=[1.0], note=["a"], port=[b"\xff"], **{"class": [1]})


def test_invalid_files_are_rejected(tmp_path: Path) -> None:
    for content in (b"", b"CBM1", b"hello, world"):
        (tmp_path / "model.cbm").write_bytes(content)
        with pytest.raises(ModelFailed, match=r"'model\.cbm' is no CatBoost model"):
            CatBoostModel(ModelSpec(name="m", uri=str(tmp_path / "model.cbm"))).load()
    with pytest.raises(ModelFailed, match=r"file .* not found"):
        CatBoostModel(ModelSpec(name="m", uri=str(tmp_path / "none.cbm"))).load()


def test_embeddings_are_rejected(tmp_path: Path) -> None:
    frame = pandas.DataFrame({"vector": [[1.0, 2.0], [2.0, 3.0], [0.0, 1.0], [4.0, 5.0]]})
    trained = catboost.CatBoostClassifier(embedding_features=["vector"], **QUICK).fit(frame, [0, 1, 0, 1])
    with pytest.raises(ModelFailed, match="embedding features"):
        _load(trained, tmp_path)


def _with_frame(model: CatBoostModel, frame: pandas.DataFrame) -> Any:
    request = PandasCodec.encode_request(frame)
    return model.infer(bind(Infer(request.tensors, (), request.parameters), model.signature(), "m"))["predict"]


def test_columns_by_content_type_in_any_order(tmp_path: Path) -> None:
    frame, labels = _passengers()
    trained = catboost.CatBoostClassifier(**QUICK, cat_features=["port", "class"], text_features=["note"])
    trained.fit(frame, labels)
    model = _load(trained, tmp_path)
    np.testing.assert_array_equal(_with_frame(model, frame[["note", "age", "class", "port"]]), trained.predict(frame))
    with pytest.raises(InvalidInput, match="the table has no 'note'"):
        _with_frame(model, frame[["age", "class", "port"]])


def test_a_matrix_by_content_type_under_any_name(tmp_path: Path) -> None:
    data = load_iris(as_frame=True)
    trained = catboost.CatBoostClassifier(**QUICK).fit(data.data, data.target)
    model = _load(trained, tmp_path)
    np.testing.assert_array_equal(_with_frame(model, data.data.iloc[:, ::-1]), trained.predict(data.data))
    call = Infer({"anything": Tensor.of(data.data.to_numpy())}, (), {"content_type": "np"})
    np.testing.assert_array_equal(
        np.asarray(model.infer(bind(call, model.signature(), "m"))["predict"]), trained.predict(data.data)
    )
