"""Derivatives that are compared with central differences of the function in each call."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from dragoman.core.errors import ModelFailed
from dragoman.core.vectors import Ability, Config, Vector, VectorFunction, Vectors, as_vector, as_vectors, replace_item
from dragoman.derivatives.derived import DerivedFunction, split_by_scale
from dragoman.derivatives.verification import (
    NotConfirmedError,
    check_finite,
    confirm_directional,
    confirm_gradient,
)

# Up to this number of components of a direction are confirmed one by one if their joint comparison fails.
_MAX_SEPARATE = 64

_ABILITIES: Mapping[str, Ability] = {
    "Gradient": "gradient",
    "ApplyJacobian": "apply_jacobian",
    "ApplyHessian": "apply_hessian",
}


class VerifiedDerivatives(DerivedFunction):
    """The given derivatives, each compared with differences of `function` at the point of the call.

    A call takes the evaluation at the point and usually two more, see `verification`. ApplyHessian is compared with
    differences of the gradient, which is compared itself unless the user has written it. Raises ModelFailed if a
    derivative is not confirmed, and InvalidOutput if the function's value is not finite.

    Parameters
    ----------
    derivatives : computes them.
    function : evaluates, and has the user's gradient if `derivatives` has none.
    name : of the function, for messages.
    enabled : False only checks that the function's value is finite.
    is_needed : returns whether derivatives under a config need the comparison; by default all do.
    """

    def __init__(
        self,
        derivatives: VectorFunction,
        function: VectorFunction,
        name: str,
        enabled: bool = True,
        is_needed: Callable[[Config], bool] = lambda config: True,
    ) -> None:
        super().__init__(function)
        self._derivatives, self._name, self._enabled, self._is_needed = derivatives, name, enabled, is_needed
        self._has_written_gradient = "gradient" not in derivatives.sources()
        self.vectorised = function.vectorised

    def evaluate(self, inputs: Vectors, config: Config) -> Any:
        return self.base.evaluate(inputs, config)

    def gradient(self, output: int, input: int, inputs: Vectors, sens: Vector, config: Config) -> Any:  # noqa: A002
        value = self._finite_value(output, inputs, config, sens)
        result = as_vector(
            self._derivatives.gradient(output, input, inputs, sens, config), len(inputs[input]), "gradient"
        )
        if value is None:  # the first call may have shown that the comparison is needed
            value = self._finite_value(output, inputs, config, sens)
        if value is not None and self._enabled:
            self._confirm_gradient(output, input, inputs, sens, config, value, result)
        return result

    def apply_jacobian(self, output: int, input: int, inputs: Vectors, vec: Vector, config: Config) -> Any:  # noqa: A002
        value = self._finite_value(output, inputs, config)

        def act(vec: Vector) -> Vector:
            result = self._derivatives.apply_jacobian(output, input, inputs, vec, config)
            return as_vector(result, self.output_sizes(config)[output], "apply_jacobian")

        def values(x: Vector) -> Vector:
            return self._values(replace_item(inputs, input, x), config)[output]

        if value is None:
            result = act(vec)
            value = self._finite_value(output, inputs, config)
            if value is None:
                return result
        return self._confirmed_action("ApplyJacobian", act, values, inputs[input], value, vec)

    def apply_hessian(
        self, output: int, input1: int, input2: int, inputs: Vectors, sens: Vector, vec: Vector, config: Config
    ) -> Any:
        value, size = self._finite_value(output, inputs, config, sens), len(inputs[input1])

        def act(vec: Vector) -> Vector:
            result = self._derivatives.apply_hessian(output, input1, input2, inputs, sens, vec, config)
            return as_vector(result, size, "apply_hessian")

        def gradient(x: Vector) -> Vector:
            function = self.base if self._has_written_gradient else self._derivatives
            result = function.gradient(output, input1, replace_item(inputs, input2, x), sens, config)
            return as_vector(result, size, "gradient")

        if value is None:
            result = act(vec)
            value = self._finite_value(output, inputs, config, sens)
            if value is None:
                return result
        if not self._enabled:
            return act(vec)
        slope = gradient(inputs[input2])
        if not self._has_written_gradient:
            self._confirm_gradient(output, input1, inputs, sens, config, value, slope)
        if self._source("ApplyHessian").startswith("finite differences"):
            return act(vec)  # itself differences of the confirmed gradient
        return self._confirmed_action("ApplyHessian", act, gradient, inputs[input2], slope, vec)

    def sources(self) -> Mapping[Ability, str]:
        return self._derivatives.sources()

    def notes(self) -> Mapping[str, Any]:
        return self._derivatives.notes()

    def close(self) -> None:
        self.base.close()

    def _values(self, inputs: Vectors, config: Config) -> tuple[Vector, ...]:
        return as_vectors(self.base.evaluate(inputs, config), self.output_sizes(config))

    def _finite_value(self, output: int, inputs: Vectors, config: Config, sens: Vector | None = None) -> Vector | None:
        """Return the output at the point, checked to be finite; None if derivatives need no comparison."""
        if not self._is_needed(config):
            return None
        value = self._values(inputs, config)[output]
        check_finite(value, output, inputs, sens)
        return value

    def _confirm_gradient(
        self, output: int, index: int, inputs: Vectors, sens: Vector, config: Config, value: Vector, gradient: Vector
    ) -> None:
        def values(x: Vector) -> Vector:
            return self._values(replace_item(inputs, index, x), config)[output]

        try:
            confirm_gradient(values, inputs[index], value, sens, gradient)
        except NotConfirmedError as error:
            raise self._confirmation_error("Gradient", error) from error

    def _confirmed_action(
        self,
        verb: str,
        act: Callable[[Vector], Vector],
        values: Callable[[Vector], Vector],
        x: Vector,
        value: Vector,
        vec: Vector,
    ) -> Vector:
        """Return the action on `vec` as the sum of actions on parts of it, each of which is confirmed."""
        if not self._enabled:
            return act(vec)
        total = np.zeros(len(value))
        for summand in split_by_scale(x, vec):
            try:
                total = total + _confirm(act, values, x, value, summand)
            except NotConfirmedError as error:
                raise self._confirmation_error(verb, error) from error
        return total

    def _source(self, verb: str) -> str:
        return self.sources().get(_ABILITIES[verb], "author")

    def _confirmation_error(self, verb: str, reason: Exception) -> ModelFailed:
        return ModelFailed(
            f"{verb} of '{self._name}' by {self._source(verb)} is not confirmed by central differences: {reason}; "
            "provide gradient= or jacobian=, write the function in JAX, use derivatives='finite differences', or set "
            "verify_derivatives=False if the derivative is right"
        )


def _confirm(
    act: Callable[[Vector], Vector], values: Callable[[Vector], Vector], x: Vector, value: Vector, vec: Vector
) -> Vector:
    """Return the action on `vec`, confirmed as a whole or, if it has few components, for each of them."""
    result, moved = act(vec), np.flatnonzero(vec)
    try:
        confirm_directional(values, x, value, vec, result)
    except NotConfirmedError:
        if not 1 < len(moved) <= _MAX_SEPARATE:
            raise
        for j in moved:
            component = np.where(np.arange(len(vec)) == j, vec, 0.0)
            confirm_directional(values, x, value, component, act(component))
    return result
