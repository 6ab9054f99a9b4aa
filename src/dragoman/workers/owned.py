"""An answer becomes its reader's own: no later call can change what is not sent yet."""

import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from dragoman.core.bytes_tensor import BytesTensor
from dragoman.core.calls import Call, Infer, Inference
from dragoman.core.datatypes import FP64, Array
from dragoman.core.tensor import Tensor


def owned(answer: Any, call: Call[Any]) -> Any:
    """The answer, with a copy of each array that the model may still hold and write to.

    It holds none that owns its memory and that nothing else refers to; the arrays of the call are not its own.
    """
    if isinstance(answer, Tensor):
        return Tensor(answer.data.copy(), answer.datatype, answer.parameters)
    if not isinstance(answer, Inference):
        return answer
    outputs = answer.outputs
    for name in outputs:  # all is plainly new: arrays that nothing else refers to, or that lie in bytes
        tensor = outputs[name]
        data: Any = tensor.data if type(tensor) is Tensor else None
        base = data.base if data is not None else answer
        if type(base) is not bytes and (base is not None or sys.getrefcount(tensor) + sys.getrefcount(data) > _NEW):
            break
    else:
        return answer
    del tensor, data, base  # which would count as references, too
    kept: list[str] = []
    for name, found in _references(answer.outputs).items():
        data = answer.outputs[name].data
        if found > _FRESH or not _alone(data):
            root = _root(data)
            if type(root) is not bytes and not any(root is lent for lent in _roots(call)):
                kept.append(name)
    if not kept:
        return answer
    copies = {name: replace(answer.outputs[name], data=answer.outputs[name].data.copy()) for name in kept}
    return replace(answer, outputs={**answer.outputs, **copies})


def _roots(call: Call[Any]) -> list[Any]:
    """Whose memory the inputs of a call are."""
    inputs = call.inputs if isinstance(call, Infer) else {}
    return [_root(tensor.data) for tensor in inputs.values() if _has_array(tensor)]


def _has_array(tensor: Tensor) -> bool:
    """Whether there is an array that anybody could write to; text is made into one only when asked for."""
    return not (isinstance(tensor, BytesTensor) and (tensor.is_text or tensor.in_one_piece))


def _references(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """How many references there are to each tensor that has an array, and to that."""
    # Either may be held: a tensor that the model made once, or an array that it makes tensors of.
    return {
        name: sys.getrefcount(tensor) + sys.getrefcount(tensor.data)
        for name, tensor in tensors.items()
        if type(tensor) is Tensor or _has_array(tensor)
    }


def _alone(data: Array) -> bool:
    """Whether the memory is this array's own, or that of an array which nothing but this one refers to."""
    base: Any = data.base
    if base is None or type(base) is bytes:
        return True
    return type(base) is np.ndarray and base.base is None and sys.getrefcount(base) <= _BASE


def _root(data: Array) -> Any:
    """Whose memory it is."""
    found: Any = data
    while getattr(found, "base", None) is not None:
        found = found.base
    return found


def _base_references(data: Array) -> int:
    base: Any = data.base
    return sys.getrefcount(base)


def _new_references(outputs: Mapping[str, Tensor]) -> int:
    """How many references `owned` sees to a tensor and its array, where there are no others."""
    for name in outputs:
        tensor = outputs[name]
        data: Any = tensor.data
        return sys.getrefcount(tensor) + sys.getrefcount(data)
    return 0


# What is counted where nobody else holds anything; it differs between versions of Python.
_FRESH = _references({"": Tensor(np.zeros(1), FP64)})[""]
_NEW = _new_references({"": Tensor(np.zeros(1), FP64)})
_BASE = _base_references(np.zeros(2)[:1])
