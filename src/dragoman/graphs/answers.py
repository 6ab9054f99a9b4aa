"""What a node gives becomes vectors of the sizes that it told, or an error that names the node."""

import logging
from collections.abc import Sequence
from typing import Any

from dragoman.core.errors import DragomanError, InvalidOutput, ModelFailed
from dragoman.core.vector_answers import as_vector, as_vectors, number_array
from dragoman.core.vectors import Vector

log = logging.getLogger("dragoman.model")


def outputs(answer: Any, sizes: Sequence[int], rows: int | None) -> tuple[Vector, ...]:
    """All outputs of a node, read-only: vectors, or matrices where it was asked about so many rows of points."""
    found = as_vectors(answer, sizes) if rows is None else _matrices(answer, sizes, rows)
    return tuple(_frozen(each) for each in found)


def derivative(answer: Any, size: int, what: str) -> Vector:
    """A vector of `size` numbers, read-only."""
    return _frozen(as_vector(answer, size, what))


def named(fault: Exception, node: str) -> DragomanError:
    """The error of a node with its name before it, of the same kind where callers are told of that."""
    if isinstance(fault, DragomanError):
        return type(fault)(f"node '{node}': {fault.message}")
    log.error("node '%s' failed", node, exc_info=fault)
    return ModelFailed(f"node '{node}' failed: {type(fault).__name__}: {fault}"[:1000])


def _matrices(answer: Any, sizes: Sequence[int], rows: int) -> list[Vector]:
    several = answer if isinstance(answer, tuple | list) and len(answer) == len(sizes) else (answer,)
    if len(several) != len(sizes):
        raise InvalidOutput(f"expected {len(sizes)} outputs, got {len(several)}")
    found = []
    for o, (each, size) in enumerate(zip(several, sizes, strict=True)):
        matrix = number_array(each, f"output {o}")
        if matrix.shape == (rows,) and size == 1:
            matrix = matrix.reshape(rows, 1)
        if matrix.shape != (rows, size):
            raise InvalidOutput(f"output {o}: expected shape {[rows, size]}, got {list(matrix.shape)}")
        found.append(matrix)
    return found


def _frozen(value: Vector) -> Vector:
    if value.flags.writeable:
        value = value.view()
        value.flags.writeable = False
    return value
