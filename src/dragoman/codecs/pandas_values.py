"""A tensor as the values of a column: in the dtype that its parameters name, or as its content type has it."""

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from dragoman.codecs.elements import decoded, fault, texts
from dragoman.codecs.json_texts import json_value
from dragoman.codecs.pandas_dtypes import CATEGORIES, CATEGORIES_DTYPE, DTYPE, ORDERED, TEXT, dtype_of, kind_of, pd
from dragoman.codecs.registry import CODECS
from dragoman.core.bytes_tensor import flattened
from dragoman.core.datatypes import BYTES, INT64, Array
from dragoman.core.errors import InvalidInput
from dragoman.core.tensor import Tensor, numpy_numbers, object_array

_MOMENT = re.compile(r"[+-]?\d{4,}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,9})?")
_PACKAGE_DTYPES = re.compile(r"bool|u?int(8|16|32|64)|float(16|32|64)|str|string(\[\w+\])?|object")


def column_values(tensor: Tensor, where: str) -> Any:
    """What `pd.Series` takes as the column: a view of the tensor where it holds numbers. Raises InvalidInput."""
    shape = tensor.shape
    if not (len(shape) == 1 or (len(shape) == 2 and shape[1] == 1)):
        raise fault(where, "pd", f"needs a column of shape [N] or [N, 1], got {list(shape)}")
    flat = flattened(tensor)
    name = flat.parameters.get(DTYPE)
    if name is None:
        return _told_by_content_type(flat, where)
    kind = "categories" if name == "category" else kind_of(str(name))
    if not kind:
        raise fault(where, "pd", f"knows no '{DTYPE}' {name!r}")
    return _KINDS[kind](flat, str(name), where)


def _told_by_content_type(tensor: Tensor, where: str) -> Any:
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
            raise fault(where, content_type, f"gives an array of shape {list(values.shape)}, which is no column")
        return values.reshape(-1)
    return _objects(values) if content_type == "base64" else pd.Series(values)


def _text_or_bytes(tensor: Tensor) -> Any:
    """Text if all of it is UTF-8, else bytes."""
    try:
        return _text(texts(tensor, ""))
    except InvalidInput:
        return tensor.data


def _text(values: list[Any], dtype: Any = None) -> Any:
    return pd.Series(_objects(values), dtype=TEXT if dtype is None else dtype)


def _objects(values: list[Any]) -> Array:
    return object_array(values, (len(values),))


# --- by the name of the dtype ----------------------------------------------------------------------------------


def _elements(tensor: Tensor, where: str) -> list[Any]:
    """Texts, and None where one is missing."""
    if tensor.parameters.get("content_type") == "pd_json":
        read = partial(json_value, nonfinite=True)
        return decoded(tensor, where, "pd_json", "JSON", read)
    return decoded(tensor, where, str(tensor.parameters.get("content_type", "pd")), "text in UTF-8", bytes.decode)


def _texts(tensor: Tensor, name: str, where: str) -> Any:
    content_type = tensor.parameters.get("content_type")
    if name == "object" and content_type in ("base64", "datetime"):
        return pd.Series(_objects(CODECS.input(str(content_type)).to_value(tensor, where)), dtype=object)
    values = _elements(tensor, where)
    if name == "object":
        return pd.Series(_objects(values), dtype=object)
    _check_kind(values, str, name, where)
    return _text(values, dtype_of(name, where))


def _check_kind(values: list[Any], kind: type, name: str, where: str) -> None:
    for at, value in enumerate(values):
        if type(value) is not kind and value is not None:
            raise fault(where, "pd", f"with '{DTYPE}' '{name}' expects {kind.__name__}, got {value!r} at element {at}")


def _dates(tensor: Tensor, name: str, where: str) -> Any:
    dtype = dtype_of(name, where)
    zone = getattr(dtype, "tz", None)
    end = "" if zone is None else "+00:00"
    values = _elements(tensor, where)
    _check_kind(values, str, name, where)
    for at, value in enumerate(values):
        if value is not None and not (value.endswith(end) and _MOMENT.fullmatch(value.removesuffix(end))):
            zoned = "in UTC, ending +00:00" if zone is not None else "with no zone"
            raise fault(
                where, "datetime", f"with '{DTYPE}' '{name}' expects ISO 8601 {zoned}, got {value!r} at element {at}"
            )
    plain = ["NaT" if value is None else value.removesuffix(end) for value in values]
    try:
        moments = np.array(plain, dtype=f"datetime64[{_unit(name)}]")
    except ValueError as bad:
        raise fault(where, "datetime", f"expects ISO 8601: {bad}") from bad
    series = pd.Series(moments)
    return series if zone is None else series.dt.tz_localize("UTC").dt.tz_convert(zone)


def _unit(name: str) -> str:
    return name.partition("[")[2].partition(",")[0].rstrip("]")


def _spans(tensor: Tensor, name: str, where: str) -> Any:
    if tensor.datatype is not INT64:
        raise fault(where, "pd", f"with '{DTYPE}' '{name}' needs datatype INT64, got {tensor.datatype}")
    return tensor.data.view(f"m8[{_unit(name)}]")


def _masked(tensor: Tensor, name: str, where: str) -> Any:
    dtype = dtype_of(name, where)
    plain = dtype.numpy_dtype
    if plain.kind == "b" and tensor.datatype is BYTES:
        values = _elements(tensor, where)
        _check_kind(values, bool, name, where)
        return pd.array(values, dtype=dtype)
    data = tensor.data
    wanted = "biuf".index(plain.kind) if plain.kind != "u" else 1
    if data.dtype == plain:
        missing = np.isnan(data) if plain.kind == "f" else np.zeros(data.shape, bool)
    elif data.dtype.kind == "f" and wanted == 1:
        missing = np.isnan(data)
    else:
        raise fault(where, "pd", f"with '{DTYPE}' '{name}' does not fit datatype {tensor.datatype}")
    with np.errstate(invalid="ignore"):
        numbers = np.where(missing, 0, data).astype(plain)
    if (numbers.astype(data.dtype) != data)[~missing].any():
        raise fault(where, "pd", f"with '{DTYPE}' '{name}' does not hold every number of the tensor")
    return _ARRAYS[plain.kind](numbers, missing)


def _categories(tensor: Tensor, name: str, where: str) -> Any:
    given = tensor.parameters
    kind = str(given.get(CATEGORIES_DTYPE, "object"))
    if not _PACKAGE_DTYPES.fullmatch(kind):
        raise fault(where, "pd", f"knows no '{CATEGORIES_DTYPE}' {kind!r}")
    try:
        listed = json_value(str(given.get(CATEGORIES, "")).encode(), nonfinite=True)
        if not isinstance(listed, list):
            raise ValueError(f"expected a list, got {type(listed).__name__}")
        categories = pd.CategoricalDtype(pd.Index(listed, dtype=kind), ordered=given.get(ORDERED) is True)
    except (ValueError, TypeError, OverflowError) as bad:
        raise fault(where, "pd", f"expects '{CATEGORIES}' as a JSON list of {kind}: {bad}") from bad
    values = _elements(tensor, where) if tensor.datatype is BYTES else tensor.data.tolist()
    codes = {value: code for code, value in enumerate(categories.categories.tolist())}
    found = [-1 if value is None else codes.get(value, -2) for value in values]
    if -2 in found:
        at = found.index(-2)
        raise fault(where, "pd", f"expects one of its '{CATEGORIES}', got {values[at]!r} at element {at}")
    return pd.Categorical.from_codes(found, dtype=categories)


_ARRAYS: Mapping[str, Any] = {
    "b": pd.arrays.BooleanArray,
    "i": pd.arrays.IntegerArray,
    "u": pd.arrays.IntegerArray,
    "f": pd.arrays.FloatingArray,
}
_KINDS: Mapping[str, Callable[[Tensor, str, str], Any]] = {
    "text": _texts,
    "dates": _dates,
    "spans": _spans,
    "masked": _masked,
    "categories": _categories,
}
