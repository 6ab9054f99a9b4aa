"""Functions of vectors, such as simulators: several float vectors in and out, with derivatives.

`derivatives` and `graphs` work on this interface; a runtime makes a `Model` of it.
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
    """y_0, ..., y_m = F(x_0, ..., x_n; config), of float64 vectors. Subclasses override what they support.

    With J the derivative of output `output` by input `input`:

    - `gradient` is Jᵀ sens, as long as that input; sens is as long as that output;
    - `apply_jacobian` is J vec, as long as that output; vec is as long as that input;
    - `apply_hessian` is d/d x_input2 (J_input1ᵀ sens) · vec, as long as input1; vec is as long as input2.

    (Source: the UM-Bridge interface.) Input vectors are read-only. Results may be arrays, lists or scalars; the
    caller checks them. Methods may be called from several threads at a time. `vectorised`: `evaluate` also
    accepts matrices whose rows are points, and returns matrices with as many rows. `concurrency`: useful number
    of threads; more than one for functions that wait for other servers. `derivatives`: how missing derivatives
    are added, as for `@vector_function` ("auto", "jax", ...); None adds none. `verify_derivatives`,
    `evaluate_at_load`, `max_evaluations`: options of added derivatives, as for `@vector_function`.
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
        """Return the supported operations and where each comes from: "author", "torch", "jax", "complex step", "dual
        numbers", "finite differences", "graph", ... By default every overridden method is the author's.
        """
        return {
            name: "author"
            for name in ABILITIES
            if getattr(type(self), name) is not getattr(VectorFunction, name) or name in vars(self)
        }

    def notes(self) -> Mapping[str, Any]:
        """Return further metadata as JSON values, e.g. cost and accuracy of derivatives."""
        return {}

    def unavailable(self) -> str:
        """Return why it cannot answer now, e.g. because a server is down; "" if it can. Must return at once."""
        return ""

    def close(self) -> None:
        """Free connections and threads."""


def carried_by(target: Any) -> VectorFunction | None:
    """Return the VectorFunction that an object is, or was declared to be; else None."""
    found = target if isinstance(target, VectorFunction) else getattr(target, "__dict__", {}).get(MARK)
    return found if isinstance(found, VectorFunction) else None


def put(inputs: Sequence[T], index: int, value: T) -> tuple[T, ...]:
    """The inputs with another value in one place."""
    return (*inputs[:index], value, *inputs[index + 1 :])
