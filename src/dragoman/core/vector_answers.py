"""What the author of a function of vectors gives back, as float64 vectors of the sizes that were promised."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from dragoman.core.errors import InvalidOutput
from dragoman.core.vectors import Vector

_NUMBERS = "fiu"


def as_vectors(answer: Any, sizes: Sequence[int]) -> tuple[Vector, ...]:
    """The outputs of `evaluate`: a vector for each size. InvalidOutput naming the output that does not fit.

    A tuple holds one output each, and so does a list or a matrix whose members are vectors; anything else is the only
    output: an array of one axis, a list of numbers, or one number.
    """
    found = parts(answer)
    if len(found) != len(sizes):
        raise InvalidOutput(f"expected {len(sizes)} output vectors, got {len(found)}")
    return tuple(as_vector(each, size, f"output {i}") for i, (each, size) in enumerate(zip(found, sizes, strict=True)))


def as_vector(answer: Any, size: int, what: str) -> Vector:
    """One vector of `size` numbers: of an array of one axis, a list of numbers, or one number. `what` names it."""
    if type(answer) is np.ndarray and answer.dtype == np.float64 and answer.shape == (size,):  # as most are
        return answer
    vector = number_array(answer, what)
    if vector.ndim == 0:
        vector = vector.reshape(1)
    if vector.ndim != 1:
        raise InvalidOutput(f"{what}: expected a vector of {size} numbers, got shape {list(vector.shape)}")
    if len(vector) != size:
        raise InvalidOutput(f"{what}: expected {size} numbers, got {len(vector)}")
    return vector


def number_array(answer: Any, what: str) -> Vector:
    """A float64 array of what an author gave: arrays of NumPy, PyTorch and JAX, lists, scalars. Else InvalidOutput."""
    if hasattr(answer, "detach"):  # a PyTorch tensor, which may ask for gradients
        answer = answer.detach().cpu().numpy()
    try:
        array = np.asarray(answer)
    except (TypeError, ValueError) as error:
        raise InvalidOutput(f"{what}: expected numbers, got {type(answer).__name__}: {error}") from error
    if array.dtype.kind not in _NUMBERS:
        if array.size == 0:
            return np.zeros(array.shape)
        told = f"{type(answer).__name__} of {array.dtype.name}"
        raise InvalidOutput(f"{what}: expected real numbers, got {told}")
    return np.asarray(array, np.float64)


def parts(answer: Any) -> tuple[Any, ...]:
    """The outputs of an answer, one each."""
    if isinstance(answer, tuple):
        return answer
    if isinstance(answer, list) and answer and all(_is_vector(each) for each in answer):
        return tuple(answer)
    if getattr(answer, "ndim", 0) == 2:
        return tuple(answer)
    return (answer,)


def _is_vector(value: Any) -> bool:
    return isinstance(value, list | tuple) or getattr(value, "ndim", 0) > 0
