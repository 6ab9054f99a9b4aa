"""Derivatives that are compared with central differences of the function in each call."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from dragoman.core.errors import ModelFailed
from dragoman.core.vector_answers import as_vector, as_vectors
from dragoman.core.vectors import Ability, Config, Vector, VectorFunction, Vectors, put
from dragoman.derivatives.derived import Of
from dragoman.derivatives.scales import by_scale
from dragoman.derivatives.verification import Unconfirmed, check_finite, confirm_directional, confirm_gradient

# Up to so many components of a direction are confirmed each alone where that fails for all together.
_SEPARATE = 64


class Verified(Of):
    """The given derivatives, each compared with differences of `function` at the point of the call.

    A call costs the evaluation at the point and two more; see `verification` for the few that cost more. ApplyHessian
    is compared with differences of the gradient, which is compared itself unless the author has written it.
    Raises ModelFailed where a derivative is not confirmed, and InvalidOutput where the function's value is not finite.

    Parameters
    ----------
    derivatives : gives them.
    function : evaluates, and has the author's gradient if `derivatives` gives none.
    name : of the function, for messages.
    enabled : False leaves only the check that the function's value is finite.
    needed : whether derivatives under a config need the check; by default all do.
    """

    def __init__(
        self,
        derivatives: VectorFunction,
        function: VectorFunction,
        name: str,
        enabled: bool = True,
        needed: Callable[[Config], bool] = lambda config: True,
    ) -> None:
        super().__init__(function)
        self._derivatives, self._name, self._enabled, self._needed = derivatives, name, enabled, needed
        self._authors_gradient = "gradient" not in derivatives.sources()
        self.vectorised = function.vectorised

    def evaluate(self, inputs: Vectors, config: Config) -> Any:
        return self.base.evaluate(inputs, config)

    def gradient(self, output: int, input: int, inputs: Vectors, sens: Vector, config: Config) -> Any:  # noqa: A002
        here = self._here(output, inputs, config, sens)
        found = as_vector(
            self._derivatives.gradient(output, input, inputs, sens, config), len(inputs[input]), "gradient"
        )
        if here is None:  # what the first call has shown may ask for it
            here = self._here(output, inputs, config, sens)
        if here is not None and self._enabled:
            self._confirm_gradient(output, input, inputs, sens, config, here, found)
        return found

    def apply_jacobian(self, output: int, input: int, inputs: Vectors, vec: Vector, config: Config) -> Any:  # noqa: A002
        here = self._here(output, inputs, config)

        def act(part: Vector) -> Vector:
            found = self._derivatives.apply_jacobian(output, input, inputs, part, config)
            return as_vector(found, self.output_sizes(config)[output], "apply_jacobian")

        def values(at: Vector) -> Vector:
            return self._values(put(inputs, input, at), config)[output]

        if here is None:
            whole = act(vec)
            here = self._here(output, inputs, config)
            if here is None:
                return whole
        return self._by_parts("ApplyJacobian", act, values, inputs[input], here, vec)

    def apply_hessian(
        self, output: int, input1: int, input2: int, inputs: Vectors, sens: Vector, vec: Vector, config: Config
    ) -> Any:
        here, size = self._here(output, inputs, config, sens), len(inputs[input1])

        def act(part: Vector) -> Vector:
            found = self._derivatives.apply_hessian(output, input1, input2, inputs, sens, part, config)
            return as_vector(found, size, "apply_hessian")

        def gradient(at: Vector) -> Vector:
            function = self.base if self._authors_gradient else self._derivatives
            found = function.gradient(output, input1, put(inputs, input2, at), sens, config)
            return as_vector(found, size, "gradient")

        if here is None:
            whole = act(vec)
            here = self._here(output, inputs, config, sens)
            if here is None:
                return whole
        if not self._enabled:
            return act(vec)
        slope = gradient(inputs[input2])
        if not self._authors_gradient:
            self._confirm_gradient(output, input1, inputs, sens, config, here, slope)
        if self._source("apply_hessian").startswith("finite differences"):
            return act(vec)  # nothing else to compare it with
        return self._by_parts("ApplyHessian", act, gradient, inputs[input2], slope, vec)

    def sources(self) -> Mapping[Ability, str]:
        return self._derivatives.sources()

    def notes(self) -> Mapping[str, Any]:
        return self._derivatives.notes()

    def close(self) -> None:
        self.base.close()

    # --- the comparison ------------------------------------------------------------------------------------

    def _values(self, inputs: Vectors, config: Config) -> tuple[Vector, ...]:
        return as_vectors(self.base.evaluate(inputs, config), self.output_sizes(config))

    def _here(self, output: int, inputs: Vectors, config: Config, sens: Vector | None = None) -> Vector | None:
        """The output's value at the point, finite; None where the derivatives need no check."""
        if not self._needed(config):
            return None
        found = self._values(inputs, config)[output]
        check_finite(found, output, inputs, sens)
        return found

    def _confirm_gradient(
        self, output: int, index: int, inputs: Vectors, sens: Vector, config: Config, here: Vector, found: Vector
    ) -> None:
        def values(at: Vector) -> Vector:
            return self._values(put(inputs, index, at), config)[output]

        try:
            confirm_gradient(values, inputs[index], here, sens, found)
        except Unconfirmed as error:
            raise unconfirmed("Gradient", self._name, self._source("gradient"), error) from error

    def _by_parts(
        self,
        verb: str,
        act: Callable[[Vector], Vector],
        values: Callable[[Vector], Vector],
        x: Vector,
        here: Vector,
        vec: Vector,
    ) -> Vector:
        """The action on `vec` as the sum of actions on its parts, each of which is confirmed."""
        if not self._enabled:
            return act(vec)
        total = np.zeros(len(here))
        for part in by_scale(x, vec):
            try:
                total = total + _confirmed(act, values, x, here, part)
            except Unconfirmed as error:
                ability: Ability = "apply_hessian" if verb == "ApplyHessian" else "apply_jacobian"
                raise unconfirmed(verb, self._name, self._source(ability), error) from error
        return total

    def _source(self, ability: Ability) -> str:
        return self.sources().get(ability, "author")


def _confirmed(
    act: Callable[[Vector], Vector], values: Callable[[Vector], Vector], x: Vector, here: Vector, vec: Vector
) -> Vector:
    """The action on `vec`, confirmed as a whole or for each component of a short one."""
    found, moved = act(vec), np.flatnonzero(vec)
    try:
        confirm_directional(values, x, here, vec, found)
    except Unconfirmed:
        if not 1 < len(moved) <= _SEPARATE:
            raise
        for j in moved:
            alone = np.where(np.arange(len(vec)) == j, vec, 0.0)
            confirm_directional(values, x, here, alone, act(alone))
    return found


def unconfirmed(verb: str, name: str, source: str, why: Exception) -> ModelFailed:
    """The error of a derivative that differences do not confirm, with what an author can do."""
    return ModelFailed(
        f"{verb} of '{name}' by {source} is not confirmed by central differences: {why}; provide gradient= or "
        "jacobian=, write the function in JAX, use derivatives='finite differences', or set "
        "verify_derivatives=False if the derivative is right"
    )
