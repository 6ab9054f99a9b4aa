"""Tensors as bytes: the binary tensor data of REST and the raw contents of gRPC.

`where` begins error messages, for example `input 'x'`.
"""

import math
from collections.abc import Sequence

import numpy as np

from dragoman.core.bytes_tensor import bytes_from_raw, raw_of, reshape_read_only
from dragoman.core.datatypes import BOOL, BYTES, Datatype
from dragoman.core.errors import InvalidInput
from dragoman.core.sizes import INLINE
from dragoman.core.tensor import NONE, Parameters, Tensor
from dragoman.formats.policy import Buffer, Policy


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


def raw_from_tensor(tensor: Tensor) -> Buffer:
    """Return the binary form of a tensor; a view if it is large and contiguous."""
    if tensor.datatype is BYTES:
        return memoryview(raw_of(tensor))
    if tensor.data.nbytes <= INLINE:
        return tensor.data.tobytes()
    flat = np.ascontiguousarray(tensor.data).reshape(-1)
    return flat.view(np.uint8).data
