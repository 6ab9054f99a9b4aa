"""A simulator in three lines. Its derivatives are computed by complex step."""

import numpy as np
from numpy.typing import NDArray

import dragoman

Array = NDArray[np.float64]

POSITIONS = np.linspace(0, 1, 21)  # m from the clamp


@dragoman.vector_function(inputs={"load": 1, "stiffness": 1}, outputs={"deflection": 21}, at=[[1], [2]])
def beam(load: Array, stiffness: Array) -> Array:
    """Deflection of a clamped beam of 1 m, by its even load and its stiffness.

    Metres, N/m and N m².
    """
    return np.asarray(load * POSITIONS**2 * (6 - 4 * POSITIONS + POSITIONS**2) / (24 * stiffness))
