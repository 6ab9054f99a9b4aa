"""Nodes with written derivatives, which count their calls, and the same functions in PyTorch."""

import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from dragoman.core.vectors import Config, Vector, VectorFunction, Vectors

_POINTWISE: dict[str, tuple[Any, Any, Any, Any]] = {
    "sin": (np.sin, np.cos, lambda z: -np.sin(z), torch.sin),
    "cubic": (lambda z: z**3 / 3 + z, lambda z: z**2 + 1, lambda z: 2 * z, lambda z: z**3 / 3 + z),
    "exp": (
        lambda z: np.exp(z / 4),
        lambda z: np.exp(z / 4) / 4,
        lambda z: np.exp(z / 4) / 16,
        lambda z: torch.exp(z / 4),
    ),
}


class Ridge(VectorFunction):
    """y_o = f_o(sum_i A_oi x_i): every output depends on every input, and mixes them to second order."""

    def __init__(self, inputs: Sequence[int], outputs: Sequence[int], kinds: Sequence[str], seed: int) -> None:
        random = np.random.default_rng(seed)
        self.inputs, self.outputs, self.kinds = tuple(inputs), tuple(outputs), tuple(kinds)
        scale = 1 / max(1, sum(inputs)) ** 0.5
        self.matrices = [[random.normal(size=(m, n)) * scale for n in inputs] for m in outputs]
        self.shifts = [random.normal(size=m) for m in outputs]
        self.calls: Counter[str] = Counter()
        self._lock = threading.Lock()

    def input_sizes(self, config: Config) -> Sequence[int]:
        return self.inputs

    def output_sizes(self, config: Config) -> Sequence[int]:
        return self.outputs

    def evaluate(self, inputs: Vectors, config: Config) -> Any:
        self._count("evaluate")
        return [_POINTWISE[kind][0](self._inner(o, inputs)) for o, kind in enumerate(self.kinds)]

    def gradient(self, output: int, input: int, inputs: Vectors, sens: Vector, config: Config) -> Any:  # noqa: A002
        self._count("gradient")
        assert sens.shape == (self.outputs[output],)
        slope = _POINTWISE[self.kinds[output]][1](self._inner(output, inputs))
        return self.matrices[output][input].T @ (slope * sens)

    def apply_jacobian(self, output: int, input: int, inputs: Vectors, vec: Vector, config: Config) -> Any:  # noqa: A002
        self._count("apply_jacobian")
        assert vec.shape == (self.inputs[input],)
        slope = _POINTWISE[self.kinds[output]][1](self._inner(output, inputs))
        return slope * (self.matrices[output][input] @ vec)

    def apply_hessian(
        self, output: int, input1: int, input2: int, inputs: Vectors, sens: Vector, vec: Vector, config: Config
    ) -> Any:
        self._count("apply_hessian")
        curvature = _POINTWISE[self.kinds[output]][2](self._inner(output, inputs))
        moved = self.matrices[output][input2] @ vec
        return self.matrices[output][input1].T @ (curvature * sens * moved)

    def by_torch(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the same in PyTorch."""
        outputs = []
        for matrices, shift, kind in zip(self.matrices, self.shifts, self.kinds, strict=True):
            z = torch.from_numpy(shift)
            for matrix, x in zip(matrices, inputs, strict=True):
                z = z + torch.from_numpy(matrix) @ x
            outputs.append(_POINTWISE[kind][3](z))
        return outputs

    def _inner(self, output: int, inputs: Vectors) -> Any:
        assert tuple(len(x) for x in inputs) == self.inputs
        return self.shifts[output] + sum(a @ x for a, x in zip(self.matrices[output], inputs, strict=True))

    def _count(self, name: str) -> None:
        with self._lock:
            self.calls[name] += 1
