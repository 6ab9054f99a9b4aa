"""What the Open Inference Protocol says the same over REST and gRPC: its extensions and their parameters."""

import time
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from dragoman.core.calls import Infer, Inference
from dragoman.core.datatypes import BYTES, Array
from dragoman.core.errors import InvalidInput
from dragoman.core.signature import Shape, TensorSpec
from dragoman.core.tensor import Parameters, Tensor, numpy_numbers, object_array
from dragoman.protocols.wire import Policy

# Triton's parameter is an unsigned 64-bit number; half of that is 292,000 years.
_MOST_US = 1 << 63
# Classes are told as text, one by one; nobody reads more of them.
MOST_CLASSES = 1000
# Rows from here on are not sorted as a whole for their best few.
_WIDE = 4096

EXTENSIONS = ("binary_tensor_data", "classification", "model_repository", "parameters", "schedule_policy")


# OIP has no form for a tensor of any rank. Its shape in the metadata is one that fits, for clients that know no better;
# over REST this parameter of the tensor tells it from a tensor of one axis.
ANY_RANK = "any_rank"
_ONE_AXIS = (-1,)


def metadata_tensors(specs: Iterable[TensorSpec]) -> Iterator[tuple[str, str, Shape, bool]]:
    """Yield name, datatype, shape and whether any rank fits, of each tensor whose datatype is known.

    A tensor of unknown datatype has no form in the metadata. Its name is checked all the same.
    """
    for spec in specs:
        if spec.datatype is not None:
            yield spec.name, spec.datatype.name, _ONE_AXIS if spec.shape is None else spec.shape, spec.shape is None


def deadline_s(parameters: Parameters, deadline: float | None = None) -> float | None:
    """The earlier of a transport's deadline and that of the parameter `timeout`, which counts microseconds.

    The parameter is that of Triton's schedule policy extension. Raises InvalidInput where it is no such number.
    """
    timeout_us = parameters.get("timeout")
    if timeout_us is None:
        return deadline
    if isinstance(timeout_us, bool) or not isinstance(timeout_us, int) or not 0 <= timeout_us < _MOST_US:
        told = str(timeout_us)[:32] if isinstance(timeout_us, int | float) else repr(timeout_us)
        raise InvalidInput(f"parameter 'timeout': expected a number of microseconds below 2^63, got {told}")
    if timeout_us == 0:
        return deadline
    own = time.monotonic() + timeout_us / 1e6
    return own if deadline is None else min(own, deadline)


def check_counts(call: Infer, policy: Policy) -> Infer:
    """The call, if it has no more inputs and outputs than the operator allows."""
    most = policy.max_tensors
    if len(call.inputs) > most:
        raise InvalidInput(f"'inputs': expected at most {most}, got {len(call.inputs)}")
    if len(call.outputs) > most:
        raise InvalidInput(f"'outputs': expected at most {most}, got {len(call.outputs)}")
    return call


def content_type_wanted(parameters: Parameters, name: str) -> str:
    """The content type of a requested output, "" where it names none; InvalidInput where that is no text."""
    wanted = parameters.get("content_type", "")
    if not isinstance(wanted, str):
        raise InvalidInput(f"output '{name}': parameter 'content_type' expects a name, got {wanted!r}")
    return wanted


def classes_wanted(parameters: Parameters, name: str) -> int:
    """The `classification` parameter of a requested output: how many of its best classes to tell; 0 for none.

    Raises InvalidInput where it is no such number, or above `MOST_CLASSES`.
    """
    wanted = parameters.get("classification", 0)
    if isinstance(wanted, bool) or not isinstance(wanted, int) or wanted < 0:
        raise InvalidInput(f"output '{name}': parameter 'classification' expects a number of classes, got {wanted!r}")
    if wanted > MOST_CLASSES:
        raise InvalidInput(f"output '{name}': parameter 'classification' expects at most {MOST_CLASSES} classes")
    return wanted


def classified(answer: Inference, wanted: Mapping[str, int]) -> Inference:
    """The answer with each wanted output replaced by its best classes, as BYTES `value:index`.

    OIP, classification extension: the classes lie on the last axis, best first. A vector is one row.
    """
    if not wanted:
        return answer
    outputs = {name: _best(t, wanted[name]) if wanted.get(name) else t for name, t in answer.outputs.items()}
    return Inference(outputs, answer.parameters, answer.metadata)


def _best(tensor: Tensor, count: int) -> Tensor:
    values = numpy_numbers(tensor)
    kind = tensor.datatype.kind
    if kind in ("bytes", "bool") or not values.ndim:
        return tensor
    # To invert integers turns their order round as to negate does, and overflows nowhere.
    falling = np.negative(values) if kind == "float" else np.invert(values)
    order = _first(falling, count)
    best = np.take_along_axis(values, order, axis=-1)
    form = "{:f}:{}" if kind == "float" else "{}:{}"
    texts = [form.format(v, i).encode() for v, i in zip(best.flat, order.flat, strict=True)]
    return Tensor(object_array(texts, order.shape), BYTES)


def _first(values: Array, count: int) -> Array:
    """Where the `count` smallest on the last axis are, the smallest first; of equal ones the earlier goes first."""
    size = values.shape[-1]
    if count * 8 >= size or size < _WIDE or not values.size:
        order: Array = np.argsort(values, axis=-1, kind="stable")[..., :count]
        return order
    last = np.partition(values, count - 1, axis=-1)[..., count - 1]
    rows = values.reshape(-1, size)
    found = np.empty((len(rows), count), np.intp)
    for at, (row, bound) in enumerate(zip(rows, last.reshape(-1), strict=True)):
        near = np.arange(size) if np.isnan(bound) else np.flatnonzero(row <= bound)
        found[at] = near[np.argsort(row[near], kind="stable")[:count]]
    return found.reshape(*values.shape[:-1], count)
