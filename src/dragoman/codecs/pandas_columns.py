"""A column of a data frame as a tensor, with what is needed to make it again."""

from collections.abc import Iterable
from datetime import datetime
from typing import Any

import numpy as np

from dragoman.codecs.elements import tensor_of, text_tensor
from dragoman.codecs.json_texts import json_text
from dragoman.codecs.pandas_dtypes import CATEGORIES, CATEGORIES_DTYPE, DTYPE, ORDERED, TEXT, dtype_name, kind_of, pd
from dragoman.codecs.registry import CODECS
from dragoman.core.datatypes import Array, datatype_of
from dragoman.core.errors import InvalidInput
from dragoman.core.tensor import Scalar, Tensor

_EXACT_IN_FP64 = 1 << 53


def column_tensor(series: Any, name: str) -> Tensor:
    """The tensor [N, 1] of a column; numbers are a view of it. InvalidInput names a column that has no form."""
    where, dtype = f"column '{name}'", series.dtype
    if isinstance(dtype, pd.CategoricalDtype):
        return _categorical(series, where)
    if dtype == np.dtype(object):
        return _objects(series.to_numpy(), where)
    if isinstance(dtype, np.dtype) and dtype.kind in "biuf":
        return _numbers(series.to_numpy(), where)
    known = dtype_name(dtype, where)
    match kind_of(known):
        case "text":
            return _texts(series, known, where)
        case "dates":
            return _dates(series, known)
        case "spans":
            return _tensor(series.to_numpy().view("<i8"), {DTYPE: known})
        case _:
            return _masked(series, known, where)


def _tensor(flat: Array, parameters: dict[str, Scalar]) -> Tensor:
    return Tensor(flat.reshape(-1, 1), datatype_of(flat.dtype), parameters)


def _numbers(flat: Array, where: str) -> Tensor:
    try:
        tensor = _tensor(flat, {})
    except InvalidInput as bad:
        raise InvalidInput(f"{where}: {bad.message}") from bad
    if flat.dtype != tensor.datatype.dtype:
        raise InvalidInput(f"{where}: dtype {flat.dtype} has no form on the wire; convert it to native byte order")
    return tensor


# --- text ------------------------------------------------------------------------------------------------


def _texts(series: Any, known: str, where: str) -> Tensor:
    values = series.to_numpy(object)
    told: dict[str, Scalar] = {DTYPE: known}
    try:
        return text_tensor(values.tolist(), {"content_type": "str", **({} if series.dtype == TEXT else told)})
    except (TypeError, UnicodeEncodeError):  # one is missing, or is no text
        return _elements(values, series.isna().to_numpy(), "str", told, where)


def _elements(values: Iterable[Any], missing: Array, content_type: str, extra: dict[str, Scalar], where: str) -> Tensor:
    """Elements of text; where some are missing, which BYTES cannot tell, all go as JSON."""
    try:
        if not missing.any():
            return text_tensor(list(values), {"content_type": content_type, **extra})
        texts = [json_text(None if gone else v) for v, gone in zip(values, missing, strict=True)]
    except UnicodeEncodeError as bad:
        raise InvalidInput(f"{where}: expected text that UTF-8 can hold, got {bad.object!r}") from bad
    return tensor_of(texts, {"content_type": "pd_json", **extra})


def _dates(series: Any, known: str) -> Tensor:
    """ISO 8601 in all digits of the unit, and in UTC where the dtype has a zone, which its name keeps."""
    zoned = series.dt.tz is not None
    if zoned:
        series = series.dt.tz_convert("UTC").dt.tz_localize(None)
    moments = series.to_numpy()
    end = "+00:00" if zoned else ""
    texts = [text + end for text in np.datetime_as_string(moments).tolist()]
    return _elements(texts, np.isnat(moments), "datetime", {DTYPE: known}, "")


# --- numbers that may be missing -----------------------------------------------------------------------------


def _masked(series: Any, known: str, where: str) -> Tensor:
    """Nullable numbers: as they are, or with NaN where some are missing, which integers first have to fit into."""
    missing = series.isna().to_numpy()
    plain = series.dtype.numpy_dtype
    if not missing.any():
        return _tensor(series.to_numpy(plain), {DTYPE: known})
    if plain.kind == "b":
        flags = series.to_numpy(bool, na_value=False).tolist()
        return _elements(flags, missing, "", {DTYPE: known}, where)
    if plain.kind == "f":
        numbers = series.to_numpy(plain, na_value=np.nan)
        if np.isnan(numbers).sum() != missing.sum():
            raise InvalidInput(f"{where}: {known} with both missing values and NaN has no form on the wire")
        return _tensor(numbers, {DTYPE: known})
    integers = series.to_numpy(plain, na_value=0)
    if int(integers.max()) > _EXACT_IN_FP64 or int(integers.min()) < -_EXACT_IN_FP64:
        raise InvalidInput(f"{where}: {known} with missing values goes as FP64, which holds no integer beyond 2**53")
    return _tensor(np.where(missing, np.nan, integers), {DTYPE: known})


# --- categories ----------------------------------------------------------------------------------------------


def _categorical(series: Any, where: str) -> Tensor:
    """The categories' values, for readers that know none; and in the parameters the categories, as JSON."""
    categories, codes = series.cat.categories, series.cat.codes.to_numpy()
    listed = categories.tolist()
    kinds = {type(value) for value in listed}
    plain = isinstance(categories.dtype, np.dtype) and categories.dtype.kind in "biuf"
    if not (plain or kinds <= {str}) or any(value != value for value in listed):
        raise InvalidInput(f"{where}: categories of {categories.dtype} have no form on the wire; convert them first")
    extra: dict[str, Scalar] = {
        DTYPE: "category",
        CATEGORIES: json_text(listed, nonfinite=True).decode(),
        CATEGORIES_DTYPE: str(categories.dtype),
        ORDERED: bool(series.cat.ordered),
    }
    missing = codes < 0
    if missing.any() or kinds == {str} or not listed:
        values = np.array([*listed, None], dtype=object)[codes]
        return _elements(values, missing, "str", extra, where)
    return Tensor(categories.to_numpy()[codes].reshape(-1, 1), datatype_of(categories.dtype), extra)


# --- objects -------------------------------------------------------------------------------------------------


def _objects(values: Array, where: str) -> Tensor:
    """All text, all bytes, all points in time, or else values that JSON knows."""
    kinds = set(map(type, values))
    if kinds <= {str}:
        extra: dict[str, Scalar] = {} if np.dtype(object) == TEXT else {DTYPE: "object"}
        return _elements(values, np.zeros(len(values), bool), "str", extra, where)
    if kinds in ({bytes}, {datetime}):
        content_type = "base64" if kinds == {bytes} else "datetime"
        tensor = CODECS.input(content_type).to_tensor(values.tolist())
        return Tensor(tensor.data, tensor.datatype, {**tensor.parameters, DTYPE: "object"})
    texts: list[bytes] = []
    for at, value in enumerate(values):
        try:
            texts.append(json_text(value, nonfinite=True))
        except ValueError as bad:
            raise InvalidInput(
                f"{where}: expected text, bytes or JSON values in a column of objects, got {type(value).__name__} at "
                f"row {at} ({bad})"
            ) from bad
    return tensor_of(texts, {"content_type": "pd_json", DTYPE: "object"})
