"""Copy output arrays that a model may still write to before the response is sent."""

from collections.abc import Collection
from typing import Any

from dragoman.core.bytes_tensor import BytesTensor
from dragoman.core.calls import Call, Infer, Inference
from dragoman.core.datatypes import Array
from dragoman.core.tensor import Tensor

# Copying so few bytes costs less than finding out whose memory they are.
_SMALL = 4096


def copy_outputs(answer: Any, call: Call[Any]) -> Any:
    """Return the answer with a copy of each array that a later call could change.

    Tensors of the call, and large arrays that are part of one or lie in immutable memory (`bytes`), are not copied.
    """
    if type(answer) is not Inference:
        return _copy(answer) if isinstance(answer, Tensor) else answer
    inputs = call.inputs.values() if type(call) is Infer else ()
    copies: dict[str, Tensor] = {}
    for name, tensor in answer.outputs.items():
        if tensor not in inputs and _has_array(tensor):
            data = tensor.data
            if data.nbytes <= _SMALL or not _is_safe(data, inputs):
                copies[name] = Tensor(data.copy(), tensor.datatype, tensor.parameters)
    if not copies:
        return answer
    outputs = copies if len(copies) == len(answer.outputs) else {**answer.outputs, **copies}
    return Inference(outputs, answer.parameters, answer.metadata)


def _is_safe(data: Array, inputs: Collection[Tensor]) -> bool:
    """True if the model cannot write to an array: it lies in `bytes`, or is part of an input of the call."""
    owner = _owner(data)
    return type(owner) is bytes or any(_owner(each.data) is owner for each in inputs if _has_array(each))


def _copy(tensor: Tensor) -> Tensor:
    return Tensor(tensor.data.copy(), tensor.datatype, tensor.parameters)


def _has_array(tensor: Tensor) -> bool:
    """Return False for text and bytes whose array is made only on demand, so that the model does not have it."""
    return type(tensor) is Tensor or not (isinstance(tensor, BytesTensor) and (tensor.is_text or tensor.in_one_piece))


def _owner(data: Array) -> Any:
    """Return the object that owns the memory of an array."""
    found: Any = data
    while (base := getattr(found, "base", None)) is not None:
        found = base
    return found
