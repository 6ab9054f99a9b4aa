"""Heat in a rod whose conductivity is not known: its logarithm is a field of 20 Karhunen-Loève modes. Written in JAX.

u_t = (k u_x)_x on [0, 1], u(0, x) = 0, u(t, 0) = 0, the heat `power` flows in at x = 1; implicit Euler to t = 0.5.
The field's covariance is exp(-|x - y| / length): its modes are those of the matrix between the cells.
"""

import jax
import jax.numpy as jnp
import numpy as np

import dragoman

CELLS, MODES, STEPS, UNTIL = 40, 20, 20, 0.5
WIDTH, PAUSE = 1 / CELLS, UNTIL / STEPS
CENTRES = (np.arange(CELLS) + 0.5) * WIDTH


def modes(length: float) -> np.ndarray:
    """The first modes, each times the square root of its variance, at the cells: [cells, modes]."""
    variances, shapes = np.linalg.eigh(WIDTH * np.exp(-np.abs(CENTRES[:, None] - CENTRES) / length))
    shapes = shapes * np.sign(shapes[0])  # else a sign is left to chance
    found: np.ndarray = (shapes * np.sqrt(variances / WIDTH))[:, ::-1][:, :MODES]
    return found


@dragoman.vector_function(
    inputs={"field": MODES, "power": 1}, outputs={"temperature": CELLS, "flux": 1}, derivatives="jax"
)
def heat(field: jax.Array, power: jax.Array, *, length: float = 0.2) -> tuple[jax.Array, jax.Array]:
    conductivity = jnp.exp(modes(length) @ field)
    # Between two cells the harmonic mean; to the cold end half a cell.
    between = 2 / (1 / conductivity[1:] + 1 / conductivity[:-1])
    cold = 2 * conductivity[0]
    diagonal = jnp.zeros(CELLS).at[0].set(cold).at[1:].add(between).at[:-1].add(between)
    matrix = (jnp.diag(diagonal) - jnp.diag(between, 1) - jnp.diag(between, -1)) / WIDTH**2
    step = jnp.linalg.inv(jnp.eye(CELLS) + PAUSE * matrix)
    source = jnp.zeros(CELLS).at[-1].set(PAUSE * power[0] / WIDTH)
    temperature = jax.lax.fori_loop(0, STEPS, lambda _, u: step @ (u + source), jnp.zeros(CELLS))
    return temperature, cold * temperature[:1] / WIDTH
