"""Inputs of a request from arrays and values, and outputs of a response as them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from dragoman.codecs.codec import CODECS
from dragoman.core.datatypes import BYTES, Array
from dragoman.core.errors import InvalidInput
from dragoman.core.signature import Signature, TensorSpec
from dragoman.core.tensor import NONE, Parameters, Tensor, with_own_dtype
from dragoman.formats.message import InferenceRequest, InferenceResponse, RequestInput, RequestOutput


class Result(Mapping[str, Any]):
    """Outputs of one response by name, in the order of the model.

    `result["y"]` is the value decoded by the output's content type (strings, datetimes, ...), or an array without one
    or with decode=False. Arrays are read-only views of the response: copy them before writing. BF16 is an array of
    `ml_dtypes.bfloat16`, BYTES an object array of `bytes`.
    """

    def __init__(self, response: InferenceResponse, decode: bool = True) -> None:
        self.response = response
        self._decode = decode
        self._tensors = response.tensors
        self._values: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._values:
            self._values[name] = self._value(name, self._tensors[name])
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __repr__(self) -> str:
        outputs = [f"{name}: {t.datatype}{list(t.shape)}" for name, t in self._tensors.items()]
        return f"<Result of {self.response.model_name}: {', '.join(outputs)}>"

    @property
    def value(self) -> Any:
        """The response as one value: decoded by its content type (a DataFrame for `pd`), else its only output.

        A response with several outputs and no content type is a dict.
        """
        kind = self.response.parameters.get("content_type")
        codec = CODECS.request(str(kind)) if kind and self._decode else None
        if codec is not None:
            return codec.decode_response(self.response)
        return next(iter(self.values())) if len(self) == 1 else dict(self)

    def to_numpy(self, name: str = "") -> Array:
        """Return the array of an output without decoding; the name may be left out if there is one output.

        Raises InvalidInput if there are several outputs and no name, KeyError for an unknown name.
        """
        if not name and len(self) != 1:
            raise InvalidInput(f"expected the name of an output, one of {', '.join(map(repr, self))}")
        return self._tensors[name or next(iter(self))].data

    def to_frame(self) -> Any:
        """Return the outputs as columns of a pandas DataFrame. Raises InvalidInput if they cannot be columns."""
        codec = CODECS.request("pd")
        assert codec is not None
        return codec.decode_response(self.response)

    def _value(self, name: str, tensor: Tensor) -> Any:
        content_type = tensor.parameters.get("content_type")
        if not content_type or not self._decode:
            return tensor.data
        where = f"output '{name}'"
        return CODECS.input(str(content_type), where).to_value(tensor, where)


OutputNames = Sequence[str | RequestOutput] | None

_NUMBERS = (int, float)  # bool is an int
_SCALARS = (*_NUMBERS, np.generic)
_PLAIN = (*_NUMBERS, str, bytes, list, tuple)
_TEXT = {"content_type": "str"}
_UNKNOWN = TensorSpec("")


def needs_signature(inputs: Any) -> bool:
    """Return whether the model's metadata is needed: for an input without a name or numbers without a dtype."""
    match inputs:
        case InferenceRequest() | RequestInput():
            return False
        case Mapping():
            return any(isinstance(v, (*_SCALARS, list, tuple)) and not _is_text(v) for v in inputs.values())
    return not _are_inputs(inputs) and not _is_frame(inputs)


def request(inputs: Any, signature: Signature | None, model: str) -> InferenceRequest:
    """Build a request; `signature` is None if it is not needed. Raises InvalidInput."""
    match inputs:
        case InferenceRequest():
            return inputs
        case RequestInput():
            return InferenceRequest(inputs=[inputs])
        case Mapping():
            return InferenceRequest(
                inputs=[_request_input(str(n), v, _spec(signature, str(n))) for n, v in inputs.items()]
            )
    if _are_inputs(inputs):
        return InferenceRequest(inputs=list(inputs))
    codec = None if isinstance(inputs, (np.ndarray, *_PLAIN)) else CODECS.request_for(inputs)
    if codec is not None:
        encoded: InferenceRequest = codec.encode_request(inputs)
        return encoded
    spec = _single_input(signature, model)
    return InferenceRequest(inputs=[_request_input(spec.name, inputs, spec)])


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


def _is_frame(inputs: Any) -> bool:
    return _from_pandas(inputs) and inputs.ndim == 2


def _from_pandas(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] == "pandas" and hasattr(value, "ndim")


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


def _request_input(name: str, value: Any, spec: TensorSpec) -> RequestInput:
    try:
        return RequestInput(name, _tensor(value, spec))
    except InvalidInput as error:
        raise InvalidInput(f"input '{name}': {error.message}") from error


def _tensor(value: Any, spec: TensorSpec) -> Tensor:
    match value:
        case Tensor():
            return with_own_dtype(value) if type(value) is Tensor else value
        case RequestInput():
            return value.tensor
        case np.ndarray():
            return Tensor.of(value)
        case np.number() | np.bool_() if spec.datatype is None:
            return Tensor.of(value.reshape(1))  # one axis, like a Python number
        case np.generic():
            value = value.item()
    if isinstance(value, _PLAIN) and not _has_codec(value):
        return _plain_tensor(value, spec)
    if _from_pandas(value) and isinstance(value.dtype, np.dtype) and value.dtype.kind in "biuf":
        return Tensor.of(value.to_numpy())
    if _from_pandas(value):
        return _column(value)
    codec = CODECS.input_for(value)
    return _from_array_protocol(value, spec) if codec is None else codec.to_tensor(value)


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


def _column(series: Any) -> Tensor:
    codec = CODECS.request("pd")
    assert codec is not None
    (tensor,) = codec.to_tensors(series.to_frame("column")).values()
    return tensor


def _plain_tensor(value: Any, spec: TensorSpec) -> Tensor:
    """Convert numbers, strings and lists of them to the datatype of the model."""
    datatype = spec.datatype
    if not isinstance(value, (list, tuple)):
        # Open Inference: a scalar has no shape; models declare it as one element, usually [1].
        value = np.full((1,) * len(spec.shape or (0,)), value, object if isinstance(value, str | bytes) else None)
        array = value
    else:
        array = _array(value)
    if not array.size and datatype is not None:
        return Tensor(np.empty(array.shape, datatype.dtype), datatype)
    tensor = Tensor.of(array, datatype)
    text = tensor.datatype is BYTES and array.ndim < 2 and _is_all_text(array.flat)
    return Tensor(tensor.data, tensor.datatype, _TEXT) if text else tensor


def _array(value: Any) -> Any:
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise InvalidInput(f"expected lists of equal lengths: {error}") from error
    return np.array(value, dtype=object) if array.dtype.kind in "SU" else array


def _is_all_text(elements: Iterable[Any]) -> bool:
    return all(isinstance(e, str) for e in elements)
