"""What the frameworks themselves compute, in this process and without any code of the server."""

import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

Arrays = Mapping[str, Any]
Run = Callable[[Arrays], dict[str, Any]]


def reference(path: Path) -> Run:
    """Return a function from named inputs to the outputs of a model, by the names that the server gives them."""
    suffixes: dict[str, Callable[[Path], Run]] = {
        ".onnx": _onnx,
        ".jit": _script,
        ".joblib": _pickle,
        ".pkl": _pickle,
        ".sav": _pickle,
        ".json": _booster_file,
        "": _saved_model,
    }
    return suffixes[path.suffix](path)


def _onnx(path: Path) -> Run:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(path, options)
    names = [output.name for output in session.get_outputs()]

    def run(inputs: Arrays) -> dict[str, Any]:
        values = zip(names, session.run(names, dict(inputs)), strict=True)
        # A classifier's maps from classes to numbers, one for each row: the rows of a matrix.
        return {
            n: np.array([[*row.values()] for row in v], np.float32) if isinstance(v, list) else v for n, v in values
        }

    return run


def _script(path: Path) -> Run:
    import torch

    load: Any = torch.jit.load
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = load(str(path)).eval()

    def run(inputs: Arrays) -> dict[str, Any]:
        arguments = {n: v.item() if v.shape == () else torch.from_numpy(v) for n, v in inputs.items()}
        with torch.inference_mode():
            return {"output-0": module(**arguments).numpy()}

    return run


def _saved_model(path: Path) -> Run:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import tensorflow

    v1: Any = tensorflow.compat.v1
    graph = tensorflow.Graph()
    session = v1.Session(graph=graph)
    with graph.as_default():
        signature = v1.saved_model.load(session, ["serve"], str(path)).signature_def["serving_default"]

    def run(inputs: Arrays) -> dict[str, Any]:
        feed = {signature.inputs[name].name: value for name, value in inputs.items()}
        result: dict[str, Any] = session.run({n: tensor.name for n, tensor in signature.outputs.items()}, feed)
        return result

    return run


def _pickle(path: Path) -> Run:
    import joblib

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of another version that has saved it
        value = joblib.load(path)
    if type(value).__module__ == "xgboost.core":
        return _booster(value)

    def run(inputs: Arrays) -> dict[str, Any]:
        (rows,) = inputs.values()
        if hasattr(value, "predict"):
            return {"predict": value.predict(rows)}
        result = value.transform([text.decode() for text in rows] if rows.dtype == object else rows)
        return {"transform": result.toarray() if hasattr(result, "toarray") else result}

    return run


def _booster_file(path: Path) -> Run:
    import xgboost

    booster = xgboost.Booster()
    booster.load_model(path)
    return _booster(booster)


def _booster(booster: Any) -> Run:
    import xgboost

    def run(inputs: Arrays) -> dict[str, Any]:
        (rows,) = inputs.values()
        names = {"feature_names": booster.feature_names, "feature_types": booster.feature_types}
        return {"predict": booster.predict(xgboost.DMatrix(rows, **names))}

    return run
