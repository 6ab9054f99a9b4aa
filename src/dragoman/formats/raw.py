"""Tensors as bytes: the binary tensor data of REST and the raw contents of gRPC.

`where` begins error messages, for example `input 'x'`.
"""

import math
import struct
from collections.abc import Sequence

import numpy as np

from dragoman.core.bytes_tensor import BytesTensor, raw_of
from dragoman.core.datatypes import BOOL, BYTES, Array, Datatype
from dragoman.core.errors import InvalidInput
from dragoman.core.sizes import INLINE
from dragoman.core.tensor import NONE, Parameters, Tensor, object_array
from dragoman.formats.policy import Buffer, Policy

_LENGTH = struct.Struct("<I")
_MIN_PACKED = 16  # performance only: elements below which a plain loop is the fastest


def check_shape(shape: Sequence[int], where: str, policy: Policy, datatype: Datatype) -> int:
    """Return the number of elements of a shape. Raises InvalidInput if an axis, the rank or the number is too large."""
    if len(shape) > policy.max_rank:
        raise InvalidInput(f"{where}: expected at most {policy.max_rank} axes, got {len(shape)}")
    count = math.prod(shape)
    most = min(policy.max_elements, policy.max_bytes_elements) if datatype is BYTES else policy.max_elements
    if shape and (min(shape) < 0 or (not 0 < count <= most and max(shape) >= 1 << 63)):
        raise InvalidInput(f"{where}: expected a shape of integers from 0 to 2^63-1, got {list(shape)}")
    if count > most:
        of = " of BYTES" if most < policy.max_elements else ""
        raise InvalidInput(f"{where}: shape {list(shape)} has more elements than the limit{of}, {most}")
    return count


def reshape_read_only(array: Array, shape: Sequence[int], where: str) -> Array:
    """Return the array reshaped and read-only; the number of elements must agree."""
    try:
        array = array.reshape(shape)
    except ValueError as error:  # for example [0, 2^62, 4]: no elements, but sizes beyond the address space
        raise InvalidInput(f"{where}: shape {list(shape)} is too large") from error
    array.flags.writeable = False
    return array


def tensor_from_raw(
    where: str, datatype: Datatype, shape: Sequence[int], raw: Buffer, policy: Policy, parameters: Parameters = NONE
) -> Tensor:
    """Return the tensor with these bytes: little-endian, row-major, no padding. Large aligned arrays are views.

    BYTES elements each follow their length as four bytes; BOOL elements are one byte, 0 or 1 (Open Inference, binary
    tensor data extension). Raises InvalidInput naming the tensor.
    """
    count = check_shape(shape, where, policy, datatype)
    if datatype is BYTES:
        return bytes_from_raw(where, shape, raw, parameters)
    size = count * datatype.size
    if len(raw) != size:
        raise InvalidInput(f"{where}: shape {list(shape)} of {datatype} needs {size} bytes, got {len(raw)}")
    if 0 < size <= INLINE and datatype is not BOOL:
        return Tensor(np.ndarray(shape, datatype.dtype, bytes(raw)), datatype, parameters)
    flat = np.frombuffer(raw, np.uint8 if datatype is BOOL else datatype.dtype)
    if not flat.flags.aligned:  # native code may need it, and NumPy is faster with it
        flat = flat.copy()
    if datatype is BOOL:
        if flat.size and flat.max() > 1:
            raise InvalidInput(f"{where}: expected BOOL bytes of 0 or 1, got {flat.max()}")
        flat = flat.view(np.bool_)
    return Tensor(reshape_read_only(flat, shape, where), datatype, parameters)


def bytes_from_raw(
    where: str, shape: Sequence[int], raw: Buffer, parameters: Parameters, came_as_text: bool = False
) -> Tensor:
    """Return the BYTES tensor of a raw encoding. Raises InvalidInput if its elements are not those of the shape."""
    count = math.prod(shape)
    if (starts := _short_elements(raw, count)) is not None:
        return BytesTensor.of_raw(bytes(raw), starts, shape, parameters, came_as_text)
    elements = _split_bytes(raw, count, where)
    if came_as_text:
        return BytesTensor.of_texts([each.decode() for each in elements], shape, parameters)
    return Tensor(reshape_read_only(object_array(elements, (count,)), shape, where), BYTES, parameters)


def _short_elements(raw: Buffer, count: int) -> Array | None:
    """Return where the lengths of many short elements start; None if they are few or may not be short.

    A length below 256 is one byte and three zeros. If no element holds a zero byte, all of these are found at once,
    and they are the lengths if each leads to the next.
    """
    if not _MIN_PACKED <= count <= len(raw) // 5:
        return None
    data = np.frombuffer(raw, np.uint8)
    zero = data == 0
    starts = np.flatnonzero(zero[1:-2] & zero[2:-1] & zero[3:])
    if starts.size != count or np.count_nonzero(zero) != 3 * count:
        return None
    ends = starts + 4 + data[starts]
    if starts[0] != 0 or ends[-1] != data.size or (starts[1:] != ends[:-1]).any():
        return None
    return starts


def _split_bytes(raw: Buffer, count: int, where: str) -> list[bytes]:
    elements: list[bytes] = []
    data = bytes(raw)  # its slices are the elements
    read, add = _LENGTH.unpack_from, elements.append
    at, end = 0, len(data)
    while at + 4 <= end and len(elements) <= count:
        start = at + 4
        at = start + read(data, at)[0]
        if at > end:
            needed, left = at - start, end - start
            raise InvalidInput(f"{where}: BYTES element {len(elements)} needs {needed} bytes, {left} are left")
        add(data[start:at])
    if at < end and len(elements) <= count:
        raise InvalidInput(f"{where}: incomplete length of BYTES element {len(elements)}")
    if len(elements) != count:
        more = " or more" if at < end else ""
        raise InvalidInput(f"{where}: the shape needs {count} BYTES elements, got {len(elements)}{more}")
    return elements


def raw_from_tensor(tensor: Tensor) -> Buffer:
    """Return the binary form of a tensor; a view if it is large and contiguous."""
    if tensor.datatype is BYTES:
        return memoryview(raw_of(tensor))
    if tensor.data.nbytes <= INLINE:
        return tensor.data.tobytes()
    flat = np.ascontiguousarray(tensor.data).reshape(-1)
    return flat.view(np.uint8).data
