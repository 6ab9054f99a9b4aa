"""The example `posterior`: its derivatives against the same written whole in PyTorch, and by both its ends."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dragoman.plugins import import_file
from dragoman_simulators.graph_runtime.model import load_graph, read_graph
from dragoman_simulators.graphs.function import GraphFunction

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")

EXAMPLE = Path(__file__).parents[4] / "examples" / "scientific" / "posterior"


@pytest.fixture(scope="module")
def posterior() -> GraphFunction:
    return load_graph(read_graph(EXAMPLE), EXAMPLE)


def log_posterior(m: torch.Tensor, load: float = 1.0) -> torch.Tensor:
    field, beam = import_file(EXAMPLE / "field.py"), import_file(EXAMPLE.parent / "beam" / "model.py")
    modulus = 10 * torch.exp(torch.from_numpy(field.SHAPES) @ m)
    curvatures = torch.from_numpy(beam.CURVATURES)
    stiffness = curvatures.T @ (curvatures * (torch.from_numpy(beam.WEIGHTS) * modulus)[:, None])
    displacement = torch.linalg.solve(stiffness, torch.from_numpy(load * beam.PIECES[1:]))
    data = torch.tensor([5.9, 25.9, 45.5, 78.7, 104.8, 130.8], dtype=torch.float64)
    residuals = displacement[[4, 9, 14, 19, 24, 29]] - data
    like = -0.5 * (residuals @ residuals) / 4 - 3 * np.log(2 * np.pi * 4)
    density: torch.Tensor = like - 0.5 * (m @ m) - 2 * np.log(2 * np.pi)
    return density


@pytest.mark.parametrize("config", [{}, {"load": 1.2}])
@pytest.mark.parametrize("seed", range(3))
def test_derivatives_equal_those_of_torch(posterior: GraphFunction, config: dict[str, Any], seed: int) -> None:
    random = np.random.default_rng(seed)
    m, vec, sens = random.normal(size=4), random.normal(size=4), np.array([1.7])
    at, along = torch.from_numpy(m), torch.from_numpy(vec)
    load = config.get("load", 1.0)
    gradient = torch.func.grad(lambda p: 1.7 * log_posterior(p, load))
    slope = torch.func.jvp(lambda p: log_posterior(p, load), (at,), (along,))[1]
    curve = torch.func.jvp(gradient, (at,), (along,))[1]

    def near(got: Any, expected: Any) -> None:
        np.testing.assert_allclose(got, expected, rtol=1e-8, atol=1e-8)

    near(posterior.evaluate([m], config)[0][0], log_posterior(at, load))
    near(posterior.gradient(0, 0, [m], sens, config), gradient(at))
    near(posterior.apply_jacobian(0, 0, [m], vec, config)[0], slope)
    near(posterior.apply_hessian(0, 0, 0, [m], sens, vec, config), curve)


def test_newtons_method_finds_the_maximum(posterior: GraphFunction) -> None:
    m, one = np.zeros(4), np.ones(1)
    for _ in range(20):
        hessian = np.column_stack([posterior.apply_hessian(0, 0, 0, [m], one, e, {}) for e in np.eye(4)])
        np.testing.assert_allclose(hessian, hessian.T, rtol=1e-8, atol=1e-8)
        step = np.linalg.solve(hessian, posterior.gradient(0, 0, [m], one, {}))
        m = m - step
    assert np.abs(posterior.gradient(0, 0, [m], one, {})).max() < 1e-6
    assert np.linalg.eigvalsh(hessian).max() < 0
