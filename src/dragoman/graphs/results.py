"""Check and convert the results of nodes; name the node in errors."""

import logging
from collections.abc import Sequence
from typing import Any

from dragoman.core.errors import DragomanError, InvalidOutput, ModelFailed
from dragoman.core.vector_answers import as_vector, as_vectors, number_array
from dragoman.core.vectors import Vector

log = logging.getLogger("dragoman.model")


def output_vectors(result: Any, sizes: Sequence[int], rows: int | None) -> tuple[Vector, ...]:
    """Return the outputs of a node, read-only: vectors or, for `rows` points, matrices."""
    outputs = as_vectors(result, sizes) if rows is None else _matrices(result, sizes, rows)
    return tuple(map(_read_only, outputs))


def derivative_vector(result: Any, size: int, name: str) -> Vector:
    """Return a derivative as a read-only vector of `size` numbers; `name` is for messages."""
    return _read_only(as_vector(result, size, name))


def node_error(error: Exception, node: str) -> DragomanError:
    """Return the error with the name of the node, of the same type if it is one of ours, else ModelFailed."""
    if isinstance(error, DragomanError):
        return type(error)(f"node '{node}': {error.message}")
    log.error("node '%s' failed", node, exc_info=error)
    return ModelFailed(f"node '{node}' failed: {type(error).__name__}: {error}"[:1000])


def _matrices(result: Any, sizes: Sequence[int], rows: int) -> list[Vector]:
    several = result if isinstance(result, tuple | list) and len(result) == len(sizes) else (result,)
    if len(several) != len(sizes):
        raise InvalidOutput(f"expected {len(sizes)} outputs, got {len(several)}")
    matrices = []
    for o, (each, size) in enumerate(zip(several, sizes, strict=True)):
        matrix = number_array(each, f"output {o}")
        if matrix.shape == (rows,) and size == 1:
            matrix = matrix.reshape(rows, 1)
        if matrix.shape != (rows, size):
            raise InvalidOutput(f"output {o}: expected shape {[rows, size]}, got {list(matrix.shape)}")
        matrices.append(matrix)
    return matrices


def _read_only(array: Vector) -> Vector:
    if array.flags.writeable:
        array = array.view()
        array.flags.writeable = False
    return array
