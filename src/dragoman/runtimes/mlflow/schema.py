"""MLflow schemas as tensors, and tensors as the values that MLflow expects."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dragoman.codecs.elements import strings
from dragoman.core.datatypes import BYTES, DATATYPES, NUMERIC, Array, Datatype, datatype_of
from dragoman.core.errors import InvalidInput, ModelFailed
from dragoman.core.signature import Shape, TensorSpec
from dragoman.core.tensor import Tensor, object_array
from dragoman.runtimes.mlflow import RUNTIME

# Converts a tensor to the value that MLflow expects; the name is for messages.
ToValue = Callable[[Tensor, str], Any]


@dataclass(frozen=True, slots=True)
class SchemaEntry:
    """One column or tensor of a schema; `key` is its name for MLflow, or its position if it has none."""

    key: Any
    spec: TensorSpec
    to_value: ToValue


def entries(schema: Any, prefix: str) -> tuple[SchemaEntry, ...]:
    """Return the entries of an mlflow.types.Schema; the name of an unnamed one is `prefix` and its position."""
    make = _tensor if schema.is_tensor_spec() else _column
    return tuple(make(item, i, item.name or f"{prefix}{i}") for i, item in enumerate(schema.inputs))


def frame(columns: Mapping[Any, Any]) -> Any:
    """Return the data frame of these columns. Raises InvalidInput if their lengths differ."""
    lengths = {str(name): len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise InvalidInput(f"the columns of one table need the same number of rows, got {lengths}")
    return RUNTIME.require("pandas").DataFrame(dict(columns))


def writable_copy(array: Array) -> Array:
    """Return the array, or a copy if it is read-only: the model's code may modify it."""
    return array if array.flags.writeable else array.copy()


# --- tensors ---------------------------------------------------------------------------------------------


def _tensor(item: Any, position: int, name: str) -> SchemaEntry:
    dtype: np.dtype[Any] = item.type
    try:
        kind = datatype_of(dtype)
    except InvalidInput as error:
        raise ModelFailed(f"tensor '{name}' of the model's signature: {error.message}") from error
    shape = tuple(int(n) for n in item.shape)
    convert = _text_tensor if dtype.kind == "U" else _as_dtype(dtype)
    return SchemaEntry(item.name or position, _spec(name, kind, shape, item), convert)


def _text_tensor(tensor: Tensor, name: str) -> Array:
    return strings(tensor, name).astype(np.str_)


def _as_dtype(dtype: np.dtype[Any]) -> ToValue:
    return lambda tensor, name: writable_copy(tensor.data.astype(dtype, copy=False))


# --- columns ---------------------------------------------------------------------------------------------


def _column(item: Any, position: int, name: str) -> SchemaEntry:
    # Arrays, objects, maps and other types: each element is JSON.
    kind, convert = _COLUMNS.get(getattr(item.type, "name", ""), (BYTES, _from_json))
    return SchemaEntry(item.name or position, _spec(name, kind, (-1,), item), convert)


def _spec(name: str, kind: Datatype, shape: Shape, item: Any) -> TensorSpec:
    return TensorSpec(name, kind, shape, accepts=_smaller(kind), optional=not getattr(item, "required", True))


def _smaller(kind: Datatype) -> frozenset[Datatype]:
    """Return the datatypes whose values all fit this one."""
    if kind.kind in ("bytes", "bool"):
        return frozenset()
    # NumPy calls INT64 to FP64 safe, which rounds beyond 2**53: a datatype of the same size has to be of the same kind.
    smaller = (d for d in NUMERIC if d.kind != "bool" and d.size < kind.size)
    return frozenset(d for d in smaller if np.can_cast(d.dtype, kind.dtype, "safe"))


def _text(tensor: Tensor, name: str) -> list[str]:
    texts: list[str] = strings(tensor, name).tolist()
    return texts


def _bytes(tensor: Tensor, name: str) -> list[bytes]:
    elements: list[bytes] = tensor.data.tolist()
    return elements


def _datetime(tensor: Tensor, name: str) -> Any:
    pandas = RUNTIME.require("pandas")
    try:
        times = pandas.to_datetime(_text(tensor, name), format="ISO8601", utc=True)
        return times.tz_convert(None).as_unit("ns")
    except ValueError as error:
        value = str(error).partition("\n")[0]
        raise InvalidInput(f"input '{name}': expected dates and times in ISO 8601: {value}") from error


def _from_json(tensor: Tensor, name: str) -> Array:
    try:
        return object_array(map(json.loads, _text(tensor, name)), tensor.data.shape)
    except ValueError as error:
        raise InvalidInput(f"input '{name}': expected JSON in each element: {error}") from error


# The datatype and the conversion of each column type of MLflow.
_COLUMNS: Mapping[str, tuple[Datatype, ToValue]] = {
    **{
        name: (DATATYPES[datatype], _as_dtype(DATATYPES[datatype].dtype))
        for name, datatype in (
            ("boolean", "BOOL"),
            ("integer", "INT32"),
            ("long", "INT64"),
            ("float", "FP32"),
            ("double", "FP64"),
        )
    },
    "string": (BYTES, _text),
    "binary": (BYTES, _bytes),
    "datetime": (BYTES, _datetime),
}
