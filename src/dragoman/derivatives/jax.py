"""Derivatives of functions written in JAX: reverse mode, forward mode, and forward over reverse; in float64."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dragoman.core.vector_answers import parts
from dragoman.core.vectors import Config, Vector, VectorFunction, Vectors
from dragoman.derivatives.authored import Authored
from dragoman.derivatives.traced import Lifted, OfConfig, Traced, only

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
        self._made = OfConfig(lambda config: _Actions(lambda *x: _vectors(author.callee(x, config))))
        self.vectorised = author.declared.vectorised is not False

    def evaluate(self, inputs: Vectors, config: Config) -> Any:
        actions = self._made(config)
        with _float64():
            if not inputs or inputs[0].ndim < 2:
                return tuple(map(np.asarray, actions.evaluate(*inputs)))
            rows = len(inputs[0])
            padded = [_padded(x) for x in inputs]
            return tuple(np.asarray(y)[:rows] for y in actions.rows(*padded))

    def gradient(self, output: int, input: int, inputs: Vectors, sens: Vector, config: Config) -> Any:  # noqa: A002
        with _float64():
            return np.asarray(self._made(config).gradient(output, input, tuple(inputs), sens))

    def apply_jacobian(self, output: int, input: int, inputs: Vectors, vec: Vector, config: Config) -> Any:  # noqa: A002
        with _float64():
            return np.asarray(self._made(config).jacobian(output, input, tuple(inputs), vec))

    def apply_hessian(
        self, output: int, input1: int, input2: int, inputs: Vectors, sens: Vector, vec: Vector, config: Config
    ) -> Any:
        with _float64():
            return np.asarray(self._made(config).hessian(output, input1, input2, tuple(inputs), sens, vec))


def written_in_jax(author: Authored) -> tuple[VectorFunction, JaxFunction]:
    """What the author has written, and what follows from the function."""
    function = JaxFunction(author)
    return Lifted(function, lambda vector: vector, _float64), function


def push_through(function: Callable[..., Any], arguments: Vectors, index: int, vec: Vector) -> Any:
    """The derivative of a function of JAX arrays by one argument, applied to vec."""
    with _float64():
        x = tuple(map(jnp.asarray, arguments))
        put = jax.jvp(lambda at: jnp.atleast_1d(function(*_put(x, index, at))), (x[index],), (jnp.asarray(vec),))
        return np.asarray(put[1])


class _Actions:
    """The four actions of one function of vectors, compiled."""

    def __init__(self, function: Callable[..., tuple[Any, ...]]) -> None:
        def pull(output: int, input: int, x: tuple[Any, ...], sens: Any) -> Any:  # noqa: A002
            return jax.vjp(lambda at: only(function(*_put(x, input, at)), output), x[input])[1](sens)[0]

        def push(output: int, input: int, x: tuple[Any, ...], vec: Any) -> Any:  # noqa: A002
            return jax.jvp(lambda at: only(function(*_put(x, input, at)), output), (x[input],), (vec,))[1]

        def curve(output: int, input1: int, input2: int, x: tuple[Any, ...], sens: Any, vec: Any) -> Any:
            return jax.jvp(lambda at: pull(output, input1, _put(x, input2, at), sens), (x[input2],), (vec,))[1]

        self.evaluate = _compiled(function)
        self.rows = _compiled(jax.vmap(function))
        self.gradient = _compiled(pull, 0, 1)
        self.jacobian = _compiled(push, 0, 1)
        self.hessian = _compiled(curve, 0, 1, 2)


def _compiled(function: Callable[..., Any], *static: int) -> Callable[..., Any]:
    """The function compiled for each shape; or as it is, once it turns out that it cannot be compiled."""
    fast, plain = jax.jit(function, static_argnums=static), False

    def run(*arguments: Any) -> Any:
        nonlocal plain
        if not plain:
            try:
                return fast(*arguments)
            except _NOT_COMPILED:
                plain = True
        return function(*[x if isinstance(x, int) else jax.tree.map(jnp.asarray, x) for x in arguments])

    return run


def _vectors(answer: Any) -> tuple[Any, ...]:
    """Each output as a float64 vector: of an array, a list of numbers, or one number."""
    return tuple(jnp.atleast_1d(jnp.asarray(each)).astype(jnp.float64) for each in parts(answer))


def _put(x: tuple[Any, ...], index: int, value: Any) -> tuple[Any, ...]:
    return (*x[:index], value, *x[index + 1 :])


def _padded(rows: Vector) -> Vector:
    """As many rows as the next power of two, by repeating the last: each number of rows is compiled once."""
    wanted = 1 << max(0, len(rows) - 1).bit_length()
    return np.concatenate([rows, np.repeat(rows[-1:], wanted - len(rows), axis=0)]) if len(rows) else rows


def _float64() -> AbstractContextManager[Any]:
    """64-bit floats in this thread, as long as it lasts."""
    if hasattr(jax, "enable_x64"):
        made: AbstractContextManager[Any] = jax.enable_x64(True)
        return made
    from jax.experimental import enable_x64  # JAX before 0.8

    older: AbstractContextManager[Any] = enable_x64()
    return older
