"""The classification extension: the top classes of an output, as BYTES `value:index` or `value:index:label`."""

from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from typing import Any, TypeVar

import numpy as np
from msgspec import structs

from dragoman.core import error_texts
from dragoman.core.calls import ConcurrentCalls, Describe, Inference, ModelDescription, Request, Response
from dragoman.core.datatypes import BYTES, Array
from dragoman.core.errors import InvalidInput
from dragoman.core.tensor import Parameters, Tensor, numpy_numbers, object_array
from dragoman.protocols.open_inference.extensions import configuration
from dragoman.protocols.wire import EngineCall

Out = TypeVar("Out")

MAX_CLASSES = 1000
_MAX_ROW = 1_000_000


def parse_class_count(parameters: Parameters, name: str) -> int:
    """Return the parameter `classification` of a requested output: how many top classes to return; 0 for raw values.

    Raises InvalidInput unless it is an integer from 0 to `MAX_CLASSES`.
    """
    count = parameters.get("classification", 0)
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise InvalidInput(f"output '{name}': parameter 'classification' expects a number of classes, got {count!r}")
    if count > MAX_CLASSES:
        raise InvalidInput(f"output '{name}': parameter 'classification' expects at most {MAX_CLASSES} classes")
    return count


def classified_call(
    request: Request[Inference], counts: Mapping[str, int], format_response: Callable[[Response[Inference]], Out]
) -> EngineCall[Any, Out]:
    """Return the call for an inference whose outputs are replaced by their top classes before they are formatted."""
    describe = Request(Describe(), request.model, request.version)
    both = Request(ConcurrentCalls((request, describe)), request.model, request.version, request.id, request.deadline_s)

    def format_both(response: Response[tuple[Response[Any], ...]]) -> Out:
        inferred, described = response.answer
        return format_response(classify(described.answer, counts, inferred))

    return EngineCall(both, format_both)


def classify(model: ModelDescription, counts: Mapping[str, int], response: Response[Inference]) -> Response[Inference]:
    """Replace each output named in `counts` by its top classes. Raises InvalidInput if it cannot be."""
    inference = response.answer
    top = partial(_replace_by_top_classes, model)
    outputs = {name: top(name, t, counts[name]) if counts.get(name) else t for name, t in inference.outputs.items()}
    return Response(structs.replace(inference, outputs=outputs), response.model, response.version)


def _replace_by_top_classes(model: ModelDescription, name: str, tensor: Tensor, count: int) -> Tensor:
    """Return the top classes: [batch, count], or [count] of a model without a batch axis; the highest value first."""
    kind = tensor.datatype.kind
    if kind in ("bytes", "bool"):
        raise InvalidInput(error_texts.unsupported_classes(tensor.datatype.name))
    values = numpy_numbers(tensor)
    rows = values.shape[:1] if _has_batch_axis(model, name, values.ndim) else ()
    size = prod(values.shape[len(rows) :])
    if size > _MAX_ROW:
        raise InvalidInput(error_texts.TOO_MANY_CLASSES)
    values = values.reshape(*rows, size)
    # Bitwise inversion reverses the order of integers without overflow.
    order = _smallest(np.negative(values) if kind == "float" else np.invert(values), count)
    top = np.take_along_axis(values, order, axis=-1)
    template = "{:f}:{}" if kind == "float" else "{}:{}"
    labels = _labels(model, name, size)
    texts = [_text(template.format(v, i), labels, i) for v, i in zip(top.flat, order.flat, strict=True)]
    return Tensor(object_array(texts, order.shape), BYTES)


def _labels(model: ModelDescription, name: str, size: int) -> tuple[str, ...]:
    """Return the class names of an output of this many values a row.

    Those that the model itself knows count if there is one for each value, which a detector's are not, and if no
    `config.pbtxt` says which outputs have some.
    """
    labels = model.labels.get(name)
    is_stated = labels is not None and bool(labels.file)
    if labels is None or (not is_stated and (configuration(model) is not None or len(labels.names) != size)):
        return ()
    return labels.names


def _has_batch_axis(model: ModelDescription, name: str, rank: int) -> bool:
    """Return whether the first axis counts rows, as a `config.pbtxt` declares it.

    Without one and with one axis that is so only for models whose requests are merged.
    """
    if (config := configuration(model)) is not None:
        return rank > 0 and config["max_batch_size"] > 0
    spec = model.signature.output(name)
    is_free = spec is None or spec.shape is None or spec.shape[:1] == (-1,)
    return rank > 0 and (model.max_batch_size > 0 or (rank > 1 and is_free))


def _text(text: str, labels: tuple[str, ...], index: int) -> bytes:
    label = labels[index] if index < len(labels) else ""
    return f"{text}:{label}".encode() if label else text.encode()


def _smallest(values: Array, count: int) -> Array:
    """Return the indices of the `count` smallest values on the last axis, in ascending order; ties by index."""
    size = values.shape[-1]
    if count * 8 >= size or not values.size:
        order: Array = np.argsort(values, axis=-1, kind="stable")[..., :count]
        return order
    bounds = np.partition(values, count - 1, axis=-1)[..., count - 1]
    rows = values.reshape(-1, size)
    indices = np.empty((len(rows), count), np.intp)
    for i, (row, bound) in enumerate(zip(rows, bounds.reshape(-1), strict=True)):
        candidates = np.arange(size) if np.isnan(bound) else np.flatnonzero(row <= bound)
        indices[i] = candidates[np.argsort(row[candidates], kind="stable")[:count]]
    return indices.reshape(*values.shape[:-1], count)
