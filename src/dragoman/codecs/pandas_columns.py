"""Encode a column of a data frame as a tensor, with parameters from which its dtype is restored."""

from collections.abc import Iterable
from datetime import datetime
from typing import Any

import numpy as np

from dragoman.codecs.codec import CODECS
from dragoman.codecs.elements import bytes_tensor, text_tensor
from dragoman.codecs.json import serialize_json
from dragoman.codecs.pandas_values import (
    CATEGORIES,
    CATEGORIES_DTYPE,
    DTYPE,
    ORDERED,
    TEXT_DTYPE,
    dtype_name,
    family_of,
    pd,
)
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
                f"{where}: expected text, bytes or JSON values in a column of objects, got {type(value).__name__} at "
                f"row {at} ({error})"
            ) from error
    return bytes_tensor(texts, {"content_type": "pd_json", DTYPE: "object"})
