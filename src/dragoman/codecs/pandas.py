"""The content type `pd`: a request or answer as a data frame, one column a tensor."""

import weakref
from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np

from dragoman.codecs.codec import RequestCodec
from dragoman.codecs.pandas_columns import column_tensor
from dragoman.codecs.pandas_dtypes import pd
from dragoman.codecs.pandas_values import column_values
from dragoman.core.bytes_tensor import with_parameters
from dragoman.core.errors import InvalidInput
from dragoman.core.tensor import Tensor

# The label of a column that is an integer, which as a name on the wire is text.
LABEL = "pandas_label"


class PandasCodec(RequestCodec):
    """`pd.DataFrame`. Each column is a tensor [N, 1] of its name; [N] is read as well.

    Content types of the columns are stacked: each column is decoded by its own first. The rows are numbered anew;
    an index that holds data has to become a column (`reset_index()`), or is left out with `drop_index=True`.
    """

    content_type = "pd"
    type_hint = pd.DataFrame

    @classmethod
    def can_encode(cls, value: Any) -> bool:
        return isinstance(value, pd.DataFrame)

    @classmethod
    def to_tensors(cls, value: Any, noun: str = "input", **options: Any) -> dict[str, Tensor]:
        if not isinstance(value, pd.DataFrame):
            raise InvalidInput(f"content type 'pd' takes a DataFrame, got {type(value).__name__}")
        if not options.get("drop_index"):
            _check_index(value.index)
        tensors: dict[str, Tensor] = {}
        for at, label in enumerate(value.columns):
            name = _name(label)
            if name in tensors:
                raise InvalidInput(f"column '{name}' is there twice; a name on the wire stands for one column")
            tensor = column_tensor(value.iloc[:, at], name)
            if not isinstance(label, str):
                tensor = with_parameters(tensor, {**tensor.parameters, LABEL: int(label)})
            tensors[name] = tensor
        if not tensors and len(value):
            raise InvalidInput(f"a data frame of {len(value)} rows and no columns has no form on the wire")
        return tensors

    @classmethod
    def to_value(cls, tensors: Mapping[str, Tensor], noun: str = "input") -> Any:
        columns: dict[Hashable, Any] = {}
        for name, tensor in tensors.items():
            label = tensor.parameters.get(LABEL, name)
            if label in columns or isinstance(label, bool | float):
                raise InvalidInput(f"{noun} '{name}': '{LABEL}' {label!r} is no new name of a column")
            columns[label] = column_values(tensor, f"{noun} '{name}'")
        lengths = {name: len(values) for name, values in zip(tensors, columns.values(), strict=True)}
        if len(set(lengths.values())) > 1:
            shown = ", ".join(f"'{name}' {n}" for name, n in lengths.items())
            raise InvalidInput(f"content type 'pd' needs {noun}s of one length as columns, got {shown}")
        return _frame(columns)


def series_value(tensor: Tensor, where: str) -> Any:
    """One tensor as a `pd.Series`. Raises InvalidInput."""
    series = pd.Series(column_values(tensor, where), copy=_COPY)
    return _guarded(series, pd.Series(series, copy=False))


def series_tensor(series: Any) -> Tensor:
    """One `pd.Series` as a tensor [N, 1]. Raises InvalidInput."""
    if not isinstance(series, pd.Series):
        raise InvalidInput(f"expected a Series, got {type(series).__name__}")
    _check_index(series.index)
    return column_tensor(series, str(series.name or ""))


# Before version 3 pandas wrote into the arrays that it was given, and those of the wire are read-only.
_COPY = int(pd.__version__.partition(".")[0]) < 3


def _frame(columns: Mapping[Hashable, Any]) -> Any:
    series = {label: pd.Series(values, copy=_COPY) for label, values in columns.items()}
    return _guarded(pd.DataFrame(series, copy=False), series)


def _guarded(made: Any, *kept: Any) -> Any:
    """The frame, whose columns stay shared as long as it lives: who writes into one gets a copy of it.

    pandas copies on writing where data has another owner; it does not look whether an array may be written to.
    """
    weakref.finalize(made, id, kept).atexit = False
    return made


def _check_index(index: Any) -> None:
    counts = isinstance(index.dtype, np.dtype) and index.dtype.kind in "iu"
    if index.nlevels > 1 or index.name is not None or not (counts or not len(index)):
        raise InvalidInput(
            f"content type 'pd' has no form for an index of {index.dtype} named {index.names}; make it a column by "
            "reset_index(), or pass drop_index=True"
        )


def _name(label: Any) -> str:
    if isinstance(label, str):
        return label
    if isinstance(label, int | np.integer) and not isinstance(label, bool):
        return str(label)
    raise InvalidInput(f"content type 'pd' takes columns named by text or integers, got {label!r}")
