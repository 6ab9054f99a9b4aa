"""Decode a tensor as a column of a data frame, with the dtype in its parameters or by its content type."""

import importlib
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from dragoman.codecs.codec import CODECS
from dragoman.codecs.elements import content_error, decode_elements, decode_texts
from dragoman.codecs.json import parse_json
from dragoman.core.bytes_tensor import flatten
from dragoman.core.datatypes import BYTES, INT64, Array
from dragoman.core.errors import InvalidInput
from dragoman.core.tensor import Tensor, numpy_numbers, object_array

try:
    pd: Any = importlib.import_module("pandas")
except ImportError as missing:
    raise ImportError(
        f"content type 'pd' needs the package 'pandas' ({missing}); pip install 'dragoman[pandas]'"
    ) from missing

# Parameters of a column: its dtype where datatype and content type do not imply it; the categories of a categorical.
DTYPE = "pandas_dtype"
CATEGORIES = "pandas_categories"
CATEGORIES_DTYPE = "pandas_categories_dtype"
ORDERED = "pandas_ordered"

# Default dtype of text: `str` since pandas 3, before `object`.
TEXT_DTYPE: Any = pd.Series(["text"]).dtype

_MASKED = re.compile(r"U?Int(8|16|32|64)|Float(32|64)|boolean")
_DATETIMES = re.compile(r"datetime64\[(s|ms|us|ns)(, [\w/+:. -]{1,64})?\]", re.ASCII)
_TIMEDELTAS = re.compile(r"timedelta64\[(s|ms|us|ns)\]")
_TEXTS = re.compile(r"str|string(\[\w+\])?|object")


def dtype_name(dtype: Any, where: str) -> str:
    """Return the name of a dtype that `dtype_of` converts back. Raises InvalidInput if there is none."""
    for name in (str(dtype), f"{dtype}[{getattr(dtype, 'storage', '')}]"):
        try:
            if family_of(name) and pd.api.types.pandas_dtype(name) == dtype:
                return name
        except (TypeError, ValueError, KeyError):
            continue
    raise InvalidInput(f"{where}: pandas dtype {dtype} is not supported: convert the column first")


def family_of(name: str) -> str:
    """Return the family of a dtype name: masked, datetime, timedelta or text; "" for any other name."""
    families = {"masked": _MASKED, "datetime": _DATETIMES, "timedelta": _TIMEDELTAS, "text": _TEXTS}
    return next((family for family, pattern in families.items() if pattern.fullmatch(name)), "")


def dtype_of(name: str, where: str) -> Any:
    """Return the dtype that the parameters of a column name. Raises InvalidInput for an unknown name."""
    try:
        return pd.api.types.pandas_dtype(name)
    except (TypeError, ValueError, KeyError) as error:
        raise content_error(where, "pd", f"unknown '{DTYPE}' {name!r}") from error


_ISO_8601 = re.compile(r"[+-]?\d{4,}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,9})?")
_CATEGORY_DTYPES = re.compile(r"bool|u?int(8|16|32|64)|float(16|32|64)|str|string(\[\w+\])?|object")


def column_values(tensor: Tensor, where: str) -> Any:
    """Return the column as values for `pd.Series`; numbers are a view of the tensor. Raises InvalidInput."""
    shape = tensor.shape
    if not (len(shape) == 1 or (len(shape) == 2 and shape[1] == 1)):
        raise content_error(where, "pd", f"expected a column of shape [N] or [N, 1], got {list(shape)}")
    flat = flatten(tensor)
    name = flat.parameters.get(DTYPE)
    if name is None:
        return _by_content_type(flat, where)
    family = "category" if name == "category" else family_of(str(name))
    if not family:
        raise content_error(where, "pd", f"unknown '{DTYPE}' {name!r}")
    return _DECODERS[family](flat, str(name), where)


def _by_content_type(tensor: Tensor, where: str) -> Any:
    content_type = str(tensor.parameters.get("content_type", ""))
    if not content_type and tensor.datatype is BYTES:
        return _text_or_bytes(tensor)
    if not content_type:
        return numpy_numbers(tensor)
    values = CODECS.input(content_type, where).to_value(tensor, where)
    if content_type == "str":
        return _text(values)
    if isinstance(values, np.ndarray):
        if values.size != tensor.data.size:
            raise content_error(where, content_type, f"expected a column, got an array of shape {list(values.shape)}")
        return values.reshape(-1)
    return _objects(values) if content_type == "base64" else pd.Series(values)


def _text_or_bytes(tensor: Tensor) -> Any:
    """Return text if all elements are UTF-8, else bytes."""
    try:
        return _text(decode_texts(tensor, ""))
    except InvalidInput:
        return tensor.data


def _text(values: list[Any], dtype: Any = None) -> Any:
    return pd.Series(_objects(values), dtype=TEXT_DTYPE if dtype is None else dtype)


def _objects(values: list[Any]) -> Array:
    return object_array(values, (len(values),))


# --- by the family of the dtype --------------------------------------------------------------------------------


def _elements(tensor: Tensor, where: str) -> list[Any]:
    """Return the elements as text, or as JSON values, of which null is None."""
    content_type = str(tensor.parameters.get("content_type", "pd"))
    if content_type == "pd_json":
        return decode_elements(tensor, where, content_type, "JSON", partial(parse_json, nonfinite=True))
    return decode_elements(tensor, where, content_type, "UTF-8 text", bytes.decode)


def _texts(tensor: Tensor, name: str, where: str) -> Any:
    content_type = tensor.parameters.get("content_type")
    if name == "object" and content_type in ("base64", "datetime"):
        return pd.Series(_objects(CODECS.input(str(content_type)).to_value(tensor, where)), dtype=object)
    values = _elements(tensor, where)
    if name == "object":
        return pd.Series(_objects(values), dtype=object)
    _check_type(values, str, name, where)
    return _text(values, dtype_of(name, where))


def _check_type(values: list[Any], kind: type, name: str, where: str) -> None:
    for at, value in enumerate(values):
        if type(value) is not kind and value is not None:
            text = f"'{DTYPE}' '{name}': expected {kind.__name__}, got {value!r} at element {at}"
            raise content_error(where, "pd", text)


def _datetimes(tensor: Tensor, name: str, where: str) -> Any:
    dtype = dtype_of(name, where)
    zone = getattr(dtype, "tz", None)
    suffix = "" if zone is None else "+00:00"
    values = _elements(tensor, where)
    _check_type(values, str, name, where)
    for at, value in enumerate(values):
        if value is not None and not (value.endswith(suffix) and _ISO_8601.fullmatch(value.removesuffix(suffix))):
            expected = "in UTC, ending in +00:00" if zone is not None else "without a time zone"
            text = f"'{DTYPE}' '{name}': expected ISO 8601 {expected}, got {value!r} at element {at}"
            raise content_error(where, "datetime", text)
    plain = ["NaT" if value is None else value.removesuffix(suffix) for value in values]
    try:
        times = np.array(plain, dtype=f"datetime64[{_unit(name)}]")
    except ValueError as error:
        raise content_error(where, "datetime", f"expected ISO 8601: {error}") from error
    series = pd.Series(times)
    return series if zone is None else series.dt.tz_localize("UTC").dt.tz_convert(zone)


def _unit(name: str) -> str:
    return name.partition("[")[2].partition(",")[0].rstrip("]")


def _timedeltas(tensor: Tensor, name: str, where: str) -> Any:
    if tensor.datatype is not INT64:
        raise content_error(where, "pd", f"'{DTYPE}' '{name}': expected datatype INT64, got {tensor.datatype}")
    return tensor.data.view(f"m8[{_unit(name)}]")


def _decode_masked(tensor: Tensor, name: str, where: str) -> Any:
    dtype = dtype_of(name, where)
    plain = dtype.numpy_dtype
    if plain.kind == "b" and tensor.datatype is BYTES:
        values = _elements(tensor, where)
        _check_type(values, bool, name, where)
        return pd.array(values, dtype=dtype)
    data = tensor.data
    if data.dtype == plain:
        missing = np.isnan(data) if plain.kind == "f" else np.zeros(data.shape, bool)
    elif data.dtype.kind == "f" and plain.kind in "iu":
        missing = np.isnan(data)
    else:
        raise content_error(where, "pd", f"'{DTYPE}' '{name}' does not match datatype {tensor.datatype}")
    with np.errstate(invalid="ignore"):
        numbers = np.where(missing, 0, data).astype(plain)
    if (numbers.astype(data.dtype) != data)[~missing].any():
        raise content_error(where, "pd", f"'{DTYPE}' '{name}' cannot hold every number of the tensor")
    return _ARRAYS[plain.kind](numbers, missing)


def _categories(tensor: Tensor, name: str, where: str) -> Any:
    parameters = tensor.parameters
    dtype = str(parameters.get(CATEGORIES_DTYPE, "object"))
    if not _CATEGORY_DTYPES.fullmatch(dtype):
        raise content_error(where, "pd", f"unknown '{CATEGORIES_DTYPE}' {dtype!r}")
    try:
        listed = parse_json(str(parameters.get(CATEGORIES, "")).encode(), nonfinite=True)
        if not isinstance(listed, list):
            raise ValueError(f"expected a list, got {type(listed).__name__}")
        categories = pd.CategoricalDtype(pd.Index(listed, dtype=dtype), ordered=parameters.get(ORDERED) is True)
    except (ValueError, TypeError, OverflowError) as error:
        raise content_error(where, "pd", f"'{CATEGORIES}': expected a JSON list of {dtype}: {error}") from error
    values = _elements(tensor, where) if tensor.datatype is BYTES else tensor.data.tolist()
    codes = {value: code for code, value in enumerate(categories.categories.tolist())}
    found_codes = [-1 if value is None else codes.get(value, -2) for value in values]
    if -2 in found_codes:
        at = found_codes.index(-2)
        raise content_error(where, "pd", f"expected one of its '{CATEGORIES}', got {values[at]!r} at element {at}")
    return pd.Categorical.from_codes(found_codes, dtype=categories)


_ARRAYS: Mapping[str, Any] = {
    "b": pd.arrays.BooleanArray,
    "i": pd.arrays.IntegerArray,
    "u": pd.arrays.IntegerArray,
    "f": pd.arrays.FloatingArray,
}
_DECODERS: Mapping[str, Callable[[Tensor, str, str], Any]] = {
    "text": _texts,
    "datetime": _datetimes,
    "timedelta": _timedeltas,
    "masked": _decode_masked,
    "category": _categories,
}
