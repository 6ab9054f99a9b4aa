"""The local node of the graph: a = exp(m / 2), with derivatives by hand."""

from typing import Any

import numpy as np

import dragoman


@dragoman.vector_function(
    inputs=[3],
    gradient=lambda m, sens: np.exp(m / 2) / 2 * sens,
    apply_jacobian=lambda m, vec: np.exp(m / 2) / 2 * vec,
    apply_hessian=lambda m, sens, vec: np.exp(m / 2) / 4 * sens * vec,
)
def field(m: Any) -> Any:
    return np.exp(m / 2)
