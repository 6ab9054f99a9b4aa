"""MLflow models of any flavor, through mlflow.pyfunc."""

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from dragoman.codecs.decode import Defaults
from dragoman.codecs.elements import strings
from dragoman.core.calls import Handle, Handled, Infer
from dragoman.core.datatypes import BYTES, DATATYPES, NUMERIC, Array, Datatype, datatype_of, widens
from dragoman.core.documents import parse_json
from dragoman.core.errors import InvalidInput, InvalidOutput, ModelFailed
from dragoman.core.model import Model
from dragoman.core.runtime import Runtime
from dragoman.core.signature import Shape, Signature, TensorSpec
from dragoman.core.spec import ModelSpec
from dragoman.core.tensor import Parameters, Tensor, numpy_numbers, object_array
from dragoman.runtimes.class_names import estimator_kind
from dragoman.runtimes.files import check_pickle, model_path
from dragoman.runtimes.mlflow.scoring import INVOCATIONS, score
from dragoman.runtimes.tables import content

log = logging.getLogger("dragoman.model")

# Converts a tensor to the value that MLflow expects; the name is for messages.
ToValue = Callable[[Tensor, str], Any]


class SchemaEntry(msgspec.Struct, frozen=True):
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
    return frozenset(each for each in NUMERIC if widens(each, kind))


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
        return object_array(map(parse_json, _text(tensor, name)), tensor.data.shape)
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
    merges = 0
    handlers = (INVOCATIONS,)

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
        self._describe_estimator()
        value = self._model.metadata.signature
        self._inputs, self._outputs = _entries(value, "inputs", "input-"), _entries(value, "outputs", "output-")
        self._takes_tensors = bool(self._inputs) and value.inputs.is_tensor_spec()
        self._defaults = Defaults.of(self.spec)
        self._params = {param.name: param for param in getattr(value, "params", None) or ()}

    def _describe_estimator(self) -> None:
        """Find out kind and classes of an estimator with the interface of scikit-learn, if the flavor has one."""
        self._classes: tuple[str, ...] = ()
        try:
            estimator = self._model.get_raw_model()
        except Exception:  # not every flavor has one, and MLflow promises no class of error
            return
        self.kind = estimator_kind(estimator)
        flavor = self._model.metadata.flavors.get("python_function", {})
        classes = getattr(estimator, "classes_", ())
        if flavor.get("predict_fn") == "predict_proba" and getattr(classes, "ndim", 0) == 1:
            self._classes = tuple(map(str, classes))

    def class_labels(self) -> Mapping[str, Sequence[str]]:
        names = [entry.spec.name for entry in self._outputs] or ["output-0"]
        return {names[0]: self._classes} if self._classes and len(names) == 1 else {}

    def signature(self) -> Signature:
        return Signature(
            inputs=tuple(entry.spec for entry in self._inputs),
            outputs=tuple(TensorSpec(e.spec.name, e.spec.datatype, e.spec.shape) for e in self._outputs),
            open_inputs=not self._inputs,
            open_outputs=not self._outputs,
            batched=self.spec.max_batch_size > 1,
            decodes=True,
            content_type=self._defaults.request,
            outputs_are_hints=True,
        )

    def example_inputs(self) -> Mapping[str, Any] | None:
        """Return the inputs of the input_example that was saved with the model; None if there is none."""
        try:
            example = self._model.metadata.load_input_example(self.spec.uri)
            return None if example is None else self._example_columns(example)
        except Exception as error:  # whatever reading a file of another version of MLflow raises
            log.warning("input example not used: model=%s error=%s: %s", self.spec.name, type(error).__name__, error)
            return None

    def _example_columns(self, example: Any) -> Mapping[str, Any] | None:
        """Return an example, a data frame, a dict, an array or lists, as arrays by the names of the inputs."""
        if isinstance(example, Mapping):
            columns = dict(example)
        elif hasattr(example, "columns"):
            columns = {str(name): example[name] for name in example.columns}
        else:
            array, names = np.asarray(example), [entry.spec.name for entry in self._inputs]
            if not names:
                return None
            columns = {names[0]: array} if len(names) == 1 else dict(zip(names, array.T, strict=True))
        arrays = {name: _array(value) for name, value in columns.items()}
        return {name: array if array.shape else array.reshape(1) for name, array in arrays.items()}

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

    def handle(self, call: Handle) -> Handled:
        return score(self._model, call.content, call.content_type)

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
                    value = parse_json(value)
                params[name] = param.validate_param_spec(value, param)
            except (self._mlflow_error, ValueError) as error:
                kind = getattr(param.dtype, "name", param.dtype)
                expected = kind if param.shape is None else f"a JSON list of {kind}"
                raise InvalidInput(f"parameter '{name}': expected {expected}, got {parameters[name]!r:.100}") from error
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


def _load(spec: ModelSpec) -> Model:

    return MlflowModel(spec)


RUNTIME = Runtime(
    load=_load,
    packages=("mlflow", "pandas"),
    extra="mlflow",
    folder_files=("MLmodel",),
    priority=40,  # an MLflow model may hold files of any other kind, such as a model.py
)
