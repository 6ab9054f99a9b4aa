"""The deflection of a clamped beam under its load, by the stiffness of its material at each node (Euler-Bernoulli).

(E I u'')'' = load, u(0) = u'(0) = 0 and the other end free. Curvatures are differences and u minimises the energy, so
K(E) u = f with K linear in E, from which the derivatives follow in closed form, by one more solution each.
"""

import numpy as np
from numpy.typing import NDArray

import dragoman

Array = NDArray[np.float64]

NODES, LENGTH, RADIUS = 31, 1.0, 0.1
STEP = LENGTH / (NODES - 1)
MOMENT = np.pi / 4 * RADIUS**4


def curvatures() -> Array:
    """The matrix from the deflections of nodes 1 to 30 (node 0 is clamped) to the curvatures at nodes 0 to 30."""
    inner = np.diag(np.ones(NODES), -1)[:NODES, :NODES] + np.diag(np.ones(NODES - 1), 1) - 2 * np.eye(NODES)
    inner[0, 1] = 2  # the deflection is even about the clamp
    inner[-1] = 0  # no moment at the free end
    return inner[:, 1:] / STEP**2


CURVATURES = curvatures()
# Length of the beam that each node represents, which weighs its stiffness in the energy.
PIECES = STEP * np.array([0.5, *[1.0] * (NODES - 2), 0.5])
WEIGHTS = MOMENT * PIECES


def stiffness(modulus: Array) -> Array:
    """K(E): symmetric, linear in E."""
    return CURVATURES.T @ (CURVATURES * (WEIGHTS * modulus)[:, None])


def solved(modulus: Array, forces: Array) -> Array:
    """K(E)⁻¹ forces. Raises InvalidInput unless every modulus is positive."""
    if not (modulus > 0).all():
        node = int(np.flatnonzero(~(modulus > 0))[0])
        raise dragoman.errors.InvalidInput(
            f"input 'modulus': expected positive numbers, got {modulus[node]} at node {node}, where the beam would "
            "not resist bending"
        )
    return np.asarray(np.linalg.solve(stiffness(modulus), forces))


def jacobian(modulus: Array, *, load: float = 1.0) -> Array:
    """du/dE_i = -K⁻¹ K_i u, at every node."""
    bent = CURVATURES @ solved(modulus, load * PIECES[1:])
    return np.vstack([np.zeros(NODES), solved(modulus, -CURVATURES.T * (WEIGHTS * bent))])


def gradient(modulus: Array, sens: Array, *, load: float = 1.0) -> Array:
    """-(K⁻¹ s)ᵀ K_i u: one adjoint solution."""
    bent = CURVATURES @ solved(modulus, load * PIECES[1:])
    adjoint: Array = CURVATURES @ solved(modulus, sens[1:])
    return -WEIGHTS * adjoint * bent


def apply_hessian(modulus: Array, sens: Array, vec: Array, *, load: float = 1.0) -> Array:
    """The gradient's product rule, with the changes of u and of the adjoint along vec."""
    found = solved(modulus, np.stack([load * PIECES[1:], sens[1:]], axis=1))
    changes = -solved(modulus, stiffness(vec) @ found)
    (bent, adjoint), (bent_change, adjoint_change) = (CURVATURES @ found).T, (CURVATURES @ changes).T
    return np.asarray(-WEIGHTS * (adjoint_change * bent + adjoint * bent_change))


@dragoman.vector_function(
    inputs={"modulus": NODES},
    outputs={"deflection": NODES},
    at=[np.full(NODES, 10.0)],
    jacobian=jacobian,
    gradient=gradient,
    apply_hessian=apply_hessian,
)
def beam(modulus: Array, *, load: float = 1.0) -> Array:
    return np.concatenate([[0.0], solved(modulus, load * PIECES[1:])])
