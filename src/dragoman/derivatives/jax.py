"""Derivatives of functions written in JAX: reverse mode, forward mode, and forward over reverse; in float64."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dragoman.core.vector_answers import parts
from dragoman.core.vectors import Config, Vector, VectorFunction, Vectors, put
from dragoman.derivatives.config_cache import OfConfig
from dragoman.derivatives.framework import Lifted, Traced, only
from dragoman.derivatives.user_function import Authored
from dragoman.derivatives.verification import check_finite

# Control flow in Python on the numbers themselves cannot be compiled; it is followed anew in each call instead.
_NOT_COMPILED = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)


class JaxFunction(Traced):
    """A function of JAX arrays. Compiled once for each config and sizes where it can be; `vectorised` by jax.vmap.

    Gradient is jax.vjp, ApplyJacobian jax.jvp, ApplyHessian jax.jvp of jax.vjp. 64-bit floats are enabled while the
    function runs, in this thread alone; arrays that the author made before are as precise as they were made.
    """

    source = "jax"
    vectorised = True

    def __init__(self, author: Authored) -> None:
        super().__init__(author)
        self._made = OfConfig(lambda config: _Actions(lambda *x: _vectors(author.evaluate(x, config))))
        self.vectorised = author.declared.vectorised is not False

    def evaluate(self, inputs: Vectors, config: Config) -> Any:
        actions = self._made(config)
        with _float64():
            if not inputs or inputs[0].ndim < 2:
                return tuple(map(np.asarray, actions.evaluate(*inputs)))
            if len(inputs[0]):
                return actions.rows(inputs)
        return tuple(np.zeros((0, size)) for size in self.output_sizes(config))

    def needs_verification(self, config: Config) -> bool:
        """Whether the function runs on numbers: one that is compiled cannot make a plain number of a traced one."""
        return self._made(config).interpreted

    def gradient(self, output: int, input: int, inputs: Vectors, sens: Vector, config: Config) -> Any:  # noqa: A002
        weights = _alone(sens, output, self.output_sizes(config))
        with _float64():
            values, found = self._made(config).pull(tuple(inputs), weights)
            check_finite(np.asarray(only(values, output)), output, inputs, sens)
            return np.asarray(found[input])

    def apply_jacobian(self, output: int, input: int, inputs: Vectors, vec: Vector, config: Config) -> Any:  # noqa: A002
        direction = _alone(vec, input, [len(x) for x in inputs])
        with _float64():
            values, found = self._made(config).push(tuple(inputs), direction)
            check_finite(np.asarray(only(values, output)), output, inputs)
            return np.asarray(found[output])

    def apply_hessian(
        self, output: int, input1: int, input2: int, inputs: Vectors, sens: Vector, vec: Vector, config: Config
    ) -> Any:
        weights = _alone(sens, output, self.output_sizes(config))
        direction = _alone(vec, input2, [len(x) for x in inputs])
        with _float64():
            values, found = self._made(config).curve(tuple(inputs), weights, direction)
            check_finite(np.asarray(only(values, output)), output, inputs, sens)
            return np.asarray(found[input1])


def written_in_jax(author: Authored) -> tuple[VectorFunction, JaxFunction]:
    """What the author has written, and what follows from the function."""
    function = JaxFunction(author)
    return Lifted(function, lambda vector: vector, _float64), function


def push_through(function: Callable[..., Any], arguments: Vectors, index: int, vec: Vector) -> Any:
    """The derivative of a function of JAX arrays by one argument, applied to vec."""
    with _float64():
        x = tuple(map(jnp.asarray, arguments))
        pushed = jax.jvp(lambda at: jnp.atleast_1d(function(*put(x, index, at))), (x[index],), (jnp.asarray(vec),))
        return np.asarray(pushed[1])


class _Actions:
    """The four actions of one function of vectors, compiled.

    Each is of all inputs and outputs at once, of which the caller makes all but one zero: a few needless products
    beside the function itself, and one compilation instead of one for each output and pair of inputs.
    """

    def __init__(self, function: Callable[..., tuple[Any, ...]]) -> None:
        def pull(x: tuple[Any, ...], weights: tuple[Any, ...]) -> Any:
            values, back = jax.vjp(function, *x)
            return values, back(weights)

        def push(x: tuple[Any, ...], direction: tuple[Any, ...]) -> Any:
            return jax.jvp(function, x, direction)

        def curve(x: tuple[Any, ...], weights: tuple[Any, ...], direction: tuple[Any, ...]) -> Any:
            (values, _), (_, found) = jax.jvp(lambda *at: pull(at, weights), x, direction)
            return values, found

        self.interpreted = False
        self.evaluate = self._compiled(function)
        self._mapped: Callable[..., Any] | None = jax.jit(jax.vmap(function))
        self.pull, self.push, self.curve = self._compiled(pull), self._compiled(push), self._compiled(curve)

    def rows(self, inputs: Vectors) -> tuple[Any, ...]:
        """The outputs at many points, one a row: together, or one after another where vmap cannot follow."""
        if self._mapped is not None:
            try:
                padded = [_padded(x) for x in inputs]
                return tuple(np.asarray(y)[: len(inputs[0])] for y in self._mapped(*padded))
            except _NOT_COMPILED:
                self._mapped = None
        points = zip(*inputs, strict=True)
        return tuple(np.stack(each) for each in zip(*(self.evaluate(*point) for point in points), strict=True))

    def _compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function compiled for each shape; or as it is, once it turns out that it cannot be compiled."""
        fast, plain = jax.jit(function), False

        def run(*arguments: Any) -> Any:
            nonlocal plain
            if not plain:
                try:
                    return fast(*arguments)
                except _NOT_COMPILED:
                    plain = self.interpreted = True
            return function(*jax.tree.map(jnp.asarray, arguments))

        return run


def _vectors(answer: Any) -> tuple[Any, ...]:
    """Each output as a float64 vector: of an array, a list of numbers, or one number."""
    return tuple(jnp.atleast_1d(jnp.asarray(each)).astype(jnp.float64) for each in parts(answer))


def _alone(vector: Vector, index: int, sizes: Sequence[int]) -> tuple[Vector, ...]:
    """The vector at its place, and zeros at all others."""
    return tuple(vector if i == index else np.zeros(size) for i, size in enumerate(sizes))


def _padded(rows: Vector) -> Vector:
    """As many rows as the next power of two, by repeating the last: each number of rows is compiled once."""
    wanted = 1 << max(0, len(rows) - 1).bit_length()
    return np.concatenate([rows, np.repeat(rows[-1:], wanted - len(rows), axis=0)])


def _float64() -> AbstractContextManager[Any]:
    """64-bit floats in this thread, as long as it lasts."""
    if hasattr(jax, "enable_x64"):
        made: AbstractContextManager[Any] = jax.enable_x64(True)
        return made
    from jax.experimental import enable_x64  # JAX before 0.8

    older: AbstractContextManager[Any] = enable_x64()
    return older
