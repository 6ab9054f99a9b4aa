"""A simulator as one writes it for the `umbridge` package: y_0 = x², y_1 = sum of x³, of three numbers."""

import sys
from typing import Any

import umbridge


class Powers(umbridge.Model):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__("powers")

    def get_input_sizes(self, config: Any) -> list[int]:
        return [3]

    def get_output_sizes(self, config: Any) -> list[int]:
        return [3, 1]

    def __call__(self, parameters: Any, config: Any) -> Any:
        (x,) = parameters
        return [[v**2 for v in x], [sum(v**3 for v in x)]]

    def gradient(self, out_wrt: int, in_wrt: int, parameters: Any, sens: Any, config: Any) -> Any:
        (x,) = parameters
        if out_wrt == 0:
            return [2 * v * s for v, s in zip(x, sens, strict=True)]
        return [3 * v**2 * sens[0] for v in x]

    def apply_jacobian(self, out_wrt: int, in_wrt: int, parameters: Any, vec: Any, config: Any) -> Any:
        (x,) = parameters
        if out_wrt == 0:
            return [2 * v * t for v, t in zip(x, vec, strict=True)]
        return [sum(3 * v**2 * t for v, t in zip(x, vec, strict=True))]

    def apply_hessian(
        self, out_wrt: int, in_wrt1: int, in_wrt2: int, parameters: Any, sens: Any, vec: Any, config: Any
    ) -> Any:
        (x,) = parameters
        if out_wrt == 0:
            return [2 * s * t for s, t in zip(sens, vec, strict=True)]
        return [6 * v * sens[0] * t for v, t in zip(x, vec, strict=True)]

    def supports_evaluate(self) -> bool:
        return True

    supports_gradient = supports_apply_jacobian = supports_apply_hessian = supports_evaluate


if __name__ == "__main__":
    umbridge.serve_models([Powers()], int(sys.argv[1]))
