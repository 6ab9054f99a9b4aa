"""Simulators written for the umbridge package or as functions of vectors; some fail on demand."""

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import umbridge

from dragoman.core.vectors import Config, Vector, VectorFunction, Vectors


class Forward(umbridge.Model):  # type: ignore[misc]
    """As users write it: y0 = scale x0^2 (by element), y1 = x1 . x1 + sum(x0); sizes depend on the config."""

    def __init__(self) -> None:
        super().__init__("forward")

    def get_input_sizes(self, config: dict[str, Any]) -> list[int]:
        return [config.get("n", 2), 3]

    def get_output_sizes(self, config: dict[str, Any]) -> list[int]:
        return [config.get("n", 2), 1]

    def __call__(self, parameters: list[list[float]], config: dict[str, Any] | None = None) -> list[list[float]]:
        assert all(type(p) is list for p in parameters)
        x0, x1 = parameters
        scale = (config or {}).get("scale", 1.0)
        return [[scale * v * v for v in x0], [sum(v * v for v in x1) + sum(x0)]]

    def supports_evaluate(self) -> bool:
        return True

    def _jacobian(self, out: int, inn: int, p: list[list[float]], config: dict[str, Any]) -> Any:
        x0, x1 = np.array(p[0]), np.array(p[1])
        if (out, inn) == (0, 0):
            return 2 * config.get("scale", 1.0) * np.diag(x0)
        return {
            (0, 1): np.zeros((len(x0), 3)),
            (1, 0): np.ones((1, len(x0))),
            (1, 1): 2 * x1[None, :],
        }[out, inn]

    def gradient(self, out_wrt: int, in_wrt: int, parameters: Any, sens: Any, config: Any = None) -> list[float]:
        return list(np.array(sens) @ self._jacobian(out_wrt, in_wrt, parameters, config))

    def supports_gradient(self) -> bool:
        return True

    def apply_jacobian(self, out_wrt: int, in_wrt: int, parameters: Any, vec: Any, config: Any = None) -> list[float]:
        return list(self._jacobian(out_wrt, in_wrt, parameters, config) @ np.array(vec))

    def supports_apply_jacobian(self) -> bool:
        return True

    def apply_hessian(
        self, out_wrt: int, in_wrt1: int, in_wrt2: int, parameters: Any, sens: Any, vec: Any, config: Any = None
    ) -> list[float]:
        size = len(parameters[in_wrt1])
        if in_wrt1 != in_wrt2 or out_wrt != in_wrt1:
            return [0.0] * size
        scale = config.get("scale", 1.0) if out_wrt == 0 else 1.0
        return [2 * scale * s * v for s, v in zip(sens * (size if out_wrt else 1), vec, strict=True)]

    def supports_apply_hessian(self) -> bool:
        return True


forward = Forward()


class Points(VectorFunction):
    """y = sum(x^2) and 2 x, of many points at once; counts how often it is called."""

    vectorised = True
    input_names = ("x",)
    output_names = ("square", "double")

    def __init__(self) -> None:
        self.calls = 0

    def input_sizes(self, config: Config) -> Sequence[int]:
        return (2,)

    def output_sizes(self, config: Config) -> Sequence[int]:
        return (1, 2)

    def evaluate(self, inputs: Vectors, config: Config) -> Any:
        self.calls += 1
        assert inputs[0].ndim == 2
        return (inputs[0] ** 2).sum(axis=1), 2 * inputs[0]

    def gradient(self, output: int, input: int, inputs: Vectors, sens: Vector, config: Config) -> Any:  # noqa: A002
        return 2 * sens[0] * inputs[0] if output == 0 else 2 * sens


class Faulty(VectorFunction):
    """Fail as the first number of the input selects."""

    def input_sizes(self, config: Config) -> Sequence[int]:
        return (1,)

    def output_sizes(self, config: Config) -> Sequence[int]:
        return (2,)

    def evaluate(self, inputs: Vectors, config: Config) -> Any:
        responses: Mapping[int, Any] = {
            0: np.array([1.0, 2.0]),
            1: [1.0, np.nan],
            2: [np.inf, -np.inf],
            3: [1.0],
            4: ([1.0, 2.0], [3.0]),
            5: ["a", "b"],
            6: [True, None],
            7: None,
            8: [[1.0, 2.0]],
            9: (np.float32(1.5), 2),
        }
        code = int(inputs[0][0])
        if code == 10:
            raise ValueError("the mesh is tangled")
        return responses[code]


class Slow(VectorFunction):
    """Return once four calls run at the same time; a trial, whose input is 0 or 1, at once."""

    meeting = threading.Barrier(4)

    def input_sizes(self, config: Config) -> Sequence[int]:
        return (1,)

    def output_sizes(self, config: Config) -> Sequence[int]:
        return (1,)

    def evaluate(self, inputs: Vectors, config: Config) -> Any:
        if inputs[0][0] > 1:
            self.meeting.wait(60)
        return inputs[0]


class Double(VectorFunction):
    """y = 2 x; the config gives the length."""

    def input_sizes(self, config: Config) -> Sequence[int]:
        return (int(config.get("n", 4)),)

    output_sizes = input_sizes

    def evaluate(self, inputs: Vectors, config: Config) -> Any:
        return 2 * inputs[0]


def shout(text: list[str]) -> list[str]:
    """Not a function of vectors."""
    return [t.upper() for t in text]
