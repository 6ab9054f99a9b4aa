"""Derivatives of functions written in JAX: by reverse mode, forward mode or both, in float64."""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dragoman.core.errors import DragomanError
from dragoman.core.vectors import Config, Vector, VectorFunction, Vectors, replace_item, split_outputs
from dragoman_simulators.derivatives.framework import FrameworkFunction, WrittenDerivatives, select_output
from dragoman_simulators.derivatives.user_function import ConfigCache, UserFunction
from dragoman_simulators.derivatives.verification import check_finite
from dragoman_simulators.derivatives.verified import ValuedDerivative

log = logging.getLogger("dragoman.derivatives")

# Raised by functions with Python control flow on array values; they run uncompiled.
_NOT_COMPILABLE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)
_SLOW_COMPILATION_S = 2.0

Array = Any
Arrays = tuple[Array, ...]
ArrayFunction = Callable[..., Arrays]
# A method of differentiation: from a function to one that returns the function's outputs and a derivative.
Method = Callable[[ArrayFunction], Callable[..., tuple[Arrays, Arrays]]]


class JaxFunction(FrameworkFunction):
    """A function of JAX arrays, compiled once for each config and sizes if possible; vectorised by jax.vmap.

    64-bit floats are enabled while the function runs, in its thread only; arrays that were created before keep their
    precision.
    """

    source = "jax"
    vectorised = True
    needs_value = False

    def __init__(self, function: UserFunction) -> None:
        super().__init__(function)
        self._compile = ConfigCache(
            lambda config: _CompiledDerivatives(lambda *x: _vectors(function.evaluate(x, config)), function.name)
        )
        self.vectorised = function.options.vectorised is not False

    def evaluate(self, inputs: Vectors, config: Config) -> Any:
        compiled = self._compile(config)
        with float64():
            if not inputs or inputs[0].ndim < 2:
                return tuple(map(np.asarray, compiled.evaluate(*inputs)))
            if len(inputs[0]):
                return compiled.evaluate_rows(inputs)
        return tuple(np.zeros((0, size)) for size in self.output_sizes(config))

    def needs_verification(self, config: Config) -> bool:
        """Return whether the function runs uncompiled: under jax.jit, arrays cannot be converted to numbers."""
        return self._compile(config).interpreted

    def gradient(self, output: int, input: int, inputs: Vectors, sens: Vector, config: Config) -> Any:  # noqa: A002
        weights = _with_zeros(sens, output, self.output_sizes(config))
        result = self._differentiate(lambda f: f.pull(tuple(inputs), weights), input, config)
        check_finite(select_output(result.outputs, output), output, inputs, sens)
        return result

    def apply_jacobian(self, output: int, input: int, inputs: Vectors, vec: Vector, config: Config) -> Any:  # noqa: A002
        direction = _with_zeros(vec, input, [len(x) for x in inputs])
        result = self._differentiate(lambda f: f.push(tuple(inputs), direction), output, config)
        check_finite(select_output(result.outputs, output), output, inputs)
        return result

    def apply_hessian(
        self, output: int, input1: int, input2: int, inputs: Vectors, sens: Vector, vec: Vector, config: Config
    ) -> Any:
        weights = _with_zeros(sens, output, self.output_sizes(config))
        direction = _with_zeros(vec, input2, [len(x) for x in inputs])
        result = self._differentiate(lambda f: f.curve(tuple(inputs), weights, direction), input1, config)
        check_finite(select_output(result.outputs, output), output, inputs, sens)
        return result

    def notes(self) -> Mapping[str, Any]:
        """Return the modes of derivatives that JAX does not compute in its usual one."""
        modes = self._compile({}).unusual_modes()
        return {**super().notes(), **({"jax": modes} if modes else {})}

    def _differentiate(
        self, call: Callable[["_CompiledDerivatives"], tuple[Arrays, Arrays]], index: int, config: Config
    ) -> ValuedDerivative:
        with float64():
            outputs, derivatives = call(self._compile(config))
            return ValuedDerivative(np.asarray(derivatives[index]), tuple(map(np.asarray, outputs)))


def differentiate(function: UserFunction) -> tuple[VectorFunction, JaxFunction]:
    """Return the derivatives that the user has written, and those by JAX."""
    derivatives = JaxFunction(function)
    return WrittenDerivatives(derivatives, lambda vector: vector, float64), derivatives


def jacobian_vector_product(function: Callable[..., Any], arguments: Vectors, index: int, vec: Vector) -> Any:
    """Return the derivative of a function of JAX arrays by one argument, applied to vec."""
    direction = _with_zeros(vec, index, [len(x) for x in arguments])
    with float64():
        arrays = to_arrays(arguments)
        push = _first_working({m: f(lambda *x: (jnp.atleast_1d(function(*x)),)) for m, f in _PUSH.items()}, {}, "")
        return np.asarray(push(arrays, to_arrays(direction))[1][0])


def to_arrays(vectors: Vectors) -> Arrays:
    return tuple(map(jnp.asarray, vectors))


# --- methods -------------------------------------------------------------------------------------------------


def _pull_in_reverse(function: ArrayFunction) -> Callable[..., tuple[Arrays, Arrays]]:
    def pull(x: Arrays, weights: Arrays) -> tuple[Arrays, Arrays]:
        outputs, pullback = jax.vjp(function, *x)
        return outputs, pullback(weights)

    return pull


def _pull_forward(function: ArrayFunction) -> Callable[..., tuple[Arrays, Arrays]]:
    """One product in forward mode for each element of the inputs."""

    def pull(x: Arrays, weights: Arrays) -> tuple[Arrays, Arrays]:
        def product(direction: Arrays) -> Array:
            slopes = jax.jvp(function, x, direction)[1]
            return sum((jnp.vdot(w, s) for w, s in zip(weights, slopes, strict=True)), start=jnp.zeros(()))

        zeros = tuple(map(jnp.zeros_like, x))
        gradients = (
            jax.lax.map(lambda unit, i=i: product(replace_item(zeros, i, unit)), jnp.eye(len(each)))
            for i, each in enumerate(x)
        )
        return function(*x), tuple(gradients)

    return pull


def _push_forward(function: ArrayFunction) -> Callable[..., tuple[Arrays, Arrays]]:
    return lambda x, direction: jax.jvp(function, x, direction)


def _push_in_reverse(function: ArrayFunction) -> Callable[..., tuple[Arrays, Arrays]]:
    """The derivative of <direction, Jᵀ s> by s."""

    def push(x: Arrays, direction: Arrays) -> tuple[Arrays, Arrays]:
        outputs, pullback = jax.vjp(function, *x)
        transposed = jax.vjp(pullback, tuple(map(jnp.zeros_like, outputs)))[1]
        return outputs, transposed(direction)[0]

    return push


def _curve_forward(pull: Method) -> Method:
    """The derivative of Jᵀ s in forward mode."""

    def method(function: ArrayFunction) -> Callable[..., tuple[Arrays, Arrays]]:
        def curve(x: Arrays, weights: Arrays, direction: Arrays) -> tuple[Arrays, Arrays]:
            (outputs, _), (_, result) = jax.jvp(lambda *x: pull(function)(x, weights), x, direction)
            return outputs, result

        return curve

    return method


def _curve_in_reverse(function: ArrayFunction) -> Callable[..., tuple[Arrays, Arrays]]:
    """The gradient of <direction, Jᵀ s>, with both derivatives in reverse mode."""

    def curve(x: Arrays, weights: Arrays, direction: Arrays) -> tuple[Arrays, Arrays]:
        def slope(*x: Array) -> tuple[Array, Arrays]:
            outputs, gradients = _pull_in_reverse(function)(x, weights)
            return sum((jnp.vdot(d, g) for d, g in zip(direction, gradients, strict=True)), jnp.zeros(())), outputs

        result, outputs = jax.grad(slope, argnums=tuple(range(len(x))), has_aux=True)(*x)
        return outputs, result

    return curve


# For Gradient, ApplyJacobian and ApplyHessian: the names of their methods, tried in this order.
_PULL: Mapping[str, Method] = {"reverse": _pull_in_reverse, "forward, one product for each element": _pull_forward}
_PUSH: Mapping[str, Method] = {"forward": _push_forward, "reverse over reverse": _push_in_reverse}
_CURVE: Mapping[str, Method] = {
    "forward over reverse": _curve_forward(_pull_in_reverse),
    "reverse over reverse": _curve_in_reverse,
    "forward over forward, one product for each element": _curve_forward(_pull_forward),
}


class _CompiledDerivatives:
    """Compiled evaluation and derivatives of a function of vectors.

    Each takes weights of all outputs and directions of all inputs, of which all but one are zero: the additional
    products are cheap, and one compilation replaces one for each output and pair of inputs.
    """

    def __init__(self, function: ArrayFunction, name: str) -> None:
        self.interpreted = False
        self._name = name
        self.evaluate = self._compile(function, "Evaluate")
        self._mapped: Callable[..., Any] | None = jax.jit(jax.vmap(function))
        self._modes: dict[str, str] = {}
        self.pull = self._first_method(function, "gradient", _PULL)
        self.push = self._first_method(function, "apply_jacobian", _PUSH)
        self.curve = self._first_method(function, "apply_hessian", _CURVE)

    def unusual_modes(self) -> Mapping[str, str]:
        """Return the mode by ability where it is not the first of its methods."""
        usual = {next(iter(methods)) for methods in (_PULL, _PUSH, _CURVE)}
        return {ability: mode for ability, mode in self._modes.items() if mode not in usual}

    def evaluate_rows(self, inputs: Vectors) -> tuple[Any, ...]:
        """Return the outputs at points given as rows; one point after another if vmap is not possible."""
        if self._mapped is not None:
            try:
                rows = [_pad_rows(x) for x in inputs]
                return tuple(np.asarray(y)[: len(inputs[0])] for y in self._mapped(*rows))
            except (*_NOT_COMPILABLE, NotImplementedError):  # an operation that vmap does not have
                self._mapped = None
        points = zip(*inputs, strict=True)
        return tuple(np.stack(each) for each in zip(*(self.evaluate(*point) for point in points), strict=True))

    def _first_method(
        self, function: ArrayFunction, ability: str, methods: Mapping[str, Method]
    ) -> Callable[..., tuple[Arrays, Arrays]]:
        compiled = {mode: self._compile(method(function), ability) for mode, method in methods.items()}
        return _first_working(compiled, self._modes, ability)

    def _compile(self, function: Callable[..., Any], program: str) -> Callable[..., Any]:
        """Compile a function for each shape; it runs uncompiled once a compilation has failed."""
        compiled, failed, called = jax.jit(function), False, False

        def run(*arguments: Any) -> Any:
            nonlocal failed, called
            if not failed:
                try:
                    return compiled(*arguments) if called else self._call_first(compiled, program, arguments)
                except _NOT_COMPILABLE:
                    failed = self.interpreted = True
                finally:
                    called = True
            return function(*jax.tree.map(jnp.asarray, arguments))

        return run

    def _call_first(self, compiled: Callable[..., Any], program: str, arguments: tuple[Any, ...]) -> Any:
        """Call a function that this call compiles; if that takes long, log the start and the duration."""
        start_s = time.monotonic()
        announcement = threading.Timer(
            _SLOW_COMPILATION_S, log.info, ("compiling: function=%s program=%s", self._name, program)
        )
        announcement.daemon = True
        announcement.start()
        try:
            return jax.block_until_ready(compiled(*arguments))
        finally:
            announcement.cancel()
            seconds = time.monotonic() - start_s
            level = logging.INFO if seconds >= _SLOW_COMPILATION_S else logging.DEBUG
            log.log(level, "compiled: function=%s program=%s seconds=%.1f", self._name, program, seconds)


def _first_working(
    methods: Mapping[str, Callable[..., tuple[Arrays, Arrays]]], modes: dict[str, str], ability: str
) -> Callable[..., tuple[Arrays, Arrays]]:
    """Return a function that calls the first method that works, and writes its mode into `modes`.

    JAX has no reverse mode for lax.while_loop, for example, and no forward mode for functions with custom_vjp.
    """

    def run(*arguments: Any) -> tuple[Arrays, Arrays]:
        if ability in modes:
            return methods[modes[ability]](*arguments)
        first: Exception | None = None
        for mode, method in methods.items():
            try:
                result = method(*arguments)
            except DragomanError:
                raise
            except Exception as error:  # JAX raises errors of several kinds for operations without a derivative
                first = first or error
                continue
            modes[ability] = mode
            return result
        assert first is not None
        raise first

    return run


def _vectors(result: Any) -> tuple[Any, ...]:
    """Convert the outputs (arrays, lists of numbers, or numbers) to float64 vectors."""
    return tuple(jnp.atleast_1d(jnp.asarray(each)).astype(jnp.float64) for each in split_outputs(result))


def _with_zeros(vector: Vector, index: int, sizes: Sequence[int]) -> tuple[Vector, ...]:
    """Return the vector at its index, and zeros of `sizes` at all others."""
    return tuple(vector if i == index else np.zeros(size) for i, size in enumerate(sizes))


def _pad_rows(rows: Vector) -> Vector:
    """Repeat the last row up to the next power of two, to limit the number of shapes that are compiled."""
    count = 1 << max(0, len(rows) - 1).bit_length()
    return np.concatenate([rows, np.repeat(rows[-1:], count - len(rows), axis=0)])


def float64() -> AbstractContextManager[Any]:
    """Enable 64-bit floats in this thread within the context."""
    if hasattr(jax, "enable_x64"):
        context: AbstractContextManager[Any] = jax.enable_x64(True)
        return context
    from jax.experimental import enable_x64  # JAX before 0.8

    older: AbstractContextManager[Any] = enable_x64()
    return older
