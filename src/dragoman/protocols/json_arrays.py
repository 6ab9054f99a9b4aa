"""Inputs and outputs of models as nested JSON lists, without names or with them; shared by LMI and KServe's V1."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from dragoman.core.calls import ModelDescription
from dragoman.core.datatypes import BYTES, Array
from dragoman.core.errors import InvalidInput, NotSupported
from dragoman.core.signature import TensorSpec
from dragoman.core.tensor import Tensor, numpy_numbers
from dragoman.formats.json_text import format_nested
from dragoman.protocols.parameters import get_object
from dragoman.protocols.wire import Policy

_TENSOR = {"name", "shape", "datatype"}
_PIECE = 1 << 16  # elements of a list converted at a time


def parse_values(value: Any, model: ModelDescription, field: str) -> Mapping[str, Tensor]:
    """Return the inputs in a field of a request: an object with a value for each input, a list of such objects, one
    for each row, or the value of the only input. Raises InvalidInput naming the input."""
    if isinstance(value, dict):
        return named_tensors(value, model)
    if not is_object_list(value):
        return single_tensor(value, model, field)
    return named_tensors(columns_of(value, model, field), model)


def call_parameters(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the parameters of a request for the model. Raises InvalidInput for a list or an object among them."""
    parameters = get_object(body, "parameters")
    for name, value in parameters.items():
        if not isinstance(value, bool | int | float | str):
            raise InvalidInput(f"parameter '{name}' must be a string, a number, true or false")
    return parameters


def is_object_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(row, dict) for row in value)


def columns_of(rows: list[dict[str, Any]], model: ModelDescription, field: str) -> dict[str, list[Any]]:
    """Return the values of each name in rows that are objects. Raises InvalidInput if their names differ."""
    if rows[0].keys() >= _TENSOR:
        raise InvalidInput(f"Open Inference tensors are accepted at /v2/models/{model.name}/infer")
    if any(row.keys() != rows[0].keys() for row in rows):
        raise InvalidInput(f"'{field}' must be objects that all have the same names")
    return {name: [row[name] for row in rows] for name in rows[0]}


def single_tensor(value: Any, model: ModelDescription, field: str = "inputs") -> Mapping[str, Tensor]:
    """Return the tensor of the model's only input; a single row may lack its first axis."""
    spec = only_input(model, field)
    return {spec.name: with_row_axis(parse_tensor(value, spec, spec.name), spec)}


def only_input(model: ModelDescription, field: str = "inputs") -> TensorSpec:
    """Return the model's only required input; if the model declares none, any name is accepted."""
    needed = [spec for spec in model.signature.inputs if not spec.optional] or list(model.signature.inputs)
    if len(needed) > 1:
        names = ", ".join(f"'{spec.name}'" for spec in needed)
        raise InvalidInput(
            f"model '{model.name}' takes {names}; expected '{field}' to be an object with a value for each"
        )
    return needed[0] if needed else TensorSpec("inputs")


def parse_tensor(value: Any, spec: TensorSpec | None, name: str) -> Tensor:
    """Convert an array or nested lists to a tensor of the model's datatype. Raises InvalidInput naming the input."""
    try:
        array = value if isinstance(value, np.ndarray) else _array(value)
        if array.dtype.kind in "USO" and not isinstance(value, np.ndarray):
            array = np.array(value, dtype=object)
        whole = spec is not None and spec.datatype is not None and array.dtype.kind not in "USO"
        keep = not whole or spec is None or _is_accepted(array, spec)
        return Tensor.of(array) if keep or spec is None else Tensor.of(array, spec.datatype)
    except (ValueError, TypeError, OverflowError, InvalidInput) as error:
        raise InvalidInput(f"input '{name}': {error}") from error


def _array(value: Any) -> Array:
    """Return lists as `np.asarray` does, converted in pieces: no other thread runs while it converts one."""
    if isinstance(value, list) and len(value) > _PIECE:
        first = np.asarray(value[:_PIECE])
        array = np.empty((len(value), *first.shape[1:]), first.dtype)
        for at in range(0, len(value), _PIECE):
            piece = np.asarray(value[at : at + _PIECE])
            if (piece.dtype, piece.shape[1:]) != (first.dtype, first.shape[1:]):  # all values decide the dtype
                return np.asarray(value)
            array[at : at + _PIECE] = piece
        return array
    return np.asarray(value)


def with_row_axis(tensor: Tensor, spec: TensorSpec | None) -> Tensor:
    """Return the tensor, with a first axis of size 1 if it lacks one axis of the model's input."""
    rank = len(spec.shape) if spec is not None and spec.shape is not None else None
    if rank is None or tensor.data.ndim != rank - 1:
        return tensor
    return Tensor(tensor.data.reshape(1, *tensor.shape), tensor.datatype)


def named_tensors(
    values: Mapping[str, Any],
    model: ModelDescription,
    adapt: Callable[[Tensor, TensorSpec | None], Tensor] = with_row_axis,
) -> Mapping[str, Tensor]:
    """Return the tensors of values by the names of inputs, adapted to the shapes of these."""
    specs = {spec.name: spec for spec in model.signature.inputs}
    return {name: adapt(parse_tensor(v, specs.get(name), name), specs.get(name)) for name, v in values.items()}


def _is_accepted(array: Array, spec: TensorSpec) -> bool:
    datatype = Tensor.of(array).datatype
    return datatype is spec.datatype or datatype in spec.accepts


def format_values(name: str, tensor: Tensor, policy: Policy, instead: str) -> Any:
    """Return an output as nested lists for `json_chunks`.

    Raises NotSupported for values that JSON cannot express; the message ends with what to do `instead`.
    """
    array = numpy_numbers(tensor)
    if tensor.datatype is BYTES:
        try:
            return np.array([element.decode() for element in array.flat], dtype=object).reshape(array.shape).tolist()
        except UnicodeDecodeError as error:
            raise NotSupported(f"output '{name}' holds bytes that are not UTF-8; {instead}") from error
    unsupported = np.isinf if policy.nonfinite != "error" else lambda values: ~np.isfinite(values)
    if tensor.datatype.kind == "float" and unsupported(array).any():
        raise NotSupported(f"output '{name}' holds NaN or infinity, not supported by JSON; {instead}")
    return format_nested(array)
