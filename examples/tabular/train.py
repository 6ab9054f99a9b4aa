"""Train small models on the data that ships with scikit-learn, one for each runtime, in some seconds.

Run `python examples/tabular/train.py`, then `dragoman serve examples/tabular/models --allow-pickle`.
"""

import json
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

MODELS = Path(__file__).parent / "models"
Split = tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]


def split(name: str) -> Split:
    """Return training rows, test rows, training labels and test labels of a data set of scikit-learn."""
    from sklearn import datasets
    from sklearn.model_selection import train_test_split

    x, y = getattr(datasets, f"load_{name}")(return_X_y=True)
    return tuple(train_test_split(x, y, random_state=0))


def breast_cancer(folder: Path) -> float:
    """scikit-learn: a scaler and a logistic regression on 30 measurements of a tumour."""
    import joblib
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    x, x_test, y, y_test = split("breast_cancer")
    pipeline = make_pipeline(StandardScaler(), LogisticRegression()).fit(x, y)
    joblib.dump(pipeline, folder / "model.joblib")
    return float(pipeline.score(x_test, y_test))


def breast_cancer_xgboost(folder: Path) -> float:
    """XGBoost: the same task, with a hundred small trees."""
    from xgboost import XGBClassifier

    x, x_test, y, y_test = split("breast_cancer")
    classifier = XGBClassifier(n_estimators=100, max_depth=3).fit(x, y)
    classifier.save_model(folder / "model.ubj")
    return float(classifier.score(x_test, y_test))


def diabetes_lightgbm(folder: Path) -> float:
    """LightGBM: progress of diabetes in a year, from ten measurements (the score is R squared)."""
    import lightgbm
    from sklearn.metrics import r2_score

    x, x_test, y, y_test = split("diabetes")
    settings = {"objective": "regression", "num_leaves": 7, "learning_rate": 0.05, "seed": 0, "verbose": -1}
    booster = lightgbm.train(settings, lightgbm.Dataset(x, y), num_boost_round=80)
    booster.save_model(folder / "model.txt")
    return float(r2_score(y_test, booster.predict(x_test)))


def wine(folder: Path) -> float:
    """scikit-learn, two versions of one model: a forest of 5 trees, and one of 100."""
    import joblib
    from sklearn.ensemble import RandomForestClassifier

    x, x_test, y, y_test = split("wine")
    score = 0.0
    for version, trees in (("1", 5), ("2", 100)):
        forest = RandomForestClassifier(n_estimators=trees, random_state=0).fit(x, y)
        (folder / version).mkdir(exist_ok=True)
        joblib.dump(forest, folder / version / "model.joblib")
        score = float(forest.score(x_test, y_test))
    return score


def digits_onnx(folder: Path) -> float:
    """ONNX: handwritten digits of 8 x 8 pixels, by a classifier of scikit-learn that was exported."""
    from skl2onnx import to_onnx
    from sklearn.linear_model import LogisticRegression

    x, x_test, y, y_test = split("digits")
    classifier = LogisticRegression(max_iter=1000).fit(x / 16, y)
    # Without zipmap=False the probabilities would be a list of maps, which no tensor can hold.
    exported = to_onnx(classifier, x[:1].astype(np.float32), options={"zipmap": False})
    (folder / "model.onnx").write_bytes(exported.SerializeToString())
    return float(classifier.score(x_test / 16, y_test))


def _digits_network() -> tuple[Any, float]:
    """Return a small PyTorch network for the digits and its accuracy."""
    import torch

    x, x_test, y, y_test = split("digits")
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    rows, labels = torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y)
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
    for _ in range(150):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(network(rows), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    network.eval()
    guessed = network(torch.tensor(x_test / 16, dtype=torch.float32)).argmax(dim=1).numpy()
    return network, float((guessed == y_test).mean())


def digits_torchscript(folder: Path) -> float:
    """TorchScript: the digits with a PyTorch network."""
    import torch

    network, score = _digits_network()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`torch.jit", category=DeprecationWarning)
        torch.jit.script(network).save(str(folder / "model.pt"))
    return score


def digits_export(folder: Path) -> float:
    """torch.export: the same network in the newer format, which contains datatypes and shapes."""
    import torch

    network, score = _digits_network()
    rows = torch.export.Dim("rows")
    program = torch.export.export(network, (torch.zeros(2, 64),), dynamic_shapes=({0: rows},))
    torch.export.save(program, folder / "model.pt2")
    return score


def iris_centroid(folder: Path) -> float:
    """Python: the mean of each kind of iris, for the model.py beside it in the repository."""
    from sklearn.datasets import load_iris

    x, x_test, y, y_test = split("iris")
    centroids = np.stack([x[y == kind].mean(axis=0) for kind in range(3)])
    learned = {"names": load_iris().target_names.tolist(), "centroids": centroids.round(6).tolist()}
    (folder / "centroids.json").write_text(json.dumps(learned, indent=1) + "\n")
    distances = np.linalg.norm(x_test[:, None] - centroids, axis=2)
    return float((distances.argmin(axis=1) == y_test).mean())


TRAINED: Mapping[str, Callable[[Path], float]] = {
    "breast-cancer": breast_cancer,
    "breast-cancer-xgboost": breast_cancer_xgboost,
    "diabetes-lightgbm": diabetes_lightgbm,
    "wine": wine,
    "digits-onnx": digits_onnx,
    "digits-torchscript": digits_torchscript,
    "digits-export": digits_export,
    "iris-centroid": iris_centroid,
}


def train(folder: Path = MODELS) -> dict[str, float]:
    """Write every model below `folder`; return the score of each on test rows."""
    scores = {}
    for name, learn in TRAINED.items():
        start_s = time.monotonic()
        (folder / name).mkdir(parents=True, exist_ok=True)
        try:
            scores[name] = learn(folder / name)
        except ImportError as fault:
            print(f"{name:24} skipped: {fault}")
            continue
        print(f"{name:24} score {scores[name]:.3f}   {time.monotonic() - start_s:.1f} s")
    return scores


if __name__ == "__main__":
    train(Path(sys.argv[1]) if len(sys.argv) > 1 else MODELS)
