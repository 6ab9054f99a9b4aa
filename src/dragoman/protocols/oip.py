"""What the Open Inference Protocol says the same over REST and gRPC: raw tensor bytes, shapes and parameters."""

import math
import struct
import time
from collections.abc import Mapping, Sequence

import numpy as np

from dragoman.core.calls import Infer, Inference
from dragoman.core.datatypes import BF16, BOOL, BYTES, Array, Datatype, bf16_to_fp32
from dragoman.core.errors import InvalidInput
from dragoman.core.tensor import NONE, Parameters, Tensor, object_array
from dragoman.protocols.wire import Buffer, Policy

EXTENSIONS = ("binary_tensor_data", "classification", "model_repository", "parameters", "schedule_policy")


def check_shape(shape: Sequence[int], name: str, policy: Policy) -> int:
    """The number of elements of an input's shape, computed without overflow; InvalidInput where it is out of bounds."""
    if len(shape) > policy.max_rank:
        raise InvalidInput(f"input '{name}': expected at most {policy.max_rank} axes, got {len(shape)}")
    for n in shape:
        if not 0 <= n < 1 << 63:
            raise InvalidInput(f"input '{name}': expected a shape of integers from 0 to 2^63-1, got {list(shape)}")
    count = math.prod(shape)
    if count > policy.max_elements:
        raise InvalidInput(
            f"input '{name}': shape {list(shape)} has more elements than the limit of {policy.max_elements}"
        )
    return count


def shaped(array: Array, shape: Sequence[int], name: str) -> Array:
    """The read-only array in its shape, whose element count is known to fit."""
    try:
        array = array.reshape(tuple(shape))
    except ValueError as fault:  # e.g. [0, 2^62, 4]: no elements, yet beyond what an address can count
        raise InvalidInput(f"input '{name}': shape {list(shape)} is too large") from fault
    array.flags.writeable = False
    return array


def tensor_from_raw(
    name: str, datatype: Datatype, shape: Sequence[int], raw: Buffer, policy: Policy, parameters: Parameters = NONE
) -> Tensor:
    """The tensor whose elements are given as bytes: little-endian, row-major, no padding; no copy is made.

    OIP: BYTES elements are each preceded by their length as four bytes; BOOL elements are one byte, 0 or 1.
    Raises InvalidInput naming the tensor.
    """
    count = check_shape(shape, name, policy)
    if datatype is BYTES:
        flat = object_array(_split_bytes(raw, count, name), (count,))
    else:
        if len(raw) != count * datatype.size:
            raise InvalidInput(
                f"input '{name}': shape {list(shape)} of {datatype} needs {count * datatype.size} bytes, got {len(raw)}"
            )
        flat = np.frombuffer(raw, np.uint8 if datatype is BOOL else datatype.dtype)
        if datatype is BOOL:
            if flat.size and flat.max() > 1:
                raise InvalidInput(f"input '{name}': expected BOOL bytes of 0 or 1, got {flat.max()}")
            flat = flat.view(np.bool_)
    return Tensor(shaped(flat, shape, name), datatype, parameters)


def _split_bytes(raw: Buffer, count: int, name: str) -> list[bytes]:
    elements: list[bytes] = []
    at, end = 0, len(raw)
    while at < end:
        if end - at < 4:
            raise InvalidInput(f"input '{name}': incomplete length of BYTES element {len(elements)}")
        (length,) = struct.unpack_from("<I", raw, at)
        at += 4
        if length > end - at:
            raise InvalidInput(
                f"input '{name}': BYTES element {len(elements)} needs {length} bytes, {end - at} are left"
            )
        elements.append(bytes(raw[at : at + length]))
        at += length
        if len(elements) > count:
            break
    if len(elements) != count:
        more = " or more" if at < end else ""
        raise InvalidInput(f"input '{name}': the shape needs {count} BYTES elements, got {len(elements)}{more}")
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


def deadline_s(parameters: Parameters, deadline: float | None = None) -> float | None:
    """The earlier of a transport's deadline and that of the parameter `timeout`, which counts microseconds.

    The parameter is that of Triton's schedule policy extension. Raises InvalidInput where it is no such number.
    """
    timeout_us = parameters.get("timeout")
    if timeout_us is None:
        return deadline
    if isinstance(timeout_us, bool) or not isinstance(timeout_us, int) or timeout_us < 0:
        raise InvalidInput(f"parameter 'timeout': expected a number of microseconds, got {timeout_us!r}")
    if timeout_us == 0:
        return deadline
    own = time.monotonic() + timeout_us / 1e6
    return own if deadline is None else min(own, deadline)


def check_counts(call: Infer, policy: Policy) -> Infer:
    """The call, if it has no more inputs and outputs than the operator allows."""
    for what, count in (("inputs", len(call.inputs)), ("outputs", len(call.outputs))):
        if count > policy.max_tensors:
            raise InvalidInput(f"'{what}': expected at most {policy.max_tensors}, got {count}")
    return call


def classes_wanted(parameters: Parameters, name: str) -> int:
    """The `classification` parameter of a requested output: how many of its best classes to tell; 0 for none."""
    wanted = parameters.get("classification", 0)
    if isinstance(wanted, bool) or not isinstance(wanted, int) or wanted < 0:
        raise InvalidInput(f"output '{name}': parameter 'classification' expects a number of classes, got {wanted!r}")
    return wanted


def classified(answer: Inference, wanted: Mapping[str, int]) -> Inference:
    """The answer with each wanted output replaced by its best classes, as BYTES `value:index`.

    OIP, classification extension: the classes lie on the last axis, best first. A vector is one row.
    """
    if not wanted:
        return answer
    outputs = {name: _best(t, wanted[name]) if wanted.get(name) else t for name, t in answer.outputs.items()}
    return Inference(outputs, answer.parameters)


def _best(tensor: Tensor, count: int) -> Tensor:
    values = bf16_to_fp32(tensor.data) if tensor.datatype is BF16 else tensor.data
    kind = tensor.datatype.kind
    if kind in ("bytes", "bool") or not values.ndim:
        return tensor
    # To invert integers turns their order round as to negate does, and overflows nowhere.
    falling = np.negative(values) if kind == "float" else np.invert(values)
    order = np.argsort(falling, axis=-1, kind="stable")[..., :count]
    best = np.take_along_axis(values, order, axis=-1)
    form = "{:f}:{}" if kind == "float" else "{}:{}"
    texts = [form.format(v, i).encode() for v, i in zip(best.flat, order.flat, strict=True)]
    return Tensor(object_array(texts, order.shape), BYTES)
