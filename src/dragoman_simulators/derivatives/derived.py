"""Derivatives that follow exactly from others, their combinations, and the scales of finite differences."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dragoman.core.errors import NotSupported
from dragoman.core.vectors import ABILITIES, Ability, Config, Vector, VectorFunction, Vectors, as_vector, as_vectors

# Forward-mode derivative of function(*arguments) by the argument at an index, applied to a vector.
JacobianVectorProduct = Callable[[Callable[..., Any], Vectors, int, Vector], Any]

DIFFERENCES = "finite differences"
EVALUATIONS = 4  # by finite differences for a product of the Jacobian, without that at the point


class DerivedFunction(VectorFunction):
    """Base of functions that add abilities to `base` and keep its sizes and names."""

    def __init__(self, base: VectorFunction) -> None:
        self.base = base
        self.input_names, self.output_names = base.input_names, base.output_names

    def input_sizes(self, config: Config) -> Sequence[int]:
        return self.base.input_sizes(config)

    def output_sizes(self, config: Config) -> Sequence[int]:
        return self.base.output_sizes(config)

    def accepts(self, name: str) -> bool:
        return self.base.accepts(name)


class MissingDerivatives(DerivedFunction):
    """No derivatives, and the reasons why."""

    def __init__(self, base: VectorFunction, reasons: Mapping[Ability, str]) -> None:
        super().__init__(base)
        self._reasons = reasons

    def sources(self) -> Mapping[Ability, str]:
        return {}

    def missing(self) -> Mapping[Ability, str]:
        return self._reasons


class CombinedFunction(VectorFunction):
    """Take each ability from the first of several functions that has it; sizes and names come from the first."""

    def __init__(self, first: VectorFunction, *others: VectorFunction) -> None:
        self._functions = (first, *others)
        self.input_names, self.output_names = first.input_names, first.output_names
        self.input_sizes, self.output_sizes = first.input_sizes, first.output_sizes  # type: ignore[method-assign]
        self.accepts = first.accepts  # type: ignore[method-assign]
        self._sources: dict[Ability, str] = {}
        for ability in ABILITIES:
            function = next((each for each in self._functions if ability in each.sources()), None)
            if function is not None:
                self._sources[ability] = function.sources()[ability]
                setattr(self, ability, getattr(function, ability))  # calls need no further indirection
                if ability == "evaluate":
                    self.vectorised = function.vectorised

    def sources(self) -> Mapping[Ability, str]:
        return self._sources

    def notes(self) -> Mapping[str, Any]:
        used = {*self._sources.values()}
        return {k: v for each in self._functions if used & {*each.sources().values()} for k, v in each.notes().items()}

    def missing(self) -> Mapping[Ability, str]:
        reasons = [each.missing() for each in reversed(self._functions)]
        return {k: v for each in reasons for k, v in each.items() if k not in self._sources}

    def close(self) -> None:
        for each in self._functions:
            each.close()


class CostlyDerivatives(DerivedFunction):
    """Derivatives that take evaluations in proportion to the sizes: only those within the limit are offered.

    The limit counts for the sizes of the empty config, if it has any, and for the smallest of several vectors; calls
    with others raise NotSupported.
    """

    def all_sources(self) -> Mapping[Ability, str]:
        """Return where each ability comes from, whatever it takes."""
        raise NotImplementedError

    def check_cost(self, ability: Ability, input_size: int, output_size: int) -> None:
        """Raise NotSupported if an ability takes too many evaluations for vectors of these sizes."""
        raise NotImplementedError

    def sources(self) -> Mapping[Ability, str]:
        missing = self.missing()
        return {ability: source for ability, source in self.all_sources().items() if ability not in missing}

    def missing(self) -> Mapping[Ability, str]:
        if self._missing is None:
            self._missing = dict(self._too_costly())
        return self._missing

    _missing: Mapping[Ability, str] | None = None

    def _too_costly(self) -> Iterator[tuple[Ability, str]]:
        try:
            inputs, outputs = (min(sizes({}), default=0) for sizes in (self.input_sizes, self.output_sizes))
        except Exception:  # there are no sizes without a config
            return
        for ability in self.all_sources():
            try:
                self.check_cost(ability, inputs, outputs)
            except NotSupported as error:
                yield ability, error.message


class UnitVectorProducts(CostlyDerivatives):
    """Jᵀ s from one J e_i for each element of the input, or J v from one Jᵀ e_i for each element of the output.

    Raises NotSupported if that takes more than `max_evaluations` calls.
    """

    def __init__(self, base: VectorFunction, max_evaluations: int) -> None:
        super().__init__(base)
        self._max_evaluations = max_evaluations

    def gradient(self, output: int, input: int, inputs: Vectors, sens: Vector, config: Config) -> Any:  # noqa: A002
        size, act = len(inputs[input]), self.base.apply_jacobian
        self.check_cost("gradient", size, len(sens))
        return [_dot(sens, act(output, input, inputs, unit, config), "apply_jacobian") for unit in unit_vectors(size)]

    def apply_jacobian(self, output: int, input: int, inputs: Vectors, vec: Vector, config: Config) -> Any:  # noqa: A002
        size, act = self.output_sizes(config)[output], self.base.gradient
        self.check_cost("apply_jacobian", len(vec), size)
        return [_dot(vec, act(output, input, inputs, unit, config), "gradient") for unit in unit_vectors(size)]

    def check_cost(self, ability: Ability, input_size: int, output_size: int) -> None:
        if ability == "gradient":
            each = EVALUATIONS if self.base.sources()["apply_jacobian"] == DIFFERENCES else 1
            check_evaluations(each * input_size, self._max_evaluations, "Gradient", "apply_jacobian")
        else:
            check_evaluations(output_size, self._max_evaluations, "ApplyJacobian", "gradient")

    def all_sources(self) -> Mapping[Ability, str]:
        known = self.base.sources()
        match "gradient" in known, "apply_jacobian" in known:
            case True, False:
                return {"apply_jacobian": f"gradient ({known['gradient']})"}
            case False, True:
                return {"gradient": f"apply_jacobian ({known['apply_jacobian']})"}
        return {}


class GradientHessian(DerivedFunction):
    """The Hessian action as the derivative, by `jvp` of the method `name`, of the gradient that the user wrote."""

    def __init__(self, base: VectorFunction, jvp: JacobianVectorProduct, name: str) -> None:
        super().__init__(base)
        self._jvp, self._name = jvp, name

    def apply_hessian(
        self, output: int, input1: int, input2: int, inputs: Vectors, sens: Vector, vec: Vector, config: Config
    ) -> Any:
        def gradient(*arguments: Any) -> Any:
            return self.base.gradient(output, input1, arguments[:-1], arguments[-1], config)

        return self._jvp(gradient, (*inputs, sens), input2, vec)

    def sources(self) -> Mapping[Ability, str]:
        return {"apply_hessian": f"{self._name} of gradient (author)"}


class LinearJacobian(DerivedFunction):
    """The Jacobian of F(x) = A x + b: J v = F(v) - F(0), the same at all points."""

    needs_value = False

    def apply_jacobian(self, output: int, input: int, inputs: Vectors, vec: Vector, config: Config) -> Any:  # noqa: A002
        origin = [np.zeros(len(x)) for x in inputs]
        direction = [*origin[:input], vec, *origin[input + 1 :]]
        sizes = self.output_sizes(config)
        end, start = (np.array(as_vectors(self.base.evaluate(x, config), sizes)[output]) for x in (direction, origin))
        return end - start

    def sources(self) -> Mapping[Ability, str]:
        return {"apply_jacobian": "linear"}


class LinearHessian(DerivedFunction):
    """The second derivatives of F(x) = A x + b, which are zero."""

    def apply_hessian(
        self, output: int, input1: int, input2: int, inputs: Vectors, sens: Vector, vec: Vector, config: Config
    ) -> Any:
        return np.zeros(len(inputs[input1]))

    def sources(self) -> Mapping[Ability, str]:
        return {"apply_hessian": "linear"}


def check_evaluations(count: int, limit: int, verb: str, source: str) -> None:
    """Raise NotSupported if a derivative takes more evaluations of the function than `max_evaluations`."""
    if count > limit:
        raise NotSupported(
            f"{verb} by {source} takes {count} evaluations of the function; expected at most {limit} "
            "(max_evaluations); provide gradient=, or write the function in JAX or PyTorch"
        )


def sample_point(sizes: Sequence[int]) -> tuple[Vector, ...]:
    """Return vectors of these sizes with numbers between 0.3 and 0.8."""
    return tuple(0.3 + 0.5 * np.modf(0.618034 * np.arange(1, size + 1) + 0.1 * i)[0] for i, size in enumerate(sizes))


def unit_vectors(size: int) -> Iterator[Vector]:
    """Yield the rows of the identity matrix without allocating it."""
    for i in range(size):
        unit = np.zeros(size)
        unit[i] = 1.0
        yield unit


def _dot(weights: Vector, result: Any, name: str) -> float:
    return float(weights @ as_vector(result, len(weights), name))


# Components that share a step differ in their relative moves by at most this factor: the smallest move is still far
# above the rounding errors of its component.
_MAX_RATIO = 1e4
# A component below this fraction of the largest one may be a rounding error of zero.
SMALL_FRACTION = 1e-3


def component_scales(x: Vector) -> Vector:
    """Return the magnitude of each component; for a zero, 1e-3 of the largest magnitude, or 1 if all are zero."""
    magnitudes = np.abs(x)
    if np.count_nonzero(magnitudes) == len(x):
        return magnitudes
    largest = float(np.max(magnitudes, initial=0.0))
    return np.where(magnitudes > 0, magnitudes, SMALL_FRACTION * largest if largest > 0 else 1.0)


def raised_scales(x: Vector) -> Vector:
    """Return the magnitude of each component, but at least 1e-3 of the largest magnitude and of 1.

    Used if moving a component by its own magnitude does not change the function.
    """
    magnitudes = np.abs(x)
    return np.maximum(magnitudes, SMALL_FRACTION * max(1.0, float(np.max(magnitudes, initial=0.0))))


def max_step(scales: Vector, vec: Vector) -> float:
    """Return the largest t for which `t * vec` moves no component by more than its scale; 0 for a zero vector."""
    if len(vec) and np.count_nonzero(vec) == len(vec):
        return float((scales / np.abs(vec)).min())
    moved = vec != 0
    return float(np.min(scales[moved] / np.abs(vec[moved]), initial=np.inf)) if moved.any() else 0.0


def reach(x: Vector, direction: Vector) -> float:
    """Return the step by which a direction moves its components by their magnitudes, the median of them.

    A direction moves no component by more than its magnitude with a step of 1, but few small components may determine
    that, and zeros move by 1e-3 of the largest component.
    """
    moved = direction != 0
    if not x[moved].any():
        return 1 / SMALL_FRACTION
    moved &= x != 0
    return max(1.0, float(np.median(np.abs(x[moved] / direction[moved]))))


def split_by_scale(x: Vector, vec: Vector) -> list[Vector]:
    """Split `vec` into summands, each of which moves components that can share a step; zeros of x are separate."""
    if len(x) and np.count_nonzero(x) == np.count_nonzero(vec) == len(x):
        steps = np.abs(x) / np.abs(vec)
        if steps.max() <= _MAX_RATIO * steps.min():
            return [vec]
    magnitudes = np.abs(vec)
    moved = magnitudes > 0
    if not moved.any():
        return []
    steps = np.full(len(vec), np.inf)
    np.divide(component_scales(x), magnitudes, out=steps, where=moved)
    summands: list[Vector] = []
    for remaining in (moved & (x != 0), moved & (x == 0)):  # the scale of a zero is a guess
        while remaining.any():
            chosen = remaining & (steps <= _MAX_RATIO * float(np.min(steps[remaining])))
            summands.append(vec if (chosen == moved).all() else np.where(chosen, vec, 0.0))
            remaining &= ~chosen
    return summands
