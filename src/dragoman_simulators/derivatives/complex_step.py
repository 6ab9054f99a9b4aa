"""The complex step: J v = Im F(x + i h v) / h, exact for analytic functions in NumPy; their operations are checked."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from dragoman.core.errors import DragomanError, InvalidOutput, ModelFailed
from dragoman.core.vectors import Ability, Config, Vector, Vectors, as_vectors, replace_item, split_outputs
from dragoman_simulators.derivatives.derived import (
    CostlyDerivatives,
    GradientHessian,
    check_evaluations,
    component_scales,
    max_step,
)
from dragoman_simulators.derivatives.finite_differences import (
    check_gradient_estimate,
    directional_derivative,
    hessian_size,
)
from dragoman_simulators.derivatives.framework import select_output
from dragoman_simulators.derivatives.user_function import UserFunction
from dragoman_simulators.derivatives.verification import NotConfirmedError, confirm_directional


class NotAnalyticError(Exception):
    """An operation has no complex derivative, or another one than the real derivative; the message names it."""


# Not analytic, piecewise, comparing values, or splitting complex numbers.
_REJECTED_UFUNCS = frozenset(
    (
        *("absolute", "fabs", "conjugate", "sign", "heaviside", "hypot", "arctan2", "copysign", "signbit"),
        *("maximum", "minimum", "fmax", "fmin", "clip", "greater", "greater_equal", "less", "less_equal"),
        *("equal", "not_equal", "logical_and", "logical_or", "logical_xor", "logical_not"),
        *("floor", "ceil", "trunc", "rint", "floor_divide", "remainder", "fmod", "divmod", "modf", "vecdot", "vecmat"),
    )
)
_REJECTED_FUNCTIONS = frozenset(
    (
        *("real", "imag", "angle", "real_if_close", "norm", "vdot", "correlate", "cov", "corrcoef", "var", "std"),
        *("sort", "argsort", "argmax", "argmin", "partition", "argpartition", "searchsorted", "unique", "histogram"),
        *("max", "min", "amax", "amin", "ptp", "median", "percentile", "quantile", "nanmax", "nanmin", "nanvar"),
        *("nanstd", "round", "around", "fix", "clip", "interp", "digitize", "allclose", "isclose", "array_equal"),
        *("eigh", "eigvalsh", "cholesky", "svd", "svdvals", "qr", "pinv", "lstsq", "slogdet", "matrix_rank", "cond"),
        *("iscomplex", "isreal", "i0"),
    )
)
_REJECTED_METHODS = (
    *("conj", "conjugate", "argmax", "argmin", "sort", "argsort", "partition", "argpartition", "searchsorted"),
    *("var", "std", "round"),
)
# Predicates that do not influence derivatives; their boolean results are returned.
_PREDICATES = frozenset(("isfinite", "isnan", "isinf"))
_POWERS = frozenset(("power", "float_power"))
_COMPLEX = np.dtype(np.complex128)


def _reject(name: str) -> Any:
    raise NotAnalyticError(f"it uses {name}")


def _rejected_method(name: str) -> Callable[..., Any]:
    def method(self: Any, *arguments: Any, **options: Any) -> Any:
        return _reject(name)

    return method


class AnalyticArray(np.ndarray[Any, np.dtype[np.complex128]]):
    """A complex128 array whose NumPy results, scalars too, are again `AnalyticArray`.

    Raises NotAnalyticError, naming the operation, for comparisons, rounding, conjugates, absolute values and casts to
    real numbers.
    """

    __array_priority__ = 100

    def __array_ufunc__(self, ufunc: np.ufunc, method: Any, *inputs: Any, **options: Any) -> Any:
        name = ufunc.__name__
        if name in _REJECTED_UFUNCS:
            _reject(f"np.{name}")
        operands = [each.view(np.ndarray) if isinstance(each, AnalyticArray) else each for each in inputs]
        if options.get("out") is not None:
            options["out"] = tuple(map(_as_ndarray, options["out"]))
        if name in _POWERS and method == "__call__" and not options and (power := _real_power(*operands)) is not None:
            return as_analytic(power)
        try:
            result = getattr(ufunc, method)(*operands, **options)
        except TypeError as error:
            raise NotAnalyticError(f"it uses {name}, which takes no complex numbers: {error}") from error
        if type(result) is np.ndarray and result.dtype is _COMPLEX:  # the usual case
            return result.view(AnalyticArray)
        if name in _PREDICATES or result is None:
            return result
        return (
            tuple(_require_complex(each, name) for each in result)
            if isinstance(result, tuple)
            else _require_complex(result, name)
        )

    def __array_function__(self, function: Any, types: Any, arguments: Any, options: Any) -> Any:
        if function.__name__ in _REJECTED_FUNCTIONS:
            _reject(f"{function.__module__}.{function.__name__}".replace("numpy", "np", 1))
        result = super().__array_function__(function, types, arguments, options)
        return as_analytic(result) if isinstance(result, np.ndarray | np.complexfloating) else result

    def __getitem__(self, key: Any) -> Any:
        return as_analytic(super().__getitem__(key))

    def __iter__(self) -> Any:
        return (self[i] for i in range(len(self)))

    def astype(self, dtype: Any, *arguments: Any, **options: Any) -> Any:
        if np.dtype(dtype).kind != "c":
            _reject(f"astype({np.dtype(dtype).name})")
        return as_analytic(super().astype(dtype, *arguments, **options))


for _name in _REJECTED_METHODS:
    setattr(AnalyticArray, _name, _rejected_method(_name))
for _name in ("float", "int", "bool", "index"):
    setattr(AnalyticArray, f"__{_name}__", _rejected_method(f"a number as {_name}"))
for _name in ("real", "imag"):
    setattr(AnalyticArray, _name, property(_rejected_method(_name)))


def as_analytic(value: Any) -> Any:
    """Return a complex value as an `AnalyticArray`, any other value unchanged."""
    array = np.asarray(value)
    return array.view(AnalyticArray) if array.dtype.kind == "c" else value


def _real_power(base: Any, exponent: Any) -> Any:
    """Return a complex number to a real power, to first order in its imaginary part; None for other operands.

    NumPy computes powers of 100 and more by complex logarithms, whose rounding errors are far above a complex step.
    """
    z, n = np.asarray(base), np.asarray(exponent)
    if z.dtype.kind != "c" or n.dtype.kind not in "iuf":
        return None
    n = n.astype(np.float64)
    slope = np.where(n == 0, 0.0, n * z.real ** np.where(n == 0, 1.0, n - 1))
    return z.real**n + 1j * (slope * z.imag)


def _as_ndarray(value: Any) -> Any:
    return value.view(np.ndarray) if isinstance(value, AnalyticArray) else value


def _require_complex(value: Any, name: str) -> Any:
    if np.asarray(value).dtype.kind != "c":
        _reject(f"{name}, which returns real numbers")
    return as_analytic(value)


# The step relative to the magnitude of the components: its square is negligible beside any float64, and its product
# with a derivative does not underflow unless the derivative itself does.
# Source: Squire and Trapp, Using complex variables to estimate derivatives of real functions, SIAM Review 40 (1998).
_STEP = 1e-20
_MIN_STEP = 1e-200

# Elements of the points that a vectorised function receives in one call.
_MAX_ELEMENTS = 1 << 20

NAME = "complex step"


class ComplexStep(CostlyDerivatives):
    """Derivatives of an analytic function of complex128 arrays.

    J v takes one evaluation; Jᵀ s takes one for each element of the input, or one in all if the function is
    vectorised. Operations of NumPy that are not analytic raise ModelFailed. Operations outside NumPy's dispatch are not
    noticed, so the results must be compared with differences, see `VerifiedDerivatives`.

    Parameters
    ----------
    with_hessian : offer the Hessian action, as central differences of the gradient.
    """

    def __init__(self, function: UserFunction, with_hessian: bool = False) -> None:
        super().__init__(function)
        self._function, self._with_hessian, self.vectorised = function, with_hessian, function.vectorised

    def apply_jacobian(self, output: int, input: int, inputs: Vectors, vec: Vector, config: Config) -> Any:  # noqa: A002
        return select_output(self.directional_derivatives(inputs, input, vec, config), output)

    def gradient(self, output: int, input: int, inputs: Vectors, sens: Vector, config: Config) -> Any:  # noqa: A002
        size = len(inputs[input])
        self.check_cost("gradient", size, len(sens))
        if not self.vectorised:
            evaluate, x = self._outputs(config), inputs[input]
            result = np.empty(size)
            for i, step in enumerate(np.maximum(_STEP * component_scales(x), _MIN_STEP)):
                moved = x.astype(np.complex128)
                moved[i] += 1j * step
                column = select_output(evaluate(replace_item(inputs, input, moved.view(AnalyticArray))), output)
                result[i] = sens.dot(column.imag / step)
            return result
        step = max(1, _MAX_ELEMENTS // (size or 1))
        ranges = (range(start, min(start + step, size)) for start in range(0, size, step))
        results = [self._columns(inputs, output, input, elements, config) @ sens for elements in ranges]
        return np.concatenate([np.zeros(0), *results])

    def apply_hessian(
        self, output: int, input1: int, input2: int, inputs: Vectors, sens: Vector, vec: Vector, config: Config
    ) -> Any:
        def gradient(x: Vector) -> Any:
            return self.gradient(output, input1, replace_item(inputs, input2, x), sens, config)

        x, slope = inputs[input1], gradient(inputs[input2])
        result, kink = directional_derivative(gradient, inputs[input2], slope, vec)
        size = np.where(kink, 0.0, hessian_size(slope, x, inputs[input2], vec))
        check_gradient_estimate("ApplyHessian", self._function.name, f"finite differences of {NAME}", result, x, size)
        return result

    def check_cost(self, ability: Ability, input_size: int, output_size: int) -> None:
        if ability != "apply_jacobian":
            check_evaluations(input_size, self._function.options.max_evaluations, "Gradient", NAME)

    def all_sources(self) -> Mapping[Ability, str]:
        sources: dict[Ability, str] = {"gradient": NAME, "apply_jacobian": NAME}
        return sources | {"apply_hessian": f"finite differences of {NAME}"} if self._with_hessian else sources

    def check(self, config: Config) -> None:
        """Raise ModelFailed if the function is not analytic at the sample point.

        Takes one complex evaluation and two real ones for each input vector.
        """
        function, sizes = self._function, self.output_sizes(config)
        point = function.sample_point(config)
        value = np.concatenate([np.zeros(0), *function.sample_outputs(config)])
        for index, x in enumerate(point):

            def values(x: Vector, index: int = index) -> Vector:
                outputs = as_vectors(function.evaluate(replace_item(point, index, x), config), sizes)
                return np.concatenate([np.zeros(0), *outputs])

            def slopes(vec: Vector, index: int = index) -> Vector:
                return np.concatenate([np.zeros(0), *self.directional_derivatives(point, index, vec, config)])

            _check_analytic(values, slopes, x, value, function.name)

    def directional_derivatives(self, inputs: Vectors, index: int, vec: Vector, config: Config) -> tuple[Vector, ...]:
        """Return the derivatives of all outputs by one input along `vec`."""
        return _complex_derivatives(self._outputs(config), inputs, index, vec)

    def _outputs(self, config: Config) -> Callable[[Vectors], tuple[Any, ...]]:
        """Return the function of complex vectors, whose outputs have the sizes for the config."""
        function, sizes = self._function, tuple(self.output_sizes(config))

        def outputs(inputs: Vectors) -> tuple[Any, ...]:
            results = _complex_outputs(lambda: function.evaluate(inputs, config), function.name)
            if tuple(map(len, results)) != sizes:
                raise InvalidOutput(f"expected output vectors of {list(sizes)} numbers, got {[*map(len, results)]}")
            return results

        return outputs

    def _columns(self, inputs: Vectors, output: int, index: int, elements: range, config: Config) -> Vector:
        """Return the derivatives of an output by some elements of an input, one row each, from one evaluation."""
        rows = len(elements)
        points = [np.repeat(x[None], rows, axis=0) for x in inputs]
        steps = np.maximum(_STEP * component_scales(inputs[index])[elements.start : elements.stop], _MIN_STEP)
        moved = points[index].astype(np.complex128)
        moved[np.arange(rows), elements] += 1j * steps
        points[index] = as_analytic(moved)
        sizes = self.output_sizes(config)
        try:
            result = self._function.evaluate(points, config)
        except NotAnalyticError as error:
            raise _not_applicable(self._function.name, str(error)) from error
        several = isinstance(result, tuple | list) and len(result) == len(sizes)
        array = _number_array(result[output] if several else result)
        if array.size != rows * sizes[output]:
            shape = [rows, sizes[output]]
            raise InvalidOutput(f"output {output}: expected shape {shape} for {rows} points, got {list(array.shape)}")
        return np.asarray(np.imag(array.reshape(rows, sizes[output])) / steps[:, None])


class ComplexStepHessian(GradientHessian):
    """The Hessian action as the complex step of the gradient that the user has written, if that is analytic."""

    def __init__(self, function: UserFunction) -> None:
        name = f"gradient of {function.name}"

        def derivative(gradient: Callable[..., Any], arguments: Vectors, index: int, vec: Vector) -> Vector:
            return _complex_derivatives(
                lambda inputs: _complex_outputs(lambda: gradient(*inputs), name), arguments, index, vec
            )[0]

        super().__init__(function, derivative, NAME)
        self._function, self._name_of_gradient = function, name

    def check(self, config: Config) -> None:
        """Raise ModelFailed if the gradient is not analytic at the sample point."""
        inputs = range(len(self._function.sample_point(config)))
        for output, size in enumerate(self._function.output_sizes(config)):
            for input1 in inputs:
                for input2 in inputs:
                    self._check_pair(output, input1, input2, np.ones(size), config)

    def _check_pair(self, output: int, input1: int, input2: int, sens: Vector, config: Config) -> None:
        function, point = self._function, self._function.sample_point(config)
        size = len(point[input1])

        def gradient(x: Vector) -> Vector:
            result = function.gradient(output, input1, replace_item(point, input2, x), sens, config)
            return as_vectors((result,), (size,))[0]

        def slopes(vec: Vector) -> Any:
            return self.apply_hessian(output, input1, input2, point, sens, vec, config)

        x = point[input2]
        _check_analytic(gradient, slopes, x, gradient(x), self._name_of_gradient)


def _check_analytic(
    values: Callable[[Vector], Vector], slopes: Callable[[Vector], Vector], x: Vector, value: Vector, name: str
) -> None:
    """Raise ModelFailed unless the complex step's `slopes` and central differences of `values` agree at x."""
    if not np.isfinite(value).all():
        raise _not_applicable(name, "its value at the sample point is not finite; set another point, at=[...]")
    vec = np.cos(1.0 + np.arange(len(x))) * component_scales(x)
    try:
        confirm_directional(values, x, value, vec, slopes(vec))
    except NotConfirmedError as error:
        raise _not_applicable(name, str(error)) from error


def _complex_derivatives(
    outputs: Callable[[Vectors], tuple[Any, ...]], arguments: Vectors, index: int, vec: Vector
) -> tuple[Vector, ...]:
    """Return the derivatives of every output along `vec` in one argument, as vectors."""
    step = max(_STEP * max_step(component_scales(arguments[index]), vec), _MIN_STEP)
    moved = as_analytic(arguments[index] + 1j * (step * vec))
    return tuple(np.imag(each) / step for each in outputs(replace_item(arguments, index, moved)))


def _complex_outputs(evaluate: Callable[[], Any], name: str) -> tuple[Any, ...]:
    """Return the outputs of a function of `AnalyticArray`s as vectors of NumPy."""
    try:
        result = evaluate()
    except NotAnalyticError as error:
        raise _not_applicable(name, str(error)) from error
    except DragomanError:
        raise
    except Exception as error:  # compiled libraries raise errors of every kind for complex numbers
        raise _not_applicable(name, f"with complex numbers it raises {type(error).__name__}: {error}") from error
    if type(result) is AnalyticArray and result.ndim == 1:  # the usual case
        return (result.view(np.ndarray),)
    return tuple(array if array.ndim else array.reshape(1) for array in map(_number_array, split_outputs(result)))


def _not_applicable(name: str, reason: str) -> ModelFailed:
    return ModelFailed(
        f"'{name}' is not analytic, so the complex step does not apply: {reason}; write it in JAX or PyTorch, provide "
        "its gradient, or use derivatives='finite differences'"
    )


def _number_array(value: Any) -> Any:
    """Return a real or complex array of NumPy. Raises InvalidOutput for other values."""
    array = np.array([np.asarray(each) for each in value]) if isinstance(value, list) else np.asarray(value)
    if array.dtype.kind not in "fciu":
        raise InvalidOutput(f"expected numbers, got {type(value).__name__} of {array.dtype.name}")
    return array.view(np.ndarray)
