"""Tensors of gRPC messages: typed contents to and from arrays, and responses with raw contents.

The fields of a protobuf message may be serialized apart and joined. So the fields of a raw response that name the model
and describe an output are serialized once and cached, and the elements follow them.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from dragoman.core.calls import Inference, Response
from dragoman.core.datatypes import BYTES, Array, Datatype
from dragoman.core.errors import InvalidInput
from dragoman.core.sizes import INLINE
from dragoman.core.tensor import NONE, Parameters, Tensor
from dragoman.formats.oip_messages import InferTensorContents, ModelInferResponse, delimiter, length_delimited
from dragoman.formats.oip_wire import FIXED, PackedContents, encode_varints
from dragoman.formats.policy import Buffer, Policy
from dragoman.formats.raw import check_shape, raw_from_tensor, reshape_read_only
from dragoman.formats.small_messages import add_to_cache

# For more elements protobuf takes longer; for 16 integers a tenth of the time of `encode_varints` (7 us instead of 56).
_MANY_ELEMENTS = 1 << 10  # performance only
_ENCODED_ELEMENTS = 1 << 16  # performance only: elements encoded at a time
_OUTPUTS_FIELD: int = ModelInferResponse.DESCRIPTOR.fields_by_name["outputs"].number
_CONTENTS_FIELD: int = ModelInferResponse.InferOutputTensor.DESCRIPTOR.fields_by_name["contents"].number

# The dtypes of fields with elements that may be wider than the datatype.
_WIDE: Mapping[str, np.dtype[Any]] = {"int_contents": np.dtype("<i4"), "uint_contents": np.dtype("<u4")}


def tensor_from_packed(
    where: str,
    datatype: Datatype,
    shape: Sequence[int],
    packed: PackedContents,
    policy: Policy,
    parameters: Parameters = NONE,
) -> Tensor:
    """As `tensor_from_contents`, for contents that are one packed field."""
    count = check_shape(shape, where, policy, datatype)
    _check_field(where, datatype, [packed.field])
    if len(packed) != count:
        raise InvalidInput(f"{where}: shape {list(shape)} needs {count} elements, got {len(packed)}")
    try:
        wide = packed.array()
    except InvalidInput as error:
        raise InvalidInput(f"{where}: {error.message}") from error
    return Tensor(reshape_read_only(_narrow(where, datatype, wide), shape, where), datatype, parameters)


def tensor_from_contents(
    where: str, datatype: Datatype, shape: Sequence[int], contents: Any, policy: Policy, parameters: Parameters = NONE
) -> Tensor:
    """Return the tensor with the elements of an InferTensorContents.

    Raises InvalidInput naming the tensor if they are not in the field of the datatype alone, or do not fit the datatype
    or the shape.
    """
    count = check_shape(shape, where, policy, datatype)
    values = _values(where, datatype, contents)
    if len(values) != count:
        raise InvalidInput(f"{where}: shape {list(shape)} needs {count} elements, got {len(values) or 'no data'}")
    return Tensor(reshape_read_only(_array(where, datatype, values), shape, where), datatype, parameters)


def serialize_typed_response(message: Any, tensors: Collection[Tensor]) -> bytes | list[Buffer]:
    """Serialize a ModelInferResponse with these tensors as the typed contents of its outputs; changes the message.

    Many elements are encoded here, in chunks: protobuf needs an object for each and holds the interpreter lock.
    """
    if sum(tensor.data.size for tensor in tensors) < _MANY_ELEMENTS:
        for tensor, output in zip(tensors, message.outputs, strict=True):
            output.contents.SetInParent()  # a tensor without elements is marked as typed, too
            getattr(output.contents, tensor.datatype.contents_field).extend(tensor.data.reshape(-1).tolist())
        return bytes(message.SerializeToString())
    outputs: list[bytes] = [output.SerializeToString() for output in message.outputs]
    del message.outputs[:]
    parts: list[Buffer] = [message.SerializeToString()]
    for output, tensor in zip(outputs, tensors, strict=True):
        contents = _encode_contents(tensor)
        size = sum(map(len, contents))
        start = delimiter(_CONTENTS_FIELD, size)
        parts += (delimiter(_OUTPUTS_FIELD, len(output) + len(start) + size), output, start, *contents)
    return parts


def _encode_contents(tensor: Tensor) -> list[Buffer]:
    """Serialize an InferTensorContents with the elements of a tensor."""
    flat, field = tensor.data.reshape(-1), tensor.datatype.contents_field
    number: int = InferTensorContents.DESCRIPTOR.fields_by_name[field].number
    chunks = (flat[at : at + _ENCODED_ELEMENTS] for at in range(0, flat.size, _ENCODED_ELEMENTS))
    if tensor.datatype is BYTES:
        return [InferTensorContents(bytes_contents=part.tolist()).SerializeToString() for part in chunks]
    packed = (
        [np.ascontiguousarray(flat).data.cast("B")] if field in FIXED else [encode_varints(part) for part in chunks]
    )
    return [delimiter(number, sum(map(len, packed))), *packed] if flat.size else []


def _values(where: str, datatype: Datatype, contents: Any) -> Sequence[Any]:
    """Return the elements of the only field that is set."""
    fields: dict[str, Sequence[Any]] = {field.name: values for field, values in contents.ListFields()}
    if not fields:
        return ()
    return fields[_check_field(where, datatype, list(fields))]


def _check_field(where: str, datatype: Datatype, fields: Sequence[str]) -> str:
    """Return the name of the field of a datatype. Raises InvalidInput if others are set."""
    expected = datatype.contents_field
    if not expected:
        raise InvalidInput(f"{where}: {datatype} has no typed contents; send it in 'raw_input_contents'")
    if list(fields) != [expected]:
        raise InvalidInput(f"{where}: expected contents of {datatype} in '{expected}', got {_join_names(fields)}")
    return expected


def _array(where: str, datatype: Datatype, values: Sequence[Any]) -> Array:
    wide: Array = np.fromiter(values, _WIDE.get(datatype.contents_field, datatype.dtype), len(values))
    return _narrow(where, datatype, wide)


def _narrow(where: str, datatype: Datatype, wide: Array) -> Array:
    narrow: Array = wide.astype(datatype.dtype, copy=False)
    if narrow is not wide and (narrow != wide).any():
        raise InvalidInput(f"{where}: {wide[narrow != wide][0]} does not fit into {datatype}")
    return narrow


def _join_names(names: Iterable[str]) -> str:
    return ", ".join(f"'{n}'" for n in names)


# --- responses with raw contents ----------------------------------------------------------------------------------

_ID_FIELD: int = ModelInferResponse.DESCRIPTOR.fields_by_name["id"].number
_RAW_FIELD: int = ModelInferResponse.DESCRIPTOR.fields_by_name["raw_output_contents"].number
_starts: dict[tuple[str, str], bytes] = {}
_heads: dict[tuple[str, str, tuple[int, ...]], bytes] = {}


def serialize_raw_response(response: Response[Inference], id_: str) -> bytes | Sequence[Buffer] | None:
    """Serialize a ModelInferResponse with raw contents; large ones follow as views. None if it has parameters."""
    outputs = response.answer.outputs
    if response.answer.parameters:
        return None
    start = _starts.get((response.model, response.version)) or _start(response.model, response.version)
    parts: list[Buffer] = [start]
    if id_:
        parts += length_delimited(_ID_FIELD, id_.encode())
    for name in outputs:
        tensor = outputs[name]
        if tensor.parameters:
            return None
        parts.append(_heads.get((name, tensor.datatype.name, tensor.shape)) or _head(name, tensor))
    return append_raw_contents(parts, outputs)


def append_raw_contents(parts: list[Buffer], outputs: Mapping[str, Tensor]) -> bytes | Sequence[Buffer]:
    """Append the raw contents of the outputs, the field with the highest number, to the rest of a message."""
    size = 0
    for tensor in outputs.values():
        blob = raw_from_tensor(tensor)
        size += len(blob)
        parts += length_delimited(_RAW_FIELD, blob)
    return b"".join(parts) if size <= INLINE else parts


def _start(model: str, version: str) -> bytes:
    """Return the serialized fields that name the model."""
    message = ModelInferResponse(model_name=model, model_version=version)
    return add_to_cache(_starts, (model, version), message.SerializeToString())


def _head(name: str, tensor: Tensor) -> bytes:
    """Return the serialized field that describes an output."""
    message = ModelInferResponse()
    message.outputs.add(name=name, datatype=tensor.datatype.name, shape=tensor.shape)
    return add_to_cache(_heads, (name, tensor.datatype.name, tensor.shape), message.SerializeToString())
