"""The logarithm of a sum of three Gaussian densities, by logsumexp, so that it is right far away from all of them.

Written in PyTorch, from which every derivative follows.
"""

import math

import torch

import dragoman

MEANS = torch.tensor([[-1.5, -1.5], [1.5, 1.5], [-2.0, 2.0]], dtype=torch.float64)
VARIANCES = torch.tensor([0.8, 0.8, 0.5], dtype=torch.float64)


@dragoman.vector_function(inputs={"x": 2}, outputs={"log_density": 1}, derivatives="torch", vectorised=True)
def mixture(x: torch.Tensor) -> torch.Tensor:
    squares = ((x[..., None, :] - MEANS) ** 2).sum(dim=-1)
    logs = -squares / (2 * VARIANCES) - torch.log(2 * math.pi * VARIANCES)
    return torch.logsumexp(logs, dim=-1, keepdim=True)
