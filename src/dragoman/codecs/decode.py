"""Decode inputs and encode outputs by content type.

The content type of the request has precedence, then that in the model's settings, then a type hint.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import structs

from dragoman.codecs.codec import CODECS, FirstTensorCodec, InputCodec, RequestCodec
from dragoman.core.bytes_tensor import with_parameters
from dragoman.core.calls import Infer, Inference
from dragoman.core.datatypes import BYTES
from dragoman.core.errors import DragomanError, InvalidInput, InvalidOutput
from dragoman.core.signature import TensorSpec
from dragoman.core.spec import ModelSpec
from dragoman.core.tensor import NONE, Tensor

KEY = "content_type"


class Defaults(msgspec.Struct, frozen=True):
    """Content types in a model's settings: for the whole request, and for inputs by name."""

    request: str = ""
    inputs: Mapping[str, str] = msgspec.field(default_factory=dict)

    @classmethod
    def of(cls, spec: ModelSpec, inputs: tuple[TensorSpec, ...] = ()) -> "Defaults":
        """Return those of the operator's settings, and of the model's own `inputs` where these give none."""
        by_name = {i.name: i.content_type for i in (*inputs, *spec.inputs) if i.content_type}
        return cls(str(spec.parameters.get(KEY) or ""), by_name)


NO_DEFAULTS = Defaults()


# --- inputs ------------------------------------------------------------------------------------------------


def _input_codec(name: str, tensor: Tensor, default: str, hint: Any) -> type[InputCodec] | None:
    """Return the codec of an input; None if nothing selects one. Raises InvalidInput for an unknown content type."""
    content_type = tensor.parameters.get(KEY) or default
    if content_type:
        return CODECS.input(str(content_type), f"input '{name}'")
    return None if hint is None else CODECS.input_for_hint(hint)


def decode_input(name: str, tensor: Tensor, default: str = "", hint: Any = None) -> Any:
    """Return the value of an input by its content type, the `default` or a type hint; else its array."""
    codec = _input_codec(name, tensor, default, hint)
    return tensor.data if codec is None else codec.to_value(tensor, f"input '{name}'")


def decode_inputs(tensors: Mapping[str, Tensor], defaults: Defaults = NO_DEFAULTS) -> dict[str, Any]:
    """Return the value of each input by name."""
    return {name: decode_input(name, t, defaults.inputs.get(name, "")) for name, t in tensors.items()}


def decode_request(call: Infer, defaults: Defaults = NO_DEFAULTS, hint: Any = None) -> Any:
    """Return the value of a whole call by its content type, the `defaults` or a type hint.

    If nothing selects a content type, return the value of each input by name. Raises InvalidInput.
    """
    codec = request_codec(call, defaults, hint)
    if codec is None:
        return decode_inputs(call.inputs, defaults)
    return codec.to_value(with_defaults(call.inputs, defaults), "input")


def request_codec(call: Infer, defaults: Defaults = NO_DEFAULTS, hint: Any = None) -> type[RequestCodec] | None:
    """Return the codec of a call; None if nothing selects one. Raises InvalidInput for an unknown content type."""
    content_type = call.parameters.get(KEY) or defaults.request
    if not content_type:
        return None if hint is None else CODECS.request_for_hint(hint)
    codec = CODECS.request(str(content_type))
    if codec is None:
        expected = ", ".join(CODECS.request_types())
        raise InvalidInput(f"unknown content type '{content_type}' of a request: expected one of {expected}")
    return codec


def with_defaults(tensors: Mapping[str, Tensor], defaults: Defaults) -> Mapping[str, Tensor]:
    """Return the inputs with the default content type in the parameters of each one that has none."""
    if not defaults.inputs:
        return tensors
    return {
        name: with_parameters(t, {**t.parameters, KEY: defaults.inputs[name]})
        if name in defaults.inputs and not t.parameters.get(KEY)
        else t
        for name, t in tensors.items()
    }


# --- outputs -----------------------------------------------------------------------------------------------


def encode_answer(value: Any, content_type: str = "", names: tuple[str, ...] = ()) -> Inference:
    """Encode a result: a data frame or other value of a request codec, a dict of outputs, a tuple, or one output.

    `content_type` selects the codec of the whole response. Unnamed outputs get `names`, then `output-0`, `output-1`,
    ... by position. Raises InvalidOutput naming the output that no codec can encode.
    """
    match value:
        case Inference():
            return value
        case Mapping() if not content_type:
            return Inference({str(name): encode_output(str(name), each) for name, each in value.items()})
        case tuple() if not content_type:
            all_names = (*names, *(f"output-{i}" for i in range(len(names), len(value))))
            return Inference({n: encode_output(n, each) for n, each in zip(all_names, value, strict=False)})
    codec = CODECS.request(content_type) if content_type else CODECS.request_for(value)
    if codec is None or (not content_type and issubclass(codec, FirstTensorCodec)):
        return Inference({(name := (names or ("output-0",))[0]): encode_output(name, value)})
    try:
        return Inference(codec.to_tensors(value, "output"), codec.parameters())
    except DragomanError as error:
        raise InvalidOutput(error.message) from error


def encode_output(name: str, value: Any, content_type: str = "") -> Tensor:
    """Encode one output by its content type, or by the first codec that can encode it. Raises InvalidOutput."""
    if isinstance(value, Tensor):
        return value
    try:
        codec = CODECS.input(content_type, f"output '{name}'") if content_type else CODECS.input_for(value)
        return Tensor.of(value, parameters=NONE) if codec is None else codec.to_tensor(value)
    except DragomanError as error:
        raise InvalidOutput(f"output '{name}': {error.message}") from error
    except (TypeError, ValueError) as error:
        raise InvalidOutput(f"output '{name}': no codec can encode {type(value).__name__}") from error


def encode_outputs_as(inference: Inference, content_types: Mapping[str, str]) -> Inference:
    """Return the inference with each output that `content_types` names encoded by that codec.

    Raises InvalidInput naming the output if the content type is unknown or cannot encode its values.
    """
    outputs = {
        name: _reencode(name, tensor, content_types[name]) if name in content_types else tensor
        for name, tensor in inference.outputs.items()
    }
    return structs.replace(inference, outputs=outputs)


def _reencode(name: str, tensor: Tensor, content_type: str) -> Tensor:
    if tensor.parameters.get(KEY) == content_type:
        return tensor
    codec = CODECS.input(content_type, f"output '{name}'")
    try:
        return codec.to_tensor(_output_value(name, tensor, codec))
    except (DragomanError, TypeError, ValueError, AttributeError) as error:
        message = error.message if isinstance(error, DragomanError) else str(error)
        raise InvalidInput(
            f"output '{name}': content type '{content_type}' cannot encode {tensor.datatype} "
            f"{list(tensor.shape)}: {message}"
        ) from error


def _output_value(name: str, tensor: Tensor, codec: type[InputCodec]) -> Any:
    """Return the value of an output by its own content type, else its array.

    BYTES without a content type are values if `codec` encodes bytes, else elements that it has already encoded.
    """
    if KEY in tensor.parameters:
        return decode_input(name, tensor)
    if tensor.datatype is not BYTES:
        return tensor.data
    elements = list(tensor.data.ravel())
    return elements if codec.can_encode(elements) else codec.to_value(tensor, f"output '{name}'")
