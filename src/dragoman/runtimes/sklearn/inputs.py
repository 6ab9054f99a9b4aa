"""Inputs of scikit-learn estimators: one matrix, columns by name, or documents."""

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from dragoman.codecs.elements import strings
from dragoman.core.datatypes import BYTES, FP64, NUMERIC, Array
from dragoman.core.errors import InvalidInput
from dragoman.core.signature import TensorSpec
from dragoman.core.tensor import Tensor
from dragoman.runtimes.tables import columns_in_order, matrix

# A value of the column that the estimator knows; its type says whether the column is text.
Sample = str | float


class Table(Protocol):
    """The inputs of an estimator, and their conversion to rows."""

    @property
    def inputs(self) -> tuple[TensorSpec, ...]: ...

    def rows(self, tensors: Mapping[str, Tensor]) -> Any:
        """Return the argument of the estimator. Raises InvalidInput if text is not UTF-8."""

    def from_content(self, value: Any) -> Any:
        """Convert the value of a content type (array, data frame or list) to the argument of the estimator."""

    def sample(self) -> Mapping[str, Any] | None:
        """Return inputs of one row that the estimator probably accepts; None if its width is unknown."""

    def probe(self) -> Any:
        """Return that row as the argument of the estimator."""


def table_of(estimator: Any) -> Table:
    """Return the table of a fitted estimator, from its attributes and those of the first step of its pipeline."""
    first = _first_step(estimator)
    if hasattr(first, "build_analyzer"):
        return Documents()
    count = getattr(estimator, "n_features_in_", None)
    if count is None:
        return Matrix()
    names = getattr(estimator, "feature_names_in_", None)
    named = None if names is None else tuple(str(name) for name in names)
    if hasattr(first, "transformers_"):
        samples = _column_samples(first, named, count)
    else:
        samples = dict(enumerate(_samples(first, count)))
    columns = tuple(samples.get(i) for i in range(count))
    if not any(isinstance(sample, str) for sample in columns):
        return Matrix(tuple(s if isinstance(s, float) else 0.0 for s in columns), named)
    return InputColumns(columns, named)


@dataclass(frozen=True)
class Documents:
    """One text per row, for a pipeline that begins with a text vectorizer."""

    inputs: tuple[TensorSpec, ...] = (TensorSpec("input", BYTES, (-1,)),)

    def rows(self, tensors: Mapping[str, Tensor]) -> Any:
        ((name, tensor),) = tensors.items()
        return strings(tensor, name).tolist()

    def from_content(self, value: Any) -> Any:
        texts = value.iloc[:, 0].tolist() if hasattr(value, "columns") else list(np.ravel(value))
        if hasattr(value, "columns") and len(value.columns) != 1:
            raise InvalidInput(f"expected one input of text, got {', '.join(map(repr, value.columns))}")
        return [text.decode() if isinstance(text, bytes) else text for text in texts]

    def sample(self) -> Mapping[str, Any]:
        return {self.inputs[0].name: ["text"]}

    def probe(self) -> Any:
        return ["text"]


@dataclass(frozen=True)
class Matrix:
    """One matrix of numbers; converted to a data frame if the estimator was trained with names."""

    samples: tuple[float, ...] | None = None
    names: tuple[str, ...] | None = None

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        width = -1 if self.samples is None else len(self.samples)
        return (TensorSpec("input", FP64, (-1, width), accepts=NUMERIC, columns=self.names or ()),)

    def rows(self, tensors: Mapping[str, Tensor]) -> Any:
        (tensor,) = tensors.values()
        return self._to_frame(tensor.data)

    def from_content(self, value: Any) -> Any:
        width = np.shape(value)[-1] if self.samples is None else len(self.samples)
        return self._to_frame(matrix(value, width, self.names))

    def sample(self) -> Mapping[str, Any] | None:
        return None if self.samples is None else {self.inputs[0].name: np.array([self.samples])}

    def probe(self) -> Any:
        return self._to_frame(np.array([self.samples or (0.0,)]))

    def _to_frame(self, array: Array) -> Any:
        pandas = None if self.names is None else _pandas()
        return array if pandas is None else pandas.DataFrame(array, columns=list(self.names or ()))


@dataclass(frozen=True)
class InputColumns:
    """One input per column, for tables with text columns. Columns that the estimator does not use are optional."""

    samples: tuple[Sample | None, ...]
    names: tuple[str, ...] | None

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        return tuple(_column_spec(name, sample) for name, sample in self._columns())

    def rows(self, tensors: Mapping[str, Tensor]) -> Any:
        columns = {
            name: strings(tensor, name) if tensor.datatype is BYTES else tensor.data for name, tensor in tensors.items()
        }
        return self._to_frame(columns)

    def from_content(self, value: Any) -> Any:
        used = [name for name, sample in self._columns() if sample is not None]
        if not hasattr(value, "columns"):
            raise InvalidInput(f"expected content type 'pd' with the inputs {', '.join(map(repr, used))}")
        known = [name for name, _ in self._columns() if name in used or name in value.columns]
        frame = columns_in_order(value, known)
        return self._to_frame({name: frame[name].to_numpy() for name in known}) if self.names is None else frame

    def sample(self) -> Mapping[str, Any]:
        return {name: [sample] for name, sample in self._columns() if sample is not None}

    def probe(self) -> Any:
        return self._to_frame({n: np.array([s], object if isinstance(s, str) else float) for n, s in self._columns()})

    def _columns(self) -> Iterator[tuple[str, Sample | None]]:
        # scikit-learn's own names for columns that were trained without any.
        names = self.names or tuple(f"x{i}" for i in range(len(self.samples)))
        return zip(names, self.samples, strict=True)

    def _to_frame(self, columns: Mapping[str, Array]) -> Any:
        if self.names is not None:
            return importlib.import_module("pandas").DataFrame(dict(columns))
        rows = len(next(iter(columns.values())))
        unused: Array = np.zeros(rows)
        return np.array([columns.get(name, unused) for name, _ in self._columns()], dtype=object).T


def _column_spec(name: str, sample: Sample | None) -> TensorSpec:
    match sample:
        case None:
            return TensorSpec(name, None, (-1,), optional=True)
        case str():
            return TensorSpec(name, BYTES, (-1,))
    return TensorSpec(name, FP64, (-1,), accepts=NUMERIC)


def _pandas() -> Any:
    try:
        return importlib.import_module("pandas")
    except ImportError:
        return None


def _first_step(estimator: Any) -> Any:
    """Return the estimator that receives the columns: inside a search, at the start of a pipeline."""
    if hasattr(estimator, "best_estimator_"):
        return _first_step(estimator.best_estimator_)
    return _first_step(estimator.steps[0][1]) if getattr(estimator, "steps", None) else estimator


def _column_samples(transformer: Any, names: tuple[str, ...] | None, count: int) -> dict[int, Sample | None]:
    """Return a sample value of every column that a ColumnTransformer uses, by position."""
    result: dict[int, Sample | None] = {}
    for _, part, columns in transformer.transformers_:
        positions = _positions(columns, names, count)
        if isinstance(part, str) and part == "drop":
            continue
        for position, sample in zip(positions, _samples(part, len(positions)), strict=True):
            if not isinstance(result.get(position), str):
                result[position] = sample
    return result


def _positions(columns: Any, names: tuple[str, ...] | None, count: int) -> list[int]:
    """Return the positions of a ColumnTransformer's columns: names, positions, a slice or a mask."""
    if isinstance(columns, slice) and isinstance(columns.start or columns.stop, str):
        known = list(names or ())
        start = 0 if columns.start is None else known.index(columns.start)
        # A slice of names includes its end, as in pandas.
        return list(range(start, count if columns.stop is None else known.index(columns.stop) + 1))
    listed: Any = [columns] if isinstance(columns, str | int) else columns
    if not isinstance(listed, slice) and any(isinstance(column, str) for column in listed):
        return [(names or ()).index(column) for column in listed]
    positions: list[int] = np.arange(count)[listed].tolist()
    return positions


def _samples(transformer: Any, count: int) -> list[Sample]:
    """Return a sample value of each column of a transformer, from its fitted attributes."""
    for i, step in enumerate([s for _, s in getattr(transformer, "steps", ())] or [transformer]):
        if hasattr(step, "build_analyzer"):
            return ["a"] * count
        learned = getattr(step, "categories_", None)
        means: Any = getattr(step, "statistics_", None)
        if means is None and i == 0:  # of a scaler; a later one does not have the columns themselves
            means = getattr(step, "mean_", getattr(step, "center_", None))
        if learned is None and means is not None and np.ndim(means) == 1:
            learned = [[_rounded(value)] for value in means]
        if learned is not None and len(learned) == count:
            return [_sample(values) for values in learned]
    return [0.0] * count


def _rounded(value: Any) -> Any:
    """Return a mean or another statistic of a column with four digits, which a person reads and edits."""
    return float(f"{value:.4g}") if isinstance(value, float | np.floating) else value


def _sample(values: Any) -> Sample:
    """Return the first string among the values, else the first number."""
    for value in values:
        if isinstance(value, str):
            return str(value)
    number = next((float(v) for v in values if isinstance(v, int | float | np.number | np.bool_)), 0.0)
    return number if np.isfinite(number) else 0.0
