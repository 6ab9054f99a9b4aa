"""Whether a function that is said to be vectorised gives for rows of points what it gives for each alone."""

import logging
from typing import Any

import numpy as np

from dragoman.core.errors import DragomanError, ModelFailed
from dragoman.core.vector_answers import as_vectors, number_array
from dragoman.core.vectors import Vector, VectorFunction, Vectors

log = logging.getLogger("dragoman.derivatives")

_CLOSE = 1e-9


def check_rows(function: VectorFunction, point: Vectors, name: str) -> None:
    """ModelFailed where three rows of points do not give the three answers; what cannot be tried is left."""
    points = [tuple(x * factor for x in point) for factor in (1.0, 1.001, 0.999)]
    sizes = function.output_sizes({})
    try:
        alone = [as_vectors(function.evaluate(each, {}), sizes) for each in points]
    except DragomanError:
        raise
    except Exception as fault:
        log.debug("'%s' cannot be tried for rows: %r", name, fault)
        return
    together = _rows(function, [np.stack(column) for column in zip(*points, strict=True)], len(sizes), name)
    for output, found in enumerate(together):
        wanted = np.stack([each[output] for each in alone])
        if found.size != wanted.size:
            raise _not_vectorised(name, output, f"shape {list(wanted.shape)}", f"{list(found.shape)}")
        gap = float(np.max(np.abs(found.reshape(wanted.shape) - wanted), initial=0.0))
        if gap > _CLOSE * max(1.0, float(np.max(np.abs(wanted), initial=0.0))):
            raise _not_vectorised(name, output, "the same numbers as for each alone", f"a difference of {gap:.3g}")


def _rows(function: VectorFunction, rows: Vectors, count: int, name: str) -> list[Vector]:
    try:
        answer: Any = function.evaluate(rows, {})
        several = isinstance(answer, tuple | list) and len(answer) == count
        found = [number_array(each, "rows") for each in (answer if several else [answer])]
    except Exception as fault:
        raise _not_vectorised(name, 0, "an answer", f"{type(fault).__name__}: {fault}") from fault
    if len(found) != count:
        raise _not_vectorised(name, 0, f"{count} outputs", str(len(found)))
    return found


def _not_vectorised(name: str, output: int, wanted: str, got: str) -> ModelFailed:
    return ModelFailed(
        f"'{name}' is said to be vectorised; expected {wanted} for three rows of points in output {output}, got {got}"
    )
