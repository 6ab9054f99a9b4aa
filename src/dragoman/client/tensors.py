"""Inputs of a request from arrays, data frames, pictures and other values."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from dragoman.client.arrays import check_integers, fit, hint, is_array, to_array
from dragoman.client.frames import (
    column_to_tensor,
    columns_of_rows,
    is_frame,
    is_series,
    matrix,
    request_of_frame,
    series,
    with_series,
)
from dragoman.client.pictures import is_picture, path_hint, picture_to_tensor, takes_pixels
from dragoman.codecs.codec import CODECS
from dragoman.core.datatypes import BYTES, Array
from dragoman.core.errors import InvalidInput
from dragoman.core.signature import Signature, TensorSpec
from dragoman.core.tensor import NONE, Parameters, Tensor, with_own_dtype
from dragoman.formats.message import InferenceRequest, RequestInput, RequestOutput

OutputNames = Sequence[str | RequestOutput] | None

_NUMBERS = (int, float)  # bool is an int
_PLAIN = (*_NUMBERS, str, bytes, list, tuple)
_TEXT = {"content_type": "str"}
_CAST_ADVICE = "; cast=True rounds them"
_UNKNOWN = TensorSpec("")
_NOTHING_DECLARED = Signature()


def needs_signature(inputs: Any) -> bool:
    """Return whether the model's metadata is needed: for a value without a name, numbers, arrays and pictures."""
    match inputs:
        case InferenceRequest() | RequestInput():
            return False
        case Mapping():
            return any(map(_depends_on_spec, inputs.values()))
    return not _are_inputs(inputs)


def has_own_datatypes(inputs: Any) -> bool:
    """Return whether a request can be built without the metadata: each value has a name, a datatype and a shape."""
    if isinstance(inputs, Mapping):
        return not any(isinstance(v, (*_NUMBERS, np.generic, list, tuple)) and not _is_text(v) for v in inputs.values())
    return is_frame(inputs)


def request(inputs: Any, signature: Signature | None, model: str, cast: bool = False) -> InferenceRequest:
    """Build a request; `signature` is None if it is not needed or not known. Raises InvalidInput."""
    match inputs:
        case InferenceRequest():
            return inputs
        case RequestInput():
            return InferenceRequest(inputs=[inputs])
        case Mapping():
            return InferenceRequest(
                inputs=[_request_input(str(n), v, _spec(signature, str(n)), cast) for n, v in inputs.items()]
            )
    if _are_inputs(inputs):
        return InferenceRequest(inputs=list(inputs))
    if signature is not None and len(signature.inputs) > 1:
        inputs = columns_of_rows(inputs)
        if isinstance(inputs, Mapping):
            return request(inputs, signature, model, cast)
    if is_frame(inputs):
        to_tensor = partial(_tensor, cast=cast)
        return request_of_frame(inputs, signature or _NOTHING_DECLARED, to_tensor, cast)
    is_known = isinstance(inputs, _PLAIN) or is_array(inputs) or is_series(inputs)
    codec = None if is_known else CODECS.request_for(inputs)
    if codec is not None:
        encoded: InferenceRequest = codec.encode_request(inputs)
        return encoded
    spec = _single_input(signature, model)
    return InferenceRequest(inputs=[_request_input(spec.name, inputs, spec, cast)])


def conversion_hint(message: str, request: InferenceRequest, signature: Signature | None) -> str:
    """Return how to convert the input whose datatype a server's message rejects; "" if it rejects something else."""
    for given in request.inputs:
        spec, own = _spec(signature, given.name), given.tensor.datatype.name
        if spec.datatype is not None and own in message and spec.datatype.name in message:
            is_text = given.tensor.datatype is BYTES and given.tensor.data.size == 1
            return path_hint(given.tensor.data.flat[0], spec) if is_text else hint(given.tensor, spec)
    return ""


def with_options(
    request: InferenceRequest, outputs: OutputNames, parameters: Parameters | None, id_: str
) -> InferenceRequest:
    if not (outputs or parameters or id_):
        return request
    output_specs = [RequestOutput(o) if isinstance(o, str) else o for o in outputs or ()]
    return replace(
        request,
        outputs=output_specs or request.outputs,
        parameters={**request.parameters, **(parameters or NONE)},
        id=id_ or request.id,
    )


def _are_inputs(inputs: Any) -> bool:
    return isinstance(inputs, (list, tuple)) and bool(inputs) and all(isinstance(i, RequestInput) for i in inputs)


def _depends_on_spec(value: Any) -> bool:
    """Return whether the model's metadata may change how a value is sent."""
    if isinstance(value, (Tensor, RequestInput)):
        return False
    if isinstance(value, np.ndarray):
        return value.dtype.kind not in "SU"
    return not _is_text(value) and (isinstance(value, (*_PLAIN, np.generic)) or _is_convertible(value))


def _is_convertible(value: Any) -> bool:
    return is_array(value) or is_frame(value) or is_series(value) or is_picture(value)


def _is_text(value: Any) -> bool:
    listed = isinstance(value, (list, tuple)) and bool(value)
    return isinstance(value, str) or (listed and all(isinstance(v, str) for v in value))


def _spec(signature: Signature | None, name: str) -> TensorSpec:
    return (signature.input(name) if signature else None) or _UNKNOWN


def _single_input(signature: Signature | None, model: str) -> TensorSpec:
    specs = signature.inputs if signature else ()
    if len(specs) == 1:
        return specs[0]
    names = ", ".join(f"'{s.name}'" for s in specs) or "none"
    raise InvalidInput(
        f"one value without a name needs a model with one input, but the metadata of '{model}' has {names}"
    )


def _request_input(name: str, value: Any, spec: TensorSpec, cast: bool) -> RequestInput:
    try:
        return RequestInput(name, _tensor(value, spec, cast))
    except InvalidInput as error:
        raise InvalidInput(f"input '{name}': {error.message}") from error


def _tensor(value: Any, spec: TensorSpec, cast: bool) -> Tensor:
    match value:
        case Tensor():
            return with_own_dtype(value) if type(value) is Tensor else value
        case RequestInput():
            return value.tensor
        case np.number() | np.bool_() if spec.datatype is None:
            return Tensor.of(value.reshape(1))  # one axis, like a Python number
        case np.generic():
            value = value.item()
    value = with_series(value)
    if is_frame(value):
        return matrix(value, spec, cast)
    if is_series(value):
        return fit(series(value, spec, partial(_series_tensor, spec=spec, cast=cast)), spec, cast)
    if is_picture(value) and takes_pixels(spec):
        return picture_to_tensor(value, spec)
    if isinstance(value, (list, tuple)) and value and is_array(value[0]) and not isinstance(value[0], np.ndarray):
        if not is_picture(value):
            value = _stacked([to_array(each) for each in value])
    elif is_array(value) and not is_picture(value):
        value = to_array(value)
    if isinstance(value, np.ndarray):
        return fit(_array_tensor(value, spec, cast), spec, cast)
    if isinstance(value, _PLAIN) and not _has_codec(value):
        return _plain_tensor(value, spec, cast)
    codec = CODECS.input_for(value)
    return _from_array_protocol(value, spec) if codec is None else codec.to_tensor(value)


def _array_tensor(array: Array, spec: TensorSpec, cast: bool) -> Tensor:
    if array.dtype.kind == "O" and spec.datatype not in (None, BYTES):  # numbers of Python
        if not cast:
            check_integers(array, array, spec.datatype, _CAST_ADVICE)
        return Tensor.of(array, spec.datatype)
    return Tensor.of(array)


def _series_tensor(column: Any, spec: TensorSpec, cast: bool) -> Tensor:
    if column.dtype == np.dtype(object) and spec.datatype not in (None, BYTES):
        return _array_tensor(column.to_numpy(), spec, cast)
    return column_to_tensor(column)


def _stacked(arrays: list[Array]) -> Array:
    try:
        return np.stack(arrays)
    except ValueError as error:
        raise InvalidInput(f"expected arrays of equal shapes: {error}") from error


def _from_array_protocol(value: Any, spec: TensorSpec) -> Tensor:
    """Convert a value that supports the array protocol, such as a tensor of a framework."""
    try:
        return Tensor.of(value)
    except InvalidInput as error:
        what = f"a value of content type '{spec.content_type}'" if spec.content_type else "numbers, text or bytes"
        message = f"expected {what}, or a value with a codec, got {type(value).__name__}"
        raise InvalidInput(message if np.ndim(value) == 0 else error.message) from error


def _has_codec(value: Any) -> bool:
    """Return whether this is a list of values that need a codec, such as datetimes."""
    first = value
    while isinstance(first, (list, tuple)) and first:
        first = first[0]
    return isinstance(value, list) and not isinstance(first, (*_PLAIN, np.generic, np.ndarray, type(None)))


def _plain_tensor(value: Any, spec: TensorSpec, cast: bool) -> Tensor:
    """Convert numbers, strings and lists of them to the datatype of the model."""
    datatype = spec.datatype
    if isinstance(value, str) and takes_pixels(spec):
        advice = path_hint(value, spec)
        raise InvalidInput(f"expected {datatype}, got the text {value!r}" + (f"; {advice}" if advice else ""))
    if not isinstance(value, (list, tuple)):
        # Open Inference: a scalar has no shape; models declare it as one element, usually [1].
        value = np.full((1,) * len(spec.shape or (0,)), value, object if isinstance(value, str | bytes) else None)
        array = value
    else:
        array = _array(value)
        if spec.shape is not None and _are_single_rows(value, len(spec.shape)):
            array = array.reshape(-1, *array.shape[2:])
        if array.dtype.kind == "f" and datatype is not None and datatype.kind in ("int", "uint"):
            array = np.array(value, object).reshape(array.shape)  # an integer beside floats may be beyond 2**53
    if not array.size and datatype is not None:
        return Tensor(np.empty(array.shape, datatype.dtype), datatype)
    if cast and np.asarray(array).dtype.kind in "biuf":
        return fit(Tensor.of(array), spec, cast)
    if not cast:
        check_integers(value, array, datatype, _CAST_ADVICE)
    tensor = Tensor.of(array, datatype)
    text = tensor.datatype is BYTES and array.ndim < 2 and _is_all_text(array.flat)
    return Tensor(tensor.data, tensor.datatype, _TEXT) if text else tensor


def _are_single_rows(value: Any, axes: int) -> bool:
    """Return whether a list has arrays of one row each, [1, ...], such as pictures, for an input of as many axes."""
    return bool(value) and all(isinstance(each, np.ndarray) and each.ndim == axes and len(each) == 1 for each in value)


def _array(value: Any) -> Any:
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise InvalidInput(f"expected lists of equal lengths: {error}") from error
    return np.array(value, dtype=object) if array.dtype.kind in "SU" else array


def _is_all_text(elements: Iterable[Any]) -> bool:
    return all(isinstance(e, str) for e in elements)
