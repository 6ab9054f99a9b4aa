"""Tensors as bytes, as the binary tensor data of REST and the raw contents of gRPC carry them.

`where` names a tensor to whoever sent it: `input 'x'`.
"""

import math
import struct
from collections.abc import Sequence

import numpy as np

from dragoman.core.datatypes import BOOL, BYTES, Array, Datatype
from dragoman.core.errors import InvalidInput
from dragoman.core.tensor import NONE, Parameters, Tensor, object_array
from dragoman.payload.policy import Buffer, Policy


def check_shape(shape: Sequence[int], where: str, policy: Policy) -> int:
    """The number of elements of a tensor's shape, computed without overflow; InvalidInput where it is out of bounds."""
    if len(shape) > policy.max_rank:
        raise InvalidInput(f"{where}: expected at most {policy.max_rank} axes, got {len(shape)}")
    for n in shape:
        if not 0 <= n < 1 << 63:
            raise InvalidInput(f"{where}: expected a shape of integers from 0 to 2^63-1, got {list(shape)}")
    count = math.prod(shape)
    if count > policy.max_elements:
        raise InvalidInput(f"{where}: shape {list(shape)} has more elements than the limit of {policy.max_elements}")
    return count


def shaped(array: Array, shape: Sequence[int], where: str) -> Array:
    """The read-only array in its shape, whose element count is known to fit."""
    try:
        array = array.reshape(tuple(shape))
    except ValueError as fault:  # e.g. [0, 2^62, 4]: no elements, yet beyond what an address can count
        raise InvalidInput(f"{where}: shape {list(shape)} is too large") from fault
    array.flags.writeable = False
    return array


def tensor_from_raw(
    where: str, datatype: Datatype, shape: Sequence[int], raw: Buffer, policy: Policy, parameters: Parameters = NONE
) -> Tensor:
    """The tensor whose elements are given as bytes: little-endian, row-major, no padding; no copy is made of
    those that lie where the processor wants them.

    OIP: BYTES elements are each preceded by their length as four bytes; BOOL elements are one byte, 0 or 1.
    Raises InvalidInput naming the tensor.
    """
    count = check_shape(shape, where, policy)
    if datatype is BYTES:
        flat = object_array(_split_bytes(raw, count, where), (count,))
    else:
        if len(raw) != count * datatype.size:
            raise InvalidInput(
                f"{where}: shape {list(shape)} of {datatype} needs {count * datatype.size} bytes, got {len(raw)}"
            )
        flat = np.frombuffer(raw, np.uint8 if datatype is BOOL else datatype.dtype)
        if not flat.flags.aligned:  # native code may need it, and NumPy is faster with it
            flat = flat.copy()
        if datatype is BOOL:
            if flat.size and flat.max() > 1:
                raise InvalidInput(f"{where}: expected BOOL bytes of 0 or 1, got {flat.max()}")
            flat = flat.view(np.bool_)
    return Tensor(shaped(flat, shape, where), datatype, parameters)


def _split_bytes(raw: Buffer, count: int, where: str) -> list[bytes]:
    elements: list[bytes] = []
    at, end = 0, len(raw)
    while at < end:
        if end - at < 4:
            raise InvalidInput(f"{where}: incomplete length of BYTES element {len(elements)}")
        (length,) = struct.unpack_from("<I", raw, at)
        at += 4
        if length > end - at:
            raise InvalidInput(f"{where}: BYTES element {len(elements)} needs {length} bytes, {end - at} are left")
        elements.append(bytes(raw[at : at + length]))
        at += length
        if len(elements) > count:
            break
    if len(elements) != count:
        more = " or more" if at < end else ""
        raise InvalidInput(f"{where}: the shape needs {count} BYTES elements, got {len(elements)}{more}")
    return elements


def raw_from_tensor(tensor: Tensor) -> Buffer:
    """The bytes of a tensor as the binary and raw forms carry them; a view of the array where it is contiguous."""
    if tensor.datatype is BYTES:
        parts: list[bytes] = []
        for element in tensor.data.flat:
            parts += (struct.pack("<I", len(element)), element)
        return b"".join(parts)
    if not tensor.data.size:
        return b""
    flat = np.ascontiguousarray(tensor.data).reshape(-1)
    return flat.view(np.uint8).data
