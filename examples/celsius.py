"""A function as a model: `dragoman serve examples/celsius.py:celsius`."""

import numpy as np
from numpy.typing import NDArray


def celsius(fahrenheit: NDArray[np.float64]) -> NDArray[np.float64]:
    return (fahrenheit - 32) / 1.8
