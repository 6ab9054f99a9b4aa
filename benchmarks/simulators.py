"""The simulator of the UM-Bridge benchmark, y = 2 x, as vector functions and as a class of the umbridge package.

usage: python -m benchmarks.simulators PORT serves it with the umbridge package
"""

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import umbridge

import dragoman
from dragoman.core.vectors import Config, Vector, VectorFunction, Vectors


class Double(VectorFunction):
    """The simulator on arrays."""

    def input_sizes(self, config: Config) -> Sequence[int]:
        return (config.get("n", 4),)

    output_sizes = input_sizes

    def evaluate(self, inputs: Vectors, config: Config) -> Any:
        return 2 * inputs[0]

    def gradient(self, output: int, input: int, inputs: Vectors, sens: Vector, config: Config) -> Any:  # noqa: A002
        return 2 * sens


@dragoman.vector_function(inputs={"x": 4})
def doubled(x: Vector) -> Vector:
    """The simulator without its gradient, which is computed by the complex step and verified in each call."""
    return 2 * x


class Theirs(umbridge.Model):  # type: ignore[misc]
    """The simulator on lists, as the umbridge package requires."""

    def __init__(self) -> None:
        super().__init__("Double")

    def get_input_sizes(self, config: dict[str, Any]) -> list[int]:
        return [config.get("n", 4)]

    get_output_sizes = get_input_sizes

    def __call__(self, parameters: list[list[float]], config: dict[str, Any]) -> list[list[float]]:
        return [(2 * np.array(parameters[0])).tolist()]

    def supports_evaluate(self) -> bool:
        return True

    def gradient(
        self, out_wrt: int, in_wrt: int, parameters: list[list[float]], sens: list[float], config: dict[str, Any]
    ) -> list[float]:
        return [2 * s for s in sens]

    def supports_gradient(self) -> bool:
        return True


if __name__ == "__main__":
    umbridge.serve_models([Theirs()], int(sys.argv[1]))
