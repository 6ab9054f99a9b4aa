"""Outputs in the content type that a request asks for, whatever the model gave them as."""

from collections.abc import Mapping
from typing import Any

from dragoman.codecs.codec import InputCodec
from dragoman.codecs.decode import KEY, decode_input
from dragoman.codecs.registry import CODECS
from dragoman.core.calls import Inference
from dragoman.core.datatypes import BYTES
from dragoman.core.errors import DragomanError, InvalidInput
from dragoman.core.tensor import Tensor


def as_wanted(answer: Inference, content_types: Mapping[str, str]) -> Inference:
    """The answer, with each output that `content_types` names written by that codec.

    An output that is of this content type already stays as it is. Raises InvalidInput naming the output where the
    content type is not known, or has no form for its values.
    """
    outputs = {
        name: _written(name, tensor, content_types[name]) if name in content_types else tensor
        for name, tensor in answer.outputs.items()
    }
    return Inference(outputs, answer.parameters, answer.metadata)


def _written(name: str, tensor: Tensor, content_type: str) -> Tensor:
    if tensor.parameters.get(KEY) == content_type:
        return tensor
    codec = CODECS.input(content_type, f"output '{name}'")
    try:
        return codec.to_tensor(_value(name, tensor, codec))
    except (DragomanError, TypeError, ValueError, AttributeError) as fault:
        told = fault.message if isinstance(fault, DragomanError) else str(fault)
        raise InvalidInput(
            f"output '{name}': content type '{content_type}' has no form for {tensor.datatype} "
            f"{list(tensor.shape)}: {told}"
        ) from fault


def _value(name: str, tensor: Tensor, codec: type[InputCodec]) -> Any:
    """What the model meant: by the output's own content type, else its array.

    Bytes that no content type tells of are values of a codec that takes bytes, and for any other its written form.
    """
    if KEY in tensor.parameters:
        return decode_input(name, tensor)
    if tensor.datatype is not BYTES:
        return tensor.data
    elements = list(tensor.data.ravel())
    return elements if codec.can_encode(elements) else codec.to_value(tensor, f"output '{name}'")
