"""Calls are merged without being asked only if a model declares that its rows are independent."""

import asyncio
import time
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.compose import ColumnTransformer
from sklearn.decomposition import NMF, PCA, MiniBatchNMF
from sklearn.dummy import DummyClassifier
from sklearn.ensemble import RandomForestRegressor, VotingRegressor
from sklearn.experimental import enable_iterative_imputer  # noqa: F401
from sklearn.impute import IterativeImputer
from sklearn.linear_model import LinearRegression
from sklearn.neighbors import KNeighborsRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, LabelEncoder, MinMaxScaler, StandardScaler
from sklearn.svm import SVR

import dragoman
from dragoman.runtimes.sklearn.independence import has_independent_rows

ROWS = np.random.default_rng(3).normal(size=(40, 3))
TARGETS = ROWS[:, 0] * 2 - ROWS[:, 1] ** 2


def centred(rows: Any) -> Any:
    return rows - rows.mean(axis=0)


class Centred(TransformerMixin, BaseEstimator):  # type: ignore[misc]
    def fit(self, rows: Any, targets: Any = None) -> "Centred":
        self.fitted_ = True
        return self

    def transform(self, rows: Any) -> Any:
        return centred(rows)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        (make_pipeline(StandardScaler(), SVR()), True),
        (VotingRegressor([("a", LinearRegression()), ("b", RandomForestRegressor())]), True),
        (make_pipeline(FunctionTransformer(np.log1p), LinearRegression()), True),
        (make_pipeline(FunctionTransformer(), LinearRegression()), True),
        (make_pipeline(FunctionTransformer(centred), LinearRegression()), False),
        (ColumnTransformer([("a", make_pipeline(Centred()), [0])]), False),
        (VotingRegressor([("a", LinearRegression()), ("b", make_pipeline(Centred(), SVR()))]), False),
        (KNeighborsRegressor(metric=lambda a, b: abs(a - b).max()), False),
        (SVR(kernel=lambda a, b: a @ b.T), False),
        (LabelEncoder(), False),
        (make_pipeline(MinMaxScaler(), PCA(2), LinearRegression()), True),
        (make_pipeline(MinMaxScaler(), NMF(2), LinearRegression()), False),
        (MiniBatchNMF(2), False),
        (make_pipeline(IterativeImputer(), LinearRegression()), False),
        (DummyClassifier(strategy="uniform", random_state=0), False),
    ],
)
def test_estimators_whose_rows_may_depend_on_each_other_are_not_merged(estimator: Any, expected: bool) -> None:
    assert has_independent_rows(estimator) is expected


def save(estimator: Any, folder: Path) -> Path:
    path = folder / "model.joblib"
    joblib.dump(estimator.fit(ROWS, TARGETS), path)
    return path


async def infer_concurrently(path: Path, **settings: Any) -> tuple[NDArray[Any], list[int]]:
    """Return the predictions of one call for each row, all at the same time, and the sizes of the batches."""
    async with dragoman.open_engine(path, allow_pickle=True, **settings) as engine:
        calls = (engine.infer("model", {"input": row[None]}) for row in ROWS)
        found = await asyncio.gather(*calls)
        (deployment,) = engine.deployments()
        counters = deployment.batch_counters
        return np.concatenate([one["predict"] for one in found]), sorted(counters.executions) if counters else []


async def test_trees_give_the_same_numbers_alone_and_merged(tmp_path: Path) -> None:
    forest = RandomForestRegressor(20, random_state=0)
    path = save(forest, tmp_path)
    merged, sizes = await infer_concurrently(path)
    assert sizes[0] == 1
    assert sizes[-1] > 1
    alone, none = await infer_concurrently(path, max_batch_size=1)
    assert none == []
    np.testing.assert_array_equal(merged, alone)
    np.testing.assert_array_equal(merged, [forest.predict(row[None])[0] for row in ROWS])


async def test_rows_that_depend_on_each_other_are_not_merged(tmp_path: Path) -> None:
    model = make_pipeline(FunctionTransformer(centred), LinearRegression())
    found, sizes = await infer_concurrently(save(model, tmp_path))
    assert sizes == []
    np.testing.assert_allclose(found, model.predict(ROWS[:1])[0])  # each row is its own mean
    assert abs(model.predict(ROWS) - found).max() > 0.1


@pytest.mark.parametrize("estimator", [MiniBatchNMF(2, random_state=0), IterativeImputer(random_state=0)])
async def test_estimators_that_read_all_rows_give_the_same_numbers_to_concurrent_calls(
    estimator: Any, tmp_path: Path
) -> None:
    rows = abs(ROWS)
    rows[:, 2] = 2 * rows[:, 0] + rows[:, 1]
    rows[1:, 1] *= np.arange(1, 40)
    if isinstance(estimator, IterativeImputer):
        rows[::3, 1] = rows[7] = np.nan
    path = tmp_path / "model.joblib"
    joblib.dump(estimator.fit(rows), path)
    async with dragoman.open_engine(path, allow_pickle=True) as engine:
        found = await asyncio.gather(*(engine.infer("model", {"input": row[None]}) for row in rows))
    alone = [estimator.transform(row[None])[0] for row in rows]
    np.testing.assert_array_equal(np.concatenate([one["transform"] for one in found]), alone)
    assert abs(estimator.transform(rows) - alone).max() > 1e-3


async def test_more_rows_than_the_default_are_computed_alone(tmp_path: Path) -> None:
    forest = RandomForestRegressor(5, random_state=0)
    async with dragoman.open_engine(save(forest, tmp_path), allow_pickle=True) as engine:
        rows = np.tile(ROWS, (3, 1))
        found = await engine.infer("model", {"input": rows})
        np.testing.assert_array_equal(found["predict"], forest.predict(rows))


@dragoman.model(batched=True)
def doubled(x: NDArray[np.float64]) -> NDArray[np.float64]:
    time.sleep(0.002)
    return 2 * x


def undeclared(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return 2 * x


@pytest.mark.parametrize(("function", "expected"), [(doubled, 64), (undeclared, 0)])
async def test_functions_are_merged_if_they_are_declared_batched(function: Any, expected: int) -> None:
    async with dragoman.open_engine(function, placement="thread") as engine:
        (deployment,) = engine.deployments()
        calls = (engine.infer(function.__name__, {"x": np.array([[i]])}) for i in np.arange(30.0))
        found = await asyncio.gather(*calls)
        assert [float(one["output-0"][0, 0]) for one in found] == [2.0 * i for i in range(30)]
        assert deployment.max_batch_size == expected
