"""The No-U-Turn Sampler (Hoffman and Gelman, 2014, algorithm 3), for a log density and its gradient on a server."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
State = tuple[Array, Array, Array]  # point, momentum, gradient

_MAX_ERROR = 1000.0  # of the energy, beyond which a trajectory has diverged


def sample(
    log_density: Callable[[Array], float],
    gradient: Callable[[Array], Array],
    start: Any,
    count: int,
    step: float,
    seed: int = 0,
) -> Array:
    """Return points [count, dimensions] of a chain that begins at `start`, with leapfrog steps of this size."""
    random = np.random.default_rng(seed)

    def leap(state: State, side: int) -> State:
        point, momentum, slope = state
        momentum = momentum + side * step / 2 * slope
        point = point + side * step * momentum
        slope = gradient(point)
        return point, momentum + side * step / 2 * slope, slope

    def may_go_on(left: State, right: State) -> bool:
        across = right[0] - left[0]
        return bool(across @ left[1] >= 0 and across @ right[1] >= 0)

    def grow(left: State, right: State, side: int, depth: int, log_u: float) -> tuple[State, State, Array, int, bool]:
        """Return the ends of the trajectory, a point of its new half, the number of points in that, and may_go_on."""
        first, last, point, size, ok = build(right if side > 0 else left, side, depth, log_u)
        left, right = (left, last) if side > 0 else (first, right)
        return left, right, point, size, ok

    def build(state: State, side: int, depth: int, log_u: float) -> tuple[State, State, Array, int, bool]:
        if depth == 0:
            state = leap(state, side)
            joint = log_density(state[0]) - state[1] @ state[1] / 2
            return state, state, state[0], int(log_u <= joint), bool(log_u < joint + _MAX_ERROR)
        left, right, point, size, ok = build(state, side, depth - 1, log_u)
        if ok:
            left, right, other, more, ok = grow(left, right, side, depth - 1, log_u)
            point = other if random.random() < more / max(size + more, 1) else point
            size, ok = size + more, ok and may_go_on(left, right)
        return left, right, point, size, ok

    point = np.asarray(start, float)
    points = np.empty((count, len(point)))
    for i in range(count):
        momentum = random.normal(size=len(point))
        log_u = float(log_density(point) - momentum @ momentum / 2 - random.exponential())
        left = right = point, momentum, gradient(point)
        size, depth, ok = 1, 0, True
        while ok:
            left, right, other, more, ok = grow(left, right, random.choice([-1, 1]), depth, log_u)
            if ok and random.random() < more / size:
                point = other
            size, depth, ok = size + more, depth + 1, ok and may_go_on(left, right)
        points[i] = point
    return points
