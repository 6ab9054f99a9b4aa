"""Example requests for a signature: of the sizes at which models with free axes often run."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from dragoman.core.calls import ModelDescription, Tensors
from dragoman.core.datatypes import BYTES, FP32, Datatype
from dragoman.core.signature import Shape, Signature, TensorSpec
from dragoman.core.tensor import Tensor, numpy_numbers, object_array

# Lengths of free axes that are tried, in this order: rows and tokens, then common widths, pictures and pieces of audio.
SIZES = (1, 2, 8, 32, 64, 224, 256, 512, 640)
# Larger examples are not made: elements of all inputs together. 4 million are a picture of 1,182 x 1,182.
MAX_ELEMENTS = 1 << 22
# Shapes of an input of unknown rank, as functions of a size: a table, a picture, a vector.
_RANKS: Sequence[Shape] = ((-1, -1), (-1, 3, -1, -1), (-1,))
_TEXT = b"text"
SAMPLE_RATE = 16_000  # Hz
# Names of inputs that take the rate of a sound. That of the last one may also be another rate.
RATE_NAMES = ("sr", "sample_rate", "sampling_rate", "rate")


def example_inputs(signature: Signature) -> Iterator[dict[str, Tensor]]:
    """Yield the required inputs of requests that a model may answer, the smallest first; none if too little is known.

    The first axis is one row if others are free. Free axes get the same size first; then one input alone has it, beside
    others such as a state, which have length 1. Numbers are 1, then, for models that take integers, 0: an index is
    always valid then. A file of unknown datatypes and ranks, such as TorchScript, gets FP32.
    """
    specs = [spec for spec in signature.inputs if not spec.optional]
    if not specs or (any(spec.datatype is None for spec in specs) and not signature.outputs_are_hints):
        return
    datatypes = [spec.datatype or FP32 for spec in specs]
    shapes = [each for each in _shapes(specs) if sum(map(math.prod, each)) <= MAX_ELEMENTS]
    has_integers = any(datatype.kind in ("int", "uint") for datatype in datatypes)
    for value in (1, 0) if has_integers else (1,):
        for each in shapes:
            filled = zip(specs, datatypes, each, strict=True)
            yield {spec.name: full(datatype, shape, _value(spec, shape, value)) for spec, datatype, shape in filled}


def _value(spec: TensorSpec, shape: Shape, value: int) -> int:
    """Return the value of the elements of an input: a rate that is given to models of sounds, else the one tried."""
    return SAMPLE_RATE if math.prod(shape) == 1 and spec.name.lower() in RATE_NAMES[:-1] else value


def model_example(model: ModelDescription) -> Tensors | None:
    """Return the inputs that a model has answered, or for one that was not tried, some of declared sizes."""
    if model.example is not None or model.answered_no_example:
        return model.example
    return next(example_inputs(model.signature), None)


def json_elements(tensor: Tensor) -> list[Any]:
    """Return the elements of an example as JSON values, null for NaN.

    Raises UnicodeDecodeError for bytes that are not text, ValueError for infinities.
    """
    if tensor.datatype is BYTES:
        return [bytes(element).decode() for element in tensor.data.flat]
    values: list[Any] = numpy_numbers(tensor).reshape(-1).tolist()
    if tensor.datatype.kind != "float":
        return values
    if any(map(math.isinf, values)):
        raise ValueError("infinity")
    return [None if math.isnan(value) else value for value in values]


def full(datatype: Datatype, shape: Shape, value: int = 1) -> Tensor:
    """Return a tensor of ones, zeros or words."""
    if datatype is BYTES:
        return Tensor(object_array([_TEXT] * math.prod(shape), shape), BYTES)
    return Tensor(np.full(shape, value, datatype.dtype), datatype)


def _shapes(specs: Sequence[TensorSpec]) -> Iterator[tuple[Shape, ...]]:
    """Yield one shape for each input, without repetition."""
    known: set[tuple[Shape, ...]] = set()
    ranks = _RANKS if any(spec.shape is None for spec in specs) else ((),)
    for rank in ranks:
        declared = [rank if spec.shape is None else spec.shape for spec in specs]
        for sizes in _sizes(declared):
            shapes = tuple(_sized(shape, size) for shape, size in zip(declared, sizes, strict=True))
            if shapes not in known:
                known.add(shapes)
                yield shapes


def _sizes(declared: Sequence[Shape]) -> Iterator[Iterable[int]]:
    """Yield the size of each input: the same for all, then one that differs from 1."""
    count = len(declared)
    for size in SIZES:
        yield (size,) * count
    if count > 1:
        for index, shape in enumerate(declared):
            if -1 in shape[1:]:
                for size in SIZES[1:]:
                    yield [size if i == index else 1 for i in range(count)]


def _sized(shape: Shape, size: int) -> Shape:
    """Return a shape with its free axes of this size; the first axis counts rows if there are other free ones."""
    has_rows = -1 in shape[1:]
    return tuple((1 if has_rows and not axis else size) if n == -1 else n for axis, n in enumerate(shape))
