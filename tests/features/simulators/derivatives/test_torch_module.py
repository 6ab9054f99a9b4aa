"""Derivatives of a PyTorch module by torch.autograd."""

import numpy as np
import torch

from dragoman_simulators.derivatives.torch import ModuleFunction

A = np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
X, Y, S, V, W = (np.array(v) for v in ([0.5, -1.0, 2.0], [3.0, 0.25], [1.0, -2.0], [0.25, 1.0, -3.0], [2.0, 5.0]))


def forward(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    assert (x.shape, x.dtype, y.shape, y.dtype) == ((1, 3), torch.float64, (2, 1), torch.float32)
    return ((torch.tensor(A) @ x[0] ** 2) * y[:, 0] ** 2, torch.ones(1, 2), x.sum().float() * 2)


def test_derivatives_of_a_module() -> None:
    module = ModuleFunction(forward, [(1, 3), (2, 1)], [torch.float64, torch.float32], [2, 2, 1])
    at = [X, Y]
    by_x, by_y = (Y**2)[:, None] * A * 2 * X, np.diag(A @ X**2 * 2 * Y)
    cases = {
        "gradient by x": (module.gradient(0, 0, at, S, {}), by_x.T @ S),
        "gradient by y": (module.gradient(0, 1, at, S, {}), by_y.T @ S),
        "gradient of a constant": (module.gradient(1, 0, at, S, {}), np.zeros(3)),
        "gradient of a sum": (module.gradient(2, 0, at, np.ones(1), {}), np.full(3, 2.0)),
        "Jacobian by x": (module.apply_jacobian(0, 0, at, V, {}), by_x @ V),
        "Jacobian by y": (module.apply_jacobian(0, 1, at, W, {}), by_y @ W),
        "Jacobian of a constant": (module.apply_jacobian(1, 0, at, V, {}), np.zeros(2)),
        "Hessian by x, x": (module.apply_hessian(0, 0, 0, at, S, V, {}), ((Y**2 * S) @ A) * 2 * V),
        "Hessian by x, y": (module.apply_hessian(0, 0, 1, at, S, W, {}), ((2 * Y * W * S) @ A) * 2 * X),
        "Hessian by y, x": (module.apply_hessian(0, 1, 0, at, S, V, {}), S * 2 * Y * (A @ (2 * X * V))),
    }
    for name, (actual, expected) in cases.items():
        assert actual.dtype == np.float64, name
        np.testing.assert_allclose(actual, expected, rtol=1e-6, err_msg=name)


def test_derivatives_by_unused_inputs_are_zero() -> None:
    module = ModuleFunction(lambda x, y: (x * 2, y * x.sum()), [(3,), (2,)], [torch.float64] * 2, [3, 2])
    assert module.gradient(0, 1, [X, Y], V, {}).tolist() == [0, 0]
    assert module.apply_jacobian(0, 1, [X, Y], W, {}).tolist() == [0, 0, 0]
    assert module.apply_hessian(0, 0, 0, [X, Y], V, V, {}).tolist() == [0, 0, 0]
