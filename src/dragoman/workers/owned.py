"""An answer becomes its reader's own: no later call can change what is not sent yet."""

import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from dragoman.core.calls import Call, Infer, Inference
from dragoman.core.datatypes import FP64, Array
from dragoman.core.tensor import Tensor


def owned(answer: Any, call: Call[Any]) -> Any:
    """The answer, with a copy of each array that the model may still hold and write to.

    It holds none that owns its memory and that nothing else refers to; the arrays of the call are not its own.
    """
    if not isinstance(answer, Inference):
        return answer
    references = _references(answer.outputs)
    lent = {id(_root(t.data)) for t in call.inputs.values()} if isinstance(call, Infer) else set()
    kept = [
        name
        for (name, tensor), found in zip(answer.outputs.items(), references, strict=True)
        if not (id(_root(tensor.data)) in lent or (found <= _FRESH and _alone(tensor.data)))
    ]
    if not kept:
        return answer
    copies = {name: replace(answer.outputs[name], data=answer.outputs[name].data.copy()) for name in kept}
    return replace(answer, outputs={**answer.outputs, **copies})


def _references(tensors: Mapping[str, Tensor]) -> list[int]:
    """How many references there are to each tensor and its array."""
    # Either may be held: a tensor that the model made once, or an array that it makes tensors of.
    return [sys.getrefcount(tensor) + sys.getrefcount(tensor.data) for tensor in tensors.values()]


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


# What is counted where nobody else holds anything; it differs between versions of Python.
_FRESH = _references({"": Tensor(np.zeros(1), FP64)})[0]
_BASE = _base_references(np.zeros(2)[:1])
