"""Steps of finite differences: each component of a point is moved in proportion to its own magnitude."""

import numpy as np

from dragoman.core.vectors import Vector

# Components that one step moves together differ in the size of their relative moves by at most this factor: the
# smallest move still stands far above the rounding of the component that it is added to.
_SPREAD = 1e4
# Beside the largest component of a vector, a component below this fraction may be a rounding error of zero.
_SMALL = 1e-3


def own_scales(x: Vector) -> Vector:
    """The magnitude of each component; of a zero, a thousandth of the largest, or 1 where all are zero."""
    sizes = np.abs(x)
    largest = float(np.max(sizes, initial=0.0))
    return np.where(sizes > 0, sizes, _SMALL * largest if largest > 0 else 1.0)


def raised_scales(x: Vector) -> Vector:
    """The magnitude of each component, but at least a thousandth of the largest and of 1.

    Where moving a component by its own magnitude changes nothing, this tells whether a larger move does.
    """
    sizes = np.abs(x)
    return np.maximum(sizes, _SMALL * max(1.0, float(np.max(sizes, initial=0.0))))


def reach(scales: Vector, vec: Vector) -> float:
    """The largest step along `vec` that moves no component by more than its scale; 0 where `vec` is zero."""
    moved = vec != 0
    return float(np.min(scales[moved] / np.abs(vec[moved]), initial=np.inf)) if moved.any() else 0.0


def by_scale(x: Vector, vec: Vector) -> list[Vector]:
    """`vec` as a sum of vectors, along each of which one step suits all the components that it moves."""
    sizes = np.abs(vec)
    moved = sizes > 0
    if not moved.any():
        return []
    steps = np.full(len(vec), np.inf)
    np.divide(own_scales(x), sizes, out=steps, where=moved)
    parts: list[Vector] = []
    for left in (moved & (x != 0), moved & (x == 0)):  # how far a zero may be moved is only a guess
        while left.any():
            chosen = left & (steps <= _SPREAD * float(np.min(steps[left])))
            parts.append(vec if (chosen == moved).all() else np.where(chosen, vec, 0.0))
            left &= ~chosen
    return parts
