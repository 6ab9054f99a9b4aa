"""Derivatives of functions written in JAX: reverse mode, forward mode, and forward over reverse, in float64."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dragoman.core.vectors import Config, Vector, VectorFunction, Vectors, replace_item, split_outputs
from dragoman.derivatives.framework import FrameworkFunction, WrittenDerivatives, select_output
from dragoman.derivatives.user_function import ConfigCache, UserFunction
from dragoman.derivatives.verification import check_finite

# Raised by functions with Python control flow on array values; they run uncompiled.
_NOT_COMPILABLE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)


class JaxFunction(FrameworkFunction):
    """A function of JAX arrays, compiled once for each config and sizes if possible; vectorised by jax.vmap.

    Gradient is jax.vjp, ApplyJacobian jax.jvp, ApplyHessian jax.jvp of jax.vjp. 64-bit floats are enabled while the
    function runs, in its thread only; arrays that were created before keep their precision.
    """

    source = "jax"
    vectorised = True

    def __init__(self, function: UserFunction) -> None:
        super().__init__(function)
        self._compile = ConfigCache(
            lambda config: _CompiledDerivatives(lambda *x: _vectors(function.evaluate(x, config)))
        )
        self.vectorised = function.options.vectorised is not False

    def evaluate(self, inputs: Vectors, config: Config) -> Any:
        compiled = self._compile(config)
        with _float64():
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
        with _float64():
            values, result = self._compile(config).vjp(tuple(inputs), weights)
            check_finite(np.asarray(select_output(values, output)), output, inputs, sens)
            return np.asarray(result[input])

    def apply_jacobian(self, output: int, input: int, inputs: Vectors, vec: Vector, config: Config) -> Any:  # noqa: A002
        direction = _with_zeros(vec, input, [len(x) for x in inputs])
        with _float64():
            values, result = self._compile(config).jvp(tuple(inputs), direction)
            check_finite(np.asarray(select_output(values, output)), output, inputs)
            return np.asarray(result[output])

    def apply_hessian(
        self, output: int, input1: int, input2: int, inputs: Vectors, sens: Vector, vec: Vector, config: Config
    ) -> Any:
        weights = _with_zeros(sens, output, self.output_sizes(config))
        direction = _with_zeros(vec, input2, [len(x) for x in inputs])
        with _float64():
            values, result = self._compile(config).hvp(tuple(inputs), weights, direction)
            check_finite(np.asarray(select_output(values, output)), output, inputs, sens)
            return np.asarray(result[input1])


def differentiate(function: UserFunction) -> tuple[VectorFunction, JaxFunction]:
    """Return the derivatives that the user has written, and those by JAX."""
    derivatives = JaxFunction(function)
    return WrittenDerivatives(derivatives, lambda vector: vector, _float64), derivatives


def jacobian_vector_product(function: Callable[..., Any], arguments: Vectors, index: int, vec: Vector) -> Any:
    """Return the derivative of a function of JAX arrays by one argument, applied to vec."""
    with _float64():
        arrays = tuple(map(jnp.asarray, arguments))
        _, result = jax.jvp(
            lambda x: jnp.atleast_1d(function(*replace_item(arrays, index, x))), (arrays[index],), (jnp.asarray(vec),)
        )
        return np.asarray(result)


class _CompiledDerivatives:
    """Compiled evaluation, `vjp`, `jvp` and `hvp` (Hessian-vector product) of a function of vectors.

    Each takes weights of all outputs and directions of all inputs, of which all but one are zero: the additional
    products are cheap, and one compilation replaces one for each output and pair of inputs.
    """

    def __init__(self, function: Callable[..., tuple[Any, ...]]) -> None:
        def vjp(x: tuple[Any, ...], weights: tuple[Any, ...]) -> Any:
            values, pullback = jax.vjp(function, *x)
            return values, pullback(weights)

        def jvp(x: tuple[Any, ...], direction: tuple[Any, ...]) -> Any:
            return jax.jvp(function, x, direction)

        def hvp(x: tuple[Any, ...], weights: tuple[Any, ...], direction: tuple[Any, ...]) -> Any:
            (values, _), (_, result) = jax.jvp(lambda *x: vjp(x, weights), x, direction)
            return values, result

        self.interpreted = False
        self.evaluate = self._compile(function)
        self._mapped: Callable[..., Any] | None = jax.jit(jax.vmap(function))
        self.vjp, self.jvp, self.hvp = self._compile(vjp), self._compile(jvp), self._compile(hvp)

    def evaluate_rows(self, inputs: Vectors) -> tuple[Any, ...]:
        """Return the outputs at points given as rows; one point after another if vmap is not possible."""
        if self._mapped is not None:
            try:
                rows = [_pad_rows(x) for x in inputs]
                return tuple(np.asarray(y)[: len(inputs[0])] for y in self._mapped(*rows))
            except _NOT_COMPILABLE:
                self._mapped = None
        points = zip(*inputs, strict=True)
        return tuple(np.stack(each) for each in zip(*(self.evaluate(*point) for point in points), strict=True))

    def _compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Compile a function for each shape; it runs uncompiled once a compilation has failed."""
        compiled, failed = jax.jit(function), False

        def run(*arguments: Any) -> Any:
            nonlocal failed
            if not failed:
                try:
                    return compiled(*arguments)
                except _NOT_COMPILABLE:
                    failed = self.interpreted = True
            return function(*jax.tree.map(jnp.asarray, arguments))

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


def _float64() -> AbstractContextManager[Any]:
    """Enable 64-bit floats in this thread within the context."""
    if hasattr(jax, "enable_x64"):
        context: AbstractContextManager[Any] = jax.enable_x64(True)
        return context
    from jax.experimental import enable_x64  # JAX before 0.8

    older: AbstractContextManager[Any] = enable_x64()
    return older
