"""Data frames as inputs: one matrix of their columns, or one input per column.

Frames of pandas, polars, pyarrow and others that have columns by name; none is imported.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from dragoman.client.arrays import fit, is_array, mixed_numbers, to_array
from dragoman.codecs.codec import CODECS
from dragoman.core.datatypes import BYTES, FP64, Array, Datatype, datatype_of
from dragoman.core.errors import InvalidInput
from dragoman.core.signature import Signature, TensorSpec, check_columns
from dragoman.core.tensor import Tensor
from dragoman.formats.message import InferenceRequest, RequestInput

ToTensor = Callable[[Any, TensorSpec], Tensor]


def is_frame(value: Any) -> bool:
    """Return whether a value is a table of named columns."""
    if is_pandas(value):
        return bool(value.ndim == 2)
    return hasattr(value, "__dataframe__") or (hasattr(value, "columns") and hasattr(value, "to_numpy"))


def is_series(value: Any) -> bool:
    """Return whether a value is a column or a row of pandas."""
    return is_pandas(value) and value.ndim == 1 and hasattr(value, "iloc")


def with_series(value: Any) -> Any:
    """Return an index or an extension array of pandas as a column; other values unchanged."""
    is_bare = is_pandas(value) and value.ndim == 1 and not is_series(value)
    return sys.modules["pandas"].Series(value) if is_bare else value


def is_pandas(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] == "pandas" and hasattr(value, "ndim")


def columns_of_rows(value: Any) -> Any:
    """Return a row of pandas or a list of records as a frame of one row or lists by column; other values unchanged.

    Raises InvalidInput if the records differ in their names.
    """
    if is_series(value) and value.index.dtype.kind not in "iu":
        return value.to_frame().T.infer_objects().reset_index(drop=True)
    if not (isinstance(value, (list, tuple)) and value and all(isinstance(each, Mapping) for each in value)):
        return value
    for i, record in enumerate(value):
        if set(record) != set(value[0]):
            names = ", ".join(repr(name) for name in value[0] if name not in record)
            others = ", ".join(repr(name) for name in record if name not in value[0])
            reasons = " and ".join([f"without {names}"] * bool(names) + [f"with {others}"] * bool(others))
            raise InvalidInput(f"expected records with the same names, got number {i} {reasons}")
    return {name: [record[name] for record in value] for name in value[0]}


def request_of_frame(frame: Any, signature: Signature, to_tensor: ToTensor, cast: bool) -> InferenceRequest:
    """Return a request of a frame: its matrix for a model of one matrix, else one input per column.

    Raises InvalidInput that names the columns that are missing, too many or not numbers.
    """
    columns = _columns(frame)
    sole = signature.inputs[0] if len(signature.inputs) == 1 else None
    if sole is not None and not signature.content_type and _is_matrix(sole):
        return InferenceRequest(inputs=[RequestInput(sole.name, matrix(frame, sole, cast))])
    codec = CODECS.request_for(frame)
    if codec is not None:
        request: InferenceRequest = codec.encode_request(frame)
        fitted = [_fitted(each, signature.input(each.name), cast) for each in request.inputs]
        return replace(request, inputs=fitted)
    inputs = []
    for name, column in columns.items():
        spec = signature.input(name) or TensorSpec(name)
        array = _column_array(column)
        value = array.tolist() if array.dtype.kind in "OU" else array  # a list of text has the content type `str`
        inputs.append(_fitted(RequestInput(name, _named(name, to_tensor, value, spec)), spec, cast))
    return InferenceRequest(inputs=inputs)


def matrix(frame: Any, spec: TensorSpec, cast: bool) -> Tensor:
    """Return the columns of a frame as a matrix [rows, columns], in the model's order if it names its columns.

    It has the datatype of the model if that changes no value, or with `cast`; else the common one of the columns.
    """
    columns = _columns(frame)
    if spec.columns:
        check_columns(columns, spec.columns, "data frame")
        columns = {name: columns[name] for name in spec.columns}
    elif spec.shape is not None and len(spec.shape) == 2 and spec.shape[1] not in (-1, len(columns)):
        names = ", ".join(map(repr, columns))
        raise InvalidInput(f"expected {spec.shape[1]} columns, got {len(columns)}: {names}")
    tensors = {name: _named(name, _numbers, column) for name, column in columns.items()}
    texts = [name for name, tensor in tensors.items() if tensor.datatype is BYTES]
    if texts:
        raise InvalidInput(f"expected columns of numbers, got others in {', '.join(map(repr, texts))}")
    fitted = {name: _named(name, fit, tensor, spec, cast) for name, tensor in tensors.items()}
    datatype = spec.datatype
    if datatype is None or any(tensor.datatype is not datatype for tensor in fitted.values()):
        dtypes = [tensor.data.dtype for tensor in tensors.values()]
        datatype = datatype_of(np.result_type(*dtypes)) if dtypes else FP64
        fitted = {name: _named(name, _exactly, tensor, datatype) for name, tensor in tensors.items()}
    arrays = [tensor.data for tensor in fitted.values()]
    return Tensor(np.stack(arrays, axis=1) if arrays else np.empty((len(frame), 0), datatype.dtype), datatype)


def _exactly(tensor: Tensor, datatype: Datatype) -> Tensor:
    """Return a tensor in a datatype that holds each of its values. Raises InvalidInput if it does not."""
    result = fit(tensor, TensorSpec("", datatype), cast=False)
    if result.datatype is not datatype:
        raise InvalidInput(f"expected integers that {datatype} holds exactly, up to 2**53")
    return result


def series(value: Any, spec: TensorSpec, convert: Callable[[Any], Tensor]) -> Tensor:
    """Return a column of pandas as [N], or [N, 1] if the model declares that; a row of named values as [1, N]."""
    if spec.columns and set(map(str, value.index)) == set(spec.columns):
        value = value.set_axis([str(label) for label in value.index])[list(spec.columns)]
    elif spec.shape is None or len(spec.shape) != 2 or spec.shape[1] == 1 or value.index.dtype.kind in "iu":
        tensor = convert(value)
        is_column = spec.shape is not None and len(spec.shape) == 2 and spec.shape[1] == 1 and tensor.data.ndim == 1
        return Tensor(tensor.data.reshape(-1, 1), tensor.datatype, tensor.parameters) if is_column else tensor
    tensor = convert(value)
    return Tensor(tensor.data.reshape(1, -1), tensor.datatype, tensor.parameters)


def column_to_tensor(column: Any) -> Tensor:
    """Return a column of pandas as a tensor: numbers as [N], other values by the codec `pd`."""
    if isinstance(column.dtype, np.dtype) and column.dtype.kind in "biuf":
        return Tensor.of(column.to_numpy())
    codec = CODECS.request("pd")
    assert codec is not None
    (tensor,) = codec.to_tensors(column.reset_index(drop=True).to_frame("column")).values()
    return tensor


def _is_matrix(spec: TensorSpec) -> bool:
    return spec.datatype is not BYTES and not spec.content_type and spec.shape is not None and len(spec.shape) == 2


def _columns(frame: Any) -> dict[str, Any]:
    """Return the columns by name. Raises InvalidInput for equal names."""
    known = frame.columns if is_pandas(frame) else getattr(frame, "column_names", None) or frame.columns
    labels = [str(label) for label in known]
    twice = [label for label in dict.fromkeys(labels) if labels.count(label) > 1]
    if twice:
        raise InvalidInput(f"expected unique column names, got {', '.join(map(repr, twice))} twice")
    if is_pandas(frame):
        return {label: frame.iloc[:, at] for at, label in enumerate(labels)}
    return {label: frame[label] for label in labels}


def _numbers(column: Any) -> Tensor:
    """Return a column of numbers as a tensor [N], with NaN for missing ones; BYTES for a column of other values."""
    numeric = getattr(column.dtype, "numpy_dtype", None) if is_pandas(column) else None
    if numeric is not None and numeric.kind in "biuf":  # a nullable dtype of pandas
        present = Tensor.of(column.dropna().to_numpy(numeric))
        if len(present.data) == len(column):
            return present
        if numeric.kind == "b":
            raise InvalidInput("expected booleans, got missing values")
        return Tensor.of(column.to_numpy(_exactly(present, FP64).data.dtype, na_value=np.nan))
    array = _column_array(column)
    if array.dtype.kind == "O" and {type(element) for element in array} <= {bool, int, float}:
        array = mixed_numbers(array.tolist())
    return _OTHER if array.dtype.kind in "SUOMm" else Tensor.of(array)


_OTHER = Tensor.of(np.empty(0, object))


def _column_array(column: Any) -> Array:
    return np.asarray(to_array(column) if is_array(column) else column.to_numpy())


def _fitted(given: RequestInput, spec: TensorSpec | None, cast: bool) -> RequestInput:
    if spec is None:
        return given
    tensor = _named(given.name, fit, given.tensor, spec, cast)
    if spec.shape is not None and len(spec.shape) == 1 and tensor.datatype is not BYTES and tensor.data.ndim == 2:
        tensor = Tensor(tensor.data.reshape(-1), tensor.datatype, tensor.parameters)
    return RequestInput(given.name, tensor)


def _named(name: str, function: Callable[..., Tensor], *args: Any) -> Tensor:
    """Call a function; an InvalidInput that it raises names the column."""
    try:
        return function(*args)
    except InvalidInput as error:
        raise InvalidInput(f"column '{name}': {error.message}") from error
