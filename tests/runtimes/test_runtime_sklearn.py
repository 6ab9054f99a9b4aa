"""scikit-learn estimators return exactly what the library returns when it is called directly."""

import pickle
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pandas
import pytest
from sklearn.cluster import DBSCAN
from sklearn.compose import ColumnTransformer
from sklearn.datasets import load_breast_cancer, load_iris, load_linnerud
from sklearn.ensemble import RandomForestClassifier
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, OrdinalEncoder, RobustScaler, StandardScaler
from sklearn.svm import SVC

from dragoman.core.calls import Infer
from dragoman.core.datatypes import BYTES, FP64, INT64, NUMERIC
from dragoman.core.errors import InvalidInput, ModelFailed
from dragoman.core.model import Model
from dragoman.core.signature import TensorSpec
from dragoman.core.spec import ModelSpec
from dragoman.core.tensor import Tensor
from dragoman.runtimes.sklearn.model import SklearnModel


def _load(estimator: Any, folder: Path, name: str = "model.joblib") -> Model:
    joblib.dump(estimator, folder / name)
    model = SklearnModel(ModelSpec(name="m", uri=str(folder / name), allow_pickle=True))
    model.load()
    return model


def _call(*outputs: str, **arrays: Any) -> Infer:
    tensors = {name: Tensor.of(array) for name, array in arrays.items()}
    for tensor in tensors.values():
        tensor.data.flags.writeable = False
    return Infer(tensors, outputs)


def test_classifier(tmp_path: Path) -> None:
    x, y = load_breast_cancer(return_X_y=True)
    pipeline = make_pipeline(StandardScaler(), LogisticRegression()).fit(x, y)
    model = _load(pipeline, tmp_path)
    assert model.platform == "sklearn_joblib"
    signature = model.signature()
    assert signature.inputs == (TensorSpec("input", FP64, (-1, 30), accepts=NUMERIC),)
    assert signature.outputs == (
        TensorSpec("predict", INT64, (-1,)),
        TensorSpec("predict_proba", FP64, (-1, 2), optional=True),
        TensorSpec("decision_function", FP64, (-1,), optional=True),
    )
    assert signature.batched
    result = model.infer(_call(input=x))
    assert isinstance(result, dict)
    assert list(result) == ["predict"]
    np.testing.assert_array_equal(result["predict"], pipeline.predict(x))
    result = model.infer(_call("predict_proba", "decision_function", input=x))
    assert isinstance(result, dict)
    np.testing.assert_array_equal(result["predict_proba"], pipeline.predict_proba(x))
    np.testing.assert_array_equal(result["decision_function"], pipeline.decision_function(x))


@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.uint8, np.float16])
def test_numbers_keep_their_datatype(tmp_path: Path, dtype: Any) -> None:
    x, y = load_iris(return_X_y=True)
    forest = RandomForestClassifier(n_estimators=5, random_state=0).fit(x, y)
    rows = x.astype(dtype)
    result = _load(forest, tmp_path).infer(_call("predict_proba", input=rows))
    assert isinstance(result, dict)
    np.testing.assert_array_equal(result["predict_proba"], forest.predict_proba(rows))


def test_text_labels_say_that_they_are_text(tmp_path: Path) -> None:
    data = load_iris()
    svc = SVC().fit(data.data, data.target_names[data.target])
    model = _load(svc, tmp_path)
    assert model.signature().outputs[0] == TensorSpec("predict", BYTES, (-1,))
    result = model.infer(_call(input=data.data))
    assert isinstance(result, dict)
    labels = result["predict"]
    assert labels.data.tolist() == [label.encode() for label in svc.predict(data.data)]
    assert labels.parameters == {"content_type": "str"}


def test_feature_names_raise_no_warning(tmp_path: Path) -> None:
    data = load_iris(as_frame=True)
    pipeline = make_pipeline(StandardScaler(), LogisticRegression()).fit(data.data, data.target)
    model = _load(pipeline, tmp_path, "model.pkl")
    assert model.platform == "sklearn_pickle"
    result = model.infer(_call(input=data.data.to_numpy()))
    assert isinstance(result, dict)
    np.testing.assert_array_equal(result["predict"], pipeline.predict(data.data))


def _passengers() -> tuple[pandas.DataFrame, list[int]]:
    frame = pandas.DataFrame(
        {
            "port": ["S", "C", "Q", "S", "C", "S"],
            "age": [22.0, 38.0, 26.0, 35.0, 35.0, 54.0],
            "class": [3, 1, 3, 1, 3, 1],
            "note": ["a", "b", "c", "d", "e", "f"],
        }
    )
    return frame, [0, 1, 1, 1, 0, 0]


def test_text_columns_are_separate_inputs(tmp_path: Path) -> None:
    frame, y = _passengers()
    columns = ColumnTransformer(
        [("port", OneHotEncoder(), ["port"]), ("numbers", StandardScaler(), ["age"]), ("rank", OneHotEncoder(), [2])]
    )
    pipeline = make_pipeline(columns, LogisticRegression()).fit(frame, y)
    model = _load(pipeline, tmp_path)
    assert model.signature().inputs == (
        TensorSpec("port", BYTES, (-1,)),
        TensorSpec("age", FP64, (-1,), accepts=NUMERIC),
        TensorSpec("class", FP64, (-1,), accepts=NUMERIC),
        TensorSpec("note", None, (-1,), optional=True),
    )
    assert model.signature().outputs[1] == TensorSpec("predict_proba", FP64, (-1, 2), optional=True)
    call = _call("predict_proba", port=frame["port"].to_list(), age=frame["age"], **{"class": frame["class"]})
    result = model.infer(call)
    assert isinstance(result, dict)
    np.testing.assert_array_equal(result["predict_proba"], pipeline.predict_proba(frame))


def test_text_columns_without_names(tmp_path: Path) -> None:
    rows = np.array([["a", 1], ["b", 2], ["a", 3]], dtype=object)
    encoder = OrdinalEncoder().fit(rows)
    model = _load(encoder, tmp_path)
    assert [spec.name for spec in model.signature().inputs] == ["x0", "x1"]
    assert model.signature().outputs == (TensorSpec("transform", FP64, (-1, 2)),)
    result = model.infer(_call(x0=["b", "a"], x1=np.array([3, 1])))
    assert isinstance(result, dict)
    np.testing.assert_array_equal(result["transform"], [[1, 2], [0, 0]])


def test_values_that_the_estimator_rejects_are_invalid_input(tmp_path: Path) -> None:
    frame, y = _passengers()
    columns = ColumnTransformer([("port", OneHotEncoder(), ["port"])])
    model = _load(make_pipeline(columns, LogisticRegression()).fit(frame[["port"]], y), tmp_path)
    with pytest.raises(InvalidInput, match="unknown categories"):
        model.infer(_call(port=["X"]))


def test_text_documents(tmp_path: Path) -> None:
    texts, y = ["good film", "bad film", "good play", "bad play"], ["yes", "no", "yes", "no"]
    pipeline = make_pipeline(TfidfVectorizer(), LogisticRegression()).fit(texts, y)
    model = _load(pipeline, tmp_path)
    assert model.signature().inputs == (TensorSpec("input", BYTES, (-1,)),)
    result = model.infer(_call("predict_proba", input=texts))
    assert isinstance(result, dict)
    np.testing.assert_array_equal(result["predict_proba"], pipeline.predict_proba(texts))


def test_sparse_results_become_dense(tmp_path: Path) -> None:
    encoder = OneHotEncoder().fit([[1.0], [2.0]])
    model = _load(encoder, tmp_path)
    assert model.signature().outputs == (TensorSpec("transform", FP64, (-1, 2)),)
    result = model.infer(_call(input=np.array([[2.0]])))
    assert isinstance(result, dict)
    np.testing.assert_array_equal(result["transform"], [[0, 1]])


def test_several_targets(tmp_path: Path) -> None:
    data = load_linnerud()
    regression = LinearRegression().fit(data.data, data.target)
    assert _load(regression, tmp_path).signature().outputs == (TensorSpec("predict", FP64, (-1, 3)),)
    classes = (data.target > np.median(data.target, axis=0)).astype(np.int64)
    forest = RandomForestClassifier(n_estimators=3, random_state=0).fit(data.data, classes)
    model = _load(forest, tmp_path)
    names = [spec.name for spec in model.signature().outputs]
    assert names == ["predict", "predict_proba-0", "predict_proba-1", "predict_proba-2"]
    result = model.infer(_call("predict_proba-2", input=data.data))
    assert isinstance(result, dict)
    np.testing.assert_array_equal(result["predict_proba-2"], forest.predict_proba(data.data)[2])


def test_pickles_are_rejected_unless_allowed(tmp_path: Path) -> None:
    path = tmp_path / "model.pkl"
    path.write_bytes(pickle.dumps(StandardScaler().fit([[1.0]])))
    with pytest.raises(ModelFailed, match="--allow-pickle"):
        SklearnModel(ModelSpec(name="m", uri=str(path))).load()


def test_objects_that_are_not_estimators_are_rejected(tmp_path: Path) -> None:
    for value in ({"a": 1}, DBSCAN().fit([[1.0]]), pandas.DataFrame({"a": [1.0]}), StandardScaler):
        with pytest.raises(ModelFailed, match="which is not a model; expected a fitted scikit-learn estimator"):
            _load(value, tmp_path)
    for name, form in (("model.pkl", "pickle"), ("model.joblib", "joblib")):
        (tmp_path / name).write_bytes(b"garbage")
        with pytest.raises(ModelFailed, match=f"'{name}' cannot be read as a model saved by {form}: "):
            SklearnModel(ModelSpec(name="m", uri=str(tmp_path / name), allow_pickle=True)).load()
    with pytest.raises(ModelFailed, match=r"file .* not found"):
        SklearnModel(ModelSpec(name="m", uri=str(tmp_path / "none.joblib"), allow_pickle=True)).load()


def test_the_example_has_means_that_a_person_reads(tmp_path: Path) -> None:
    frame = pandas.DataFrame({"town": ["a", "b", "a"], "area": [31.0, 47.0, 80.001], "year": [1999.0, 2001.0, 2002.0]})
    imputed = make_pipeline(SimpleImputer(), StandardScaler())
    columns = ColumnTransformer([("text", OneHotEncoder(), ["town"]), ("numbers", imputed, ["area", "year"])])
    model = _load(make_pipeline(columns, LogisticRegression()).fit(frame, [0, 1, 1]), tmp_path)
    assert model.example_inputs() == {"town": ["a"], "area": [52.67], "year": [2001.0]}
    rows = frame[["area", "year"]]
    for scaler, means in ((StandardScaler(), [52.67, 2001.0]), (RobustScaler(), [47.0, 2001.0])):
        model = _load(make_pipeline(scaler, LogisticRegression()).fit(rows, [0, 1, 1]), tmp_path)
        assert np.array(dict(model.example_inputs() or {})["input"]).tolist() == [means]
