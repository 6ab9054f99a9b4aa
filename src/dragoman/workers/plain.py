"""The everyday messages in plain words: `marshal` takes them in less than half the time of pickle.

Only what is exactly a str, int, float, bool or None may go this way (`marshal` would turn a NumPy scalar into
bytes); for anything else, and for BYTES, there is pickle.
"""

import marshal
import pickle
from typing import Any

import numpy as np

from dragoman.core.calls import Infer, Inference, Response, Tensors
from dragoman.core.datatypes import BF16, BYTES, DATATYPES
from dragoman.core.tensor import NONE, Parameters, Tensor

_EXACT = frozenset({str, int, float, bool, type(None)})

Arrays = list[Any]


class _NotPlain(Exception):
    """This value has to be pickled."""


def dumps(value: Any) -> tuple[bytes, Arrays] | None:
    """A call with the words of its request, or an answer, alone or with the words of its response, and the memory of
    its arrays; None for all else."""
    arrays: Arrays = []
    try:
        match value:
            case (Infer() as call, *words) if _is_bare(call):
                _check(words)
                _check(call.outputs)
                plain: Any = (
                    _rows(call.inputs, arrays),
                    _parameters(call.parameters),
                    tuple(call.outputs),
                    tuple(words),
                )
            case Inference() if not value.metadata:
                plain = (_rows(value.outputs, arrays), _parameters(value.parameters))
            case Response(Inference() as answer, model, version) if not answer.metadata:
                _check((model, version))
                plain = (_rows(answer.outputs, arrays), _parameters(answer.parameters), (model, version))
            case _:
                return None
    except _NotPlain:
        return None
    return marshal.dumps(plain), arrays


def loads(part: Any, arrays: Arrays) -> Any:
    """What `dumps` was given; the arrays are views of the memory in `arrays`."""
    rows, parameters, *rest = marshal.loads(part)  # noqa: S302 (from our own child, or parent, alone)
    tensors = {
        name: Tensor(np.ndarray(shape, dtype or BF16.dtype, memory), DATATYPES[datatype], told or NONE)
        for (name, datatype, dtype, shape, told), memory in zip(rows, arrays, strict=True)
    }
    match rest:
        case [outputs, words]:
            return (Infer(tensors, outputs, parameters or NONE), *words)
        case [words]:
            return Response(Inference(tensors, parameters or NONE), *words)
    return Inference(tensors, parameters or NONE)


def _is_bare(call: Infer) -> bool:
    """Whether it is nothing but named inputs, names of outputs and parameters."""
    return call.raw is None and call.positional is None and not (call.config or call.content_types)


def _rows(tensors: Tensors, arrays: Arrays) -> list[tuple[Any, ...]]:
    _check(tensors)
    return [(name, *_row(tensor, arrays)) for name, tensor in tensors.items()]


def _row(tensor: Tensor, arrays: Arrays) -> tuple[Any, ...]:
    if tensor.datatype is BYTES:
        raise _NotPlain
    data: Any = tensor.data
    if not data.flags.c_contiguous:
        data = np.ascontiguousarray(data)
    dtype = data.dtype.str
    if tensor.datatype is BF16:  # whose dtype has no such name, and no buffer
        data, dtype = data.view(np.uint16), ""
    arrays.append(pickle.PickleBuffer(data).raw())
    return tensor.datatype.name, dtype, data.shape, _parameters(tensor.parameters)


def _parameters(parameters: Parameters) -> dict[str, Any] | None:
    if not parameters:
        return None
    _check(parameters)
    _check(parameters.values())
    return dict(parameters)


def _check(words: Any) -> None:
    for word in words:
        if type(word) not in _EXACT:
            raise _NotPlain
