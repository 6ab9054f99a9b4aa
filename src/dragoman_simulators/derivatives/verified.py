"""Derivatives that nobody wrote, compared with central differences of the function at the point of a call."""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from dragoman.core.errors import DragomanError, InvalidInput, InvalidOutput, ModelFailed
from dragoman.core.vector_binding import config_key, is_finite
from dragoman.core.vectors import (
    Ability,
    Config,
    Estimate,
    Vector,
    VectorFunction,
    Vectors,
    as_vector,
    as_vectors,
    replace_item,
)
from dragoman_simulators.derivatives.derived import DerivedFunction, component_scales, split_by_scale
from dragoman_simulators.derivatives.differences import Mask
from dragoman_simulators.derivatives.verification import (
    NotConfirmedError,
    check_finite,
    confirm_directional,
    confirm_gradient,
)

log = logging.getLogger("dragoman.derivatives")

_VERBS: Mapping[Ability, str] = {
    "gradient": "Gradient",
    "apply_jacobian": "ApplyJacobian",
    "apply_hessian": "ApplyHessian",
}
# Combinations of outputs and inputs for which an ability is tried when the function is loaded.
_MAX_TRIALS = 8
# Values of a function and of its derivative's first pass agree up to this fraction of the largest element.
_VALUE_TOLERANCE = 1e-9
_MAX_REMEMBERED = 1 << 16  # numbers of a point


# The values of the option `verify`, besides None for the default of the method. If calls are sampled, every n-th one is
# verified.
_VERIFY = ("always", "sampled", "never")
SAMPLING_INTERVAL = 32


def check_verify(value: Any, where: str) -> None:
    """Raise ModelFailed that names the option unless it is None or a known value."""
    if value is not None and value not in _VERIFY:
        raise ModelFailed(f"{where}: expected {', '.join(map(repr, _VERIFY))}, got {value!r:.100}")


class UnconfirmedError(ModelFailed):
    """A derivative that differences do not confirm."""


@dataclass(frozen=True, slots=True)
class ValuedDerivative:
    """A derivative, and the outputs of the function at the point as the method computed them."""

    derivative: Any
    outputs: Sequence[Vector]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """How derivatives are verified.

    Parameters
    ----------
    name : of the function, for messages.
    enabled : False only checks that the function's value is finite.
    interval : returns n for a config: every n-th call is verified.
    noise : relative noise of the function's values, if it is known to be above rounding errors.
    """

    name: str
    enabled: bool = True
    interval: Callable[[Config], int] = lambda config: 1
    noise: float = 0.0


class VerifiedDerivatives(DerivedFunction):
    """The given derivatives, compared with differences of `function` at the point of the call.

    A call takes the evaluation at the point and usually two more, see `verification`. ApplyHessian is compared with
    differences of the gradient, which is compared itself unless the user has written it. If only every n-th call is
    verified, then also the first one of each config, each whose result is zero, or has an element that is zero for the
    first time, or whose method computed another value than Evaluate did at the same point, and all calls of a config
    after one that failed. Raises UnconfirmedError if a derivative is not confirmed, and InvalidOutput if the function's
    value is not finite or the derivative is NaN.

    Parameters
    ----------
    derivatives : computes them. If it returns `ValuedDerivative`, it checks itself that the value is finite.
    function : evaluates, and has the user's gradient if `derivatives` has none.
    """

    def __init__(self, derivatives: VectorFunction, function: VectorFunction, verification: Verification) -> None:
        super().__init__(function)
        self._derivatives, self._verification = derivatives, verification
        self._has_written_gradient = "gradient" not in derivatives.sources()
        self.vectorised = function.vectorised
        self._unsupported: dict[Ability, str] = {}
        self._schedule = _Schedule(verification)
        self._zeros = _ConfirmedZeros()
        self._last = _LastEvaluation()

    def evaluate(self, inputs: Vectors, config: Config) -> Any:
        result = self.base.evaluate(inputs, config)
        if not self._derivatives.needs_value:
            self._last.remember(inputs, config, result)
        return result

    def gradient(self, output: int, input: int, inputs: Vectors, sens: Vector, config: Config) -> Any:  # noqa: A002
        def compute() -> Any:
            return self._derivatives.gradient(output, input, inputs, sens, config)

        def confirm(value: Vector, result: Vector) -> Vector:
            self._confirm_gradient(output, input, inputs, sens, config, value, result)
            return result

        return self._verified("gradient", (output, input), inputs, config, compute, confirm, len(inputs[input]), sens)

    def apply_jacobian(self, output: int, input: int, inputs: Vectors, vec: Vector, config: Config) -> Any:  # noqa: A002
        size = self.output_sizes(config)[output]

        def act(vec: Vector) -> Vector:
            result = self._derivatives.apply_jacobian(output, input, inputs, vec, config)
            return as_vector(_derivative(result), size, "apply_jacobian")

        def compute() -> Any:
            return self._derivatives.apply_jacobian(output, input, inputs, vec, config)

        def confirm(value: Vector, result: Vector) -> Vector:
            values = self._outputs_by(output, input, inputs, config)
            return self._confirmed_action("apply_jacobian", act, values, inputs[input], value, vec, result)

        return self._verified("apply_jacobian", (output, input), inputs, config, compute, confirm, size)

    def apply_hessian(
        self, output: int, input1: int, input2: int, inputs: Vectors, sens: Vector, vec: Vector, config: Config
    ) -> Any:
        size = len(inputs[input1])

        def act(vec: Vector) -> Vector:
            result = self._derivatives.apply_hessian(output, input1, input2, inputs, sens, vec, config)
            return as_vector(_derivative(result), size, "apply_hessian")

        def gradient(x: Vector) -> Vector:
            function = self.base if self._has_written_gradient else self._derivatives
            result = function.gradient(output, input1, replace_item(inputs, input2, x), sens, config)
            return as_vector(_derivative(result), size, "gradient")

        def compute() -> Any:
            return self._derivatives.apply_hessian(output, input1, input2, inputs, sens, vec, config)

        def confirm(value: Vector, result: Vector) -> Vector:
            slope = gradient(inputs[input2])
            if not self._has_written_gradient:
                self._confirm_gradient(output, input1, inputs, sens, config, value, slope)
            if self._source("apply_hessian").startswith("finite differences"):
                return result  # itself differences of the confirmed gradient
            return self._confirmed_action("apply_hessian", act, gradient, inputs[input2], slope, vec, result)

        return self._verified("apply_hessian", (output, input1, input2), inputs, config, compute, confirm, size, sens)

    def sources(self) -> Mapping[Ability, str]:
        return {name: source for name, source in self._derivatives.sources().items() if name not in self._unsupported}

    def notes(self) -> Mapping[str, Any]:
        return self._derivatives.notes()

    def missing(self) -> Mapping[Ability, str]:
        return {**self._derivatives.missing(), **self._unsupported}

    def close(self) -> None:
        self.base.close()

    def try_at(self, point: Vectors, config: Config, abilities: Sequence[Ability]) -> None:
        """Call these abilities at a point; those that fail are no longer offered.

        A derivative that is not confirmed there is offered, since the point may be a kink, but verified in each call.
        """
        name = self._verification.name
        try:
            sizes = self.output_sizes(config)
            as_vectors(self.base.evaluate(point, config), sizes)
        except Exception as error:
            log.warning("derivatives not tried, evaluation failed: function=%s error=%r", name, error)
            return
        for ability in abilities:
            if ability == "evaluate":
                continue
            try:
                for call in self._trials(ability, point, sizes, config):
                    call()
            except UnconfirmedError as error:
                log.warning("not confirmed at the sample point: %s", error.message)
            except (InvalidOutput, InvalidInput) as error:
                log.info("%s of '%s' cannot be tried: %s", _VERBS[ability], name, error.message)
            except Exception as error:
                message = error.message if isinstance(error, DragomanError) else f"{type(error).__name__}: {error}"
                reason = (
                    f"{self._derivatives.sources()[ability]} fails: {message.strip().partition(chr(10))[0]}; provide "
                    f"{ability}=, or use derivatives='finite differences'"
                )
                self._unsupported[ability] = reason
                log.info("derivative not offered: function=%s ability=%s reason=%s", name, ability, reason)

    # --- the calls at load ------------------------------------------------------------------------------------

    def _trials(
        self, ability: Ability, point: Vectors, sizes: Sequence[int], config: Config
    ) -> Iterator[Callable[[], Any]]:
        pairs = [(o, i) for o in range(len(sizes)) for i in range(len(point)) if sizes[o] and len(point[i])]
        for o, i in pairs[:_MAX_TRIALS]:
            sens, vec = np.ones(sizes[o]), np.cos(1.0 + np.arange(len(point[i]))) * component_scales(point[i])
            match ability:
                case "gradient":
                    yield partial(self.gradient, o, i, point, sens, config)
                case "apply_jacobian":
                    yield partial(self.apply_jacobian, o, i, point, vec, config)
                case _:
                    yield partial(self.apply_hessian, o, i, i, point, sens, vec, config)

    # --- verification -----------------------------------------------------------------------------------------

    def _verified(
        self,
        ability: Ability,
        indices: tuple[int, ...],
        inputs: Vectors,
        config: Config,
        compute: Callable[[], Any],
        confirm: Callable[[Vector, Vector], Vector],
        size: int,
        sens: Vector | None = None,
    ) -> Any:
        """Return the derivative that `compute` returns, confirmed if its turn has come.

        `indices`: of the output, and of the inputs by which it is differentiated.
        """
        output = indices[0]
        is_due = self._schedule.is_due(ability, config)
        value = None
        if is_due or self._derivatives.needs_value:
            value = self._finite_value(output, inputs, config, sens)
        computed = compute()
        derivative = _derivative(computed)
        result = as_vector(derivative, size, ability)
        self._check_numbers(ability, result)
        key = (ability, indices, result.shape, config_key(config))
        if not is_due and self._verification.enabled:
            is_due = self._zeros.has_new(key, result) or self._last.contradicts(inputs, config, output, computed)
        if is_due:
            if value is None:
                value = self._finite_value(output, inputs, config, sens)
            try:
                result = confirm(value, result)
            except UnconfirmedError:
                self._schedule.suspect(config)
                raise
            self._zeros.confirm(key, result)
        return Estimate(result, derivative.error) if isinstance(derivative, Estimate) else result

    def _finite_value(self, output: int, inputs: Vectors, config: Config, sens: Vector | None = None) -> Vector:
        value = np.array(as_vectors(self.base.evaluate(inputs, config), self.output_sizes(config))[output])
        check_finite(value, output, inputs, sens)
        return value

    def _check_numbers(self, ability: Ability, result: Vector) -> None:
        """Raise InvalidOutput if a derivative is NaN although the function's value is finite."""
        if not is_finite(result) and np.isnan(result).any():
            raise InvalidOutput(
                f"{_VERBS[ability]} of '{self._verification.name}' by {self._source(ability)}: element "
                f"{int(np.argmax(np.isnan(result)))} is nan where the function is finite; the usual cause is an "
                "operation such as sqrt, log or division outside its domain in the branch of `where` that is not "
                "selected: replace its argument there by a valid number"
            )

    def _outputs_by(self, output: int, index: int, inputs: Vectors, config: Config) -> Callable[[Vector], Vector]:
        evaluate, sizes = self.base.evaluate, self.output_sizes(config)

        def values(x: Vector) -> Vector:
            return as_vectors(evaluate(replace_item(inputs, index, x), config), sizes)[output]

        return values

    def _confirm_gradient(
        self, output: int, index: int, inputs: Vectors, sens: Vector, config: Config, value: Vector, gradient: Vector
    ) -> None:
        values, noise = self._outputs_by(output, index, inputs, config), self._verification.noise
        try:
            confirm_gradient(values, inputs[index], value, sens, gradient, noise)
        except NotConfirmedError as error:
            raise self._confirmation_error("gradient", error) from error

    def _confirmed_action(
        self,
        ability: Ability,
        act: Callable[[Vector], Vector],
        values: Callable[[Vector], Vector],
        x: Vector,
        value: Vector,
        vec: Vector,
        result: Vector,
    ) -> Vector:
        """Return the action on `vec`, as the sum of actions on parts of it if these need different steps."""
        summands = split_by_scale(x, vec)
        parts = [result] if len(summands) == 1 else [act(summand) for summand in summands]
        try:
            for summand, part in zip(summands, parts, strict=True):
                confirm_directional(values, x, value, summand, part, self._verification.noise)
        except NotConfirmedError as error:
            raise self._confirmation_error(ability, error) from error
        return np.sum(parts, axis=0) if parts else np.zeros(len(value))

    def _source(self, ability: Ability) -> str:
        return self._derivatives.sources().get(ability, "author")

    def _confirmation_error(self, ability: Ability, reason: Exception) -> UnconfirmedError:
        source = self._source(ability)
        remedy = "compute in double precision" if source == "torch" else "write the function in JAX"
        return UnconfirmedError(
            f"{_VERBS[ability]} of '{self._verification.name}' by {source} is not confirmed by central differences: "
            f"{reason}; provide gradient= or jacobian=, {remedy}, use derivatives='finite differences', or set "
            "verify='never' if the derivative is right"
        )


def _derivative(result: Any) -> Any:
    return result.derivative if isinstance(result, ValuedDerivative) else result


_MAX_CONFIGS = 256


class _Schedule:
    """Which calls are verified: every n-th one of an ability and config; once one has failed, all of its config."""

    def __init__(self, verification: Verification) -> None:
        self._verification = verification
        self._counts: OrderedDict[tuple[Ability, str], int] = OrderedDict()
        self._suspects: OrderedDict[str, None] = OrderedDict()  # configs
        self._lock = threading.Lock()

    def is_due(self, ability: Ability, config: Config) -> bool:
        """Return whether this call is verified, and count it."""
        if not self._verification.enabled:
            return False
        interval = self._verification.interval(config)
        if interval <= 1:
            return True
        key = config_key(config)
        with self._lock:
            if key in self._suspects:
                self._suspects.move_to_end(key)
                return True
            count = self._counts.pop((ability, key), 0)
            self._counts[ability, key] = count + 1
            if len(self._counts) > _MAX_CONFIGS:
                self._counts.popitem(last=False)
        return count % interval == 0

    def suspect(self, config: Config) -> None:
        """Verify all further calls of a config: a point that defeats one ability defeats the others too."""
        with self._lock:
            self._suspects[config_key(config)] = None
            if len(self._suspects) > _MAX_CONFIGS:
                self._suspects.popitem(last=False)


class _ConfirmedZeros:
    """The elements of derivatives that were zero in a verified call: a lost derivative is exactly zero."""

    def __init__(self) -> None:
        self._masks: OrderedDict[Hashable, Mask] = OrderedDict()

    def has_new(self, key: Hashable, result: Vector) -> bool:
        if 0 < len(result) == np.count_nonzero(result):
            return False
        zero, known = result == 0, self._masks.get(key)
        return bool(zero.all() or known is None or (zero & ~known).any())

    def confirm(self, key: Hashable, result: Vector) -> None:
        if np.count_nonzero(result) == len(result):
            return
        zero, known = result == 0, self._masks.get(key)
        self._masks[key] = zero if known is None else zero | known
        if len(self._masks) > _MAX_CONFIGS:
            with suppress(KeyError):  # another thread removed it
                self._masks.popitem(last=False)


class _LastEvaluation:
    """The outputs that Evaluate returned last, to compare with the value that a derivative's method computes."""

    def __init__(self) -> None:
        self._entry: tuple[bytes, str, Any] | None = None

    def remember(self, inputs: Vectors, config: Config, outputs: Any) -> None:
        if all(x.ndim == 1 for x in inputs) and sum(map(len, inputs)) <= _MAX_REMEMBERED:
            self._entry = (_bytes(inputs), config_key(config), outputs)

    def contradicts(self, inputs: Vectors, config: Config, output: int, computed: Any) -> bool:
        entry = self._entry
        if entry is None or not isinstance(computed, ValuedDerivative):
            return False
        if entry[0] != _bytes(inputs) or entry[1] != config_key(config):
            return False
        expected, actual = np.asarray(entry[2][output]), np.asarray(computed.outputs[output])
        tolerance = _VALUE_TOLERANCE * max(float(np.max(np.abs(expected), initial=0.0)), 1e-300)
        return bool((np.abs(actual - expected) > tolerance).any())


def _bytes(inputs: Vectors) -> bytes:
    return b"".join(x.tobytes() for x in inputs)
