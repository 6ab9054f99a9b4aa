"""Sample the stiffness of a beam from `posterior` with emcee and Hamiltonian Monte Carlo, and plot the samples.

    dragoman serve examples/scientific
    python examples/sample_beam.py http://127.0.0.1:8080 posterior.svg

The client is that of the umbridge package. The ensemble requests densities only, several at a time; Hamiltonian Monte
Carlo requests gradients, and Hessian actions at the peak for its step sizes.
"""

import sys
from concurrent.futures import ThreadPoolExecutor

import emcee
import matplotlib
import numpy as np
import umbridge
from numpy.typing import NDArray

matplotlib.use("svg")
import matplotlib.pyplot as plt

Array = NDArray[np.float64]

MODES = 4


class Density:
    """log p, its gradient and its Hessian, from a server."""

    def __init__(self, url: str, name: str = "posterior") -> None:
        self._model = umbridge.HTTPModel(url, name)

    def __call__(self, m: Array) -> float:
        return float(self._model([m.tolist()])[0][0])

    def gradient(self, m: Array) -> Array:
        return np.array(self._model.gradient(0, 0, [m.tolist()], [1.0]))

    def hessian(self, m: Array) -> Array:
        """Return the Hessian, one action per column."""
        columns = [self._model.apply_hessian(0, 0, 0, [m.tolist()], [1.0], unit) for unit in np.eye(len(m)).tolist()]
        return np.array(columns).T


def peak(density: Density, start: Array, steps: int = 20) -> tuple[Array, Array]:
    """Return the maximum of the density, by Newton's method, and the Cholesky factor of the covariance there."""
    m = start
    for _ in range(steps):
        values, vectors = np.linalg.eigh(-density.hessian(m))
        gradient = density.gradient(m)
        move = vectors @ ((vectors.T @ gradient) / np.maximum(np.abs(values), 1.0))
        m = m + move / max(1.0, float(np.linalg.norm(move)))
        if np.linalg.norm(move) < 1e-9:
            break
    return m, np.linalg.cholesky(np.linalg.inv(-density.hessian(m)))


def hamiltonian(
    density: Density,
    start: Array,
    spread: Array,
    count: int,
    rng: np.random.Generator,
    step: float = 0.5,
    moves: int = 3,
) -> Array:
    """Return samples of Hamiltonian Monte Carlo with the leapfrog method, in whitened coordinates."""
    samples, here, value = [], start, density(start)
    for _ in range(count):
        momentum, there = rng.normal(size=len(start)), here
        before = value - momentum @ momentum / 2
        for _ in range(moves):
            momentum = momentum + step / 2 * spread.T @ density.gradient(there)
            there = there + step * spread @ momentum
            momentum = momentum + step / 2 * spread.T @ density.gradient(there)
        proposed = density(there)
        if np.log(rng.uniform()) < proposed - momentum @ momentum / 2 - before:
            here, value = there, proposed
        samples.append(here)
    return np.array(samples)


def ensemble(density: Density, start: Array, spread: Array, count: int, rng: np.random.Generator) -> Array:
    """Return samples of emcee's ensemble of walkers, several of which send requests concurrently."""
    walkers = 2 * len(start) + 2
    places = start + rng.normal(size=(walkers, len(start))) @ spread.T
    with ThreadPoolExecutor(4) as pool:
        sampler = emcee.EnsembleSampler(walkers, len(start), density, pool=pool)
        sampler.random_state = np.random.RandomState(1).get_state()
        sampler.run_mcmc(places, count // walkers, skip_initial_state_check=True)
    found: Array = sampler.get_chain(discard=count // walkers // 4, flat=True)
    return found


def draw(path: str, chains: dict[str, Array], top: Array, spread: Array) -> None:
    """Plot the marginal density of each mode: a histogram per chain, and the normal density of the Hessian."""
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "beam"})
    figure, axes = plt.subplots(1, len(top), figsize=(3 * len(top), 2.8), layout="tight")
    deviations = np.sqrt(np.diag(spread @ spread.T))
    for k, axis in enumerate(axes):
        line = top[k] + np.linspace(-4, 4, 100) * deviations[k]
        for name, samples in chains.items():
            axis.hist(samples[:, k], bins=30, density=True, histtype="step", label=name)
        normal = np.exp(-(((line - top[k]) / deviations[k]) ** 2) / 2) / deviations[k] / np.sqrt(2 * np.pi)
        axis.plot(line, normal, "--", color="grey", label="by the Hessian")
        axis.set_xlabel(f"mode {k + 1}")
    axes[0].legend(fontsize=7)
    figure.savefig(path, metadata={"Date": None} if path.endswith(".svg") else None)
    plt.close(figure)


def main(url: str, path: str, count: int = 1000) -> dict[str, Array]:
    """Sample and plot; print means and deviations, and return the samples of each method."""
    density, rng = Density(url), np.random.default_rng(1)
    top, spread = peak(density, np.zeros(MODES))
    chains = {
        "hamiltonian": hamiltonian(density, top, spread, count // 5, rng),
        "ensemble": ensemble(density, top, spread, count, rng),
    }
    for name, samples in chains.items():
        print(f"{name:12} mean {samples.mean(axis=0).round(2)}  deviation {samples.std(axis=0).round(2)}")
    draw(path, chains, top, spread)
    return chains


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
