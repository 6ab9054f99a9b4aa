"""Functions of vectors: what a simulator is, several float vectors in and several out, with its derivatives.

This is the form that the rooms of derivatives and of graphs work on; a runtime makes a `Model` of it.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float64]
Vectors = Sequence[Vector]
Config = Mapping[str, Any]

Ability = Literal["evaluate", "gradient", "apply_jacobian", "apply_hessian"]
ABILITIES: tuple[Ability, ...] = ("evaluate", "gradient", "apply_jacobian", "apply_hessian")

T = TypeVar("T")

# The attribute under which a plain function carries the VectorFunction that it was declared to be.
MARK = "__vector_function__"


class VectorFunction:
    """y_0, ..., y_m = F(x_0, ..., x_n; config), of float64 vectors. A subclass overrides what it can do.

    With J the derivative of output `output` by input `input`:

    - `gradient` is Jᵀ sens, as long as that input; sens is as long as that output;
    - `apply_jacobian` is J vec, as long as that output; vec is as long as that input;
    - `apply_hessian` is d/d x_input2 (J_input1ᵀ sens) · vec, as long as input1; vec is as long as input2.

    (Source: the UM-Bridge interface.) Vectors that come in are read-only; what an author gives back may be arrays,
    lists or scalars, and is checked by whoever calls. Methods may be called from several threads at a time.
    `vectorised`: `evaluate` also takes matrices whose rows are points, and gives matrices with as many rows.
    `concurrency`: how many calls are worth a thread each; more than one for what waits for others.
    `derivatives`: what is added where it is missing, as `@vector_function` says it ("auto", "jax", ...); None: nothing.
    `verify_derivatives`, `evaluate_at_load`, `max_evaluations`: of what is added, as for `@vector_function`.
    """

    input_names: tuple[str, ...] = ()
    output_names: tuple[str, ...] = ()
    vectorised: bool = False
    concurrency: int = 1
    derivatives: str | None = None
    verify_derivatives: bool = True
    evaluate_at_load: bool = True
    max_evaluations: int = 10_000

    def input_sizes(self, config: Config) -> Sequence[int]:
        raise NotImplementedError

    def output_sizes(self, config: Config) -> Sequence[int]:
        raise NotImplementedError

    def evaluate(self, inputs: Vectors, config: Config) -> Any:
        raise NotImplementedError

    def gradient(self, output: int, input: int, inputs: Vectors, sens: Vector, config: Config) -> Any:  # noqa: A002
        raise NotImplementedError

    def apply_jacobian(self, output: int, input: int, inputs: Vectors, vec: Vector, config: Config) -> Any:  # noqa: A002
        raise NotImplementedError

    def apply_hessian(
        self, output: int, input1: int, input2: int, inputs: Vectors, sens: Vector, vec: Vector, config: Config
    ) -> Any:
        raise NotImplementedError

    def sources(self) -> Mapping[Ability, str]:
        """What it can do, and where that comes from: "author", "torch", "jax", "complex step", "dual numbers",
        "finite differences", "graph", ... Without an override: every method that the class, or the instance, overrides
        is the author's."""
        return {
            name: "author"
            for name in ABILITIES
            if getattr(type(self), name) is not getattr(VectorFunction, name) or name in vars(self)
        }

    def notes(self) -> Mapping[str, Any]:
        """What metadata should tell besides, as plain JSON values: what derivatives cost, how exact they are."""
        return {}

    def unavailable(self) -> str:
        """Why it cannot answer now, as when a server that it calls is down; "" while it can. Must return at once."""
        return ""

    def close(self) -> None:
        """Let go of what it holds: connections, threads."""


def carried_by(target: Any) -> VectorFunction | None:
    """The VectorFunction that an object is, or carries because it was declared to be one; None where it is none."""
    found = target if isinstance(target, VectorFunction) else getattr(target, "__dict__", {}).get(MARK)
    return found if isinstance(found, VectorFunction) else None


def put(inputs: Sequence[T], index: int, value: T) -> tuple[T, ...]:
    """The inputs with another value in one place."""
    return (*inputs[:index], value, *inputs[index + 1 :])
