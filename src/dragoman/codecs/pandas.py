"""Content type `pd`: a request or response as a data frame with one column per tensor."""

import weakref
from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np

from dragoman.codecs.codec import RequestCodec
from dragoman.codecs.pandas_columns import column_tensor
from dragoman.codecs.pandas_values import column_values, pd
from dragoman.core.bytes_tensor import with_parameters
from dragoman.core.errors import InvalidInput
from dragoman.core.tensor import Tensor

# Parameter with the label of a column that is an integer, because tensor names are text.
LABEL = "pandas_label"


class PandasCodec(RequestCodec):
    """`pd.DataFrame`. Each column is a tensor [N, 1] with its name; [N] is decoded too.

    Columns may have content types of their own, which are applied first. A decoded frame has the default index. An
    index with data must be made a column (`reset_index()`), or is left out with `drop_index=True`.
    """

    content_type = "pd"
    type_hint = pd.DataFrame

    @classmethod
    def can_encode(cls, value: Any) -> bool:
        return isinstance(value, pd.DataFrame)

    @classmethod
    def to_tensors(cls, value: Any, noun: str = "input", **options: Any) -> dict[str, Tensor]:
        if not isinstance(value, pd.DataFrame):
            raise InvalidInput(f"content type 'pd': expected a DataFrame, got {type(value).__name__}")
        if not options.get("drop_index"):
            _check_index(value.index)
        tensors: dict[str, Tensor] = {}
        for at, label in enumerate(value.columns):
            name = _tensor_name(label)
            if name in tensors:
                raise InvalidInput(f"content type 'pd': expected unique column names, got '{name}' twice")
            tensor = column_tensor(value.iloc[:, at], name)
            if not isinstance(label, str):
                tensor = with_parameters(tensor, {**tensor.parameters, LABEL: int(label)})
            tensors[name] = tensor
        if not tensors and len(value):
            raise InvalidInput(
                f"content type 'pd': expected columns, got a data frame of {len(value)} rows without any"
            )
        return tensors

    @classmethod
    def to_value(cls, tensors: Mapping[str, Tensor], noun: str = "input") -> Any:
        columns: dict[Hashable, Any] = {}
        for name, tensor in tensors.items():
            label = tensor.parameters.get(LABEL, name)
            if label in columns or isinstance(label, bool | float):
                raise InvalidInput(f"{noun} '{name}': '{LABEL}': expected a unique text or integer, got {label!r}")
            columns[label] = column_values(tensor, f"{noun} '{name}'")
        lengths = {name: len(values) for name, values in zip(tensors, columns.values(), strict=True)}
        if len(set(lengths.values())) > 1:
            shown = ", ".join(f"'{name}' {n}" for name, n in lengths.items())
            raise InvalidInput(f"content type 'pd': expected {noun}s of equal lengths as columns, got {shown}")
        series = {label: pd.Series(values, copy=_COPY) for label, values in columns.items()}
        return _keep_shared(pd.DataFrame(series, copy=False), series)


def decode_series(tensor: Tensor, where: str) -> Any:
    """Return a tensor as a `pd.Series`. Raises InvalidInput."""
    series = pd.Series(column_values(tensor, where), copy=_COPY)
    return _keep_shared(series, pd.Series(series, copy=False))


def encode_series(series: Any) -> Tensor:
    """Return a `pd.Series` as a tensor [N, 1]. Raises InvalidInput."""
    if not isinstance(series, pd.Series):
        raise InvalidInput(f"expected a Series, got {type(series).__name__}")
    _check_index(series.index)
    return column_tensor(series, str(series.name or ""))


# Before version 3, pandas writes into the arrays that it was given, and decoded arrays are read-only.
_COPY = int(pd.__version__.partition(".")[0]) < 3


def _keep_shared(frame: Any, *owners: Any) -> Any:
    """Return the frame; `owners` of its data live as long as it does, so that pandas copies a column before a write.

    pandas copies on write only data that has another owner. It does not check whether an array is read-only.
    """
    weakref.finalize(frame, id, owners).atexit = False
    return frame


def _check_index(index: Any) -> None:
    is_integer = isinstance(index.dtype, np.dtype) and index.dtype.kind in "iu"
    if index.nlevels > 1 or index.name is not None or not (is_integer or not len(index)):
        raise InvalidInput(
            f"content type 'pd': expected an unnamed integer index, got {index.dtype} named {index.names}: make it a "
            "column with reset_index(), or pass drop_index=True"
        )


def _tensor_name(label: Any) -> str:
    if isinstance(label, str):
        return label
    if isinstance(label, int | np.integer) and not isinstance(label, bool):
        return str(label)
    raise InvalidInput(f"content type 'pd': expected text or integers as column labels, got {label!r}")
