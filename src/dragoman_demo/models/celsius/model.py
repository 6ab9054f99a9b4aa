"""A function, as it is served."""

import numpy as np
from numpy.typing import NDArray

import dragoman


@dragoman.model
def celsius(fahrenheit: NDArray[np.float64]) -> NDArray[np.float64]:
    """Convert degrees Fahrenheit to degrees Celsius."""
    return (fahrenheit - 32) / 1.8
