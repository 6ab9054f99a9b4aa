"""Write a folder of models that both servers load."""

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np

CUSTOM = Path(__file__).with_name("custom.py")
CLASSES = (
    "Describe",
    "Double",
    "Plain",
    "Upper",
    "Norm",
    "Frame",
    "FrameOfLists",
    "Kinds",
    "Request",
    "Whole",
    "Marked",
    "Failing",
    "ByName",
    "JsonHelloWorld",
    "Stream",
)


def write_models(folder: Path) -> None:
    """Train small models of each library and write them with their model-settings.json."""
    warnings.simplefilter("ignore")
    _write_sklearn(folder)
    _write_boosted(folder)
    _write_mlflow(folder)
    for name in CLASSES:
        home = _settings(folder, name.lower(), f"{name.lower()}_model.{name}")
        shutil.copy(CUSTOM, home / f"{name.lower()}_model.py")
    tagged = [
        {"name": "words", "datatype": "BYTES", "shape": [-1], "parameters": {"content_type": "str"}},
        {"name": "x", "datatype": "FP32", "shape": [-1, 2], "parameters": {"content_type": "np"}},
    ]
    home = _settings(folder, "tagged", "tagged_model.Describe", inputs=tagged, parameters={"content_type": "pd"})
    shutil.copy(CUSTOM, home / "tagged_model.py")


def _settings(folder: Path, name: str, implementation: str, file: str = "", **fields: Any) -> Path:
    home = folder / name
    home.mkdir(parents=True, exist_ok=True)
    parameters = {**fields.pop("parameters", {}), **({"uri": f"./{file}"} if file else {})}
    settings = {
        "name": name,
        "implementation": implementation,
        **fields,
        **({"parameters": parameters} if parameters else {}),
    }
    (home / "model-settings.json").write_text(json.dumps(settings, indent=1))
    return home


def _write_sklearn(folder: Path) -> None:
    import pandas as pd
    from joblib import dump
    from sklearn.compose import ColumnTransformer
    from sklearn.datasets import load_iris
    from sklearn.linear_model import LinearRegression, LogisticRegression
    from sklearn.multioutput import MultiOutputRegressor
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    x, y = load_iris(return_X_y=True)
    implementation = "mlserver_sklearn.SKLearnModel"

    def write(name: str, model: Any, **fields: Any) -> None:
        dump(model, _settings(folder, name, implementation, "model.joblib", **fields) / "model.joblib")

    classifier = LogisticRegression(max_iter=1000).fit(x, y)
    write("sk-classifier", classifier)
    write("sk-version", classifier, parameters={"version": "v2"})
    write(
        "sk-metadata",
        classifier,
        platform="sklearn",
        inputs=[{"name": "rows", "datatype": "FP32", "shape": [-1, 4], "parameters": {"content_type": "np"}}],
        outputs=[
            {"name": "predict", "datatype": "INT64", "shape": [-1]},
            {"name": "predict_proba", "datatype": "FP64", "shape": [-1, 3]},
        ],
    )
    write("sk-proba", classifier, parameters={"extra": {"predict_fn": "predict_proba"}})
    write("sk-names", LogisticRegression(max_iter=1000).fit(x, np.array(["a", "bb", "c"])[y]))
    write("sk-regressor", LinearRegression().fit(x[:, :3], x[:, 3]))
    write("sk-two-outputs", MultiOutputRegressor(LinearRegression()).fit(x[:, :2], x[:, 2:]))
    write("sk-scaler", StandardScaler().fit(x), parameters={"extra": {"predict_fn": "transform"}})
    words = np.array([["red"], ["green"], ["blue"], ["red"]])
    write(
        "sk-words", make_pipeline(OneHotEncoder(handle_unknown="ignore"), LogisticRegression()).fit(words, [0, 1, 1, 0])
    )
    frame = pd.DataFrame({"size": [1.0, 2.0, 3.0, 4.0], "colour": ["red", "green", "red", "blue"]})
    columns = ColumnTransformer(
        [("words", OneHotEncoder(handle_unknown="ignore"), ["colour"]), ("size", StandardScaler(), ["size"])]
    )
    model = make_pipeline(columns, LogisticRegression()).fit(frame, [0, 1, 0, 1])
    write("sk-frame", model, parameters={"content_type": "pd"})


def _write_boosted(folder: Path) -> None:
    import catboost
    import lightgbm
    import xgboost
    from sklearn.datasets import load_iris

    x, y = load_iris(return_X_y=True)
    binary = y < 2
    for name, model in (
        ("xgb-classes", xgboost.XGBClassifier(n_estimators=4).fit(x, y)),
        ("xgb-binary", xgboost.XGBClassifier(n_estimators=4).fit(x[binary], y[binary])),
        ("xgb-regressor", xgboost.XGBRegressor(n_estimators=4).fit(x, x[:, 0])),
        ("xgb-booster", xgboost.train({"objective": "binary:logistic"}, xgboost.DMatrix(x[binary], y[binary]), 4)),
    ):
        model.save_model(_settings(folder, name, "mlserver_xgboost.XGBoostModel", "model.json") / "model.json")
    quiet = {"verbose": -1, "num_threads": 1, "min_data_in_leaf": 5}
    for name, options, labels in (
        ("lgb-regressor", {"objective": "regression"}, x[:, 0]),
        ("lgb-binary", {"objective": "binary"}, (y > 0).astype(int)),
        ("lgb-classes", {"objective": "multiclass", "num_class": 3}, y),
    ):
        home = _settings(folder, name, "mlserver_lightgbm.LightGBMModel", "model.bst")
        lightgbm.train({**quiet, **options}, lightgbm.Dataset(x, labels), 4).save_model(str(home / "model.bst"))
    names = np.array(["a", "bb", "c"])[y]
    for name, labels in (("cat-classes", y), ("cat-binary", (y > 0).astype(int)), ("cat-names", names)):
        home = _settings(folder, name, "mlserver_catboost.CatboostModel", "model.cbm")
        classifier = catboost.CatBoostClassifier(iterations=4, verbose=False, allow_writing_files=False)
        classifier.fit(x, labels).save_model(str(home / "model.cbm"))
    home = _settings(folder, "cat-regressor", "mlserver_catboost.CatboostModel", "model.cbm")
    regressor = catboost.CatBoostRegressor(iterations=4, verbose=False, allow_writing_files=False)
    regressor.fit(x, x[:, 0] - 5).save_model(str(home / "model.cbm"))


def _write_mlflow(folder: Path) -> None:
    import mlflow
    import pandas as pd
    from mlflow.models import infer_signature
    from sklearn.linear_model import LinearRegression, LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder

    implementation = "mlserver_mlflow.MLflowRuntime"
    frame = pd.DataFrame({"a": [1.0, 2.0, 3.0], "b": [1, 3, 2]})
    model = LinearRegression().fit(frame, [1.0, 2.0, 4.0])
    home = _settings(folder, "mlf-columns", implementation, "model")
    _save(mlflow, model, home, infer_signature(frame, model.predict(frame)))
    rows = frame.to_numpy()
    model = LinearRegression().fit(rows, [1.0, 2.0, 4.0])
    home = _settings(folder, "mlf-tensor", implementation, "model")
    _save(mlflow, model, home, infer_signature(rows, model.predict(rows)))
    words = pd.DataFrame({"colour": ["red", "green", "blue"]})
    pipeline = make_pipeline(OneHotEncoder(handle_unknown="ignore"), LogisticRegression()).fit(words, ["x", "y", "x"])
    home = _settings(folder, "mlf-words", implementation, "model")
    _save(mlflow, pipeline, home, infer_signature(words, pipeline.predict(words)))


def _save(mlflow: Any, model: Any, home: Path, signature: Any) -> None:
    mlflow.sklearn.save_model(
        model, str(home / "model"), signature=signature, serialization_format="cloudpickle", pip_requirements=[]
    )
