"""MLflow models return exactly what mlflow.pyfunc returns when it is called directly."""

import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
from sklearn.datasets import load_iris
from sklearn.linear_model import LogisticRegression

from dragoman.codecs import PandasCodec
from dragoman.core.binding import bind
from dragoman.core.calls import Infer
from dragoman.core.datatypes import BOOL, BYTES, FP32, FP64, INT32, INT64
from dragoman.core.errors import InvalidInput, InvalidOutput, ModelFailed
from dragoman.core.model import Model
from dragoman.core.signature import TensorSpec
from dragoman.core.spec import ModelSpec
from dragoman.core.tensor import Tensor
from dragoman.engine_setup import open_engine
from dragoman.runtimes.mlflow import MlflowModel

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
pyfunc: Any = None
models: Any = None
types: Any = None


@pytest.fixture(scope="module", autouse=True)
def _import_mlflow() -> None:
    """Import it when a test runs: collection in another process of pytest-xdist does not need it."""
    global pyfunc, models, types
    pyfunc, models, types = (pytest.importorskip(f"mlflow.{name}") for name in ("pyfunc", "models", "types"))


def _load(folder: Path, **settings: Any) -> MlflowModel:
    model = MlflowModel(ModelSpec(name="m", uri=str(folder), allow_pickle=True, **settings))
    model.load()
    return model


def _python(function: Callable[[Any, Any], Any], folder: Path, signature: Any = None) -> MlflowModel:
    """Save a Python function of data and params as an MLflow model and load it."""
    # MLflow warns about missing type hints and examples, and sets its own filter for the former.
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("ignore", UserWarning)

        class Wrapped(pyfunc.PythonModel):  # type: ignore[misc]
            def predict(self, context, model_input, params=None):  # type: ignore[no-untyped-def]
                return function(model_input, params)

        pyfunc.save_model(str(folder / "model"), python_model=Wrapped(), signature=signature, pip_requirements=[])
    return _load(folder / "model")


def _infer(model: Model, inputs: dict[str, Any], **parameters: Any) -> Any:
    tensors = {name: Tensor.of(array) for name, array in inputs.items()}
    for tensor in tensors.values():
        tensor.data.flags.writeable = False
    return model.infer(bind(Infer(tensors, parameters=parameters), model.signature(), "m"))


def _columns(*columns: tuple[str, str], params: Any = None) -> Any:
    schema = types.Schema([types.ColSpec(kind, name) for kind, name in columns])
    return models.ModelSignature(inputs=schema, params=params)


def _echo(data: Any, params: Any) -> Any:
    return data


def test_sklearn_flavor(tmp_path: Path) -> None:
    flavor = pytest.importorskip("mlflow.sklearn")
    data = load_iris(as_frame=True)
    trained = LogisticRegression(max_iter=500).fit(data.data, data.target)
    signature = models.infer_signature(data.data, trained.predict(data.data))
    folder = tmp_path / "model"
    flavor.save_model(
        trained, str(folder), signature=signature, pip_requirements=[], serialization_format="cloudpickle"
    )
    model = _load(folder)
    assert model.platform == "mlflow_pyfunc"
    assert [(s.name, s.datatype, s.shape) for s in model.signature().inputs] == [
        (name, FP64, (-1,)) for name in data.feature_names
    ]
    assert model.signature().outputs == (TensorSpec("output-0", INT64, (-1,)),)
    assert not model.signature().batched
    assert _load(folder, max_batch_size=8).signature().batched
    for dtype in (np.float64, np.float32, np.int16):
        rows = data.data.astype(dtype)
        result = _infer(model, {name: rows[name].to_numpy() for name in rows})
        np.testing.assert_array_equal(result["output-0"], trained.predict(rows))
    names = list(data.feature_names)
    direct = pyfunc.load_model(str(folder)).predict(data.data)
    np.testing.assert_array_equal(_infer(model, {n: data.data[n].to_numpy() for n in names})["output-0"], direct)
    with pytest.raises(InvalidInput, match="the same number of rows"):
        _infer(model, {name: np.zeros(1 + i) for i, name in enumerate(names)})
    with pytest.raises(InvalidInput, match="expected datatype FP64, got INT64"):
        _infer(model, {name: np.zeros(1, np.int64) for name in names})


@pytest.mark.parametrize("function", ["predict", "predict_proba"])
def test_kind_and_classes_of_an_estimator(tmp_path: Path, function: str) -> None:
    flavor = pytest.importorskip("mlflow.sklearn")
    x, y = load_iris(return_X_y=True)
    classifier = LogisticRegression(max_iter=1000).fit(x, np.array(["a", "b", "c"])[y])
    options: dict[str, Any] = {"serialization_format": "pickle", "pyfunc_predict_fn": function}
    flavor.save_model(classifier, str(tmp_path / "model"), **options)
    model = _load(tmp_path / "model")
    assert model.kind == "classifier"
    assert model.class_labels() == ({"output-0": ("a", "b", "c")} if function == "predict_proba" else {})


def test_columns_of_every_type(tmp_path: Path) -> None:
    kinds = ("boolean", "integer", "long", "float", "double", "string", "binary", "datetime")
    signature = models.ModelSignature(
        inputs=types.Schema([types.ColSpec(kind, kind, required=kind != "long") for kind in kinds])
    )
    model = _python(
        lambda data, params: pandas.DataFrame({"dtype": [str(d) for d in data.dtypes]}), tmp_path, signature
    )
    specs = model.signature().inputs
    assert [s.datatype for s in specs] == [BOOL, INT32, INT64, FP32, FP64, BYTES, BYTES, BYTES]
    assert [s.name for s in specs if s.optional] == ["long"]
    columns = {
        "boolean": [True, False],
        "integer": np.array([1, 2], np.int32),
        "float": np.array([1, 2], np.float32),
        "double": np.array([1, 2], np.float32),
        "string": ["é", "b\0"],
        "binary": [b"\xff", b"b\0"],
        "datetime": ["2024-02-29", "2024-02-29T12:30:00.5+02:00"],
    }
    dtypes = _infer(model, columns)["dtype"].tolist()
    text = str(pandas.Series(["a"]).dtype)  # "object" before pandas 3
    assert dtypes == ["bool", "int32", "float32", "float64", text, "object", "datetime64[ns]"]
    echoed = _infer(_python(_echo, tmp_path / "echo", signature), {**columns, "long": np.array([1, 2])})
    assert echoed["string"].tolist() == ["é", "b\0"]
    assert echoed["binary"].tolist() == [b"\xff", b"b\0"]
    assert echoed["datetime"].tolist() == ["2024-02-29T00:00:00", "2024-02-29T10:30:00.500000"]
    assert echoed["long"].dtype == np.int64
    for name, wrong in (("datetime", ["yesterday", "today"]), ("string", [b"\xff", b"a"])):
        with pytest.raises(InvalidInput, match=f"input '{name}': expected"):
            _infer(model, {**columns, name: wrong})


def test_columns_of_lists_and_objects_are_json(tmp_path: Path) -> None:
    schema = pytest.importorskip("mlflow.types.schema")
    signature = models.ModelSignature(inputs=types.Schema([types.ColSpec(schema.Array(types.DataType.double), "a")]))
    model = _python(
        lambda data, params: {"sum": [sum(each) for each in data["a"]], "as": data["a"]}, tmp_path, signature
    )
    assert model.signature().inputs == (TensorSpec("a", BYTES, (-1,)),)
    result = _infer(model, {"a": ["[1.5, 2.0]", "[3.0]"]})
    assert result["sum"].tolist() == [3.5, 3.0]
    assert result["as"].tolist() == ["[1.5, 2.0]", "[3.0]"]
    with pytest.raises(InvalidInput, match="expected JSON in each element"):
        _infer(model, {"a": ["[1.5, 2.0", "[3.0]"]})
    with pytest.raises(InvalidInput, match="expected JSON in each element"):
        _infer(model, {"a": ["[" * 100_000, "[3.0]"]})
    with pytest.raises(InvalidInput, match="MLflow takes no such inputs"):
        _infer(model, {"a": ['["x"]', "[3.0]"]})


def test_columns_without_names(tmp_path: Path) -> None:
    signature = models.ModelSignature(inputs=types.Schema([types.ColSpec("double"), types.ColSpec("string")]))
    model = _python(lambda data, params: [len(data.columns)] * len(data), tmp_path, signature)
    assert [s.name for s in model.signature().inputs] == ["input-0", "input-1"]
    assert _infer(model, {"input-0": [1.0], "input-1": ["a"]})["output-0"].tolist() == [2]


def test_tensors(tmp_path: Path) -> None:
    one = types.Schema([types.TensorSpec(np.dtype("float32"), (-1, 4))])
    model = _python(_echo, tmp_path, models.ModelSignature(inputs=one, outputs=one))
    assert model.signature().inputs[0].shape == (-1, 4)
    assert model.signature().outputs == (TensorSpec("output-0", FP32, (-1, 4)),)
    rows = np.arange(8, dtype=np.float32).reshape(2, 4)
    np.testing.assert_array_equal(_infer(model, {"input-0": rows})["output-0"], rows)


def test_named_tensors_and_in_place_changes(tmp_path: Path) -> None:
    def doubled(data: Any, params: Any) -> Any:
        data["x"] *= 2
        return data

    signature = models.ModelSignature(
        inputs=types.Schema(
            [
                types.TensorSpec(np.dtype("float32"), (-1, 2), "x"),
                types.TensorSpec(np.dtype("str"), (-1,), "text"),
                types.TensorSpec(np.dtype("bytes"), (-1,), "raw"),
            ]
        )
    )
    model = _python(doubled, tmp_path, signature)
    result = _infer(model, {"x": np.ones((2, 2), np.float32), "text": ["é", "b"], "raw": [b"\xff", b"b"]})
    np.testing.assert_array_equal(result["x"], np.full((2, 2), 2))
    assert result["text"].tolist() == ["é", "b"]
    assert result["raw"].tolist() == [b"\xff", b"b"]


def test_without_a_signature(tmp_path: Path) -> None:
    model = _python(lambda data, params: [type(data).__name__], tmp_path)
    assert model.signature().open_inputs
    assert model.signature().open_outputs
    assert _infer(model, {"x": np.ones((2, 2))})["output-0"].tolist() == ["ndarray"]
    assert _infer(model, {"x": np.ones(2), "y": ["a", "b"]})["output-0"].tolist() == ["DataFrame"]
    with pytest.raises(InvalidInput, match=r"input 'y': expected a column of a table, shape \[-1\]"):
        _infer(model, {"x": np.ones(2), "y": np.ones((2, 2))})


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({}, {"k": 3, "v": [0.5]}),
        ({"k": 5, "v": "[1, 2.5]", "other": "x"}, {"k": 5, "v": [1.0, 2.5]}),
        ({"k": 5.5}, "parameter 'k': expected integer, got 5.5"),
        ({"k": "5"}, "parameter 'k': expected integer, got '5'"),
        ({"v": 3.0}, "parameter 'v': expected a JSON list of double, got 3.0"),
        ({"v": "[1"}, "parameter 'v': expected a JSON list of double"),
        ({"v": "[" * 100_000}, "parameter 'v': expected a JSON list of double"),
    ],
)
def test_params_from_call_parameters(tmp_path: Path, columns: Any, expected: Any) -> None:
    params = types.ParamSchema(
        [types.ParamSpec("k", types.DataType.integer, 3), types.ParamSpec("v", types.DataType.double, [0.5], (-1,))]
    )
    model = _python(lambda data, params: [params], tmp_path, _columns(("double", "a"), params=params))
    if isinstance(expected, str):
        with pytest.raises(InvalidInput, match=expected.replace("[", r"\[")):
            _infer(model, {"a": [1.0]}, **columns)
        return
    (text,) = _infer(model, {"a": [1.0]}, **columns)["output-0"].tolist()
    assert json.loads(text) == expected


def test_results_of_every_type(tmp_path: Path) -> None:
    frame = pandas.DataFrame(
        {
            "n": [1, 2],
            "s": ["x", "y"],
            "t": pandas.to_datetime(["2024-01-01T00:00:00", "2024-01-01T01:02:03"]),
            "c": pandas.Categorical(["u", "v"]),
            "m": pandas.array([1, None], dtype="Int64"),
        }
    )
    model = _python(lambda data, params: frame, tmp_path)
    result = _infer(model, {"x": [1.0]})
    assert result["n"].tolist() == [1, 2]
    assert Tensor.of(result["s"]).data.tolist() == [b"x", b"y"]
    assert result["t"].tolist() == ["2024-01-01T00:00:00", "2024-01-01T01:02:03"]
    assert Tensor.of(result["c"]).data.tolist() == [b"u", b"v"]
    np.testing.assert_array_equal(result["m"], [1, np.nan])
    series = _python(lambda data, params: frame["n"], tmp_path / "series")
    assert _infer(series, {"x": [1.0]})["output-0"].tolist() == [1, 2]
    records = _python(lambda data, params: [{"a": np.float32(0.5)}, {"a": None}], tmp_path / "records")
    assert _infer(records, {"x": [1.0]})["output-0"].tolist() == ['{"a": 0.5}', '{"a": null}']


def test_an_output_schema_names_the_columns_of_an_array(tmp_path: Path) -> None:
    out = types.Schema([types.ColSpec("double", "p"), types.ColSpec("double", "q")])
    signature = models.ModelSignature(inputs=types.Schema([types.ColSpec("double", "a")]), outputs=out)
    model = _python(lambda data, params: np.ones((len(data), 2 + (len(data) == 3))), tmp_path, signature)
    assert model.signature().outputs == (TensorSpec("p", FP64, (-1,)), TensorSpec("q", FP64, (-1,)))
    assert {name: array.shape for name, array in _infer(model, {"a": [1.0]}).items()} == {"p": (1,), "q": (1,)}
    with pytest.raises(InvalidOutput, match="expected 2 columns"):
        _infer(model, {"a": [1.0, 2.0, 3.0]})


def test_invalid_models_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ModelFailed, match="expected a folder with the file MLmodel"):
        _load(tmp_path)
    (tmp_path / "MLmodel").write_text("flavors: {}\n")
    with pytest.raises(ModelFailed, match="--allow-pickle"):
        MlflowModel(ModelSpec(name="m", uri=str(tmp_path))).load()
    with pytest.raises(ModelFailed, match="cannot be loaded by MLflow"):
        _load(tmp_path)


def test_a_frame_by_content_type(tmp_path: Path) -> None:
    model = _python(_echo, tmp_path / "m", _columns(("long", "a"), ("string", "b")))
    frame = pandas.DataFrame({"a": [1, 2], "b": ["x", "y"]})
    request = PandasCodec.encode_request(frame)
    result = model.infer(bind(Infer(request.tensors, (), request.parameters), model.signature(), "m"))
    assert {name: list(value) for name, value in result.items()} == {"a": [1, 2], "b": ["x", "y"]}
    wrong = PandasCodec.encode_request(frame[["a"]])
    with pytest.raises(InvalidInput, match="b"):
        model.infer(bind(Infer(wrong.tensors, (), wrong.parameters), model.signature(), "m"))


@pytest.mark.filterwarnings("ignore:Operation with range is deprecated")  # of pandas, in MLflow
@pytest.mark.parametrize(
    ("example", "columns", "inputs"),
    [
        (
            pandas.DataFrame({"size": [1.5, 2.5], "name": ["a", "b"]}),
            (("double", "size"), ("string", "name")),
            {"size": [1.5, 2.5], "name": [b"a", b"b"]},
        ),
        ({"size": 3.0, "name": "c"}, (("double", "size"), ("string", "name")), {"size": [3.0], "name": [b"c"]}),
        (np.array([[1, 2], [3, 4]]), (), {"input-0": [[1, 2], [3, 4]]}),
    ],
)
async def test_the_input_example_of_a_model_is_its_example(
    tmp_path: Path, example: Any, columns: Any, inputs: dict[str, Any]
) -> None:
    specs = [types.ColSpec(*each) for each in columns] or [types.TensorSpec(np.dtype("int64"), (-1, 2))]
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("ignore")

        class First(pyfunc.PythonModel):  # type: ignore[misc]
            def predict(self, context, model_input, params=None):  # type: ignore[no-untyped-def]
                return np.asarray(model_input)[:, 0].astype(np.float64)

        pyfunc.save_model(
            str(tmp_path / "m"),
            python_model=First(),
            signature=models.ModelSignature(inputs=types.Schema(specs)),
            input_example=example,
            pip_requirements=[],
        )
    async with open_engine(tmp_path, allow_pickle=True, placement="thread") as engine:
        (deployment,) = engine.deployments()
        assert (deployment.reason, deployment.trial_error) == ("", "")
        assert deployment.example is not None
        assert {name: tensor.data.tolist() for name, tensor in deployment.example.items()} == inputs


async def test_a_damaged_input_example_is_reported_and_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = _python(_echo, tmp_path, _columns(("double", "x")))
    path = Path(model.spec.uri)
    (path / "MLmodel").write_text(
        (path / "MLmodel").read_text() + "saved_input_example_info:\n  artifact_path: gone.json\n"
    )
    async with open_engine(path, allow_pickle=True, placement="thread") as engine:
        (deployment,) = engine.deployments()
        assert deployment.example is not None
        assert deployment.example["x"].data.tolist() == [1.0]
    assert "input example not used: model=model" in caplog.text
