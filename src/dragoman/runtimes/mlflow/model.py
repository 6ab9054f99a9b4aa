"""MLflow models of any flavor, through mlflow.pyfunc."""

import json
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from dragoman.codecs.decode import Defaults
from dragoman.codecs.elements import strings
from dragoman.core.calls import Infer
from dragoman.core.datatypes import BYTES, Array
from dragoman.core.errors import InvalidInput, InvalidOutput, ModelFailed
from dragoman.core.model import Model
from dragoman.core.signature import Signature, TensorSpec
from dragoman.core.tensor import Parameters, Tensor, numpy_numbers, object_array
from dragoman.runtimes.files import check_pickle, model_path
from dragoman.runtimes.mlflow import RUNTIME
from dragoman.runtimes.mlflow.schema import SchemaEntry, entries, frame, writable_copy
from dragoman.runtimes.tables import content


class MlflowModel(Model):
    """A folder with an `MLmodel` file; the package of its flavor must be installed as well.

    Inputs follow the MLflow signature: columns make a data frame, tensors an array or a dict of arrays. Datetimes are
    ISO 8601 (UTC without an offset), columns of lists or objects are JSON. Without a signature, one input of two or
    more axes is the array, other inputs are the columns of a data frame. The params of the signature are parameters of
    the call, lists as JSON.

    Outputs: the columns of a data frame or the arrays of a dict, by name; otherwise the names of the output schema, or
    `output-0`. Dates are ISO 8601; what is neither number nor string is JSON.

    MLflow does not declare whether rows are independent: calls are merged only if the operator sets `max_batch_size`.
    Loading imports code and unpickles for every flavor, so it needs `allow_pickle`.
    """

    platform = "mlflow_pyfunc"

    def load(self) -> None:
        path = model_path(self.spec)
        if not (path / "MLmodel").is_file():
            raise ModelFailed(f"'{path.name}' is not an MLflow model: expected a folder with the file MLmodel")
        check_pickle(path, self.spec)
        # Disables telemetry, which starts when mlflow is imported.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        pyfunc = RUNTIME.require("mlflow.pyfunc")
        self._mlflow_error: Any = RUNTIME.require("mlflow.exceptions").MlflowException
        RUNTIME.require("pandas")
        try:
            self._model = pyfunc.load_model(str(path.resolve()))
        except (self._mlflow_error, ImportError) as error:
            raise ModelFailed(f"'{path.name}' cannot be loaded by MLflow: {error}") from error
        value = self._model.metadata.signature
        self._inputs, self._outputs = _entries(value, "inputs", "input-"), _entries(value, "outputs", "output-")
        self._takes_tensors = bool(self._inputs) and value.inputs.is_tensor_spec()
        self._defaults = Defaults.of(self.spec)
        self._params = {param.name: param for param in getattr(value, "params", None) or ()}

    def signature(self) -> Signature:
        return Signature(
            inputs=tuple(entry.spec for entry in self._inputs),
            outputs=tuple(TensorSpec(e.spec.name, e.spec.datatype, e.spec.shape) for e in self._outputs),
            open_inputs=not self._inputs,
            open_outputs=not self._outputs,
            batched=self.spec.max_batch_size > 1,
            decodes=True,
            content_type=self._defaults.request,
        )

    def infer(self, call: Infer) -> Mapping[str, Array]:
        value = content(call, self._defaults)
        data = self._data(call.inputs) if value is None else value
        params = self._parse_params(call.parameters)
        try:
            result = self._model.predict(data, params=params or None)
        except self._mlflow_error as error:
            if error.error_code != "INVALID_PARAMETER_VALUE":
                raise
            # MLflow checks the data against the signature itself; its message begins with all of the data.
            raise InvalidInput(f"MLflow takes no such inputs: {str(error).rpartition('Error: ')[2]}") from error
        return self._name_outputs(result)

    def _data(self, tensors: Mapping[str, Tensor]) -> Any:
        if not self._inputs:
            return _data_without_signature(tensors)
        values = {
            entry.key: entry.to_value(tensors[entry.spec.name], entry.spec.name)
            for entry in self._inputs
            if entry.spec.name in tensors
        }
        if not self._takes_tensors:
            return frame(values)
        return values if isinstance(self._inputs[0].key, str) else values[0]

    def _parse_params(self, parameters: Parameters) -> dict[str, Any]:
        """Return the signature's params that the call sets; MLflow adds the defaults of the others."""
        params: dict[str, Any] = {}
        for name in self._params.keys() & parameters.keys():
            param, value = self._params[name], parameters[name]
            try:
                if param.shape is not None and isinstance(value, str):
                    value = json.loads(value)
                params[name] = param.validate_param_spec(value, param)
            except (self._mlflow_error, ValueError) as error:
                kind = getattr(param.dtype, "name", param.dtype)
                expected = kind if param.shape is None else f"a JSON list of {kind}"
                raise InvalidInput(f"parameter '{name}': expected {expected}, got {parameters[name]!r}") from error
        return params

    def _name_outputs(self, result: Any) -> dict[str, Array]:
        if isinstance(result, Mapping):
            return {str(name): _array(value) for name, value in result.items()}
        if hasattr(result, "columns"):
            return {str(name): _array(result[name]) for name in result.columns}
        array = _array(result)
        names = [entry.spec.name for entry in self._outputs] or ["output-0"]
        if len(names) == 1:
            return {names[0]: array}
        if array.ndim != 2 or array.shape[1] != len(names):
            raise InvalidOutput(f"expected {len(names)} columns {names}, got an array of shape {list(array.shape)}")
        return {name: array[:, i] for i, name in enumerate(names)}


def _entries(signature: Any, side: str, prefix: str) -> tuple[SchemaEntry, ...]:
    schema = getattr(signature, side, None)
    return () if schema is None else entries(schema, prefix)


def _data_without_signature(tensors: Mapping[str, Tensor]) -> Any:
    """Return the argument of a model without a signature."""
    arrays = {name: _to_column(tensor, name) for name, tensor in tensors.items()}
    if len(arrays) == 1 and next(iter(arrays.values())).ndim > 1:
        return writable_copy(next(iter(arrays.values())))
    for name, array in arrays.items():
        if array.ndim != 1:
            raise InvalidInput(f"input '{name}': expected a column of a table, shape [-1], got {list(array.shape)}")
    return frame(arrays)


def _to_column(tensor: Tensor, name: str) -> Array:
    if tensor.datatype is BYTES:
        return strings(tensor, name)
    return numpy_numbers(tensor)


# --- results ---------------------------------------------------------------------------------------------


def _array(value: Any) -> Array:
    """Convert a value of any library to an array of numbers or strings."""
    if hasattr(value, "toarray"):  # a sparse matrix
        value = value.toarray()
    array = _to_array(value)
    if array.dtype.kind == "M":
        # pandas writes nanoseconds only if there are any, like isoformat.
        stamp = RUNTIME.require("pandas").Timestamp
        return object_array((stamp(each).isoformat() for each in array.flat), array.shape)
    if array.dtype.kind != "O" or all(isinstance(each, str | bytes) for each in array.flat):
        return array
    if all(isinstance(each, int | float | np.number | np.bool_) for each in array.flat):
        return np.array(array.tolist())
    return object_array(map(_as_text, array.flat), array.shape)


def _to_array(value: Any) -> Array:
    if isinstance(value, list) and any(isinstance(each, dict | str | bytes) for each in value):
        return object_array(value, (len(value),))  # NumPy strings lose zero characters at their end
    try:
        return np.asarray(value)
    except ValueError:  # lists of several lengths
        return object_array(value, (len(value),))


def _as_text(element: Any) -> str | bytes:
    if isinstance(element, str | bytes):
        return element
    if hasattr(element, "isoformat"):
        return str(element.isoformat())
    return json.dumps(element, default=_plain_value)


def _plain_value(value: Any) -> Any:
    if hasattr(value, "isoformat"):
        return value.isoformat()
    if hasattr(value, "tolist"):
        return value.tolist()
    raise InvalidOutput(f"{type(value).__name__} cannot be converted to JSON")
