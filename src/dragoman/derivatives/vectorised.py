"""Check that a function declared as vectorised returns the same for rows of points as for each point."""

import logging
from typing import Any

import numpy as np

from dragoman.core.errors import DragomanError, ModelFailed
from dragoman.core.vectors import Vector, VectorFunction, Vectors, as_vectors, number_array

log = logging.getLogger("dragoman.derivatives")

_RELATIVE_TOLERANCE = 1e-9


def check_vectorised(function: VectorFunction, point: Vectors, name: str) -> None:
    """Raise ModelFailed if three rows do not give the results of three points; skipped if evaluation fails."""
    points = [tuple(x * factor for x in point) for factor in (1.0, 1.001, 0.999)]
    sizes = function.output_sizes({})
    try:
        expected = [as_vectors(function.evaluate(each, {}), sizes) for each in points]
    except DragomanError:
        raise
    except Exception as error:
        log.debug("vectorised evaluation not checked: function=%s error=%r", name, error)
        return
    outputs = _evaluate_rows(function, [np.stack(column) for column in zip(*points, strict=True)], len(sizes), name)
    for output, found in enumerate(outputs):
        wanted = np.stack([each[output] for each in expected])
        if found.size != wanted.size:
            raise _not_vectorised(name, output, f"shape {list(wanted.shape)}", f"{list(found.shape)}")
        gap = float(np.max(np.abs(found.reshape(wanted.shape) - wanted), initial=0.0))
        if gap > _RELATIVE_TOLERANCE * max(1.0, float(np.max(np.abs(wanted), initial=0.0))):
            raise _not_vectorised(name, output, "the same numbers as for each point", f"a difference of {gap:.3g}")


def _evaluate_rows(function: VectorFunction, rows: Vectors, count: int, name: str) -> list[Vector]:
    try:
        result: Any = function.evaluate(rows, {})
        several = isinstance(result, tuple | list) and len(result) == count
        outputs = [number_array(each, "rows") for each in (result if several else [result])]
    except Exception as error:
        raise _not_vectorised(name, 0, "a result", f"{type(error).__name__}: {error}") from error
    if len(outputs) != count:
        raise _not_vectorised(name, 0, f"{count} outputs", str(len(outputs)))
    return outputs


def _not_vectorised(name: str, output: int, expected: str, got: str) -> ModelFailed:
    return ModelFailed(
        f"'{name}' is declared vectorised: expected {expected} for three rows of points in output {output}, got {got}"
    )
