"""Scales of finite differences: each component moves in proportion to its own magnitude."""

import numpy as np

from dragoman.core.vectors import Vector

# Components that share a step differ in their relative moves by at most this factor: the smallest move is still far
# above the rounding errors of its component.
_MAX_RATIO = 1e4
# A component below this fraction of the largest one may be a rounding error of zero.
_SMALL_FRACTION = 1e-3


def component_scales(x: Vector) -> Vector:
    """Return the magnitude of each component; for a zero, 1e-3 of the largest magnitude, or 1 if all are zero."""
    magnitudes = np.abs(x)
    largest = float(np.max(magnitudes, initial=0.0))
    return np.where(magnitudes > 0, magnitudes, _SMALL_FRACTION * largest if largest > 0 else 1.0)


def raised_scales(x: Vector) -> Vector:
    """Return the magnitude of each component, but at least 1e-3 of the largest magnitude and of 1.

    Used if moving a component by its own magnitude does not change the function.
    """
    magnitudes = np.abs(x)
    return np.maximum(magnitudes, _SMALL_FRACTION * max(1.0, float(np.max(magnitudes, initial=0.0))))


def max_step(scales: Vector, vec: Vector) -> float:
    """Return the largest t for which `t * vec` moves no component by more than its scale; 0 for a zero vector."""
    moved = vec != 0
    return float(np.min(scales[moved] / np.abs(vec[moved]), initial=np.inf)) if moved.any() else 0.0


def split_by_scale(x: Vector, vec: Vector) -> list[Vector]:
    """Split `vec` into summands, each of which moves components that can share a step; zeros of x apart."""
    magnitudes = np.abs(vec)
    moved = magnitudes > 0
    if not moved.any():
        return []
    steps = np.full(len(vec), np.inf)
    np.divide(component_scales(x), magnitudes, out=steps, where=moved)
    summands: list[Vector] = []
    for remaining in (moved & (x != 0), moved & (x == 0)):  # the scale of a zero is a guess
        while remaining.any():
            chosen = remaining & (steps <= _MAX_RATIO * float(np.min(steps[remaining])))
            summands.append(vec if (chosen == moved).all() else np.where(chosen, vec, 0.0))
            remaining &= ~chosen
    return summands
