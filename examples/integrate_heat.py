"""Mean temperature of a rod over random conductivities, by quasi-Monte Carlo with QMCPy.

    dragoman serve examples/scientific
    python examples/integrate_heat.py http://127.0.0.1:8080 heat.svg

The 20 modes of the field are standard normal and the power is N(1, 0.1²). QMCPy's own wrapper asks the server, several
points at a time, at the points of digital nets that are randomised several times, which estimates the error.
"""

import sys

import matplotlib
import numpy as np
import qmcpy
import umbridge
from numpy.typing import NDArray

matplotlib.use("svg")
import matplotlib.pyplot as plt

Array = NDArray[np.float64]

MODES, CELLS, REPLICATIONS = 20, 40, 8


def integrated(url: str, points: int) -> tuple[Array, Array]:
    """Return the means of the temperatures and of the heat flux, and their standard errors."""
    model = umbridge.HTTPModel(url, "heat")
    mean = np.array([0.0] * MODES + [1.0])
    variance = np.array([1.0] * MODES + [0.01])
    net = qmcpy.DigitalNetB2(dimension=MODES + 1, seed=7, replications=REPLICATIONS)
    integrand = qmcpy.UMBridgeWrapper(qmcpy.Gaussian(net, mean=mean, covariance=variance), model, parallel=4)
    each = integrand(points).mean(axis=-1)  # [outputs, replications]
    return each.mean(axis=1), each.std(axis=1, ddof=1) / np.sqrt(REPLICATIONS)


def draw(path: str, mean: Array, error: Array) -> None:
    """Plot the temperature along the rod, with three standard errors on both sides."""
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "heat"})
    place = (np.arange(CELLS) + 0.5) / CELLS
    figure, axis = plt.subplots(figsize=(5, 3), layout="tight")
    axis.fill_between(place, (mean - 3 * error)[:CELLS], (mean + 3 * error)[:CELLS], alpha=0.3)
    axis.plot(place, mean[:CELLS])
    axis.set_xlabel("place along the rod")
    axis.set_ylabel("mean temperature")
    figure.savefig(path, metadata={"Date": None} if path.endswith(".svg") else None)
    plt.close(figure)


def main(url: str, path: str, points: int = 64) -> tuple[Array, Array]:
    """Integrate and plot; print the temperature at the warm end and the heat flux at the cold one."""
    mean, error = integrated(url, points)
    print(f"warm end {mean[CELLS - 1]:.4f} +- {error[CELLS - 1]:.4f}, flux {mean[CELLS]:.4f} +- {error[CELLS]:.4f}")
    draw(path, mean, error)
    return mean, error


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
