"""Values of frames as bytes: `marshal` for the usual calls and responses, pickle for all others.

`marshal` takes less than half the time of pickle. It is used only for values that are exactly a str, int, float, bool
or None, because it would turn a NumPy scalar into bytes. Arrays are passed out of band by both. Pickle is safe here:
only a child process that we started, or our parent, holds the other end of the socket.
"""

import marshal
import pickle
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import numpy as np

from dragoman.core.calls import Infer, Inference, Response, Tensors
from dragoman.core.datatypes import BF16, BYTES, DATATYPES
from dragoman.core.tensor import NONE, Parameters, Tensor

Buffer = bytes | memoryview

_EXACT_TYPES = frozenset({str, int, float, bool, type(None)})
_PICKLE_MARK = pickle.PROTO[0]  # the first byte of a pickle, and of nothing that marshal writes here


class _NeedsPickle(Exception):
    """The value cannot be written by marshal."""


def serialize(value: object) -> list[Buffer]:
    """Return a value as bytes, followed by the memory of its arrays. Raises what pickle raises."""
    arrays: list[Any] = []
    with suppress(_NeedsPickle):
        fields = _fields(value, arrays)
        if fields is not None:
            return [marshal.dumps(fields), *arrays]
    pickled: list[pickle.PickleBuffer] = []
    return [pickle.dumps(value, 5, buffer_callback=pickled.append), *(array.raw() for array in pickled)]


def deserialize(parts: list[memoryview]) -> Any:
    """Return the value of `serialize`. Its arrays are read-only views of the parts."""
    if parts[0][0] == _PICKLE_MARK:
        return pickle.loads(parts[0], buffers=parts[1:])  # noqa: S301 (see above)
    rows, parameters, *rest = marshal.loads(parts[0])  # noqa: S302 (see above)
    tensors = {
        name: Tensor(np.ndarray(shape, dtype or BF16.dtype, memory), DATATYPES[datatype], own or NONE)
        for (name, datatype, dtype, shape, own), memory in zip(rows, parts[1:], strict=True)
    }
    match rest:
        case [outputs, request]:
            return (Infer(tensors, outputs, parameters or NONE), *request)
        case [response]:
            return Response(Inference(tensors, parameters or NONE), *response)
    return Inference(tensors, parameters or NONE)


def _fields(value: object, arrays: list[Any]) -> tuple[Any, ...] | None:
    """Return the fields of a call with its request, or of an inference, alone or with its response; None for others.

    Raises _NeedsPickle for fields that are not plain.
    """
    match value:
        case (Infer() as call, *request) if _has_only_tensors(call):
            _check(request)
            _check(call.outputs)
            rows = _rows(call.inputs, arrays)
            return rows, _parameters(call.parameters), tuple(call.outputs), tuple(request)
        case Inference() if not value.metadata:
            return _rows(value.outputs, arrays), _parameters(value.parameters)
        case Response(Inference() as answer, model, version) if not answer.metadata:
            _check((model, version))
            return _rows(answer.outputs, arrays), _parameters(answer.parameters), (model, version)
    return None


def _has_only_tensors(call: Infer) -> bool:
    """Return whether a call has no fields but named inputs, names of outputs and parameters."""
    return call.raw is None and call.positional is None and not (call.config or call.content_types)


def _rows(tensors: Tensors, arrays: list[Any]) -> list[tuple[Any, ...]]:
    _check(tensors)
    return [(name, *_row(tensor, arrays)) for name, tensor in tensors.items()]


def _row(tensor: Tensor, arrays: list[Any]) -> tuple[Any, ...]:
    if tensor.datatype is BYTES:
        raise _NeedsPickle
    data: Any = tensor.data
    if not data.flags.c_contiguous:
        data = np.ascontiguousarray(data)
    dtype = data.dtype.str
    if tensor.datatype is BF16:  # its dtype has no such name and no buffer
        data, dtype = data.view(np.uint16), ""
    arrays.append(pickle.PickleBuffer(data).raw())
    return tensor.datatype.name, dtype, data.shape, _parameters(tensor.parameters)


def _parameters(parameters: Parameters) -> dict[str, Any] | None:
    if not parameters:
        return None
    _check(parameters)
    _check(parameters.values())
    return dict(parameters)


def _check(values: Iterable[Any]) -> None:
    for value in values:
        if type(value) not in _EXACT_TYPES:
            raise _NeedsPickle
