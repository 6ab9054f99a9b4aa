"""Log posterior of a signal of 128 numbers, given a blurred and noisy copy of it.

`prior` in the config chooses what is expected of the signal, of which d are the differences of neighbours, with zeros
beyond both ends: Gaussian (each number N(0, delta)), GMRF (d are N(0, delta)), LMRF (d are Laplace) or CMRF (d are
Cauchy), both of the scale delta; or asks for the signal itself: ExactSolution takes nothing and gives 128 numbers.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

import dragoman

Array = NDArray[np.float64]

SIZE, WIDTH, NOISE = 128, 5.0, 0.01
OFFSETS = np.arange(-SIZE // 2, SIZE // 2)
SPREAD = np.exp(-((OFFSETS / WIDTH) ** 2) / 2)
# Each row is the blur around one number, with periodic boundary.
BLUR = np.stack([np.roll(SPREAD / SPREAD.sum(), i - SIZE // 2) for i in range(SIZE)], axis=1)
EXACT = np.where(np.abs(np.arange(SIZE) - 63.5) < 9, 1.0, 0.0)
# Sum of the squared noise in units of its deviation, from the published values of the benchmark at EXACT.
MISFIT = 142.72609230991577


def data() -> Array:
    """Return the blurred signal with noise; its log likelihood at the exact signal is that of the benchmark."""
    noise = np.random.Generator(np.random.PCG64(1)).standard_normal(SIZE)
    return BLUR @ EXACT + NOISE * noise * np.sqrt(MISFIT / (noise @ noise))


DATA = data()


# --- priors: logarithm, first and second derivative of one number ------------------------


def gaussian(d: Array, delta: float) -> tuple[Array, Array, Array]:
    return -(d**2) / (2 * delta) - np.log(2 * np.pi * delta) / 2, -d / delta, np.full(len(d), -1 / delta)


def laplace(d: Array, delta: float) -> tuple[Array, Array, Array]:
    return -np.abs(d) / delta - np.log(2 * delta), -np.sign(d) / delta, np.zeros(len(d))


def cauchy(d: Array, delta: float) -> tuple[Array, Array, Array]:
    total = d**2 + delta**2
    return np.log(delta / np.pi) - np.log(total), -2 * d / total, 2 * (d**2 - delta**2) / total**2


Density = Callable[[Array, float], tuple[Array, Array, Array]]

# Differences of neighbours: one more than numbers.
DIFFERENCES = np.diff(np.eye(SIZE), axis=0, prepend=0, append=0)
# Gaussian differences are those of a density of SIZE numbers: the difference of the normalisation.
EXCESS = (np.log(2 * np.pi) + np.log(SIZE + 1)) / 2
PRIORS: Mapping[str, tuple[Array, Density]] = {
    "Gaussian": (np.eye(SIZE), gaussian),
    "GMRF": (DIFFERENCES, gaussian),
    "LMRF": (DIFFERENCES, laplace),
    "CMRF": (DIFFERENCES, cauchy),
}


def sizes(config: Mapping[str, Any]) -> tuple[int]:
    return (0 if config.get("prior") == "ExactSolution" else SIZE,)


def output_sizes(config: Mapping[str, Any]) -> tuple[int]:
    return (SIZE if config.get("prior") == "ExactSolution" else 1,)


def chosen(prior: str, differentiate: bool = True) -> tuple[Array, Density]:
    if prior not in PRIORS:
        if prior == "ExactSolution":
            raise dragoman.errors.NotSupported("the exact solution has no derivatives")
        raise dragoman.errors.InvalidInput(
            f"config 'prior': expected {', '.join([*PRIORS, 'ExactSolution'])}, got '{prior}'"
        )
    if differentiate and prior == "LMRF":
        raise dragoman.errors.NotSupported("the density of prior LMRF has no derivative where neighbours are equal")
    return PRIORS[prior]


def gradient(signal: Array, *, prior: str = "Gaussian", delta: float = 0.01) -> Array:
    of, density = chosen(prior)
    return of.T @ density(of @ signal, delta)[1] - BLUR.T @ (BLUR @ signal - DATA) / NOISE**2


def apply_hessian(signal: Array, sens: Array, vec: Array, *, prior: str = "Gaussian", delta: float = 0.01) -> Array:
    of, density = chosen(prior)
    curved: Array = of.T @ (density(of @ signal, delta)[2] * (of @ vec)) - BLUR.T @ (BLUR @ vec) / NOISE**2
    return curved * float(sens[0])


@dragoman.vector_function(inputs=sizes, outputs=output_sizes, gradient=gradient, apply_hessian=apply_hessian)
def deconvolution(signal: Array, *, prior: str = "Gaussian", delta: float = 0.01) -> Array | float:
    if prior == "ExactSolution":
        return EXACT
    of, density = chosen(prior, differentiate=False)
    misfit = BLUR @ signal - DATA
    likelihood = gaussian(misfit, NOISE**2)[0].sum()
    norm = EXCESS + np.log(delta) / 2 if prior == "GMRF" else 0.0
    return float(density(of @ signal, delta)[0].sum() + norm + likelihood)
