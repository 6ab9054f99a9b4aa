"""The typed contents of tensors: arrays to and from the repeated field that fits their datatype."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from dragoman.core.datatypes import (
    BOOL,
    BYTES,
    FP32,
    FP64,
    INT8,
    INT16,
    INT32,
    INT64,
    UINT8,
    UINT16,
    UINT32,
    UINT64,
    Array,
    Datatype,
)
from dragoman.core.errors import InvalidInput
from dragoman.core.tensor import NONE, Parameters, Tensor
from dragoman.formats.oip_messages import InferTensorContents, ModelInferResponse, delimiter, length_delimited
from dragoman.formats.oip_typed import FIXED, Packed, varints
from dragoman.formats.policy import Buffer, Policy
from dragoman.formats.raw import check_shape, shaped

# OIP: FP16 and BF16 have no field; they travel raw.
FIELDS: Mapping[Datatype, str] = {
    BOOL: "bool_contents",
    INT8: "int_contents",
    INT16: "int_contents",
    INT32: "int_contents",
    INT64: "int64_contents",
    UINT8: "uint_contents",
    UINT16: "uint_contents",
    UINT32: "uint_contents",
    UINT64: "uint64_contents",
    FP32: "fp32_contents",
    FP64: "fp64_contents",
    BYTES: "bytes_contents",
}

_MANY = 1 << 10  # performance only: elements from which on protobuf takes longer
_PORTION = 1 << 16  # performance only: elements encoded at a time
_OUTPUTS: int = ModelInferResponse.DESCRIPTOR.fields_by_name["outputs"].number
_CONTENTS: int = ModelInferResponse.InferOutputTensor.DESCRIPTOR.fields_by_name["contents"].number

# What holds the elements of a field whose datatypes may be narrower than it.
_WIDE: Mapping[str, np.dtype[Any]] = {"int_contents": np.dtype("<i4"), "uint_contents": np.dtype("<u4")}


def tensor_from_packed(
    where: str, datatype: Datatype, shape: Sequence[int], packed: Packed, policy: Policy, parameters: Parameters = NONE
) -> Tensor:
    """The tensor whose elements are in the one packed field of an InferTensorContents; see `tensor_from_contents`."""
    count = check_shape(shape, where, policy, datatype)
    _check_field(where, datatype, [packed.field])
    if len(packed) != count:
        raise InvalidInput(f"{where}: shape {list(shape)} needs {count} elements, got {len(packed)}")
    try:
        wide = packed.array()
    except InvalidInput as fault:
        raise InvalidInput(f"{where}: {fault.message}") from fault
    return Tensor(shaped(_narrowed(where, datatype, wide), shape, where), datatype, parameters)


def tensor_from_contents(
    where: str, datatype: Datatype, shape: Sequence[int], contents: Any, policy: Policy, parameters: Parameters = NONE
) -> Tensor:
    """The tensor whose elements are in an InferTensorContents; InvalidInput naming it where they do not fit.

    They have to be in the one field of the datatype, as many as the shape needs and none beyond its range.
    """
    count = check_shape(shape, where, policy, datatype)
    values = _values(where, datatype, contents)
    if len(values) != count:
        raise InvalidInput(f"{where}: shape {list(shape)} needs {count} elements, got {len(values) or 'no data'}")
    return Tensor(shaped(_array(where, datatype, values), shape, where), datatype, parameters)


def with_contents(message: Any, tensors: Collection[Tensor]) -> bytes | list[Buffer]:
    """Return the wire form of a ModelInferResponse with these tensors as the typed contents of its outputs.

    Many elements are encoded here, in parts: protobuf needs an object for each and holds the interpreter lock
    meanwhile. Changes the message.
    """
    if sum(tensor.data.size for tensor in tensors) < _MANY:
        for tensor, output in zip(tensors, message.outputs, strict=True):
            output.contents.SetInParent()  # a tensor without elements is marked as typed, too
            getattr(output.contents, FIELDS[tensor.datatype]).extend(tensor.data.reshape(-1).tolist())
        return bytes(message.SerializeToString())
    outputs: list[bytes] = [output.SerializeToString() for output in message.outputs]
    del message.outputs[:]
    parts: list[Buffer] = [message.SerializeToString()]
    for output, tensor in zip(outputs, tensors, strict=True):
        contents = _encoded(tensor)
        size = sum(map(len, contents))
        start = delimiter(_CONTENTS, size)
        parts += (delimiter(_OUTPUTS, len(output) + len(start) + size), output, start, *contents)
    return parts


def _encoded(tensor: Tensor) -> list[Buffer]:
    """The wire form of an InferTensorContents with the elements of a tensor."""
    flat, field = tensor.data.reshape(-1), FIELDS[tensor.datatype]
    number: int = InferTensorContents.DESCRIPTOR.fields_by_name[field].number
    portions = (flat[at : at + _PORTION] for at in range(0, flat.size, _PORTION))
    if tensor.datatype is BYTES:
        return [b"".join(chain.from_iterable(length_delimited(number, each) for each in part)) for part in portions]
    packed = [np.ascontiguousarray(flat).data.cast("B")] if field in FIXED else [varints(part) for part in portions]
    return [delimiter(number, sum(map(len, packed))), *packed] if flat.size else []


def _values(where: str, datatype: Datatype, contents: Any) -> Sequence[Any]:
    """The elements of the one field that is given; none where none is."""
    given: dict[str, Sequence[Any]] = {field.name: values for field, values in contents.ListFields()}
    if not given:
        return ()
    return given[_check_field(where, datatype, list(given))]


def _check_field(where: str, datatype: Datatype, given: Sequence[str]) -> str:
    """The field for elements of a datatype, which is the one that is given."""
    wanted = FIELDS.get(datatype)
    if wanted is None:
        raise InvalidInput(f"{where}: {datatype} has no typed contents; send it in 'raw_input_contents'")
    if list(given) != [wanted]:
        raise InvalidInput(f"{where}: expected contents of {datatype} in '{wanted}', got {_listed(given)}")
    return wanted


def _array(where: str, datatype: Datatype, values: Sequence[Any]) -> Array:
    wide: Array = np.fromiter(values, _WIDE.get(FIELDS.get(datatype, ""), datatype.dtype), len(values))
    return _narrowed(where, datatype, wide)


def _narrowed(where: str, datatype: Datatype, wide: Array) -> Array:
    narrow: Array = wide.astype(datatype.dtype, copy=False)
    if narrow is not wide and (narrow != wide).any():
        raise InvalidInput(f"{where}: {wide[narrow != wide][0]} does not fit into {datatype}")
    return narrow


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"'{n}'" for n in names)
