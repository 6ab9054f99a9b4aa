"""Content type `pd`: data frames, of which each column is a tensor."""

import weakref
from collections.abc import Hashable, Iterable, Mapping
from datetime import datetime
from typing import Any

import numpy as np

from dragoman.codecs.codec import CODECS, RequestCodec
from dragoman.codecs.elements import bytes_tensor, text_tensor
from dragoman.codecs.json import serialize_json
from dragoman.codecs.pandas_values import (
    CATEGORIES,
    CATEGORIES_DTYPE,
    DTYPE,
    ORDERED,
    TEXT_DTYPE,
    column_values,
    dtype_name,
    family_of,
    pd,
)
from dragoman.core.bytes_tensor import with_parameters
from dragoman.core.datatypes import Array, datatype_of
from dragoman.core.errors import InvalidInput
from dragoman.core.tensor import Scalar, Tensor

_EXACT_IN_FP64 = 1 << 53


def column_tensor(series: Any, name: str) -> Tensor:
    """Return a column as a tensor [N, 1]; numbers are not copied. Raises InvalidInput naming the column."""
    where, dtype = f"column '{name}'", series.dtype
    if isinstance(dtype, pd.CategoricalDtype):
        return _categorical(series, where)
    if dtype == np.dtype(object):
        return _objects(series.to_numpy(), where)
    if isinstance(dtype, np.dtype) and dtype.kind in "biuf":
        return _numbers(series.to_numpy(), where)
    name_of_dtype = dtype_name(dtype, where)
    match family_of(name_of_dtype):
        case "text":
            return _texts(series, name_of_dtype, where)
        case "datetime":
            return _datetimes(series, name_of_dtype)
        case "timedelta":
            return _tensor(series.to_numpy().view("<i8"), {DTYPE: name_of_dtype})
        case _:
            return _encode_masked(series, name_of_dtype, where)


def _tensor(flat: Array, parameters: dict[str, Scalar]) -> Tensor:
    return Tensor(flat.reshape(-1, 1), datatype_of(flat.dtype), parameters)


def _numbers(flat: Array, where: str) -> Tensor:
    try:
        tensor = _tensor(flat, {})
    except InvalidInput as error:
        raise InvalidInput(f"{where}: {error.message}") from error
    if flat.dtype != tensor.datatype.dtype:
        raise InvalidInput(f"{where}: expected native byte order, got dtype {flat.dtype}: convert the column first")
    return tensor


# --- text ------------------------------------------------------------------------------------------------


def _texts(series: Any, dtype: str, where: str) -> Tensor:
    values = series.to_numpy(object)
    parameters: dict[str, Scalar] = {DTYPE: dtype}
    try:
        own = {} if series.dtype == TEXT_DTYPE else parameters
        return text_tensor(values.tolist(), {"content_type": "str", **own})
    except (TypeError, UnicodeEncodeError):  # an element is missing, or is not text
        return _elements(values, series.isna().to_numpy(), "str", parameters, where)


def _elements(
    values: Iterable[Any], missing: Array, content_type: str, parameters: dict[str, Scalar], where: str
) -> Tensor:
    """Return text elements as a tensor; as JSON if some are missing, because BYTES has no null."""
    try:
        if not missing.any():
            return text_tensor(list(values), {"content_type": content_type, **parameters})
        texts = [serialize_json(None if is_null else v) for v, is_null in zip(values, missing, strict=True)]
    except UnicodeEncodeError as error:
        raise InvalidInput(f"{where}: expected text that UTF-8 can encode, got {error.object!r}") from error
    return bytes_tensor(texts, {"content_type": "pd_json", **parameters})


def _datetimes(series: Any, dtype: str) -> Tensor:
    """Return ISO 8601 texts with all digits of the unit; in UTC if the dtype, whose name is kept, has a time zone."""
    has_zone = series.dt.tz is not None
    if has_zone:
        series = series.dt.tz_convert("UTC").dt.tz_localize(None)
    times = series.to_numpy()
    suffix = "+00:00" if has_zone else ""
    texts = [text + suffix for text in np.datetime_as_string(times).tolist()]
    return _elements(texts, np.isnat(times), "datetime", {DTYPE: dtype}, "")


# --- nullable numbers -----------------------------------------------------------------------------


def _encode_masked(series: Any, dtype: str, where: str) -> Tensor:
    """Return nullable numbers in their own datatype, or as floats with NaN if some are missing."""
    missing = series.isna().to_numpy()
    plain = series.dtype.numpy_dtype
    if not missing.any():
        return _tensor(series.to_numpy(plain), {DTYPE: dtype})
    if plain.kind == "b":
        flags = series.to_numpy(bool, na_value=False).tolist()
        return _elements(flags, missing, "", {DTYPE: dtype}, where)
    if plain.kind == "f":
        numbers = series.to_numpy(plain, na_value=np.nan)
        if np.isnan(numbers).sum() != missing.sum():
            raise InvalidInput(f"{where}: {dtype} with both missing values and NaN is not supported")
        return _tensor(numbers, {DTYPE: dtype})
    integers = series.to_numpy(plain, na_value=0)
    if int(integers.max()) > _EXACT_IN_FP64 or int(integers.min()) < -_EXACT_IN_FP64:
        text = f"{dtype} with missing values is sent as FP64, which cannot hold integers beyond 2**53"
        raise InvalidInput(f"{where}: {text}")
    return _tensor(np.where(missing, np.nan, integers), {DTYPE: dtype})


# --- categories ----------------------------------------------------------------------------------------------


def _categorical(series: Any, where: str) -> Tensor:
    """Return the value of each element; the categories are in the parameters, as JSON."""
    categories, codes = series.cat.categories, series.cat.codes.to_numpy()
    values = categories.tolist()
    types = {type(value) for value in values}
    are_numbers = isinstance(categories.dtype, np.dtype) and categories.dtype.kind in "biuf"
    if not (are_numbers or types <= {str}) or any(value != value for value in values):
        raise InvalidInput(f"{where}: categories of {categories.dtype} are not supported: convert them first")
    parameters: dict[str, Scalar] = {
        DTYPE: "category",
        CATEGORIES: serialize_json(values, nonfinite=True).decode(),
        CATEGORIES_DTYPE: str(categories.dtype),
        ORDERED: bool(series.cat.ordered),
    }
    missing = codes < 0
    if missing.any() or types == {str} or not values:
        elements = np.array([*values, None], dtype=object)[codes]
        return _elements(elements, missing, "str", parameters, where)
    return Tensor(categories.to_numpy()[codes].reshape(-1, 1), datatype_of(categories.dtype), parameters)


# --- objects -------------------------------------------------------------------------------------------------


def _objects(values: Array, where: str) -> Tensor:
    """Return a column that is all text, all bytes or all datetimes; any other one as JSON values."""
    types = set(map(type, values))
    if types <= {str}:
        parameters: dict[str, Scalar] = {} if np.dtype(object) == TEXT_DTYPE else {DTYPE: "object"}
        return _elements(values, np.zeros(len(values), bool), "str", parameters, where)
    if types in ({bytes}, {datetime}):
        content_type = "base64" if types == {bytes} else "datetime"
        tensor = CODECS.input(content_type).to_tensor(values.tolist())
        return Tensor(tensor.data, tensor.datatype, {**tensor.parameters, DTYPE: "object"})
    texts: list[bytes] = []
    for at, value in enumerate(values):
        try:
            texts.append(serialize_json(value, nonfinite=True))
        except ValueError as error:
            raise InvalidInput(
                f"{where}: expected objects that are all text, all bytes, all datetimes or JSON values, got "
                f"{type(value).__name__} at row {at} ({error})"
            ) from error
    return bytes_tensor(texts, {"content_type": "pd_json", DTYPE: "object"})


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
